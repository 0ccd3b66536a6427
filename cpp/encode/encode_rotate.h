// Rotations in float64, kVectorsAtOnce vectors at a time: a dense one, and the fast Hadamard
// transform with its D·log₂D additions per vector.
#pragma once

#include "encoders.h"
#include "native_vectors.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

constexpr int kRotatedRows = 4;  // matrix rows that are multiplied at a time
constexpr int kDoubles = kVectorBytes / 8;

typedef double DoubleVector __attribute__((vector_size(kVectorBytes)));

// Vectors of a group as rows [D, kVectorsAtOnce]; missing vectors are zeros.
struct RotatedGroup {
  int64_t first, n;
  double* rows;

  RotatedGroup(const Rotate& call, int64_t group) : first(group * kVectorsAtOnce), n(call.rows - first) {
    if (n > kVectorsAtOnce) n = kVectorsAtOnce;
    reset_scratch();
    rows = scratch_of<double>(kVectorsAtOnce * call.D);
    for (int64_t d = 0; d < call.D; d++) {
      const float* x = call.x + first * call.D + (call.order ? call.order[d] : d);
      const double sign = call.order ? call.signs[d] : 1.0;
      for (int64_t i = 0; i < kVectorsAtOnce; i++) rows[d * kVectorsAtOnce + i] = i < n ? x[i * call.D] * sign : 0.0;
    }
  }
};

void rotate_dense(const Rotate& call, int64_t group) {
  const RotatedGroup x(call, group);
  const int64_t D = call.D;
  for (int64_t row = 0; row < D; row += kRotatedRows) {
    const int64_t rows = D - row < kRotatedRows ? D - row : kRotatedRows;
    const double* at[kRotatedRows];
    for (int r = 0; r < kRotatedRows; r++) at[r] = call.matrix + (row + (r < rows ? r : 0)) * D;
    for (int64_t i = 0; i < kVectorsAtOnce; i += 2 * kDoubles) {
      DoubleVector low[kRotatedRows] = {}, high[kRotatedRows] = {};
      for (int64_t d = 0; d < D; d++) {
        DoubleVector x_low, x_high;
        std::memcpy(&x_low, x.rows + d * kVectorsAtOnce + i, sizeof(x_low));
        std::memcpy(&x_high, x.rows + d * kVectorsAtOnce + i + kDoubles, sizeof(x_high));
        for (int r = 0; r < kRotatedRows; r++) {
          low[r] += x_low * at[r][d];
          high[r] += x_high * at[r][d];
        }
      }
      double sums[kRotatedRows][2 * kDoubles];
      for (int r = 0; r < kRotatedRows; r++) {
        std::memcpy(sums[r], &low[r], sizeof(low[r]));
        std::memcpy(sums[r] + kDoubles, &high[r], sizeof(high[r]));
      }
      for (int64_t k = 0; k < 2 * kDoubles && i + k < x.n; k++)
        for (int64_t r = 0; r < rows; r++) call.out[(x.first + i + k) * D + row + r] = static_cast<float>(sums[r][k]);
    }
  }
}

void rotate_hadamard(const Rotate& call, int64_t group) {
  const RotatedGroup x(call, group);
  constexpr int64_t V = kVectorsAtOnce;
  for (int64_t half = 1; half < call.block; half *= 2)
    for (int64_t from = 0; from < call.D; from += 2 * half)
      for (int64_t d = from; d < from + half; d++) {
        double *a = x.rows + d * V, *b = a + half * V;
        for (int64_t i = 0; i < V; i++) {
          const double sum = a[i] + b[i], difference = a[i] - b[i];
          a[i] = sum;
          b[i] = difference;
        }
      }
  for (int64_t i = 0; i < x.n; i++)
    for (int64_t d = 0; d < call.D; d++)
      call.out[(x.first + i) * call.D + d] = static_cast<float>(x.rows[d * V + i] * call.scale);
}

}  // namespace
}  // namespace tersekv
