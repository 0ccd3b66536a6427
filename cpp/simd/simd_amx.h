// AVX-512 with integer products of AMX: codes become bytes as in simd_vbmi.h, sixteen vectors of them are a tile, and
// one instruction multiplies it with the coefficients of all rows.
#pragma once

#include "bytes_avx512.h"

namespace tersekv {

struct Avx512Amx : Avx512Bytes {
  using Coef = uint8_t;

  // Entries as 256 · high + low, signed bytes in units of a 32,512th of the largest. An error of half a unit is 250
  // times less than bfloat16's.
  template <int BITS>
  struct Table {
    __m128i high, low;
    float unit;
    bool are_codes;  // each entry is its own number

    explicit Table(const float* table) {
      constexpr int kSize = 1 << BITS;
      constexpr float kMost = 32512.0f;
      const __m512i code = _mm512_and_si512(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                            _mm512_set1_epi32(kSize - 1));
      const __m512 entry =
          _mm512_permutexvar_ps(code, _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << kSize) - 1), table));
      are_codes = _mm512_cmpneq_ps_mask(entry, _mm512_cvtepi32_ps(code)) == 0;
      // As integers, magnitudes keep their order, and those of infinity and NaN are the largest.
      const float most = __builtin_bit_cast(float, _mm512_reduce_max_epi32(_mm512_castps_si512(_mm512_abs_ps(entry))));
      unit = are_codes ? 1.0f : most / kMost + (most - most);  // NaN if one is not finite
      const __m512 inverse = _mm512_set1_ps(most > 1e-33f ? kMost / most : 0.0f);
      const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(entry, inverse)), _mm512_set1_epi32(128));
      high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 8));
      // The 128 that was added for the high byte is taken from the low one again.
      low = _mm_xor_si128(_mm512_cvtepi32_epi8(whole), _mm_set1_epi8(-128));
    }
  };
};

}  // namespace tersekv
