// RoPE in 16-bit integers: AVX-512 BW and VNNI.
//
// Two codes of a token, of neighbouring channels, stand in the halves of a word, as they do in what is looked up for
// them: entry times scale plus offset, in units of the RoPE pair. A pair turned by a step stays within 16 bits, and so
// do products with a query whose absolute values add up to at most kMostQuery.
#include <immintrin.h>

#include <initializer_list>

#include "grid.h"
#include "later.h"
#include "simd_avx512bf16.h"
#include "words_vnni.h"

namespace tersekv {
namespace {

constexpr float kMostEntry = 23160.0f;  // times √2 it is less than 2^15

struct Roped {
  RopedSide side;
  int64_t half;
  bool in_order;          // pair i has column i
  bool fixed, filled;     // one range for all blocks; tables stand there
  float *scale, *offset;  // [D], over the unit of their pair
  float* unit;            // [half]
  int16_t* tables;        // [half, 32]: entries of channels 2i and 2i + 1
  float *cos, *sin;       // [half]: of a token, times the units
  int64_t row;            // the first of the queries that `measure` is of, or -1
  int16_t* words;         // [4, D]
  float measure[4], step[4];
};

// Entries of all channels as block's ranges have them.
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

// Cosines and sines of a token by pair, times the pairs' units; the longest of them as vectors, without the units.
float turn_by(Roped& own, int64_t token) {
  const RopeView& rope = *own.side.rope;
  const int64_t at = own.side.b * rope.stride_b + own.side.h * rope.stride_h + token * rope.stride_t;
  const float *cos = rope.cos + at, *sin = rope.sin + at;
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = 0; i < own.half; i += kLanes) {
    const __mmask16 held = first(own.half - i);
    __m512 c, s;
    if (own.in_order) {
      c = _mm512_maskz_loadu_ps(held, cos + i);
      s = _mm512_maskz_loadu_ps(held, sin + i);
      __builtin_prefetch(cos + kTurnTokens * rope.stride_t + i, 0, 2);
      __builtin_prefetch(sin + kTurnTokens * rope.stride_t + i, 0, 2);
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
    // Not max(most, square), which would drop what is no number.
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

// What a unit of each query's words stands for where cosines and sines are of length 1: no turn of a pair is longer
// than the pair, and its channels add up to at most √2 times that.
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
    const float bound = _mm512_reduce_add_ps(bounds);  // at which squares neither overflow nor vanish
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

// Queries as they meet keys of steps from `token` on: turned back by its angles.
void turn_queries(Roped& own, const RopedSpan& span, int64_t token) {
  const int64_t half = own.half;
  const float longest = turn_by(own, token);
  for (int64_t r = 0; r < span.rows; r++) {
    const float* q = own.side.query + (span.row + r) * own.side.query_stride;
    const float step = longest * own.measure[r];
    const bool finite = step < __builtin_inff();  // what is not has no integers, and makes all scores NaN
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

// Indices of two channels' entries: that of the second one is 16 further on.
[[gnu::always_inline]] inline __m512i indices(__m512i word) {
  // 0xEA: the first and the second, or the third.
  return _mm512_ternarylogic_epi32(word, _mm512_set1_epi32(0x000f000f), _mm512_set1_epi32(0x00100000), 0xEA);
}

// Scores of NG·16 tokens whose codes begin at `codes`, `step` steps after the turned query.
template <int BITS, int R, int NG>
void tiles(const Roped& own, const int32_t* codes, int64_t step, Later& later, float* score, int64_t score_stride) {
  constexpr int kWords = BITS == 3 ? 3 : 1, kDirect = direct_codes(BITS), kPairs = packed_slots(BITS, kWords) / 2;
  const int64_t half = own.half, group = own.side.grid->words * kLanes;
  const int64_t across = half / (2 * kPairs) * kWords * kLanes;  // from a channel's word to its partner's
  const int16_t *turns = own.side.rope->turns + 2 * step, *tables = own.tables, *query = own.words;
  __m512i sum[R][NG];
  repeat<R>([&](auto r)
                TERSEKV_INLINE { repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = _mm512_setzero_si512(); }); });
  for (int64_t d = 0; d < half; d += 2 * kPairs, codes += kWords * kLanes) {
    __m512i first[NG][kWords], second[NG][kWords];
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      repeat<kWords>([&](auto k) TERSEKV_INLINE {
        const int32_t* word = codes + g * group + k * kLanes;
        first[g][k] = _mm512_loadu_si512(word);
        second[g][k] = _mm512_loadu_si512(word + across);
      });
    });
    later.fetch_for(2 * kWords * NG);
    repeat<kPairs>([&](auto i) TERSEKV_INLINE {
      const auto index = [&](const __m512i(&word)[kWords]) TERSEKV_INLINE {
        if constexpr (i < kWords * kDirect) {
          return indices(Avx512::shr<i % kDirect * BITS>(word[i / kDirect]));
        } else {
          return indices(
              Avx512Bf16::pick(Avx512::shr<15>(word[0]), Avx512::shr<14>(word[1]), Avx512::shr<13>(word[2])));
        }
      };
      const __m512i table_a = _mm512_loadu_si512(tables + (d + 2 * i) * kLanes),
                    table_b = _mm512_loadu_si512(tables + (d + 2 * i + half) * kLanes);
      const int16_t *cosines = turns + (d + 2 * i) * 2 * kTurnTokens, *sines = cosines + 2 * kTurnTokens;
      __m512i a[NG], b[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        const __m512i c = _mm512_loadu_si512(cosines + g * 2 * kLanes), s = _mm512_loadu_si512(sines + g * 2 * kLanes);
        const __m512i x = _mm512_permutexvar_epi16(index(first[g]), table_a),
                      y = _mm512_permutexvar_epi16(index(second[g]), table_b);
        a[g] = _mm512_sub_epi16(_mm512_mulhrs_epi16(x, c), _mm512_mulhrs_epi16(y, s));
        b[g] = _mm512_add_epi16(_mm512_mulhrs_epi16(y, c), _mm512_mulhrs_epi16(x, s));
      });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const int16_t* q = query + r * 2 * half + d + 2 * i;
        repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(sum[r][g], a[g], q); });
        repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(sum[r][g], b[g], q + half); });
      });
    });
  }
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      float* out = score + r * score_stride + g * kLanes;
      const __m512 x = _mm512_cvtepi32_ps(sum[r][g]);
      _mm512_storeu_ps(out, _mm512_fmadd_ps(x, _mm512_set1_ps(own.step[r]), _mm512_loadu_ps(out)));
    });
  });
}

// Values of the same tokens, to be fetched while keys are read.
Later values_of(const Roped& own, const RopedSpan& span) {
  const View* values = span.row == 0 ? grid_in(*own.side.values) : nullptr;
  if (!values || span.first % values->t) return {};
  const GridView& keys = *own.side.grid;
  const int64_t tokens = span.last - span.first;
  return {keys, ceil_div(tokens, keys.L), values->grid,
          block_at(values->grid, own.side.b, own.side.h, span.first / values->t), ceil_div(tokens, values->t)};
}

template <int BITS, int R>
void span_scores(Roped& own, const RopedSpan& span, float* score, int64_t score_stride) {
  const GridView& v = *own.side.grid;
  const int64_t t = v.L, words = v.words * kLanes;
  Later later = values_of(own, span);
  int64_t from = -kTurnTokens;  // the token whose angles are taken off the queries
  for (int64_t token = span.first; token < span.last; token += t) {
    const Block block = block_at(v, own.side.b, own.side.h, token / t);
    if (!own.filled || !own.fixed) fill_tables(own, block);
    own.filled = true;
    if (!own.fixed || own.row != span.row) measure_queries(own, span);
    if (!own.fixed) from = -kTurnTokens;  // units may be others
    for (int64_t i = 0; i < t;) {
      if (token + i - from >= kTurnTokens) turn_queries(own, span, from = token + i);
      const int64_t step = token + i - from, left = kTurnTokens - step < t - i ? kTurnTokens - step : t - i;
      const int32_t* codes = block.codes + i / kLanes * words;
      float* out = score + token + i - span.first;
      const int64_t groups = left >= 2 * kLanes ? 2 : 1;
      if (groups == 2) {
        tiles<BITS, R, 2>(own, codes, step, later, out, score_stride);
      } else {
        tiles<BITS, R, 1>(own, codes, step, later, out, score_stride);
      }
      i += groups * kLanes;
    }
  }
}

void scores(void* side, RopedSpan span, float* score, int64_t score_stride) {
  Roped& own = *static_cast<Roped*>(side);
  with_rows(span.rows, [&](auto rows) {
    const auto run = [&](auto bits) { span_scores<bits, rows>(own, span, score, score_stride); };
    switch (own.side.grid->bits) {
      case 1:
        return run(Index<1>{});
      case 2:
        return run(Index<2>{});
      case 3:
        return run(Index<3>{});
      default:
        return run(Index<4>{});
    }
  });
}

void* prepare(const RopedSide& side) {
  auto* own = reinterpret_cast<Roped*>(scratch(ceil_div(sizeof(Roped), sizeof(float))));
  const GridView& v = *side.grid;
  const int64_t D = v.P, room = round_up(D, kLanes);
  own->side = side;
  own->half = D / 2;
  own->fixed = v.scale.stride_n == 0 && v.offset.stride_n == 0;
  own->filled = false;
  own->row = -1;
  own->in_order = true;
  for (int64_t i = 0; i < own->half; i++) own->in_order &= side.rope->channels[i].cos_column == i;
  for (float** part : {&own->scale, &own->offset, &own->unit, &own->cos, &own->sin}) *part = scratch(room);
  own->tables = reinterpret_cast<int16_t*>(scratch(D * kLanes / 2));
  own->words = reinterpret_cast<int16_t*>(scratch(4 * D / 2));
  return own;
}

}  // namespace

const RopeKernel& rope_kernel_vnni() {
  static constexpr RopeKernel kernel = {prepare, scores, turned_in_words};
  return kernel;
}

}  // namespace tersekv
