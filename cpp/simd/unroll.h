// Loops that are unrolled at compile time.
#pragma once

#include "contract.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kRowTile = 4;  // query rows that a kernel handles at once

template <int I>
struct Index {
  constexpr operator int() const { return I; }
};

// Call body N times, unrolled: shifts need constants and sums must stay in registers.
template <int N, int I = 0, class Body>
[[gnu::always_inline]] inline void repeat(Body&& body) {
  if constexpr (I < N) {
    body(Index<I>{});
    repeat<N, I + 1>(body);
  }
}
#define TERSEKV_INLINE __attribute__((always_inline))

// The smallest run of words that contains whole codes: three words for 3 bits, else one.
struct CodeUnit {
  int64_t words, shift;  // it has 1 << shift codes
  explicit CodeUnit(int bits) : words(bits == 3 ? 3 : 1), shift(bits == 4 ? 3 : bits == 2 ? 4 : 5) {}
};

// Load sixteen float16 or bfloat16.
template <class S>
[[gnu::always_inline]] inline typename S::F load_half(Float half, const uint16_t* p) {
  return half == Float::f16 ? S::template load_as<Float::f16>(p) : S::template load_as<Float::bf16>(p);
}

// Load the first n of them, zeros after them.
template <class S>
typename S::F load_half_n(Float half, const uint16_t* p, int64_t n) {
  if (n >= kLanes) return load_half<S>(half, p);
  return half == Float::f16 ? S::template load_as_n<Float::f16>(p, n) : S::template load_as_n<Float::bf16>(p, n);
}

template <Float T>
struct OfType {
  constexpr operator Float() const { return T; }
};

// Call body with the type as a compile-time constant.
template <class Body>
void with_type(Float type, Body&& body) {
  switch (type) {
    case Float::f32:
      return body(OfType<Float::f32>{});
    case Float::f16:
      return body(OfType<Float::f16>{});
    default:
      return body(OfType<Float::bf16>{});
  }
}

// Call body(Index<rows>) for 1 to MOST rows.
template <int MOST = kRowTile, int ROWS = 1, class Body>
[[gnu::always_inline]] inline void with_rows(int64_t rows, Body&& body) {
  if constexpr (ROWS < MOST)
    if (rows > ROWS) return with_rows<MOST, ROWS + 1>(rows, body);
  body(Index<ROWS>{});
}

}  // namespace
}  // namespace tersekv
