// RoPE in int16: AVX-512 BW and VNNI.
//
// The codes of two neighbouring channels of a token are in the halves of a word, and so are their
// table values: entry times scale plus offset, in units of the RoPE pair. A rotated pair stays
// within 16 bits. So do products with a query whose absolute values add up to at most kMostQuery.
#include "grid.h"
#include "prefetch.h"
#include "rope_words.h"

namespace tersekv {
namespace {

// Return the indices of two channels' entries; that of the second channel is 16 further on.
[[gnu::always_inline]] inline __m512i indices(__m512i word) {
  // 0xEA: (first & second) | third
  return _mm512_ternarylogic_epi32(word, _mm512_set1_epi32(0x000f000f), _mm512_set1_epi32(0x00100000), 0xEA);
}

// Compute scores of NG·16 tokens whose codes begin at `codes`, `step` steps after the rotated
// query.
template <int BITS, int R, int NG>
void tiles(const Roped& own, const int32_t* codes, int64_t step, Prefetch& later, float* score, int64_t score_stride) {
  constexpr int kWords = BITS == 3 ? 3 : 1, kDirect = direct_codes(BITS), kPairs = packed_slots(BITS, kWords) / 2;
  constexpr int kUnrolled = kDirect % 4 ? kDirect : 4;
  const int64_t half = own.half, group = own.side.grid->words * kLanes;
  // distance from a channel's word to its partner's
  const int64_t across = half / (2 * kPairs) * kWords * kLanes;
  const int16_t *int16_offsets = own.side.rope->int16_offsets + 2 * step, *tables = own.tables, *query = own.words;
  __m512i sum[R][NG];
  repeat<R>([&](auto r)
                TERSEKV_INLINE { repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = _mm512_setzero_si512(); }); });
  __m512i first[NG], second[NG], spare[NG], more[NG];
  int64_t d = 0;
  // Add the channels of `count` pairs of codes, from bit 0 of each half on.
  const auto add = [&](auto count) TERSEKV_INLINE {
    repeat<count>([&](auto i) TERSEKV_INLINE {
      const __m512i table_a = _mm512_loadu_si512(tables + (d + 2 * i) * kLanes),
                    table_b = _mm512_loadu_si512(tables + (d + 2 * i + half) * kLanes);
      const int16_t *cosines = int16_offsets + (d + 2 * i) * 2 * kInt16Offsets, *sines = cosines + 2 * kInt16Offsets;
      __m512i a[NG], b[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        const __m512i c = _mm512_loadu_si512(cosines + g * 2 * kLanes), s = _mm512_loadu_si512(sines + g * 2 * kLanes);
        const __m512i x = _mm512_permutexvar_epi16(indices(Avx512::shr<i * BITS>(first[g])), table_a),
                      y = _mm512_permutexvar_epi16(indices(Avx512::shr<i * BITS>(second[g])), table_b);
        a[g] = _mm512_sub_epi16(_mm512_mulhrs_epi16(x, c), _mm512_mulhrs_epi16(y, s));
        b[g] = _mm512_add_epi16(_mm512_mulhrs_epi16(y, c), _mm512_mulhrs_epi16(x, s));
      });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const int16_t* q = query + r * 2 * half + d + 2 * i;
        repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(sum[r][g], a[g], q); });
        repeat<NG>([&](auto g) TERSEKV_INLINE { add_products(sum[r][g], b[g], q + half); });
      });
    });
    d += 2 * count;
  };
  while (d < half) {
    repeat<NG>([&](auto g) TERSEKV_INLINE { spare[g] = more[g] = Avx512::no_words(); });
    for (int k = 0; k < kWords; k++, codes += kLanes) {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        first[g] = _mm512_loadu_si512(codes + g * group);
        second[g] = _mm512_loadu_si512(codes + g * group + across);
        if constexpr (BITS == 3) {
          spare[g] = Avx512::spare(spare[g], first[g]);
          more[g] = Avx512::spare(more[g], second[g]);
        }
      });
      later.fetch_for(2 * NG);
      for (int left = kDirect; left > 0; left -= kUnrolled) {
        add(Index<kUnrolled>{});
        repeat<NG>([&](auto g) TERSEKV_INLINE {
          first[g] = Avx512::shr<kUnrolled * BITS>(first[g]);
          second[g] = Avx512::shr<kUnrolled * BITS>(second[g]);
        });
      }
    }
    if constexpr (BITS == 3) {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        first[g] = Avx512::shr<13>(spare[g]);
        second[g] = Avx512::shr<13>(more[g]);
      });
      add(Index<1>{});
    }
  }
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      float* out = score + r * score_stride + g * kLanes;
      const __m512 x = _mm512_cvtepi32_ps(sum[r][g]);
      _mm512_storeu_ps(out, _mm512_fmadd_ps(x, _mm512_set1_ps(own.step[r]), _mm512_loadu_ps(out)));
    });
  });
}

// Return the prefetch of the values of the same tokens, to run while keys are read.
Prefetch values_of(const Roped& own, const RopedSpan& span) {
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
  Prefetch later = values_of(own, span);
  int64_t from = -kInt16Offsets;  // position to which the queries are rotated back
  for (int64_t token = span.first; token < span.last; token += t) {
    const Block block = block_at(v, own.side.b, own.side.h, token / t);
    if (!own.filled || !own.fixed) fill_tables(own, block);
    own.filled = true;
    if (!own.fixed || own.row != span.row) measure_queries(own, span);
    if (!own.fixed) from = -kInt16Offsets;  // units may differ per block
    for (int64_t i = 0; i < t;) {
      if (token + i - from >= kInt16Offsets) rotate_queries(own, span, (from = token + i) - span.shift);
      const int64_t step = token + i - from, left = kInt16Offsets - step < t - i ? kInt16Offsets - step : t - i;
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

void rope_scores_vnni(void* side, RopedSpan span, float* score, int64_t score_stride) {
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

void* rope_prepare_vnni(const RopedSide& side) {
  auto* own = scratch_of<Roped>();
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
  own->tables = scratch_of<int16_t>(D * kLanes);
  own->words = scratch_of<int16_t>(4 * D);
  own->row_angles = scratch(2 * side.rope->columns);
  return own;
}

}  // namespace

const RopeKernel& rope_kernel_vnni() {
  static constexpr RopeKernel kernel = {rope_prepare_vnni, rope_scores_vnni, rotated_mean_vnni};
  return kernel;
}

}  // namespace tersekv
