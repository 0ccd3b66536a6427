// Split calls into tasks over heads, rows and tokens, run them and merge.
#pragma once

#include <cstddef>
#include <vector>

#include "basis.h"
#include "contract.h"

namespace tersekv {

// Transform of the outputs [B, H, R, Dv] of the calls from number `first` on: a product with a
// matrix per head, then a mean per head [1 or B, H, Dv] is added.
struct OutputMap {
  std::size_t first = 0;
  HeadMatrix matrix;
  Float type = Float::f32;
  const void* mean = nullptr;
  int64_t mean_b = 0, mean_h = 0;

  bool given() const { return matrix.given() || mean; }
};

// A rotated mean whose scores some calls start with, and room for them.
struct SharedMean {
  View view;
  MeanScores scores;
  std::vector<MarkedScores> sets;
};

// Run calls of one query over disjoint tokens, with the same B, H, R and Dv. Return out
// [B, H, R, Dv] and lse [B, H, R] over all of them. means: their scores are computed first.
void attend(std::vector<Call>& calls, const OutputMap& map, std::vector<SharedMean>& means, int threads, float* out,
            float* lse);
void merge_segments(const Merge& call, int threads);
void decode(const Decode& call, int threads);

// Multiply all heads, on up to `threads` threads.
void multiply(BasisProduct call, int threads);

}  // namespace tersekv
