// Attention over polar coordinates in integers. polar.h uses it if the CPU supports it.
#pragma once

#include "contract.h"

namespace tersekv {

// One view for one task. Keys: query [rows, query_stride], scaled; values: query is null.
struct PolarSide {
  const PolarView* view = nullptr;
  int64_t D = 0, b = 0, h = 0, rows = 0;
  const float* query = nullptr;
  int64_t query_stride = 0;
};

// Rows [row, row + rows), at most four, and whole blocks of tokens [first, last).
struct PolarSpan {
  int64_t row, rows, first, last;
};

struct PolarKernel {
  // Return the task's data for a side, in scratch memory; null if the kernel does not support the
  // view.
  const void* (*prepare)(const PolarSide&);
  // score[r][i] += query[r] · x̂[i]. Values of the same tokens, if given, are prefetched.
  void (*scores)(const void* side, PolarSpan span, float* score, int64_t score_stride, const View* values);
  // sum[r] += Σ weight[r][i] · x̂[i], weights not negative.
  void (*sums)(const void* side, PolarSpan span, const float* weight, int64_t weight_stride, float* sum,
               int64_t sum_stride);
};

const PolarKernel& polar_kernel_vnni();

}  // namespace tersekv
