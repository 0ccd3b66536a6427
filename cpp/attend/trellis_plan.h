// Plan of the vector kernels of trellis codes for a head's bits: components in quads of equal rate.
#pragma once

#include "trellis_kernel.h"

namespace tersekv {

constexpr int64_t kTrellisBlock = 32;

// A shift over two words of a block: offsets of the words, and the shift twice, for two int16
// lanes.
struct TrellisFetch {
  int32_t low, high, shift;
};

// Four components in two pairs. For neighbours, at[0] and at[2] each extract the windows of a pair.
// Otherwise at[k] extracts that of component k, into the low byte if k is even and the high byte if
// it is odd.
struct TrellisQuad {
  TrellisFetch at[4];
};

// Quads of one rate: neighbours in [first, singles), others in [singles, last).
struct TrellisSection {
  const int8_t* entries;
  const TrellisQuad *first, *singles, *last;
};

// A query row in units of `step`, and the bias corrections for the +128 offset of unsigned entries.
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
  int32_t* d;             // [quads][4] components; padding has component 0 and scale 0
  float* scale;           // [quads][4], times the table's unit
  int32_t* coefficients;  // keys: [quads][rows] of four high and four low bytes
  TrellisQuery* queries;  // keys: [rows]
  float* collected;       // values: [quads][4 components][4 rows]
};

TrellisPlan* make_trellis_plan(const TrellisSide& side);

static inline const uint16_t* stream_of(const TrellisView& view, int64_t b, int64_t h) {
  return view.stream + b * view.stride_b + h * view.stride_h;
}

// Prefetch what is read after block n of keys: the values of its tokens, if given, and later keys.
// It must be inlined: GCC removes calls of a function that only prefetches.
[[gnu::always_inline]] static inline void prefetch_after(const TrellisPlan& plan, const TrellisSpan& span, int64_t n,
                                                         const TrellisSide* values) {
  constexpr int64_t kMostAhead = 3;  // blocks of keys; their words come from memory while so many are read
  if (span.row > 0) return;          // the first rows have done it
  const int64_t last = span.last / kTrellisBlock, blocks = last - span.first / kTrellisBlock;
  if (values) {
    const TrellisView& v = *values->view;
    const uint16_t* words = stream_of(v, values->b, values->h) + n * v.stride_n;
    for (int64_t i = 0; i < v.words; i++) __builtin_prefetch(words + i * kTrellisBlock, 0, 2);
  }
  int64_t later = n + (blocks < kMostAhead ? blocks : kMostAhead);
  if (later >= last) {
    later += span.later / kTrellisBlock - last;
    if (later >= span.later_last / kTrellisBlock) return;
  }
  const uint16_t* words = plan.stream + later * plan.view->stride_n;
  for (int64_t i = 0; i < plan.view->words; i++) __builtin_prefetch(words + i * kTrellisBlock);
  __builtin_prefetch(plan.gain + later * plan.view->gain_n);
}

}  // namespace tersekv
