// A head's matrix as floats, for products with many vectors.
#pragma once

#include "basis.h"
#include "node.h"

namespace tersekv {
namespace {  // internal to each build

using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Floats& at(float* x) { return *reinterpret_cast<Floats*>(x); }
inline const Floats& at(const float* x) { return *reinterpret_cast<const Floats*>(x); }

// Unpack sixteen entries of 6 bits from twelve bytes.
inline Floats unpack(const uint8_t* codes) {
  constexpr int kOffset = 32;
  constexpr Ints shift = {0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18};
  const auto word = [&](int i) { return codes[3 * i] | codes[3 * i + 1] << 8 | codes[3 * i + 2] << 16; };
  const int a = word(0), b = word(1), c = word(2), d = word(3);
  const Ints words = {a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
  return __builtin_convertvector((words >> shift & 63) - kOffset, Floats);
}

// Unpack a head's matrix [D, D] into w [D, width], without the factors of its channels. combine: its rows are w's rows,
// else its columns are.
inline void unpack_matrix(const HeadMatrix& of, bool combine, int64_t b, int64_t h, int64_t D, int64_t width,
                          float* w) {
  const float* dense = of.codes ? nullptr : of.dense + b * of.dense_b + h * of.dense_h;
  const uint8_t* codes = of.codes ? of.codes + b * of.codes_b + h * of.codes_h : nullptr;
  for (int64_t i = 0; i < D * width; i++) w[i] = 0.0f;
  // Blocks of sixteen rows, so that a transposed block fills whole cache lines.
  for (int64_t d0 = 0; d0 < D; d0 += kLanes)
    for (int64_t c = 0; c < D; c += kLanes)
      for (int64_t d = d0; d < d0 + kLanes && d < D; d++) {
        const int64_t n = D - c < kLanes ? D - c : kLanes;
        alignas(64) float entries[kLanes];
        if (codes)
          at(entries) = unpack(codes + (d * D + c) * 3 / 4);
        else
          for (int64_t i = 0; i < n; i++) entries[i] = dense[d * D + c + i];
        if (combine)
          for (int64_t i = 0; i < n; i++) w[d * width + c + i] = entries[i];
        else
          for (int64_t i = 0; i < n; i++) w[(c + i) * width + d] = entries[i];
      }
}

// Factor of a channel of a head's matrix.
inline float channel_of(const HeadMatrix& of, int64_t b, int64_t h, int64_t c) {
  return of.codes ? float_at(of.type, of.channels, b * of.channels_b + h * of.channels_h + c) : 1.0f;
}

}  // namespace
}  // namespace tersekv
