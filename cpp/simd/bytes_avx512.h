// Operations for packed bytes and long tables in addition to the float lanes: AVX-512.
#pragma once

#include "simd_avx512.h"

namespace tersekv {

struct Avx512Bytes : Avx512 {
  // Tables of int16, looked up for 32 tokens at once.
  static constexpr bool kShortTables = true;
  using Short = __m512i;
  struct Sum {
    __m512i low, high;
  };
  static Short load_shorts(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Short high_nibble(Short w) { return _mm512_srli_epi16(w, 4); }
  // table[index & 31]
  static Short look_up_short(const void* table, Short index) {
    return _mm512_permutexvar_epi16(index, _mm512_loadu_si512(table));
  }
  // The order of additions is fixed, because GCC 12 would regroup sums of many look-ups and then
  // keep them in memory.
  static Short add_short(Short a, Short b) {
    Short sum = _mm512_add_epi16(a, b);
    asm("" : "+v"(sum));
    return sum;
  }
  static Sum add_wide(Sum sum, Short x) {
    const __m512i low = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(x));
    const __m512i high = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(x, 1));
    return {_mm512_add_epi32(sum.low, low), _mm512_add_epi32(sum.high, high)};
  }
  static F low_float(Sum sum) { return _mm512_cvtepi32_ps(sum.low); }
  static F high_float(Sum sum) { return _mm512_cvtepi32_ps(sum.high); }
  // Store sixteen integers, rounded, twice.
  static void store_shorts(void* out, F x) {
    const __m256i shorts = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x));
    _mm512_storeu_si512(out, _mm512_broadcast_i64x4(shorts));
  }

  // Load sixteen bytes, one per lane.
  static Words load_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Load sixteen uint16, one per lane.
  static Words load_halves(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Words shift_right(Words w, int n) { return _mm512_srlv_epi32(w, _mm512_set1_epi32(n)); }
  static Words shift_left(Words w, int n) { return _mm512_sllv_epi32(w, _mm512_set1_epi32(n)); }
  static Words with(Words w, uint32_t bits) { return _mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(bits))); }
  static Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
  // table[index & 15] for sixteen floats.
  static F look_up(const float* table, Words index) { return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table)); }
  static F gather(const float* table, Words index) { return _mm512_i32gather_ps(index, table, 4); }
  static F negative_fma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  // out[c·out_stride + t] = in[t·stride + c] for t, c < 16.
  static void transpose(const float* in, int64_t stride, float* out, int64_t out_stride) {
    __m512 x[16], y[16];
    for (int i = 0; i < 16; i++) x[i] = load(in + i * stride);
    for (int i = 0; i < 16; i += 2) {
      y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    const auto pair = [](__m512 a, __m512 b, bool high) {
      const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
      return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(c, d) : _mm512_unpacklo_pd(c, d));
    };
    for (int i = 0; i < 16; i += 4)
      for (int k = 0; k < 4; k++) x[i + k] = pair(y[i + k / 2], y[i + 2 + k / 2], k % 2 != 0);
    // x[4·g + k]: column 4·lane + k of rows 4·g to 4·g + 3, for 128-bit lanes 0 to 3.
    for (int k = 0; k < 4; k++) {
      const __m512 a = _mm512_shuffle_f32x4(x[k], x[4 + k], 0x88), b = _mm512_shuffle_f32x4(x[8 + k], x[12 + k], 0x88);
      const __m512 c = _mm512_shuffle_f32x4(x[k], x[4 + k], 0xdd), d = _mm512_shuffle_f32x4(x[8 + k], x[12 + k], 0xdd);
      store(out + k * out_stride, _mm512_shuffle_f32x4(a, b, 0x88));
      store(out + (8 + k) * out_stride, _mm512_shuffle_f32x4(a, b, 0xdd));
      store(out + (4 + k) * out_stride, _mm512_shuffle_f32x4(c, d, 0x88));
      store(out + (12 + k) * out_stride, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
  }
  // x if bit `bit` of w is 1, else -x.
  static F signed_by(F x, Words w, int bit) {
    const Words minus = _mm512_andnot_si512(shift_left(w, 31 - bit), _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), minus));
  }
};

}  // namespace tersekv
