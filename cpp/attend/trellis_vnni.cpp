// Trellis codes in integers with VNNI's dot products, see trellis_windows.h.
#include "trellis_windows.h"

namespace tersekv {
namespace {

// sum += Σ unsigned · signed over four bytes. Inline assembly, because GCC 12 copies the sums of
// the intrinsic.
[[gnu::always_inline]] inline void add_byte_products(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// Sums over components for R rows, of high and low bytes of the query, and two halves of a block's
// tokens.
template <int R>
struct ScoreSums {
  __m512i of[R][2][2];
};

// Add quads [quad, last). Not inlined, because the compiler would then keep the sums in memory.
template <int R, bool NEIGHBOURS>
[[gnu::noinline]] void add_quads(const uint16_t* block, const int8_t* entry, const TrellisQuad* quad,
                                 const TrellisQuad* last, const int32_t* query, int64_t step, ScoreSums<R>& sums) {
  const Codebook entries(entry, true);
  __m512i sum[R][2][2];
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<4>([&](auto i) TERSEKV_INLINE { sum[r][i / 2][i % 2] = sums.of[r][i / 2][i % 2]; });
  });
  const auto decode = [&](__m512i(&x)[2]) TERSEKV_INLINE {
    const __m512i first = entries.at(windows<NEIGHBOURS, 0>(block, *quad)),
                  second = entries.at(windows<NEIGHBOURS, 1>(block, *quad));
    x[0] = _mm512_unpacklo_epi16(first, second);
    x[1] = _mm512_unpackhi_epi16(first, second);
  };
  __m512i x[2], next[2];
  decode(x);
  for (; quad < last; query += step) {
    quad++;
    decode(next);  // independent of the products of the previous quad, which are summed meanwhile
    repeat<R>([&](auto r) TERSEKV_INLINE {
      repeat<2>([&](auto part) TERSEKV_INLINE {
        const __m512i q = _mm512_set1_epi32(query[2 * r + part]);
        add_byte_products(sum[r][part][0], x[0], q);
        add_byte_products(sum[r][part][1], x[1], q);
      });
    });
    x[0] = next[0];
    x[1] = next[1];
  }
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<4>([&](auto i) TERSEKV_INLINE { sums.of[r][i / 2][i % 2] = sum[r][i / 2][i % 2]; });
  });
}

// Add the scores of a block for R rows.
template <int R>
void trellis_block_scores(const TrellisPlan& plan, const uint16_t* block, const uint8_t* codes, int64_t row,
                          float* score, int64_t score_stride) {
  ScoreSums<R> sums;
  repeat<R>([&](auto r) TERSEKV_INLINE {
    const TrellisQuery& q = plan.queries[row + r];
    sums.of[r][0][0] = sums.of[r][0][1] = _mm512_set1_epi32(q.high_offset);
    sums.of[r][1][0] = sums.of[r][1][1] = _mm512_set1_epi32(q.low_offset);
  });
  const int32_t* query = plan.coefficients + 2 * row;
  const int64_t step = 2 * plan.rows;
  for (int i = 0; i < plan.sections; i++) {
    const TrellisSection& s = plan.section[i];
    if (s.first < s.singles) add_quads<R, true>(block, s.entries, s.first, s.singles, query, step, sums);
    query += (s.singles - s.first) * step;
    if (s.singles < s.last) add_quads<R, false>(block, s.entries, s.singles, s.last, query, step, sums);
    query += (s.last - s.singles) * step;
  }
  const __m512 gain[2] = {gains(plan, codes), gains(plan, codes + kLanes)};
  repeat<R>([&](auto r) TERSEKV_INLINE {
    add_scores(joined(sums.of[r][0][0], sums.of[r][1][0]), joined(sums.of[r][0][1], sums.of[r][1][1]),
               plan.queries[row + r].step, gain, score + r * score_stride);
  });
}

void trellis_scores_vnni(const void* side, TrellisSpan span, float* score, int64_t score_stride,
                         const TrellisSide* values) {
  const auto& plan = *static_cast<const TrellisPlan*>(side);
  with_rows(span.rows, [&](auto rows) {
    for (int64_t n = span.first / kTrellisBlock; n < span.last / kTrellisBlock; n++, score += kTrellisBlock) {
      prefetch_after(plan, span, n, values);
      trellis_block_scores<rows>(plan, plan.stream + n * plan.view->stride_n, plan.gain + n * plan.view->gain_n,
                                 span.row, score, score_stride);
    }
  });
}

// Weights of up to kSumBlocks blocks times gains, in units of `step`. For each block and row there
// are 32 high bytes twice, then 32 low bytes twice.
template <int R>
struct Weights {
  alignas(64) uint8_t bytes[kSumBlocks][R][2][2 * kTrellisBlock];
  float step[R];

  Weights(const TrellisPlan& plan, int64_t n, int64_t blocks, const float* weight, int64_t weight_stride) {
    // Select the second and the lowest bytes of 32 int32, each twice.
    alignas(64) static constexpr Bytes kHigh = bytes_of([](int i) { return i % 32 * 4 + 1; }),
                                       kLow = bytes_of([](int i) { return i % 32 * 4; });
    const __m512i high = _mm512_load_si512(kHigh.byte), low = _mm512_load_si512(kLow.byte);
    whole_weights<R>(plan, n, blocks, weight, weight_stride, step,
                     [&](int64_t block, auto r, __m512i x, __m512i y) TERSEKV_INLINE {
                       _mm512_store_si512(bytes[block][r][0], _mm512_permutex2var_epi8(x, high, y));
                       _mm512_store_si512(bytes[block][r][1], _mm512_permutex2var_epi8(x, low, y));
                     });
  }
};

// Store the sums over the 32 lanes of four components, for four rows each.
inline void store_sums(const __m512 (&x)[2][4], float* out) {
  for (int i = 0; i < 2; i++) {
    const auto two = [](__m512 a, __m512 b) {
      return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    };
    const __m512d a = two(x[i][0], x[i][1]), b = two(x[i][2], x[i][3]);
    const __m512 four =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    const __m512 sum = _mm512_add_ps(four, _mm512_shuffle_f32x4(four, four, 0xb1));
    _mm_storeu_ps(out + 8 * i, _mm512_castps512_ps128(sum));
    _mm_storeu_ps(out + 8 * i + 4, _mm512_extractf32x4_ps(sum, 2));
  }
}

template <int R, bool NEIGHBOURS>
void quad_sums(const TrellisPlan& plan, const Codebook& entries, const TrellisQuad& quad, const Weights<R>& weights,
               int64_t first, int64_t blocks, float* out) {
  // Arrange four tokens of one component next to each other: the low bytes of all 32 words, then
  // the high bytes.
  alignas(64) static constexpr auto kOrder = bytes_of([](int i) { return i % 32 * 2 + i / 32; });
  const __m512i order = _mm512_load_si512(kOrder.byte);
  __m512i high[2][R], low[2][R];
  repeat<2>([&](auto i) TERSEKV_INLINE {
    repeat<R>([&](auto r) TERSEKV_INLINE { high[i][r] = low[i][r] = _mm512_setzero_si512(); });
  });
  const uint16_t* block = plan.stream + first * plan.view->stride_n;
  const auto decode = [&](__m512i(&x)[2]) TERSEKV_INLINE {
    x[0] = _mm512_permutexvar_epi8(order, entries.at(windows<NEIGHBOURS, 0>(block, quad)));
    x[1] = _mm512_permutexvar_epi8(order, entries.at(windows<NEIGHBOURS, 1>(block, quad)));
  };
  __m512i x[2], next[2];
  decode(x);
  for (int64_t n = 0; n < blocks; n++) {
    block += n + 1 < blocks ? plan.view->stride_n : 0;
    decode(next);
    repeat<R>([&](auto r) TERSEKV_INLINE {
      const __m512i p_high = _mm512_load_si512(weights.bytes[n][r][0]),
                    p_low = _mm512_load_si512(weights.bytes[n][r][1]);
      repeat<2>([&](auto i) TERSEKV_INLINE {
        add_byte_products(high[i][r], p_high, x[i]);
        add_byte_products(low[i][r], p_low, x[i]);
      });
    });
    x[0] = next[0];
    x[1] = next[1];
  }
  __m512 sum[2][4];
  repeat<2>([&](auto i) TERSEKV_INLINE {
    repeat<4>([&](auto r) TERSEKV_INLINE {
      if constexpr (r < R) {
        sum[i][r] = joined(high[i][r], low[i][r]);
      } else {
        sum[i][r] = _mm512_setzero_ps();
      }
    });
  });
  store_sums(sum, out);
}

template <int R>
void block_sums(const TrellisPlan& plan, int64_t first, int64_t blocks, const float* weight, int64_t weight_stride,
                float* sum, int64_t sum_stride) {
  const Weights<R> weights(plan, first, blocks, weight, weight_stride);
  float* out = plan.collected;
  for (int i = 0; i < plan.sections; i++) {
    const TrellisSection& section = plan.section[i];
    const Codebook entries(section.entries, false);
    const TrellisQuad* quad = section.first;
    for (; quad < section.singles; quad++, out += 16)
      quad_sums<R, true>(plan, entries, *quad, weights, first, blocks, out);
    for (; quad < section.last; quad++, out += 16)
      quad_sums<R, false>(plan, entries, *quad, weights, first, blocks, out);
  }
  const float* x = plan.collected;
  for (int64_t i = 0; i < 4 * plan.quads; i++, x += 4)
    repeat<R>([&](auto r)
                  TERSEKV_INLINE { sum[r * sum_stride + plan.d[i]] += x[r] * weights.step[r] * plan.scale[i]; });
}

void trellis_sums_vnni(const void* side, TrellisSpan span, const float* weight, int64_t weight_stride, float* sum,
                       int64_t sum_stride) {
  const auto& plan = *static_cast<const TrellisPlan*>(side);
  const int64_t last = span.last / kTrellisBlock;
  with_rows(span.rows, [&](auto rows) {
    for (int64_t n = span.first / kTrellisBlock; n < last; n += kSumBlocks, weight += kSumBlocks * kTrellisBlock)
      block_sums<rows>(plan, n, last - n < kSumBlocks ? last - n : kSumBlocks, weight, weight_stride, sum, sum_stride);
  });
}

const void* trellis_prepare_vnni(const TrellisSide& side) {
  TrellisPlan* plan = make_trellis_plan(side);
  if (!side.query) return plan;
  float* room = scratch(round_up(4 * plan->quads, kLanes));
  for (int64_t r = 0; r < side.rows; r++)
    plan->queries[r] = quantised(*plan, side.query + r * side.query_stride, side.D, room,
                                 [&](int64_t quad, int32_t high, int32_t low) TERSEKV_INLINE {
                                   int32_t* out = plan->coefficients + 2 * (quad * side.rows + r);
                                   out[0] = high;
                                   out[1] = low;
                                 });
  return plan;
}

}  // namespace

const TrellisKernel& trellis_kernel_vnni() {
  static constexpr TrellisKernel kernel = {trellis_prepare_vnni, trellis_scores_vnni, trellis_sums_vnni};
  return kernel;
}

}  // namespace tersekv
