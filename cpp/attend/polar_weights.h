// Weights of pairs in units of 2^-15: products of cosines and sines of the levels above the first,
// and of the radius relative to the token's largest.
#pragma once

#include <immintrin.h>

#include "polar_plan.h"

namespace tersekv {
namespace {

[[gnu::always_inline]] inline __m512i look_up(const Shorts& table, __m512i code) {
  return _mm512_permutexvar_epi16(code, _mm512_load_si512(table.entry));
}

// Load bytes of 32 tokens, one per int16.
[[gnu::always_inline]] inline __m512i load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

[[gnu::always_inline]] inline __m512 float_of(Float half, __m256i x) {
  if (half == Float::f16) return _mm512_cvtph_ps(x);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// Round thirty-two floats to int16.
[[gnu::always_inline]] inline __m512i shorts_of(__m512 a, __m512 b) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return _mm512_permutexvar_epi64(order, _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)));
}

// The largest radius of each of 32 tokens, and 2^15 divided by it.
struct Radii {
  __m512 largest[2], inverse[2];
};

Radii largest_radii(const PolarPlan& plan, int64_t n) {
  const uint16_t* radii = plan.radii + n * plan.view->radii.stride_n;
  __m512i most = _mm512_setzero_si512();  // halves without sign compare like integers, and NaN is above all
  for (int64_t k = 0; k < plan.D / 16; k++)
    most = _mm512_max_epu16(most,
                            _mm512_and_si512(_mm512_loadu_si512(radii + k * kPolarBlock), _mm512_set1_epi16(0x7fff)));
  Radii out;
  out.largest[0] = float_of(plan.view->half, _mm512_castsi512_si256(most));
  out.largest[1] = float_of(plan.view->half, _mm512_extracti64x4_epi64(most, 1));
  repeat<2>([&](auto i) TERSEKV_INLINE {
    const __mmask16 some = _mm512_cmp_ps_mask(out.largest[i], _mm512_setzero_ps(), _CMP_NEQ_UQ);
    out.inverse[i] = _mm512_maskz_div_ps(some, _mm512_set1_ps(kPolarOne), out.largest[i]);
  });
  return out;
}

// One block of tokens.
struct Tokens {
  const PolarPlan& plan;
  const uint8_t* angles;
  const uint16_t* radii;
  __m512 inverse[2];  // of the tokens' largest radii

  Tokens(const PolarPlan& of, int64_t n, const Radii& its)
      : plan(of),
        angles(of.angles + n * of.view->stride_n),
        radii(of.radii + n * of.view->radii.stride_n),
        inverse{its.inverse[0], its.inverse[1]} {}

  // Return the weights of the eight pairs under radius k, relative to the largest radius.
  [[gnu::always_inline]] inline void weights(int64_t k, __m512i (&w)[8]) const {
    const auto* at = reinterpret_cast<const __m256i*>(radii + k * kPolarBlock);
    const Float half = plan.view->half;
    const __m512i ratio = shorts_of(_mm512_mul_ps(float_of(half, _mm256_loadu_si256(at)), inverse[0]),
                                    _mm512_mul_ps(float_of(half, _mm256_loadu_si256(at + 1)), inverse[1]));
    const int64_t second = plan.D / 4, third = (second + plan.D / 16) * 8 + 4 * k,
                  fourth = (second + plan.D / 16) * 8 + plan.D / 4 + 2 * k;
    const __m512i three = _mm512_srl_epi16(load_bytes(angles + third / 8 * kPolarBlock), _mm_cvtsi64_si128(third % 8));
    const __m512i four = _mm512_srl_epi16(_mm512_slli_epi16(load_bytes(angles + fourth / 8 * kPolarBlock), 2),
                                          _mm_cvtsi64_si128(fourth % 8));
    // 0xCA: bits of the second operand where the first has a 1, else of the third
    const __m512i low = _mm512_set1_epi16(3);
    const __m512i left = _mm512_ternarylogic_epi32(low, three, four, 0xCA),
                  right = _mm512_ternarylogic_epi32(low, _mm512_srli_epi16(three, 2), four, 0xCA);
    const __m512i two = load_bytes(angles + (second + k) * kPolarBlock);
    repeat<4>([&](auto i) TERSEKV_INLINE {
      const __m512i u = _mm512_mulhrs_epi16(look_up(plan.upper[i], i < 2 ? left : right), ratio);
      const __m512i code = _mm512_srli_epi16(two, 2 * i);
      w[2 * i] = _mm512_mulhrs_epi16(u, look_up(plan.cos2, code));
      w[2 * i + 1] = _mm512_mulhrs_epi16(u, look_up(plan.sin2, code));
    });
  }
};

}  // namespace
}  // namespace tersekv
