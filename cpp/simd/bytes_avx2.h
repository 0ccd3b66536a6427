// Operations for packed bytes and long tables in addition to the float lanes: AVX2.
#pragma once

#include "simd_avx2.h"

namespace tersekv {

struct Avx2Bytes : Avx2 {
  static constexpr bool kShortTables = false;

  // Load sixteen bytes, one per lane.
  static Words load_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
  // Load sixteen uint16, one per lane.
  static Words load_halves(const uint16_t* p) {
    const auto* v = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(v)), _mm256_cvtepu16_epi32(_mm_loadu_si128(v + 1))};
  }
  static Words shift_right(Words w, int n) {
    const __m256i count = _mm256_set1_epi32(n);
    return {_mm256_srlv_epi32(w.lo, count), _mm256_srlv_epi32(w.hi, count)};
  }
  static Words shift_left(Words w, int n) {
    const __m256i count = _mm256_set1_epi32(n);
    return {_mm256_sllv_epi32(w.lo, count), _mm256_sllv_epi32(w.hi, count)};
  }
  static Words with(Words w, uint32_t bits) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(bits));
    return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
  }
  static Words either(Words a, Words b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
  // table[index & 15] for sixteen floats.
  static __m256 look_up_half(__m256 low, __m256 high, __m256i index) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), upper);
  }
  static F look_up(const float* table, Words index) {
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    return {look_up_half(low, high, index.lo), look_up_half(low, high, index.hi)};
  }
  static F gather(const float* table, Words index) {
    return {_mm256_i32gather_ps(table, index.lo, 4), _mm256_i32gather_ps(table, index.hi, 4)};
  }
  static F negative_fma(F a, F b, F c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
  }
  // out[c·out_stride + t] = in[t·stride + c] for t, c < 16.
  static void transpose(const float* in, int64_t stride, float* out, int64_t out_stride) {
    for (int c = 0; c < kLanes; c++)
      for (int t = 0; t < kLanes; t++) out[c * out_stride + t] = in[t * stride + c];
  }
  // x if bit `bit` of w is 1, else -x.
  static F signed_by(F x, Words w, int bit) {
    const Words up = shift_left(w, 31 - bit);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.lo, _mm256_andnot_ps(_mm256_castsi256_ps(up.lo), sign)),
            _mm256_xor_ps(x.hi, _mm256_andnot_ps(_mm256_castsi256_ps(up.hi), sign))};
  }
};

}  // namespace tersekv
