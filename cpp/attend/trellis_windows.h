// Windows of trellis codes, their entries, and queries and weights as integers, for the kernels in integers:
// trellis_vnni.cpp and trellis_amx.cpp. AVX-512 with VBMI (byte tables) and VBMI2 (shifts over two words).
//
// Word i of all 32 tokens of a block is one register. A shift over two such registers extracts the
// windows of 32 tokens. The low byte has the window of a component. The high byte has that of the
// component whose window is 8 bits further on, if it has the same number of bits. Table entries are
// int8 by definition of the format. Queries and weights are int16, stored as two bytes.
#pragma once

#include <immintrin.h>

#include "trellis_plan.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kSumBlocks = 16;  // blocks whose codes and weights fit the L1 cache
constexpr float kLeast = 1e-33f;    // 32512 divided by less is infinite

struct Bytes {
  uint8_t byte[64];
};

template <class ByteAt>
constexpr Bytes bytes_of(ByteAt index) {
  Bytes out{};
  for (int i = 0; i < 64; i++) out.byte[i] = static_cast<uint8_t>(index(i));
  return out;
}

// The 256 entries of one rate.
struct Codebook {
  __m512i quarter[4];

  // For keys the table is the unsigned factor of a product, so 128 is added to each entry.
  Codebook(const int8_t* entry, bool plus_128) {
    const __m512i sign = _mm512_set1_epi8(plus_128 ? -128 : 0);
    for (int i = 0; i < 4; i++) quarter[i] = _mm512_xor_si512(_mm512_loadu_si512(entry + 64 * i), sign);
  }
  [[gnu::always_inline]] __m512i at(__m512i window) const {
    const __m512i low = _mm512_permutex2var_epi8(quarter[0], window, quarter[1]);
    const __m512i high = _mm512_permutex2var_epi8(quarter[2], window, quarter[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(window), low, high);
  }
};

[[gnu::always_inline]] inline __m512i fetch(const uint16_t* block, const TrellisFetch& at) {
  const __m512i low = _mm512_loadu_si512(block + at.low), high = _mm512_loadu_si512(block + at.high);
  return _mm512_shrdv_epi16(low, high, _mm512_set1_epi32(at.shift));
}

// Return the windows of components 2·I and 2·I + 1 of a quad, in the low and high bytes of 32
// tokens.
template <bool NEIGHBOURS, int I>
[[gnu::always_inline]] inline __m512i windows(const uint16_t* block, const TrellisQuad& quad) {
  if constexpr (NEIGHBOURS) return fetch(block, quad.at[2 * I]);
  const __m512i low = fetch(block, quad.at[2 * I]), high = fetch(block, quad.at[2 * I + 1]);
  return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, low, high);
}

// Return the gains of sixteen codes: 2^((c - 144)/16), 0 for 0.
inline __m512 gains(const TrellisPlan& plan, const uint8_t* codes) {
  const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m512i exponent = _mm512_sub_epi32(_mm512_srli_epi32(code, 4), _mm512_set1_epi32(9));
  const __m512 steps = _mm512_loadu_ps(plan.view->gains + 144);  // 1 to 2^(15/16)
  const __m512 gain = _mm512_scalef_ps(_mm512_permutexvar_ps(code, steps), _mm512_cvtepi32_ps(exponent));
  return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(code, code), gain);
}

[[gnu::always_inline]] inline __m512 joined(__m512i high, __m512i low) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
}

// Add scores of a block's tokens to out. Unpacking leaves them in the order 0-3, 8-11, 16-19, 24-27 and 4-7, ...
[[gnu::always_inline]] inline void add_scores(__m512 early, __m512 late, float step, const __m512 (&gain)[2],
                                              float* out) {
  const __m512i order[2] = {_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)};
  const __m512d a = _mm512_castps_pd(early), b = _mm512_castps_pd(late);
  repeat<2>([&](auto half) TERSEKV_INLINE {
    const __m512 x = _mm512_castpd_ps(_mm512_permutex2var_pd(a, order[half], b));
    float* at = out + half * kLanes;
    _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_mul_ps(x, _mm512_set1_ps(step)), gain[half], _mm512_loadu_ps(at)));
  });
}

// Call put(block, r, x, y) with the weights of each of up to kSumBlocks blocks times gains, as 32 integers of 16 bits
// in units of step[r].
template <int R, class Put>
[[gnu::always_inline]] inline void whole_weights(const TrellisPlan& plan, int64_t n, int64_t blocks,
                                                 const float* weight, int64_t weight_stride, float* step, Put&& put) {
  alignas(64) float product[R][kSumBlocks * kTrellisBlock];
  __m512 most[R], wrong[R];
  repeat<R>([&](auto r) TERSEKV_INLINE { most[r] = wrong[r] = _mm512_setzero_ps(); });
  for (int64_t t = 0; t < blocks * kTrellisBlock; t += kLanes) {
    const uint8_t* codes = plan.gain + (n + t / kTrellisBlock) * plan.view->gain_n + t % kTrellisBlock;
    const __m512 gain = gains(plan, codes);
    repeat<R>([&](auto r) TERSEKV_INLINE {
      const __m512 p = _mm512_mul_ps(_mm512_loadu_ps(weight + r * weight_stride + t), gain);
      _mm512_store_ps(product[r] + t, p);
      most[r] = _mm512_max_ps(p, most[r]);
      wrong[r] = _mm512_fmadd_ps(p, _mm512_setzero_ps(), wrong[r]);  // infinities and NaN become NaN
    });
  }
  repeat<R>([&](auto r) TERSEKV_INLINE {
    const float largest = _mm512_reduce_max_ps(most[r]);
    step[r] = largest / 65535.0f + _mm512_reduce_add_ps(wrong[r]);
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 65535.0f / largest : 0.0f);
    for (int64_t block = 0; block < blocks; block++) {
      const float* p = product[r] + block * kTrellisBlock;
      put(block, r, _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p), inverse)),
          _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p + kLanes), inverse)));
    }
  });
}

// Quantise a query row to 16 bits: a high byte, which counts 256, and a low byte, both signed. Call put(quad, high,
// low) with those of each four components. x: room for one value per component.
template <class Put>
[[gnu::always_inline]] inline TrellisQuery quantised(const TrellisPlan& plan, const float* query, int64_t D, float* x,
                                                     Put&& put) {
  __m512 most = _mm512_setzero_ps(), wrong = _mm512_setzero_ps();
  for (int64_t d = 0; d < D; d += kLanes) {
    const __m512 q = _mm512_maskz_loadu_ps(D - d < kLanes ? (1u << (D - d)) - 1 : 0xffff, query + d);
    wrong = _mm512_fmadd_ps(q, _mm512_setzero_ps(), wrong);  // infinities and NaN become NaN
  }
  const int64_t count = 4 * plan.quads;
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 held = count - i < kLanes ? (1u << (count - i)) - 1 : 0xffff;
    const __m512i d = _mm512_maskz_loadu_epi32(held, plan.d + i);
    const __m512 q = _mm512_mul_ps(_mm512_i32gather_ps(d, query, 4), _mm512_maskz_loadu_ps(held, plan.scale + i));
    _mm512_storeu_ps(x + i, q);
    most = _mm512_max_ps(_mm512_abs_ps(q), most);
    wrong = _mm512_fmadd_ps(q, _mm512_setzero_ps(), wrong);
  }
  const float largest = _mm512_reduce_max_ps(most), invalid = _mm512_reduce_add_ps(wrong);
  const __mmask16 valid = invalid == 0.0f ? 0xffff : 0;  // if a value is not finite there are no integers
  const __m512 inverse = _mm512_set1_ps(largest > kLeast ? 32512.0f / largest : 0.0f);
  __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512i q = _mm512_maskz_cvtps_epi32(valid, _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8),
                  low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
    high_sum = _mm512_add_epi32(high_sum, high);
    low_sum = _mm512_add_epi32(low_sum, low);
    alignas(16) int32_t high_bytes[4], low_bytes[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(high_bytes), _mm512_cvtepi32_epi8(high));
    _mm_store_si128(reinterpret_cast<__m128i*>(low_bytes), _mm512_cvtepi32_epi8(low));
    for (int64_t k = 0; k < 4 && i + 4 * k < count; k++) put(i / 4 + k, high_bytes[k], low_bytes[k]);
  }
  return {largest / 32512.0f + invalid, -128 * _mm512_reduce_add_epi32(high_sum),
          -128 * _mm512_reduce_add_epi32(low_sum)};
}

}  // namespace
}  // namespace tersekv
