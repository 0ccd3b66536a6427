// Trellis codes decoded with AVX2. The windows of two components and sixteen tokens are the bytes of one
// register, and shuffles choose their entries. Gathers, which read each entry by itself, take several
// times as long.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "tile.h"
#include "trellis_plan.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Choose bytes of `high` where bit 7 of `by` is set. Inline assembly, because GCC compares before the
// intrinsic.
[[gnu::always_inline]] inline __m256i chosen(__m256i low, __m256i high, __m256i by) {
  __m256i out;
  asm("vpblendvb %3, %2, %1, %0" : "=x"(out) : "x"(low), "xm"(high), "x"(by));
  return out;
}

// The 256 entries of one rate.
struct ByteTable {
  const int8_t* entry;

  // Choose among 2^DEPTH parts of sixteen entries, from part `first` on, by the bits above `index`.
  template <int DEPTH>
  [[gnu::always_inline]] __m256i part(int first, __m256i window, __m256i index) const {
    if constexpr (DEPTH == 0) {
      const auto* at = reinterpret_cast<const __m128i*>(entry + 16 * first);
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(at)), index);
    } else {
      const __m256i low = part<DEPTH - 1>(first, window, index),
                    high = part<DEPTH - 1>(first + (1 << (DEPTH - 1)), window, index);
      return chosen(low, high, _mm256_slli_epi16(window, 4 - DEPTH));
    }
  }
  [[gnu::always_inline]] __m256i at(__m256i window) const {
    return part<4>(0, window, _mm256_and_si256(window, _mm256_set1_epi8(15)));
  }
};

[[gnu::always_inline]] inline __m256i fetch(const uint16_t* block, const TrellisFetch& at) {
  const auto words = [&](int32_t offset) TERSEKV_INLINE {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + offset));
  };
  const int shift = at.shift & 15;
  return _mm256_or_si256(_mm256_srl_epi16(words(at.low), _mm_cvtsi32_si128(shift)),
                         _mm256_sll_epi16(words(at.high), _mm_cvtsi32_si128(16 - shift)));
}

// Sixteen tokens of two components of a quad, 2·I and 2·I + 1, as integers times 2^24 in float32.
struct TwoComponents {
  __m256 low[2], high[2];
};

template <bool NEIGHBOURS, int I>
[[gnu::always_inline]] inline TwoComponents decoded(ByteTable table, const uint16_t* block, const TrellisQuad& quad) {
  asm("" : "+r"(table.entry));  // otherwise GCC keeps the whole table on the stack
  __m256i words = fetch(block, quad.at[2 * I]);
  if constexpr (!NEIGHBOURS)
    words = _mm256_blendv_epi8(words, fetch(block, quad.at[2 * I + 1]), _mm256_set1_epi16(static_cast<short>(0xff00)));
  words = _mm256_permute4x64_epi64(table.at(words), 0xd8);  // unpacking works in halves of 128 bits
  const __m256i zero = _mm256_setzero_si256(), top = _mm256_set1_epi32(static_cast<int>(0xff000000));
  TwoComponents out;
  repeat<2>([&](auto i) TERSEKV_INLINE {
    const __m256i four = i ? _mm256_unpackhi_epi16(zero, words) : _mm256_unpacklo_epi16(zero, words);
    out.low[i] = _mm256_cvtepi32_ps(_mm256_slli_epi32(four, 8));
    out.high[i] = _mm256_cvtepi32_ps(_mm256_and_si256(four, top));
  });
  return out;
}

// Call body(neighbours, table, quad, slot) for all quads; their first component has the given slot.
template <class Body>
[[gnu::always_inline]] inline void each_quad(const TrellisPlan& plan, Body&& body) {
  int64_t slot = 0;
  for (int i = 0; i < plan.sections; i++) {
    const TrellisSection& section = plan.section[i];
    const ByteTable table = {section.entries};
    const TrellisQuad* quad = section.first;
    for (; quad < section.singles; quad++, slot += 4) body(std::true_type{}, table, *quad, slot);
    for (; quad < section.last; quad++, slot += 4) body(std::false_type{}, table, *quad, slot);
  }
}

// Scales for integers times 2^24.
inline float* byte_scales(const TrellisPlan& plan) {
  float* scale = scratch(4 * plan.quads);
  for (int64_t i = 0; i < 4 * plan.quads; i++) scale[i] = plan.scale[i] * 0x1p-24f;
  return scale;
}

// Decode sixteen tokens whose words start at `block`. scale: see byte_scales. Components without bits
// are not written.
inline void trellis_bytes_tile(const TrellisPlan& plan, const float* scale, const uint16_t* block, const float* gain,
                               float* tile) {
  const auto store = [&](int64_t slot, const __m256(&x)[2]) TERSEKV_INLINE {
    const __m256 own = _mm256_set1_ps(scale[slot]);
    repeat<2>([&](auto i) TERSEKV_INLINE {
      _mm256_storeu_ps(tile + plan.d[slot] * kLanes + 8 * i,
                       _mm256_mul_ps(_mm256_mul_ps(x[i], own), _mm256_loadu_ps(gain + 8 * i)));
    });
  };
  each_quad(plan, [&](auto neighbours, const ByteTable& table, const TrellisQuad& quad, int64_t slot) TERSEKV_INLINE {
    repeat<2>([&](auto i) TERSEKV_INLINE {
      constexpr int I = 1 - i;  // backwards, because padding has the first component
      const TwoComponents two = decoded<neighbours, I>(table, block, quad);
      store(slot + 2 * I + 1, two.high);
      store(slot + 2 * I, two.low);
    });
  });
}

}  // namespace
}  // namespace tersekv
