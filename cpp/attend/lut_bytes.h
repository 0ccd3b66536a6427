// Coefficients and codes as bytes, for the micro-kernels in integers: lut_vbmi.h and lut_amx.h.
#pragma once

#include "bytes_avx512.h"
#include "lut.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// True if each entry is its own number, as for integers.
inline bool holds_codes(const GridView& view) {
  for (int i = 0; i < 1 << view.bits; i++)
    if (view.entries[i] != static_cast<float>(i)) return false;
  return true;
}

// Fractions that are added to weights of tokens before rounding, so that many small ones do not all become zero.
alignas(64) constexpr float kDither[2][kLanes] = {
    {},
    {-15 / 32.0f, 1 / 32.0f, -7 / 32.0f, 9 / 32.0f, -11 / 32.0f, 5 / 32.0f, -3 / 32.0f, 13 / 32.0f, -13 / 32.0f,
     3 / 32.0f, -5 / 32.0f, 11 / 32.0f, -9 / 32.0f, 7 / 32.0f, -1 / 32.0f, 15 / 32.0f}};

// Call put(p, x, y) with each 32 of `slots` coefficients of a row as integers of 16 bits; zeros after them. 128 is
// added to them, so that their high bytes are those of 256 · high + low with a signed low byte. Return their unit.
template <class Put>
[[gnu::always_inline]] inline float whole_coefs(const float* row, int64_t slots, bool values, Put&& put) {
  constexpr float most = 32512.0f;
  const __m512 dither = _mm512_load_ps(kDither[values]);
  const auto pairs = [&](auto body) TERSEKV_INLINE {
    int64_t p = 0;
    for (; p + 2 * kLanes <= slots; p += 2 * kLanes)
      body(p, _mm512_loadu_ps(row + p), _mm512_loadu_ps(row + p + kLanes));
    if (p == slots) return;
    const auto left = static_cast<uint32_t>((uint64_t{1} << (slots - p)) - 1);
    body(p, _mm512_maskz_loadu_ps(static_cast<__mmask16>(left), row + p),
         _mm512_maskz_loadu_ps(static_cast<__mmask16>(left >> 16), row + p + kLanes));
  };
  // As integers, magnitudes keep their order, and those of infinity and NaN are the largest.
  __m512i sizes[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  pairs([&](int64_t, __m512 x, __m512 y) TERSEKV_INLINE {
    sizes[0] = _mm512_max_epi32(sizes[0], _mm512_castps_si512(_mm512_abs_ps(x)));
    sizes[1] = _mm512_max_epi32(sizes[1], _mm512_castps_si512(_mm512_abs_ps(y)));
  });
  const float largest = __builtin_bit_cast(float, _mm512_reduce_max_epi32(_mm512_max_epi32(sizes[0], sizes[1])));
  const __m512 inverse = _mm512_set1_ps(largest > 1e-33f ? most / largest : 0.0f);
  const auto whole = [&](__m512 part) TERSEKV_INLINE {
    return _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_fmadd_ps(part, inverse, dither)), _mm512_set1_epi32(128));
  };
  pairs([&](int64_t p, __m512 x, __m512 y) TERSEKV_INLINE { put(p, whole(x), whole(y)); });
  return largest / most + (largest - largest);  // NaN if one is not finite
}

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

// The codes of a CodeUnit for sixteen lanes.
template <int BITS>
struct UnitCodes {
  static constexpr int kWords = BITS == 3 ? 3 : 1, kFours = BITS == 3 ? 8 : direct_codes(BITS) / 2;
  __m512i word[kWords];

  [[gnu::always_inline]] explicit UnitCodes(const int32_t* words) {
    repeat<kWords>([&](auto i) TERSEKV_INLINE { word[i] = _mm512_loadu_si512(words + i * kLanes); });
  }

  // Codes 4 · I to 4 · I + 3 of each lane as bytes, which may hold other bits above them.
  template <int I>
  [[gnu::always_inline]] __m512i four() const {
    if constexpr (BITS != 3) {
      return Shifts<BITS, 4 * I>::of(word[0]);
    } else if constexpr (I == 2) {
      return Shifts<3, -2>::after(Shifts<3, 8>::of(word[0]), word[1]);
    } else if constexpr (I == 7) {
      // Bits 15 and 31 of the three words are the last two codes.
      __m512i spare = _mm512_setzero_si512();
      repeat<3>([&](auto i) TERSEKV_INLINE { spare = Avx512Bytes::spare(spare, word[i]); });
      return Shifts<3, -2>::after(Shifts<3, 8>::of(word[2]), _mm512_srli_epi32(spare, 13));
    } else {
      return Shifts < 3, I < 2 ? 4 * I : I < 5 ? 4 * I - 10 : 4 * I - 20 > ::of(word[I < 2 ? 0 : I < 5 ? 1 : 2]);
    }
  }
};

}  // namespace
}  // namespace tersekv
