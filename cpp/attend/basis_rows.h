// A head's matrix as floats, for products with many vectors.
#pragma once

#include "basis.h"
#include "node.h"
#include "transposed.h"

namespace tersekv {
namespace {  // internal to each build

// Unpack sixteen entries of 6 bits from twelve bytes.
inline void unpack(const uint8_t* codes, float* to) {
  constexpr int kHalf = kLanes / 2, kOffset = 32;
  using Longs = int64_t __attribute__((vector_size(8 * kHalf)));
  using Ints = int32_t __attribute__((vector_size(4 * kHalf)));
  using Floats = float __attribute__((vector_size(4 * kHalf), aligned(4), may_alias));
  constexpr Longs shift = {0, 6, 12, 18, 24, 30, 36, 42};
  for (int half = 0; half < 2; half++) {  // the bytes 0 to 7, then 4 to 11
    int64_t bytes;
    __builtin_memcpy(&bytes, codes + 4 * half, sizeof(bytes));
    const Longs entries = (bytes >> 16 * half) + Longs{} >> shift & 63;
    const Ints plain = __builtin_convertvector(entries, Ints) - kOffset;
    reinterpret_cast<Floats*>(to)[half] = __builtin_convertvector(plain, Floats);
  }
}

// Return the entry of 6 bits at an index.
inline float entry_at(const uint8_t* codes, int64_t index) {
  const int64_t byte = index * 3 / 4;
  const int low = index % 4 * 6 % 8;
  const int bits = codes[byte] | (low > 2 ? codes[byte + 1] << 8 : 0);
  return static_cast<float>((bits >> low & 63) - 32);
}

// Return a head's matrix [D, D], rows `width` floats apart, without the factors of its channels: the matrix itself, or
// unpacked into w [D, width]. combine: its rows are those of the result, else its columns are.
inline const float* unpack_matrix(const HeadMatrix& of, bool combine, int64_t b, int64_t h, int64_t D, int64_t width,
                                  float* w) {
  if (of.codes) {
    const uint8_t* codes = of.codes + b * of.codes_b + h * of.codes_h;
    if (D % kLanes) {
      for (int64_t i = 0; i < D * width; i++) w[i] = 0.0f;
      for (int64_t d = 0; d < D; d++)
        for (int64_t c = 0; c < D; c++) w[combine ? d * width + c : c * width + d] = entry_at(codes, d * D + c);
      return w;
    }
    float block[kLanes * kLanes];
    for (int64_t d = 0; d < D; d += kLanes)
      for (int64_t c = 0; c < D; c += kLanes) {
        float* to = combine ? w + d * width + c : block;
        const int64_t stride = combine ? width : kLanes;
        for (int64_t i = 0; i < kLanes; i++) unpack(codes + ((d + i) * D + c) * 3 / 4, to + i * stride);
        if (!combine) transpose(block, kLanes, w + c * width + d, width);
      }
    return w;
  }
  const float* dense = of.dense + b * of.dense_b + h * of.dense_h;
  if (combine && D == width) return dense;
  for (int64_t i = 0; D < width && i < D * width; i++) w[i] = 0.0f;
  if (combine || D % kLanes) {
    for (int64_t d = 0; d < D; d++)
      for (int64_t c = 0; c < D; c++) w[combine ? d * width + c : c * width + d] = dense[d * D + c];
    return w;
  }
  for (int64_t d = 0; d < D; d += kLanes)
    for (int64_t c = 0; c < D; c += kLanes) transpose(dense + d * D + c, D, w + c * width + d, width);
  return w;
}

// Factor of a channel of a head's matrix.
inline float channel_of(const HeadMatrix& of, int64_t b, int64_t h, int64_t c) {
  return of.codes ? float_at(of.type, of.channels, b * of.channels_b + h * of.channels_h + c) : 1.0f;
}

}  // namespace
}  // namespace tersekv
