// Conversion to int16 and sums of int16 products: AVX-512 BW and VNNI.
#pragma once

#include <immintrin.h>

#include "rope_kernel.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each file

constexpr float kMostWord = 32767.0f;
constexpr float kMostQuery = 65000.0f;  // times kMostWord, and rounded, less than 2^31
constexpr float kLeast = 1e-33f;        // for less, its inverse times kMostQuery would be too large

// sum += Σ of two products. Inline assembly, because GCC 12 copies the sums of the intrinsic.
[[gnu::always_inline]] inline void add_products(__m512i& sum, __m512i x, const int16_t* pair) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*reinterpret_cast<const int32_t*>(pair)));
}

// Return the mask of the first n of sixteen lanes.
inline __mmask16 first(int64_t n) { return n < kLanes ? (1u << n) - 1 : 0xffff; }

// Convert x [n] to int16; return the unit.
inline float to_words(const float* x, int64_t n, int16_t* words) {
  __m512 sum = _mm512_setzero_ps(), most = _mm512_setzero_ps();
  const auto part = [&](int64_t i) { return _mm512_maskz_loadu_ps(first(n - i), x + i); };
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 size = _mm512_abs_ps(part(i));
    sum = _mm512_add_ps(sum, size);
    most = _mm512_max_ps(most, size);
  }
  const float all = _mm512_reduce_add_ps(sum) / kMostQuery, largest = _mm512_reduce_max_ps(most) / kMostWord;
  const float step = all > largest || all != all ? all : largest;
  // if infinite or NaN there are no integers, and all scores become NaN
  const bool finite = step < __builtin_inff();
  const __m512 inverse = _mm512_set1_ps(finite && step > kLeast ? 1.0f / step : 0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512i word = finite ? _mm512_cvtps_epi32(_mm512_mul_ps(part(i), inverse)) : _mm512_setzero_si512();
    _mm512_mask_cvtepi32_storeu_epi16(words + i, first(n - i), word);
  }
  return finite ? step : __builtin_nanf("");
}

}  // namespace
}  // namespace tersekv
