// AVX-512 with integer products: four codes per lane become bytes by one shift (VBMI), and a dot product (VNNI) adds
// their products with coefficients of 16 bits, which are two bytes each.
#pragma once

#include "bytes_avx512.h"

namespace tersekv {

struct Avx512Vbmi : Avx512Bytes {
  static constexpr int kCodes = 4;
  using Coef = uint16_t;
  // Each lane group has two sums per row, and codes or their two bytes.
  static constexpr int max_groups(int rows) { return rows > 2 ? 2 : 4; }

  // table[code] = unit · E[code] + middle, with integers E from 0 on: the codes themselves if the table is evenly
  // spaced, else 16 bits in two bytes.
  template <int BITS>
  struct Table {
    alignas(16) uint8_t low[16], high[16];
    bool codes;

    Table(const float* table, float& unit, float& middle) {
      constexpr int kSize = 1 << BITS;
      const auto known = static_cast<__mmask16>((1u << kSize) - 1);
      const __m512 x = _mm512_maskz_loadu_ps(known, table);
      const __m512i number = _mm512_and_si512(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(kSize - 1));
      const float least = _mm512_mask_reduce_min_ps(known, x), range = _mm512_mask_reduce_max_ps(known, x) - least;
      const __m512 even =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(number), _mm512_set1_ps(range / (kSize - 1)), _mm512_set1_ps(least));
      const __m512 off = _mm512_abs_ps(_mm512_sub_ps(x, even));
      codes = _mm512_mask_cmp_ps_mask(known, off, _mm512_set1_ps(1e-6f * range), _CMP_NLE_UQ) == 0;
      const float step = range / (codes ? kSize - 1 : 65535);
      const __m512 from = _mm512_sub_ps(x, _mm512_set1_ps(least));
      const __m512i wide =
          codes ? number : _mm512_cvtps_epi32(_mm512_mul_ps(from, _mm512_set1_ps(range > 0 ? 65535 / range : 0.0f)));
      const __m512i all = _mm512_permutexvar_epi32(number, wide);
      _mm_store_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(all));
      _mm_store_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(_mm512_srli_epi32(all, 8)));
      middle += unit * least;
      unit *= step;
    }
  };
};

}  // namespace tersekv
