// Sixteen lanes in two 256-bit registers: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "simd_float32.h"

namespace tersekv {

struct Avx2 : Float32Codes<Avx2> {
  static constexpr const char* kName = "avx2";
  static constexpr double kNsPerProduct = 0.035;
  static constexpr int kExactTokens = 1;
  // There are sixteen registers: rows times groups times two, plus the table, the words and a
  // coefficient.
  static constexpr int max_groups(int rows) { return rows <= 2 ? 2 : 1; }
  static constexpr bool split(int sums) { return sums <= 2; }
  static constexpr bool kSmallTables = true;  // tables of up to 8 entries need half the instructions

  struct F {
    __m256 lo, hi;
  };
  struct Words {
    __m256i lo, hi;
  };

  template <int BITS>
  struct Table {
    __m256 low, high;
    explicit Table(const float* table) {
      alignas(32) float entry[16];
      for (int i = 0; i < 16; i++) entry[i] = table[i & ((1 << BITS) - 1)];
      low = _mm256_load_ps(entry);
      high = _mm256_load_ps(entry + 8);
    }
    __m256 half(__m256i index) const {
      const __m256 first = _mm256_permutevar8x32_ps(low, index);
      if constexpr (BITS <= 3) return first;
      // Bit 3 of the index becomes the sign, the only bit that blendv reads.
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
      return _mm256_blendv_ps(first, _mm256_permutevar8x32_ps(high, index), upper);
    }
    F at(Words index) const { return {half(index.lo), half(index.hi)}; }
  };

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
  }
  static F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
  static F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }  // b if one is NaN
  static F abs(F a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
  }
  static F with_sign(F magnitude, F sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(magnitude.lo, _mm256_and_ps(bit, sign.lo)),
            _mm256_or_ps(magnitude.hi, _mm256_and_ps(bit, sign.hi))};
  }
  static float hsum(F a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }
  static float hmax(F a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
  }

  static Words load_words(const int32_t* p) {
    const auto* v = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
  }
  template <int N>
  static Words shr(Words w) {
    return {_mm256_srli_epi32(w.lo, N), _mm256_srli_epi32(w.hi, N)};
  }
  static Words no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  // Return bits 15 and 31 of w, and those of earlier words one bit further down.
  static Words spare(Words earlier, Words w) {
    const __m256i mask = _mm256_set1_epi32(INT32_MIN | 0x8000);
    return {_mm256_or_si256(_mm256_srli_epi32(earlier.lo, 1), _mm256_and_si256(w.lo, mask)),
            _mm256_or_si256(_mm256_srli_epi32(earlier.hi, 1), _mm256_and_si256(w.hi, mask))};
  }

  template <Float T>
  static F load_as(const void* p) {
    if constexpr (T == Float::f32) return load(static_cast<const float*>(p));
    const auto* v = static_cast<const __m128i*>(p);
    const __m128i lo = _mm_loadu_si128(v), hi = _mm_loadu_si128(v + 1);
    if constexpr (T == Float::f16) return {_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi)};
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
  }
  // Load the first n of sixteen elements, zeros after them.
  template <Float T>
  static F load_as_n(const void* p, int64_t n) {
    alignas(64) unsigned char buffer[64] = {};
    std::memcpy(buffer, p, n * (T == Float::f32 ? 4 : 2));
    return load_as<T>(buffer);
  }
  static __m256 hide(__m256 x, const uint8_t* seen) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(seen));
    const __m256i hidden = _mm256_cmpeq_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_setzero_si256());
    return _mm256_blendv_ps(x, _mm256_set1_ps(-__builtin_inff()), _mm256_castsi256_ps(hidden));
  }
  static F hide(F x, const uint8_t* seen) { return {hide(x.lo, seen), hide(x.hi, seen + 8)}; }
  // x = whole(x) + fraction(x, whole(x)), with a fraction from 0 to 1.
  static F whole(F x) { return {_mm256_floor_ps(x.lo), _mm256_floor_ps(x.hi)}; }
  static F fraction(F x, F n) { return {_mm256_sub_ps(x.lo, n.lo), _mm256_sub_ps(x.hi, n.hi)}; }
  // x·2^n for integral n in [-126, 127].
  static __m256 scale2(__m256 x, __m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static F scale2(F x, F n) { return {scale2(x.lo, n.lo), scale2(x.hi, n.hi)}; }
  static F zero_below(F x, F value, float limit) {
    const __m256 bound = _mm256_set1_ps(limit);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, bound, _CMP_LT_OQ), value.lo),
            _mm256_andnot_ps(_mm256_cmp_ps(x.hi, bound, _CMP_LT_OQ), value.hi)};
  }
};

}  // namespace tersekv
