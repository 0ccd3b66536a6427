// RoPE as kernels are given it: pairs of channels, and cosines and sines of any position.
#pragma once

#include <cstdint>

namespace tersekv {

// Channel d becomes x[d]·cos[column] + sign·x[partner]·sin[sin_column]; one without a partner (-1) stays.
struct RopeChannel {
  int32_t partner, cos_column, sin_column, sign;
};

// Of a vector that is turned: which of the columns that are read a channel multiplies, -1 for none.
struct TurnedChannel {
  int32_t cos, sin;
};

// Cosines and sines of 0 to M - 1 steps: those of fast columns are rows of `table`, those of slow ones sums of its last
// kLanes rows, with factors in rows of `matrix`; cosines in front of sines. Pair i of coefficients is fast column i, or
// slow column i - fast.
struct RopeOffsets {
  int64_t M = 0, rows = 0, fast = 0, slow = 0;
  const float* table = nullptr;     // [rows, M], rows = 2·fast, and kLanes more where some are slow
  const float* matrix = nullptr;    // [2·slow, kLanes]
  const int32_t* pair = nullptr;    // [columns] of cos and sin
  const int32_t* column = nullptr;  // [pairs]
  const int16_t* words = nullptr;   // [rows / 2, M, 2]: the table times 32767, or null
  bool in_order = false;            // pair i has column i, and so many columns that whole vectors of them can be read
  int64_t pairs() const { return fast + slow; }
};

// Cosines and sines of positions: [digits, rows, 2, columns], columns in whole vectors. With several digits the table
// holds a position's digits in base kTableBase, whose rotations multiply; with one digit it holds each token's own row.
constexpr int kTableBits = 6;
constexpr int64_t kTableBase = 1 << kTableBits;
constexpr int64_t kMostTableDigits = 8;

struct RopeView {
  const float* table = nullptr;
  int64_t digits = 0, table_rows = 0, columns = 0;
  // [1 or B, 1 or H, T or 1]: each token's position (or row), or the first token's where they are consecutive.
  const int32_t* places = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0;
  bool consecutive = false;
  const RopeChannel* channels = nullptr;  // [D]
  // Of a vector that is turned: the columns that are read, those of cos in front.
  const int32_t* read = nullptr;
  int64_t reads_cos = 0, reads = 0;
  const TurnedChannel* turned = nullptr;  // [D]
  // Not null: positions are consecutive, channels take cosines and sines of the same columns, and angles of the next
  // steps.M tokens follow from those of any token.
  const RopeOffsets* offsets = nullptr;
  // Not null: positions are consecutive, channels d and d + D/2 are pairs of one column, and these are cosines and
  // sines of the next steps times 32767, [D/4, 2, kInt16Offsets, 2]: of pairs 2i and 2i + 1 side by side.
  const int16_t* int16_offsets = nullptr;
};

// Position of a token, or its row in a table of one digit. static: see contract.h.
static inline int64_t place_of(const RopeView& rope, int64_t b, int64_t h, int64_t token) {
  const int32_t first = rope.places[b * rope.stride_b + h * rope.stride_h + token * rope.stride_t];
  return rope.consecutive ? first + token : first;
}

}  // namespace tersekv
