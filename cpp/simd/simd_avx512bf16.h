// AVX-512 with bfloat16 dot products: each look-up returns two codes' values per lane; products of
// bfloat16 are summed in float32.
#pragma once

#include "simd_avx512.h"

namespace tersekv {

struct Avx512Bf16 : Avx512 {
  static constexpr int kCodes = 2;
  using Coef = uint16_t;

  template <int BITS>
  struct Table {
    __m512i entry;
    // The permute reads five bits of each half-word, so copies make masking unnecessary. Entries
    // need no rounding.
    explicit Table(const float* table) {
      constexpr int kSize = 1 << BITS;
      alignas(64) float copies[16];
      for (int i = 0; i < 16; i++) copies[i] = table[i % kSize];
      const __m512 f = _mm512_load_ps(copies);
      entry = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(f, f));
    }
    __m512bh at(Words index) const { return reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(index, entry)); }
  };

  static __m512bh factor(const uint16_t* coef) {
    int32_t pair;
    __builtin_memcpy(&pair, coef, sizeof(pair));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  }
  static F dot(__m512bh factor, __m512bh value, F sum) { return _mm512_dpbf16_ps(sum, factor, value); }
  static void store_coefs(float* row, int64_t p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(row) + p),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
  static void store_coef_pair(float* row, int64_t p, F x, F y) {
    _mm512_storeu_si512(reinterpret_cast<uint16_t*>(row) + p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
  }
  // Replace each vector by the sum of its lanes, in every lane; four vectors share the additions.
  template <int R>
  static void spread(F (&x)[R]) {
    const F a = x[0], b = x[R > 1 ? 1 : 0], c = x[R > 2 ? 2 : 0], d = x[R > 3 ? 3 : 0];
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    F sum = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4E));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xB1));
    for (int r = 0; r < R; r++) x[r] = _mm512_permutexvar_ps(_mm512_set1_epi32(r), sum);
  }
};

}  // namespace tersekv
