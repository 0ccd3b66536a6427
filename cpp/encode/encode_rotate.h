// Rotations in float64, kVectorsAtOnce vectors at a time: a dense one, and the fast Hadamard
// transform with its D·log₂D additions per vector.
#pragma once

#include "encoders.h"
#include "floats.h"
#include "native_vectors.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// A tile of matrix rows and vectors whose sums fit into registers: 32 with AVX-512, else 16.
constexpr int kRotatedRows = 4, kRotatedColumns = kVectorBytes == 64 ? 4 : 2;

// Vectors of a group as rows [D, kVectorsAtOnce]; missing vectors are zeros.
struct RotatedGroup {
  static constexpr int64_t V = kVectorsAtOnce;
  const Rotate& call;
  int64_t first, n;
  float* turned;
  double* rows;

  RotatedGroup(const Rotate& call, int64_t group) : call(call), first(group * V), n(call.rows - first) {
    if (n > V) n = V;
    reset_scratch();
    turned = scratch(V * call.D);
    rows = scratch_of<double>(V * call.D);
    const char* from = call.x + first * call.D * bytes_of(call.type);
    const float* x = reinterpret_cast<const float*>(from);
    if (call.type != Float::f32) {
      float* floats = scratch(n * call.D);
      to_floats(call.type, from, 1, n * call.D, floats);
      x = floats;
    }
    transpose_vectors(x, call.D, n, call.D, V, turned);
    for (int64_t d = 0; d < call.D; d++) {
      const float* x = turned + (call.order ? call.order[d] : d) * V;
      const double sign = call.order ? call.signs[d] : 1.0;
      for (int64_t i = 0; i < V; i++) rows[d * V + i] = x[i] * sign;
    }
  }

  // Store `turned` [D, kVectorsAtOnce] as the group's results.
  void store() const { transpose_matrix(turned, V, call.D, n, call.out + first * call.D, call.D); }
};

void rotate_dense(const Rotate& call, int64_t group) {
  const RotatedGroup x(call, group);
  constexpr int64_t V = kVectorsAtOnce, width = kRotatedColumns * kVectorDoubles;
  const int64_t D = call.D;
  for (int64_t row = 0; row < D; row += kRotatedRows) {
    const double* at[kRotatedRows];
    for (int r = 0; r < kRotatedRows; r++) at[r] = call.matrix + (row + r < D ? row + r : row) * D;
    for (int64_t i = 0; i < V; i += width) {
      DoubleVector sums[kRotatedRows][kRotatedColumns] = {};
      for (int64_t d = 0; d < D; d++) {
        DoubleVector of[kRotatedColumns];
        repeat<kRotatedColumns>([&](auto c) TERSEKV_INLINE {
          std::memcpy(&of[c], x.rows + d * V + i + c * kVectorDoubles, sizeof(of[c]));
        });
        repeat<kRotatedRows>([&](auto r) TERSEKV_INLINE {
          const double entry = at[r][d];
          repeat<kRotatedColumns>([&](auto c) TERSEKV_INLINE { sums[r][c] += of[c] * entry; });
        });
      }
      repeat<kRotatedRows>([&](auto r) TERSEKV_INLINE {
        if (row + r < D)
          repeat<kRotatedColumns>([&](auto c) TERSEKV_INLINE {
            const auto rounded = __builtin_convertvector(sums[r][c], RoundedVector);
            std::memcpy(x.turned + (row + r) * V + i + c * kVectorDoubles, &rounded, sizeof(rounded));
          });
      });
    }
  }
  x.store();
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
  for (int64_t i = 0; i < call.D * V; i++) x.turned[i] = static_cast<float>(x.rows[i] * call.scale);
  x.store();
}

}  // namespace
}  // namespace tersekv
