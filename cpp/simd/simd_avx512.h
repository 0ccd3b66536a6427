// Sixteen lanes in one 512-bit register: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "simd_float32.h"

namespace tersekv {

struct Avx512 : Float32Codes<Avx512> {
  static constexpr const char* kName = "avx512";
  static constexpr double kNsPerProduct = 0.013;
  static constexpr int kExactTokens = 4;
  static constexpr int max_groups(int) { return 4; }
  // Eight or more chains of additions hide the latency of one.
  static constexpr bool split(int sums) { return sums <= 8; }
  static constexpr bool kSmallTables = false;

  using F = __m512;
  using Words = __m512i;

  template <int BITS>
  struct Table {
    __m512 entry;
    // The permute reads four bits of the index, so copies of a small table make masking
    // unnecessary.
    explicit Table(const float* table) {
      alignas(64) float copies[16];
      for (int i = 0; i < 16; i++) copies[i] = table[i & ((1 << BITS) - 1)];
      entry = _mm512_load_ps(copies);
    }
    F at(Words index) const { return _mm512_permutexvar_ps(index, entry); }
  };

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  // Store the lanes whose bits are set one after the other. Nothing after them is written.
  static void store_marked(float* p, F x, unsigned bits) {
    const auto count = static_cast<unsigned>(__builtin_popcount(bits));
    const F lanes = _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), x);
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), lanes);
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }  // b if one is NaN
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F with_sign(F magnitude, F sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
  }
  static float hsum(F a) { return _mm512_reduce_add_ps(a); }
  static float hmax(F a) { return _mm512_reduce_max_ps(a); }

  static Words load_words(const int32_t* p) { return _mm512_loadu_si512(p); }
  template <int N>
  static Words shr(Words w) {
    if constexpr (N == 0) return w;
    return _mm512_srli_epi32(w, N);
  }
  static Words no_words() { return _mm512_setzero_si512(); }
  // Return bits 15 and 31 of w, and those of earlier words one bit further down.
  static Words spare(Words earlier, Words w) {
    // 0xF8: first | (second & third)
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(earlier, 1), w, _mm512_set1_epi32(INT32_MIN | 0x8000), 0xF8);
  }

  template <Float T>
  static F load_as(const void* p) {
    if constexpr (T == Float::f32) return load(static_cast<const float*>(p));
    const __m256i h = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return from_half<T>(h);
  }
  // Load the first n of sixteen elements, zeros after them.
  template <Float T>
  static F load_as_n(const void* p, int64_t n) {
    const auto mask = static_cast<__mmask16>((1u << n) - 1);
    if constexpr (T == Float::f32) return _mm512_maskz_loadu_ps(mask, p);
    return from_half<T>(_mm256_maskz_loadu_epi16(mask, p));
  }
  template <Float T>
  static F from_half(__m256i h) {
    if constexpr (T == Float::f16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  static F hide(F x, const uint8_t* seen) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(seen));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), _mm_test_epi8_mask(bytes, bytes), x);
  }
  // x = whole(x) + fraction(x, whole(x)), with a fraction from 0 to 1. Here scale2 takes the whole part itself.
  static F whole(F x) { return x; }
  static F fraction(F x, F) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  // x·2^whole(n).
  static F scale2(F x, F n) { return _mm512_scalef_ps(x, n); }
  static F zero_below(F x, F value, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), value);
  }
};

}  // namespace tersekv
