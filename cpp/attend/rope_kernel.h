// Keys before RoPE, and rotated means, in int16. roped_grid.h and rotated_mean.h use it if the CPU
// supports it. Positions are consecutive, so the query is rotated once for several tokens, which
// share cosines and sines of a few steps.
#pragma once

#include "contract.h"

namespace tersekv {

constexpr int64_t kInt16Offsets = 64;  // tokens that share one rotated query

// A view of kind `roped` for one task.
struct RopedSide {
  const RopeView* rope = nullptr;
  const GridView* grid = nullptr;  // with the table of this batch row
  int64_t b = 0, h = 0;
  const View* values = nullptr;  // values of the same tokens, which are prefetched
  const float* query = nullptr;  // [rows, query_stride], scaled
  int64_t query_stride = 0;
};

// Rows [row, row + rows), at most four, over tokens [first, last), whose positions are `shift` less.
struct RopedSpan {
  int64_t row, rows, first, last, shift;
};

// Sums of table [reads, stride] · factor for 16·n tokens. reads is even; the table is stored in
// pairs [reads / 2, stride, 2].
struct RotatedMeanProduct {
  const int16_t* table = nullptr;
  int64_t reads = 0, stride = 0, tokens = 0, rows = 0;
  const float *factor = nullptr, *constant = nullptr;  // [rows, reads], [rows]
  int16_t* words = nullptr;                            // room for [rows, reads]
  float* score = nullptr;
  int64_t score_stride = 0;
};

struct RopeKernel {
  // Return the task's data for a side, in scratch memory.
  void* (*prepare)(const RopedSide&);
  // score[r][i] += query[r] · x̂[i]
  void (*scores)(void* side, RopedSpan span, float* score, int64_t score_stride);
  // score[r][i] += constant[r] + Σ_c factor[r][c] · table[c][i]
  void (*rotated_mean)(const RotatedMeanProduct&);
};

const RopeKernel& rope_kernel_vnni();
void rotated_mean_vnni(const RotatedMeanProduct& of);

// Return the codes before RoPE if they are a grid of at most 4 bits with scales per channel, maybe
// with outliers; else null.
static inline const View* roped_codes(const View& keys) {
  const bool apart = keys.kind == Kind::sum && keys.count == 2 && keys.parts[1].kind == Kind::sparse;
  const View* codes = apart ? keys.parts : &keys;
  const GridView& grid = codes->grid;
  if (codes->kind != Kind::grid || grid.bits > 4 || grid.lane_scaled || grid.group != grid.L) return nullptr;
  return keys.D % 2 || keys.D / 2 % packed_slots(grid.bits, grid.bits == 3 ? 3 : 1) ? nullptr : codes;
}

}  // namespace tersekv
