// RoPE as kernel argument: pairs of channels, and cosines and sines of any position.
#pragma once

#include <cstdint>

#include "marks.h"

namespace tersekv {

// Channel d becomes x[d]·cos[column] + sign·x[partner]·sin[sin_column]. A channel without a partner
// (-1) is unchanged.
struct RopeChannel {
  int32_t partner, cos_column, sin_column, sign;
};

// For a channel of a rotated mean: indices of its columns among those that are read, -1 for none.
struct RotatedChannel {
  int32_t cos, sin;
};

// Offset tables: cosines and sines of 0 to M - 1 steps. Those of fast columns are rows of `table`.
// Those of slow columns are linear combinations of its last kLanes rows, with factors in rows of
// `matrix`. Cosines come before sines. Pair i of coefficients is fast column i, or slow column i -
// fast.
struct RopeOffsets {
  int64_t M = 0, rows = 0, fast = 0, slow = 0;
  const float* table = nullptr;     // [rows, M], rows = 2·fast, and kLanes more if there are slow columns
  const float* matrix = nullptr;    // [2·slow, kLanes]
  const int32_t* pair = nullptr;    // [columns]: pair of a column
  const int32_t* column = nullptr;  // [pairs]
  const int16_t* words = nullptr;   // [rows / 2, M, 2]: the table times 32767, or null
  bool in_order = false;            // pair i has column i, and there are enough columns to read whole vectors
  int64_t pairs() const { return fast + slow; }
};

// Cosines and sines of positions: [digits, rows, 2, columns], columns in whole vectors. With
// several digits the rows are the digits of a position in base kTableBase, whose rotations are
// multiplied. With one digit there is one row per token.
constexpr int kTableBits = 6;
constexpr int64_t kTableBase = 1 << kTableBits;
constexpr int64_t kMostTableDigits = 8;

struct RopeView {
  const float* table = nullptr;
  int64_t digits = 0, table_rows = 0, columns = 0;
  // [1 or B, 1 or H, T or 1]: each token's position (or row), or only the first token's if
  // positions are consecutive.
  const int32_t* places = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0;
  bool consecutive = false;
  Marks marks;  // if given, `places` has the position of the first bit, and the bits give those of tokens
  const RopeChannel* channels = nullptr;  // [D]
  // For a rotated mean: the columns that are read, those of cos first.
  const int32_t* read = nullptr;
  int64_t reads_cos = 0, reads = 0;
  const RotatedChannel* rotated = nullptr;  // [D]
  // If not null, positions are consecutive, or in order with gaps in a rotated mean, and channels
  // use the same columns of cosines and sines. The angles of the next offsets->M positions follow
  // from those of any position.
  const RopeOffsets* offsets = nullptr;
  // If not null, positions are consecutive, and channels d and d + D/2 are a pair with one column.
  // The array has cosines and sines of the next steps times 32767. Its shape is
  // [D/4, 2, kInt16Offsets, 2], pairs 2i and 2i + 1 interleaved.
  const int16_t* int16_offsets = nullptr;
};

// Return the position of a token, or its row in a table of one digit. static: see contract.h.
static inline int64_t place_of(const RopeView& rope, int64_t b, int64_t h, int64_t token) {
  const int32_t first = rope.places[b * rope.stride_b + h * rope.stride_h + token * rope.stride_t];
  return rope.consecutive ? first + token : first;
}

}  // namespace tersekv
