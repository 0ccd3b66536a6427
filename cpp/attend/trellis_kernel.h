// Attention over trellis codes of an instruction set of its own. trellis.h uses it if the CPU supports it.
#pragma once

#include "contract.h"

namespace tersekv {

// One view for one task. Keys: query [rows, query_stride], scaled; values: query is null.
struct TrellisSide {
  const TrellisView* view = nullptr;
  int64_t D = 0, b = 0, h = 0, rows = 0;
  const float* query = nullptr;
  int64_t query_stride = 0;
  const float* scale = nullptr;  // [D], of this head
};

// Rows [row, row + rows), at most `code_rows` of the instruction set, and whole blocks of tokens [first, last). Keys:
// tokens [later, later_last) are read next.
struct TrellisSpan {
  int64_t row, rows, first, last, later = 0, later_last = 0;
};

struct TrellisKernel {
  // Return the task's data for a side, in scratch memory.
  const void* (*prepare)(const TrellisSide&);
  // score[r][i] += query[r] · x̂[i]. Values of the same tokens, if given, are prefetched.
  void (*scores)(const void* side, TrellisSpan span, float* score, int64_t score_stride, const TrellisSide* values);
  // sum[r] += Σ weight[r][i] · x̂[i], weights not negative.
  void (*sums)(const void* side, TrellisSpan span, const float* weight, int64_t weight_stride, float* sum,
               int64_t sum_stride);
};

const TrellisKernel& trellis_kernel_avx2();    // float32
const TrellisKernel& trellis_kernel_avx512();  // float32
const TrellisKernel& trellis_kernel_vnni();    // integers
const TrellisKernel& trellis_kernel_amx();     // integers

}  // namespace tersekv
