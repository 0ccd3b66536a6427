// What packed bytes and long tables need beyond the float lanes: AVX-512.
#pragma once

#include "simd_avx512.h"

namespace tersekv {

struct Avx512Bytes : Avx512 {
  // Sixteen bytes, one per lane.
  static Words load_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Words shift_right(Words w, int n) { return _mm512_srl_epi32(w, _mm_cvtsi32_si128(n)); }
  static Words shift_left(Words w, int n) { return _mm512_sll_epi32(w, _mm_cvtsi32_si128(n)); }
  static Words with(Words w, uint32_t bits) { return _mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(bits))); }
  static Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
  // table[index & 15] for sixteen floats.
  static F look_up(const float* table, Words index) { return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table)); }
  static F gather(const float* table, Words index) { return _mm512_i32gather_ps(index, table, 4); }
  static F negative_fma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  // x where bit `bit` of w is 1, else -x.
  static F signed_by(F x, Words w, int bit) {
    const Words minus = _mm512_andnot_si512(shift_left(w, 31 - bit), _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), minus));
  }
};

}  // namespace tersekv
