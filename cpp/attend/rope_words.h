// Keys' table values and rotated queries in int16, as rope_vnni.cpp multiplies them.
#pragma once

#include <immintrin.h>

#include <initializer_list>

#include "bytes_avx512.h"
#include "rope_row.h"
#include "simd_avx512bf16.h"
#include "words_vnni.h"

namespace tersekv {
namespace {  // internal to each file

constexpr float kMostEntry = 23160.0f;  // times √2 it is less than 2^15

struct Roped {
  RopedSide side;
  int64_t half;
  bool in_order;          // pair i has column i
  bool fixed, filled;     // fixed: all blocks share one range; filled: `tables` is computed
  float *scale, *offset;  // [D], in units of their pair
  float* unit;            // [half]
  int16_t* tables;        // [half, 32]: entries of channels 2i and 2i + 1
  float *cos, *sin;       // [half]: of a token, times the units
  int64_t row;            // first query row that `measure` belongs to, or -1
  int16_t* words;         // [4, D]
  float measure[4], step[4];
  float* row_angles;  // [2][columns]: room for cosines and sines of a token
};

// Compute the table values of all channels from a block's scales and offsets.
void fill_tables(Roped& own, const Block& block) {
  const GridView& v = *own.side.grid;
  const int64_t half = own.half;
  const auto ranges = [&](const uint16_t* from, float* to) {
    for (int64_t d = 0; d < 2 * half; d += kLanes) {
      const int64_t left = 2 * half - d;
      const auto read = [&](auto type) {
        return left < kLanes ? Avx512::load_as_n<type()>(from + d, left) : Avx512::load_as<type()>(from + d);
      };
      __m512 x = _mm512_setzero_ps();
      if (from) x = v.half == Float::f16 ? read([] { return Float::f16; }) : read([] { return Float::bf16; });
      _mm512_storeu_ps(to + d, x);
    }
  };
  ranges(block.scale, own.scale);
  ranges(block.offset, own.offset);
  float most = 0.0f;
  for (int i = 0; i < 1 << v.bits; i++) most = most > __builtin_fabsf(v.table[i]) ? most : __builtin_fabsf(v.table[i]);
  for (int64_t i = 0; i < half; i++) {
    float bound = 0.0f;
    for (const int64_t d : {i, i + half}) {
      const float size = __builtin_fabsf(own.scale[d]) * most + __builtin_fabsf(own.offset[d]);
      bound = size > bound || size != size ? size : bound;
    }
    own.unit[i] = bound / kMostEntry;
    const float inverse = bound > kLeast ? kMostEntry / bound : 0.0f;
    for (const int64_t d : {i, i + half}) {
      own.scale[d] *= inverse;
      own.offset[d] *= inverse;
    }
  }
  alignas(64) float copies[kLanes];
  for (int i = 0; i < kLanes; i++) copies[i] = v.table[i & ((1 << v.bits) - 1)];
  const __m512 entries = _mm512_load_ps(copies);
  for (int64_t d = 0; d < 2 * half; d++) {
    const __m512 x = _mm512_fmadd_ps(entries, _mm512_set1_ps(own.scale[d]), _mm512_set1_ps(own.offset[d]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(own.tables + d * kLanes),
                        _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
  }
}

// Compute cosines and sines of a token by pair, times the pairs' units. Return the largest length
// of (cos, sin), without the units.
float angles_at(Roped& own, int64_t token) {
  const RopeView& rope = *own.side.rope;
  const RopeRow at = rope_row<Avx512Bytes>(rope, place_of(rope, own.side.b, own.side.h, token), own.row_angles);
  const float *cos = at.cos, *sin = at.sin;
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = 0; i < own.half; i += kLanes) {
    const __mmask16 held = first(own.half - i);
    __m512 c, s;
    if (own.in_order) {
      c = _mm512_maskz_loadu_ps(held, cos + i);
      s = _mm512_maskz_loadu_ps(held, sin + i);
    } else {
      alignas(64) float columns[2][kLanes] = {};
      for (int64_t k = 0; k < kLanes && i + k < own.half; k++) {
        const int32_t column = rope.channels[i + k].cos_column;
        columns[0][k] = cos[column];
        columns[1][k] = sin[column];
      }
      c = _mm512_load_ps(columns[0]);
      s = _mm512_load_ps(columns[1]);
    }
    const __m512 square = _mm512_fmadd_ps(c, c, _mm512_mul_ps(s, s)), unit = _mm512_maskz_loadu_ps(held, own.unit + i);
    // Not max(most, square), which would drop NaN.
    most = _mm512_mask_mov_ps(most, _mm512_cmp_ps_mask(square, most, _CMP_NLE_UQ), square);
    _mm512_storeu_ps(own.cos + i, _mm512_mul_ps(c, unit));
    _mm512_storeu_ps(own.sin + i, _mm512_mul_ps(s, unit));
  }
  float longest = 0.0f;
  alignas(64) float lanes[kLanes];
  _mm512_store_ps(lanes, most);
  for (const float x : lanes) longest = x > longest || x != x ? x : longest;
  return __builtin_sqrtf(longest);
}

// Compute the unit of each query's int16 values for cosines and sines of length 1. Rotation does
// not lengthen a pair, and its two channels add up to at most √2 times its length.
void measure_queries(Roped& own, const RopedSpan& span) {
  for (int64_t r = 0; r < span.rows; r++) {
    const float* q = own.side.query + (span.row + r) * own.side.query_stride;
    const auto pairs = [&](float factor, auto take) TERSEKV_INLINE {
      for (int64_t i = 0; i < own.half; i += kLanes) {
        const __mmask16 held = first(own.half - i);
        const __m512 unit = _mm512_mul_ps(_mm512_maskz_loadu_ps(held, own.unit + i), _mm512_set1_ps(factor));
        take(_mm512_mul_ps(_mm512_maskz_loadu_ps(held, q + i), unit),
             _mm512_mul_ps(_mm512_maskz_loadu_ps(held, q + own.half + i), unit));
      }
    };
    __m512 bounds = _mm512_setzero_ps(), sums = bounds, most = bounds;
    pairs(1.0f, [&](__m512 a, __m512 b) TERSEKV_INLINE {
      bounds = _mm512_add_ps(bounds, _mm512_add_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    });
    const float bound = _mm512_reduce_add_ps(bounds);  // dividing by it, squares neither overflow nor underflow
    pairs(bound > kLeast ? 1.0f / bound : 0.0f, [&](__m512 a, __m512 b) TERSEKV_INLINE {
      const __m512 size = _mm512_sqrt_ps(_mm512_fmadd_ps(a, a, _mm512_mul_ps(b, b)));
      sums = _mm512_add_ps(sums, size);
      most = _mm512_max_ps(most, size);
    });
    const float all = bound * _mm512_reduce_add_ps(sums) * (1.41422f / kMostQuery);
    const float largest = bound * _mm512_reduce_max_ps(most) / kMostWord;
    own.measure[r] = all > largest || all != all ? all : largest;
  }
  own.row = span.row;
}

// Rotate queries back by the angles of `token`, for keys at steps from it on.
void rotate_queries(Roped& own, const RopedSpan& span, int64_t token) {
  const int64_t half = own.half;
  const float longest = angles_at(own, token);
  for (int64_t r = 0; r < span.rows; r++) {
    const float* q = own.side.query + (span.row + r) * own.side.query_stride;
    const float step = longest * own.measure[r];
    // if infinite or NaN there are no integers, and all scores become NaN
    const bool finite = step < __builtin_inff();
    const __m512 inverse = _mm512_set1_ps(finite && step > kLeast ? 1.0f / step : 0.0f);
    int16_t* words = own.words + r * 2 * half;
    for (int64_t i = 0; i < half; i += kLanes) {
      const __mmask16 held = first(half - i);
      const __m512 a = _mm512_maskz_loadu_ps(held, q + i), b = _mm512_maskz_loadu_ps(held, q + half + i);
      const __m512 c = _mm512_mul_ps(_mm512_loadu_ps(own.cos + i), inverse),
                   s = _mm512_mul_ps(_mm512_loadu_ps(own.sin + i), inverse);
      const auto put = [&](int16_t* to, __m512 x) TERSEKV_INLINE {
        const __m512i word = finite ? _mm512_cvtps_epi32(x) : _mm512_setzero_si512();
        _mm512_mask_cvtsepi32_storeu_epi16(to + i, held, word);
      };
      put(words, _mm512_fmadd_ps(a, c, _mm512_mul_ps(b, s)));
      put(words + half, _mm512_fmsub_ps(b, c, _mm512_mul_ps(a, s)));
    }
    own.step[r] = finite ? step * (32768.0f / kMostWord) : __builtin_nanf("");
  }
}

}  // namespace
}  // namespace tersekv
