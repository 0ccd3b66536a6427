// Transposition of sixteen rows of sixteen floats, in blocks as wide as a register.
#pragma once

#include <cstdint>
#include <utility>

#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

#ifdef __AVX512F__
constexpr int kBlock = 16;
#elif __AVX2__
constexpr int kBlock = 8;
#else
constexpr int kBlock = 4;
#endif

using BlockFloats = float __attribute__((vector_size(4 * kBlock), aligned(4), may_alias));
using BlockInts = int32_t __attribute__((vector_size(4 * kBlock)));

// Exchange the lanes of `a` with bit S for those of `b` without it. GCC and Clang name the shuffle differently.
template <int S, int... L>
[[gnu::always_inline]] inline void exchange_lanes(BlockFloats& a, BlockFloats& b, std::integer_sequence<int, L...>) {
  const BlockFloats x = a, y = b;
#ifdef __clang__
  a = __builtin_shufflevector(x, y, (L & S ? kBlock + L - S : L)...);
  b = __builtin_shufflevector(x, y, (L & S ? kBlock + L : L + S)...);
#else
  a = __builtin_shuffle(x, y, BlockInts{(L & S ? kBlock + L - S : L)...});
  b = __builtin_shuffle(x, y, BlockInts{(L & S ? kBlock + L : L + S)...});
#endif
}

// Exchange the blocks of `S` lanes above the diagonal with those below it.
template <int S>
[[gnu::always_inline]] inline void exchange(BlockFloats (&x)[kBlock]) {
  repeat<kBlock>([&](auto i) TERSEKV_INLINE {
    if constexpr ((i & S) == 0) exchange_lanes<S>(x[i], x[i + S], std::make_integer_sequence<int, kBlock>());
  });
  if constexpr (S > 1) exchange<S / 2>(x);
}

// to[j·to_stride + i] = from[i·from_stride + j] for i, j < 16.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int i = 0; i < kLanes; i += kBlock)
    for (int j = 0; j < kLanes; j += kBlock) {
      BlockFloats x[kBlock];
      for (int k = 0; k < kBlock; k++) x[k] = *reinterpret_cast<const BlockFloats*>(from + (i + k) * from_stride + j);
      exchange<kBlock / 2>(x);
      for (int k = 0; k < kBlock; k++) *reinterpret_cast<BlockFloats*>(to + (j + k) * to_stride + i) = x[k];
    }
}

}  // namespace
}  // namespace tersekv
