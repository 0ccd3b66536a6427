// Trellis codes decoded with AVX2, or with AVX-512 where VBMI is missing. The windows of two components and 16 or 32
// tokens are the bytes of one register, and shuffles choose their entries. Gathers, which read each entry by itself,
// take several times as long.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "tile.h"
#include "trellis_plan.h"
#if TERSEKV_avx512
#include "bytes_avx512.h"
#endif

namespace tersekv {
namespace {  // internal to each build of the kernels

// Operations on registers of 32 bytes.
struct Narrow {
  using Words = __m256i;
  using F = __m256;
  static constexpr int kFloats = 8;

  static Words load_16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  // Sixteen table entries for each 128 bits.
  static Words entries(const int8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Words shuffled(Words table, Words index) {
    return _mm256_shuffle_epi8(table, _mm256_and_si256(index, _mm256_set1_epi8(15)));
  }
  // Choose bytes of `high` where bit BIT, at least 4, of `by` is set. Inline assembly, because GCC compares before the
  // intrinsic.
  template <int BIT>
  static Words chosen(Words low, Words high, Words by) {
    Words out;
    asm("vpblendvb %3, %2, %1, %0" : "=x"(out) : "x"(low), "xm"(high), "x"(_mm256_slli_epi16(by, 7 - BIT)));
    return out;
  }
  // The 16 bits of two words that start at bit `shift` of the first. shift: twice, for two words.
  static Words window(Words first, Words second, int shift) {
    shift &= 15;
    return _mm256_or_si256(_mm256_srl_epi16(first, _mm_cvtsi32_si128(shift)),
                           _mm256_sll_epi16(second, _mm_cvtsi32_si128(16 - shift)));
  }
  static Words bytes_of(Words even, Words odd) {
    return _mm256_blendv_epi8(even, odd, _mm256_set1_epi16(static_cast<short>(0xff00)));
  }
  // Unpacking works in halves of 128 bits. Order words for it.
  static Words ordered(Words x) { return _mm256_permute4x64_epi64(x, 0xd8); }
  template <int HALF>
  static Words widened(Words x) {  // to 32 bits, of which they are the upper ones
    const Words zero = _mm256_setzero_si256();
    return HALF ? _mm256_unpackhi_epi16(zero, x) : _mm256_unpacklo_epi16(zero, x);
  }
  static F even_byte(Words x) { return _mm256_cvtepi32_ps(_mm256_slli_epi32(x, 8)); }
  static F odd_byte(Words x) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xff000000))));
  }

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static Words load_bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static F gather(const float* table, Words index) { return _mm256_i32gather_ps(table, index, 4); }
  static float hsum(F x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }
};

#if TERSEKV_avx512
// The same on 64 bytes.
struct Wide : Avx512Bytes {
  static constexpr int kFloats = 16;

  static Words load_16(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static Words entries(const int8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Words shuffled(Words table, Words index) {
    return _mm512_shuffle_epi8(table, _mm512_and_si512(index, _mm512_set1_epi8(15)));
  }
  template <int BIT>
  static Words chosen(Words low, Words high, Words by) {
    return _mm512_mask_blend_epi8(_mm512_test_epi8_mask(by, _mm512_set1_epi8(static_cast<char>(1 << BIT))), low, high);
  }
  static Words window(Words first, Words second, int shift) {
    const Words down = _mm512_set1_epi32(shift), up = _mm512_sub_epi16(_mm512_set1_epi16(16), down);
    return _mm512_or_si512(_mm512_srlv_epi16(first, down), _mm512_sllv_epi16(second, up));
  }
  static Words bytes_of(Words even, Words odd) { return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, even, odd); }
  static Words ordered(Words x) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x); }
  template <int HALF>
  static Words widened(Words x) {
    const Words zero = _mm512_setzero_si512();
    return HALF ? _mm512_unpackhi_epi16(zero, x) : _mm512_unpacklo_epi16(zero, x);
  }
  static F even_byte(Words x) { return _mm512_cvtepi32_ps(_mm512_slli_epi32(x, 8)); }
  static F odd_byte(Words x) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xff000000))));
  }
};
#endif

// The 256 entries of one rate.
template <class V>
struct ByteTable {
  const int8_t* entry;

  // Choose among 2^DEPTH parts of sixteen entries, from part `first` on, by the bits of the window above its lowest 4.
  template <int DEPTH>
  [[gnu::always_inline]] typename V::Words part(int first, typename V::Words window) const {
    if constexpr (DEPTH == 0) {
      return V::shuffled(V::entries(entry + 16 * first), window);
    } else {
      return V::template chosen<DEPTH + 3>(part<DEPTH - 1>(first, window),
                                           part<DEPTH - 1>(first + (1 << (DEPTH - 1)), window), window);
    }
  }
  [[gnu::always_inline]] typename V::Words at(typename V::Words window) const { return part<4>(0, window); }
};

template <class V>
[[gnu::always_inline]] inline typename V::Words fetch(const uint16_t* block, const TrellisFetch& at) {
  return V::window(V::load_16(block + at.low), V::load_16(block + at.high), at.shift);
}

// Tokens of two components of a quad, 2·I and 2·I + 1, as integers times 2^24 in float32.
template <class V>
struct TwoComponents {
  typename V::F low[2], high[2];
};

template <class V, bool NEIGHBOURS, int I>
[[gnu::always_inline]] inline TwoComponents<V> decoded(ByteTable<V> table, const uint16_t* block,
                                                       const TrellisQuad& quad) {
  asm("" : "+r"(table.entry));  // otherwise GCC keeps the whole table on the stack
  auto words = fetch<V>(block, quad.at[2 * I]);
  if constexpr (!NEIGHBOURS) words = V::bytes_of(words, fetch<V>(block, quad.at[2 * I + 1]));
  words = V::ordered(table.at(words));
  TwoComponents<V> out;
  repeat<2>([&](auto i) TERSEKV_INLINE {
    const auto four = V::template widened<i>(words);
    out.low[i] = V::even_byte(four);
    out.high[i] = V::odd_byte(four);
  });
  return out;
}

// Call body(neighbours, table, quad, slot) for all quads; their first component has the given slot.
template <class V, class Body>
[[gnu::always_inline]] inline void each_quad(const TrellisPlan& plan, Body&& body) {
  int64_t slot = 0;
  for (int i = 0; i < plan.sections; i++) {
    const TrellisSection& section = plan.section[i];
    const ByteTable<V> table = {section.entries};
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
  using V = Narrow;
  const auto store = [&](int64_t slot, const V::F(&x)[2]) TERSEKV_INLINE {
    const V::F own = V::set1(scale[slot]);
    repeat<2>([&](auto i) TERSEKV_INLINE {
      V::store(tile + plan.d[slot] * kLanes + 8 * i, V::mul(V::mul(x[i], own), V::load(gain + 8 * i)));
    });
  };
  each_quad<V>(plan,
               [&](auto neighbours, const ByteTable<V>& table, const TrellisQuad& quad, int64_t slot) TERSEKV_INLINE {
                 repeat<2>([&](auto i) TERSEKV_INLINE {
                   constexpr int I = 1 - i;  // backwards, because padding has the first component
                   const auto two = decoded<V, neighbours, I>(table, block, quad);
                   store(slot + 2 * I + 1, two.high);
                   store(slot + 2 * I, two.low);
                 });
               });
}

}  // namespace
}  // namespace tersekv
