// Products of each head's vectors with a square matrix: dense, or in a basis of 6-bit entries
// (kernels/basis.py).
#pragma once

#include "contract.h"

namespace tersekv {

// Rows of a matrix per head: `dense`, or `codes` with a factor per channel. Strides count elements;
// 0: all share one.
struct HeadMatrix {
  const float* dense = nullptr;  // [1 or B, 1 or H, D, D]
  int64_t dense_b = 0, dense_h = 0;
  const uint8_t* codes = nullptr;  // [1 or B, H, 3·D²/4], D a multiple of 4
  int64_t codes_b = 0, codes_h = 0;
  Float type = Float::f32;
  const void* channels = nullptr;  // [1 or B, H, D]
  int64_t channels_b = 0, channels_h = 0;

  bool given() const { return dense || codes; }
  // True if all batch rows have the same matrices.
  bool shared() const { return dense_b == 0 && codes_b == 0 && channels_b == 0; }
};

constexpr int64_t kSolvedAtOnce = 256;

// Least and most vectors of a task, for which unpacking and transposing a matrix costs little. A task has fewer
// vectors where threads would have no task.
constexpr int64_t kMultipliedAtOnce = 48, kMostAtOnce = 512;

// R vectors of each of B·H heads. Strides of x and out are between vectors; the vectors of a head
// are consecutive. A product may be in place, with equal strides.
struct BasisProduct {
  int64_t B, H, R, D;
  bool combine;  // true: weighted sum of the rows; false: dot product with each row
  HeadMatrix matrix;
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  bool invert = false;  // find y with x = sum of y_d·row_d, for a matrix in codes
  // of the y_d [B, H, D]: then x is not read, and each y is that of a unit vector, in these units
  const float* units = nullptr;
  int threads = 1;  // few vectors are divided into no more tasks than this

  // Batch rows of a product's task, which multiply with the same matrix.
  int64_t batch_rows() const {
    if (!matrix.shared()) return 1;
    const int64_t all = ceil_div(kMultipliedAtOnce, R > 0 ? R : 1), even = ceil_div(B * H, threads);
    return even < all && even > 0 ? even : all;
  }
  // Tasks over a product's vectors of one head and batch row. They each unpack the matrix again.
  int64_t parts() const { return batch_rows() == 1 ? ceil_div(R, kMostAtOnce) : 1; }
  // Number of tasks. Those of an inverse each factor the matrix again.
  int64_t tasks() const {
    return invert ? B * H * ceil_div(R, kSolvedAtOnce) : H * ceil_div(B, batch_rows()) * parts();
  }
};

void basis_product_baseline(const BasisProduct& call, int64_t task);
void basis_product_avx2(const BasisProduct& call, int64_t task);
void basis_product_avx512(const BasisProduct& call, int64_t task);

}  // namespace tersekv
