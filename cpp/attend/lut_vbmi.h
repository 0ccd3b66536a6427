// The micro-kernel of lut.h in integers, see simd_vbmi.h.
#pragma once

#include "lut.h"
#include "simd_vbmi.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Fractions that are added to weights of tokens before rounding, so that many small ones do not all become zero.
alignas(64) constexpr float kDither[2][kLanes] = {
    {},
    {-15 / 32.0f, 1 / 32.0f, -7 / 32.0f, 9 / 32.0f, -11 / 32.0f, 5 / 32.0f, -3 / 32.0f, 13 / 32.0f, -13 / 32.0f,
     3 / 32.0f, -5 / 32.0f, 11 / 32.0f, -9 / 32.0f, 7 / 32.0f, -1 / 32.0f, 15 / 32.0f}};

// Coefficients as integers of 16 bits in a unit per row and call, 256 · high + low with signed bytes: of each four
// first the high bytes, then the low ones. They are written over the floats.
template <int R>
struct Coefs<Avx512Vbmi, R> {
  const uint16_t* data;
  int64_t stride;
  float unit[R];

  // Sums of products with codes of 4 bits fit 32 bits for 2^20 slots.
  Coefs(float* rows, int64_t row_stride, int64_t slots, bool values)
      : data(reinterpret_cast<const uint16_t*>(rows)), stride(2 * row_stride) {
    constexpr float most = 32512.0f;
    const __m512 dither = _mm512_load_ps(kDither[values]);
    // Of the four integers in sixteen bytes the second bytes, then the first.
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12));
    for (int r = 0; r < R; r++) {
      float* row = rows + r * row_stride;
      // As integers, magnitudes keep their order, and those of infinity and NaN are the largest.
      __m512i sizes[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      pairs(row, slots, [&](int64_t, __m512 x, __m512 y) TERSEKV_INLINE {
        sizes[0] = _mm512_max_epi32(sizes[0], _mm512_castps_si512(_mm512_abs_ps(x)));
        sizes[1] = _mm512_max_epi32(sizes[1], _mm512_castps_si512(_mm512_abs_ps(y)));
      });
      const float largest = __builtin_bit_cast(float, _mm512_reduce_max_epi32(_mm512_max_epi32(sizes[0], sizes[1])));
      const __m512 inverse = _mm512_set1_ps(largest > 1e-33f ? most / largest : 0.0f);
      unit[r] = largest / most + (largest - largest);  // NaN if one is not finite
      pairs(row, slots, [&](int64_t p, __m512 x, __m512 y) TERSEKV_INLINE {
        const auto whole = [&](__m512 part) TERSEKV_INLINE {
          return _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_fmadd_ps(part, inverse, dither)), _mm512_set1_epi32(128));
        };
        const __m512i both =
            _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(whole(x), bytes), 0xFF00FF00FF00FF00, whole(y), bytes);
        // The 128 that was added for the high byte is taken from the low one again.
        const __m512i signs = _mm512_set1_epi64(static_cast<int64_t>(0x8080808000000000));
        _mm512_storeu_si512(row + p / 2, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                                                  _mm512_xor_si512(both, signs)));
      });
    }
  }

 private:
  // Call body with each 32 of `slots` floats, zeros after them.
  template <class Body>
  [[gnu::always_inline]] static inline void pairs(const float* row, int64_t slots, Body&& body) {
    int64_t p = 0;
    for (; p + 2 * kLanes <= slots; p += 2 * kLanes)
      body(p, _mm512_loadu_ps(row + p), _mm512_loadu_ps(row + p + kLanes));
    if (p == slots) return;
    const auto left = static_cast<uint32_t>((uint64_t{1} << (slots - p)) - 1);
    body(p, _mm512_maskz_loadu_ps(static_cast<__mmask16>(left), row + p),
         _mm512_maskz_loadu_ps(static_cast<__mmask16>(left >> 16), row + p + kLanes));
  }
};

// Offsets in 64 bits of eight codes: four of each of two words, from their p-th on.
template <int BITS, int P>
struct Shifts {
  struct Bytes {
    uint8_t byte[64];
  };
  alignas(64) static constexpr Bytes made = [] {
    Bytes out{};
    for (int i = 0; i < 64; i++) {
      const int p = P + i % 4;
      out.byte[i] = static_cast<uint8_t>((i / 4 % 2 * 32 + p % 2 * 16 + (p + 2) / 2 * BITS - BITS) & 63);
    }
    return out;
  }();
  static __m512i of(__m512i words) { return _mm512_multishift_epi64_epi8(_mm512_load_si512(made.byte), words); }
  // Bytes 2 and 3 of each lane from `words`, the others from `first`.
  static __m512i after(__m512i first, __m512i words) {
    return _mm512_mask_multishift_epi64_epi8(first, 0xCCCCCCCCCCCCCCCC, _mm512_load_si512(made.byte), words);
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
    constexpr int kWordCodes = 2 * direct_codes(BITS);
    const uint16_t* coef = coefs.data;
    const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
    __m512i upper[NG][R], lower[NG][R];  // in units of 256 and of 1
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      repeat<R>([&](auto r) TERSEKV_INLINE { upper[g][r] = lower[g][r] = _mm512_setzero_si512(); });
    });
    // Add four codes per lane, whose bytes may hold other bits above them.
    const auto four = [&](const __m512i(&index)[NG], const uint16_t* c) TERSEKV_INLINE {
      __m512i code[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE { code[g] = _mm512_and_si512(index[g], mask); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const uint16_t* both = c + r * coefs.stride;
        repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(upper[g][r], code[g], both); });
        repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(lower[g][r], code[g], both + 2); });
      });
    };
    const auto load = [&](__m512i(&words)[NG], int64_t at) TERSEKV_INLINE {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        words[g] = _mm512_loadu_si512(codes.data + g * codes.group_stride + at * kLanes);
      });
    };
    for (; codes.count > 0; codes.count--, codes.data += codes.step) {
      later.fetch_for(NG * codes.words);
      if constexpr (BITS == 3) {
        for (int64_t at = 0; at < codes.words; at += 3, coef += 32) {
          __m512i w[3][NG], spare[NG], index[NG];
          repeat<3>([&](auto i) TERSEKV_INLINE { load(w[i], at + i); });
          const auto each = [&](auto p, auto from) TERSEKV_INLINE {
            repeat<NG>([&](auto g) TERSEKV_INLINE { index[g] = from(g); });
            four(index, coef + p);
          };
          each(Index<0>{}, [&](auto g) TERSEKV_INLINE { return Shifts<3, 0>::of(w[0][g]); });
          each(Index<4>{}, [&](auto g) TERSEKV_INLINE { return Shifts<3, 4>::of(w[0][g]); });
          each(Index<8>{},
               [&](auto g) TERSEKV_INLINE { return Shifts<3, -2>::after(Shifts<3, 8>::of(w[0][g]), w[1][g]); });
          each(Index<12>{}, [&](auto g) TERSEKV_INLINE { return Shifts<3, 2>::of(w[1][g]); });
          each(Index<16>{}, [&](auto g) TERSEKV_INLINE { return Shifts<3, 6>::of(w[1][g]); });
          each(Index<20>{}, [&](auto g) TERSEKV_INLINE { return Shifts<3, 0>::of(w[2][g]); });
          each(Index<24>{}, [&](auto g) TERSEKV_INLINE { return Shifts<3, 4>::of(w[2][g]); });
          // Bits 15 and 31 of the three words are the last two codes.
          repeat<NG>([&](auto g) TERSEKV_INLINE {
            spare[g] = _mm512_setzero_si512();
            repeat<3>([&](auto i) TERSEKV_INLINE { spare[g] = Avx512Vbmi::spare(spare[g], w[i][g]); });
            spare[g] = _mm512_srli_epi32(spare[g], 13);
          });
          each(Index<28>{},
               [&](auto g) TERSEKV_INLINE { return Shifts<3, -2>::after(Shifts<3, 8>::of(w[2][g]), spare[g]); });
        }
      } else {
        for (int64_t at = 0; at < codes.words; at++, coef += kWordCodes) {
          __m512i w[NG], index[NG];
          load(w, at);
          repeat<kWordCodes / 4>([&](auto j) TERSEKV_INLINE {
            repeat<NG>([&](auto g) TERSEKV_INLINE { index[g] = Shifts<BITS, 4 * j>::of(w[g]); });
            four(index, coef + 4 * j);
          });
        }
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
