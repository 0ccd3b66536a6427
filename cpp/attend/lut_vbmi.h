// The micro-kernel of lut.h in integers, see simd_vbmi.h.
#pragma once

#include "lut_bytes.h"
#include "simd_vbmi.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Coefficients as integers of 16 bits in a unit per row and call: of each four first the high bytes, then the low ones.
// They are written over the floats.
template <int R>
struct Coefs<Avx512Vbmi, R> {
  const uint16_t* data;
  int64_t stride;
  float unit[R];

  // Sums of products with codes of 4 bits fit 32 bits for 2^20 slots.
  Coefs(float* rows, int64_t row_stride, int64_t slots, bool values)
      : data(reinterpret_cast<const uint16_t*>(rows)), stride(2 * row_stride) {
    // Of the four integers in sixteen bytes the second bytes, then the first.
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12));
    for (int r = 0; r < R; r++) {
      float* row = rows + r * row_stride;
      unit[r] = whole_coefs(row, slots, values, [&](int64_t p, __m512i x, __m512i y) TERSEKV_INLINE {
        const __m512i both = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(x, bytes), 0xFF00FF00FF00FF00, y, bytes);
        // The 128 that was added for the high byte is taken from the low one again.
        const __m512i signs = _mm512_set1_epi64(static_cast<int64_t>(0x8080808000000000));
        _mm512_storeu_si512(row + p / 2, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                                                  _mm512_xor_si512(both, signs)));
      });
    }
  }
};

// sum += Σ of four products, of bytes without and with signs. Inline assembly, because GCC 12 copies the sums of the
// intrinsic.
[[gnu::always_inline]] inline void add_products(__m512i& sum, __m512i bytes, const uint16_t* coef) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(bytes), "m"(*reinterpret_cast<const int32_t*>(coef)));
}

template <int BITS, int R, int NG>
struct LutSums<Avx512Vbmi, BITS, R, NG> {
  __m512 sum[1][NG][R];

  [[gnu::always_inline]] inline LutSums(const Avx512Vbmi::Table<BITS>& /*table*/, Codes codes,
                                        const Coefs<Avx512Vbmi, R>& coefs, Prefetch& later) {
    using Unit = UnitCodes<BITS>;
    const uint16_t* coef = coefs.data;
    const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
    __m512i upper[NG][R], lower[NG][R];  // in units of 256 and of 1
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      repeat<R>([&](auto r) TERSEKV_INLINE { upper[g][r] = lower[g][r] = _mm512_setzero_si512(); });
    });
    for (; codes.count > 0; codes.count--, codes.data += codes.step) {
      later.fetch_for(NG * codes.words);
      for (int64_t at = 0; at < codes.words; at += Unit::kWords, coef += 4 * Unit::kFours) {
        const int32_t* words = codes.data + at * kLanes;
        const auto unit = [&](auto g) TERSEKV_INLINE { return Unit(words + g * codes.group_stride); };
        const auto add = [&](const auto&... units) TERSEKV_INLINE {
          repeat<Unit::kFours>([&](auto i) TERSEKV_INLINE {
            const __m512i code[] = {_mm512_and_si512(units.template four<i>(), mask)...};
            repeat<R>([&](auto r) TERSEKV_INLINE {
              const uint16_t* both = coef + 4 * i + r * coefs.stride;
              repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(upper[g][r], code[g], both); });
              repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(lower[g][r], code[g], both + 2); });
            });
          });
        };
        if constexpr (NG == 1) add(unit(Index<0>{}));
        if constexpr (NG == 2) add(unit(Index<0>{}), unit(Index<1>{}));
        if constexpr (NG == 4) add(unit(Index<0>{}), unit(Index<1>{}), unit(Index<2>{}), unit(Index<3>{}));
      }
    }
    repeat<R>([&](auto r) TERSEKV_INLINE {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        const __m512 whole =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(upper[g][r]), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(lower[g][r]));
        sum[0][g][r] = _mm512_mul_ps(whole, _mm512_set1_ps(coefs.unit[r]));
      });
    });
  }
};

}  // namespace
}  // namespace tersekv
