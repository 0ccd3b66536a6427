// Vectors of the widest registers of the instruction set that a file is compiled for.
#pragma once

#include <cstdint>
#include <cstring>

namespace tersekv {
namespace {  // internal to each build of the encoders

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kVectorFloats = kVectorBytes / 4;

typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVector __attribute__((vector_size(kVectorBytes)));

inline FloatVector load_vector(const float* p) {
  FloatVector out;
  std::memcpy(&out, p, sizeof(out));
  return out;
}
inline void store_vector(float* p, FloatVector x) { std::memcpy(p, &x, sizeof(x)); }
inline void store_vector(int32_t* p, IntVector x) { std::memcpy(p, &x, sizeof(x)); }

// Transpose vectors [n, D] to rows [D, lanes]; lanes from n on are zeros.
inline void transpose_vectors(const float* x, int64_t n, int64_t D, int64_t lanes, float* rows) {
  for (int64_t d = 0; d < D; d++) {
    float* row = rows + d * lanes;
    for (int64_t i = 0; i < n; i++) row[i] = x[i * D + d];
    for (int64_t i = n; i < lanes; i++) row[i] = 0.0f;
  }
}

}  // namespace
}  // namespace tersekv
