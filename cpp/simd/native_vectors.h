// Vectors of the widest registers of the instruction set that a file is compiled for.
#pragma once

#include <cstdint>
#include <cstring>

#include "contract.h"
#include "transposed.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kVectorFloats = kVectorBytes / 4, kVectorDoubles = kVectorBytes / 8;

typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVector __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVector __attribute__((vector_size(kVectorBytes)));
typedef float RoundedVector __attribute__((vector_size(kVectorBytes / 2)));  // as many as doubles

inline FloatVector load_vector(const float* p) {
  FloatVector out;
  std::memcpy(&out, p, sizeof(out));
  return out;
}
inline void store_vector(float* p, FloatVector x) { std::memcpy(p, &x, sizeof(x)); }
inline void store_vector(int32_t* p, IntVector x) { std::memcpy(p, &x, sizeof(x)); }

// to[j·to_stride + i] = from[i·from_stride + j] for i < n and j < m.
inline void transpose_matrix(const float* from, int64_t from_stride, int64_t n, int64_t m, float* to,
                             int64_t to_stride) {
  const int64_t whole = n / kLanes * kLanes, blocks = m / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t j = 0; j < blocks; j += kLanes)
      transpose(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
  for (int64_t j = 0; j < m; j++)
    for (int64_t i = j < blocks ? whole : 0; i < n; i++) to[j * to_stride + i] = from[i * from_stride + j];
}

// Transpose vectors [n, D], `stride` apart, to rows [D, lanes]; lanes from n on are zeros.
inline void transpose_vectors(const float* x, int64_t stride, int64_t n, int64_t D, int64_t lanes, float* rows) {
  transpose_matrix(x, stride, n, D, rows, lanes);
  for (int64_t d = 0; d < D; d++)
    for (int64_t i = n; i < lanes; i++) rows[d * lanes + i] = 0.0f;
}

}  // namespace
}  // namespace tersekv
