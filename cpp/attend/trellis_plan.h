// What the integer kernel of trellis codes reads off a head's bits: components in quads of equal rate.
#pragma once

#include "trellis_kernel.h"

namespace tersekv {

constexpr int64_t kTrellisBlock = 32;

// A shift over two words of a block: their places, and the shift twice, for two lanes of 16 bits.
struct TrellisFetch {
  int32_t low, high, shift;
};

// Four components in two pairs. Of neighbours at[0] and at[2] bring the windows of a pair each; else at[k] brings that
// of component k, in the low byte where k is even and in the high byte where it is odd.
struct TrellisQuad {
  TrellisFetch at[4];
};

// Quads of one rate: neighbours in [first, singles), others in [singles, last).
struct TrellisSection {
  const int8_t* entries;
  const TrellisQuad *first, *singles, *last;
};

// A row of queries in units of `step`, and what an entry's 128 too much adds to its sums.
struct TrellisQuery {
  float step;
  int32_t high_offset, low_offset;
};

struct TrellisPlan {
  const TrellisView* view;
  const uint16_t* stream;  // of this head
  const uint8_t* gain;
  int64_t rows, quads;
  int sections;
  TrellisSection section[kTrellisRates];
  int32_t* d;             // [quads][4] components; 0 with scale 0 where there is none
  float* scale;           // [quads][4], times the table's unit
  int32_t* coefficients;  // keys: [quads][rows] of four high and four low bytes
  TrellisQuery* queries;  // keys: [rows]
  float* collected;       // values: [quads][4 components][4 rows]
};

TrellisPlan* make_trellis_plan(const TrellisSide& side);

static inline const uint16_t* stream_of(const TrellisView& view, int64_t b, int64_t h) {
  return view.stream + b * view.stride_b + h * view.stride_h;
}

}  // namespace tersekv
