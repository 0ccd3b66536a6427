// Attention over trellis codes with AVX2. Products are in float32, so results differ from those of
// decoded tokens by rounding alone. Nothing decoded is stored: scores and sums stay in registers.
#include "trellis_bytes.h"

namespace tersekv {
namespace {

constexpr int64_t kSumTokens = 512;  // whose weights fit the L1 cache

struct Side {
  const TrellisPlan* plan;
  float* scale;   // [quads][4], see byte_scales
  float* query;   // keys: [quads][4][rows], times scale
  float* weight;  // values: [4][kSumTokens], times gains
};

const void* prepare(const TrellisSide& of) {
  auto* side = scratch_of<Side>();
  const TrellisPlan& plan = *make_trellis_plan(of);
  side->plan = &plan;
  side->scale = byte_scales(plan);
  if (of.query) {
    side->query = scratch(4 * plan.quads * of.rows);
    for (int64_t slot = 0; slot < 4 * plan.quads; slot++)
      for (int64_t r = 0; r < of.rows; r++)
        side->query[slot * of.rows + r] = of.query[r * of.query_stride + plan.d[slot]] * side->scale[slot];
  } else {
    side->weight = scratch(kRowTile * kSumTokens);
  }
  return side;
}

__m256 gains(const TrellisView& view, const uint8_t* codes) {
  const __m128i code = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return _mm256_i32gather_ps(view.gains, _mm256_cvtepu8_epi32(code), 4);
}

// Add the scores of sixteen tokens for R rows.
template <int R>
void add_scores(const Side& side, const uint16_t* block, const uint8_t* codes, int64_t row, float* score,
                int64_t score_stride) {
  const TrellisPlan& plan = *side.plan;
  const float* query = side.query + row;
  __m256 sum[R][2];
  repeat<2 * R>([&](auto i) TERSEKV_INLINE { sum[i / 2][i % 2] = _mm256_setzero_ps(); });
  each_quad(plan, [&](auto neighbours, const ByteTable& table, const TrellisQuad& quad, int64_t) TERSEKV_INLINE {
    repeat<2>([&](auto I) TERSEKV_INLINE {
      const TwoComponents two = decoded<neighbours, I>(table, block, quad);
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const __m256 low = _mm256_broadcast_ss(query + r), high = _mm256_broadcast_ss(query + plan.rows + r);
        repeat<2>([&](auto i) TERSEKV_INLINE {
          sum[r][i] = _mm256_fmadd_ps(low, two.low[i], _mm256_fmadd_ps(high, two.high[i], sum[r][i]));
        });
      });
      query += 2 * plan.rows;
    });
  });
  repeat<2>([&](auto i) TERSEKV_INLINE {
    const __m256 gain = gains(*plan.view, codes + 8 * i);
    repeat<R>([&](auto r) TERSEKV_INLINE {
      float* out = score + r * score_stride + 8 * i;
      _mm256_storeu_ps(out, _mm256_fmadd_ps(sum[r][i], gain, _mm256_loadu_ps(out)));
    });
  });
}

void scores(const void* own, TrellisSpan span, float* score, int64_t score_stride, const TrellisSide* values) {
  const auto& side = *static_cast<const Side*>(own);
  const TrellisPlan& plan = *side.plan;
  with_rows(span.rows, [&](auto rows) {
    for (int64_t n = span.first / kTrellisBlock; n < span.last / kTrellisBlock; n++) {
      prefetch_after(plan, span, n, values);
      for (int64_t lane = 0; lane < kTrellisBlock; lane += kLanes, score += kLanes)
        add_scores<rows>(side, plan.stream + n * plan.view->stride_n + lane, plan.gain + n * plan.view->gain_n + lane,
                         span.row, score, score_stride);
    }
  });
}

float total(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// Add the sums of blocks [first, last) for R rows.
template <int R>
void add_sums(const Side& side, int64_t first, int64_t last, const float* weight, int64_t weight_stride, float* sum,
              int64_t sum_stride) {
  const TrellisPlan& plan = *side.plan;
  const int64_t tokens = (last - first) * kTrellisBlock;
  for (int64_t t = 0; t < tokens; t += 8) {
    const uint8_t* codes = plan.gain + (first + t / kTrellisBlock) * plan.view->gain_n + t % kTrellisBlock;
    const __m256 gain = gains(*plan.view, codes);
    repeat<R>([&](auto r) TERSEKV_INLINE {
      _mm256_storeu_ps(side.weight + r * kSumTokens + t,
                       _mm256_mul_ps(_mm256_loadu_ps(weight + r * weight_stride + t), gain));
    });
  }
  const uint16_t* stream = plan.stream + first * plan.view->stride_n;
  each_quad(plan, [&](auto neighbours, const ByteTable& table, const TrellisQuad& quad, int64_t slot) TERSEKV_INLINE {
    repeat<2>([&](auto I) TERSEKV_INLINE {
      __m256 low[R], high[R];
      repeat<R>([&](auto r) TERSEKV_INLINE { low[r] = high[r] = _mm256_setzero_ps(); });
      for (int64_t t = 0; t < tokens; t += kLanes) {
        const uint16_t* block = stream + t / kTrellisBlock * plan.view->stride_n + t % kTrellisBlock;
        const TwoComponents two = decoded<neighbours, I>(table, block, quad);
        repeat<R>([&](auto r) TERSEKV_INLINE {
          repeat<2>([&](auto i) TERSEKV_INLINE {
            const __m256 p = _mm256_loadu_ps(side.weight + r * kSumTokens + t + 8 * i);
            low[r] = _mm256_fmadd_ps(p, two.low[i], low[r]);
            high[r] = _mm256_fmadd_ps(p, two.high[i], high[r]);
          });
        });
      }
      const int64_t at = slot + 2 * I;
      repeat<R>([&](auto r) TERSEKV_INLINE {
        sum[r * sum_stride + plan.d[at]] += total(low[r]) * side.scale[at];
        sum[r * sum_stride + plan.d[at + 1]] += total(high[r]) * side.scale[at + 1];
      });
    });
  });
}

void sums(const void* own, TrellisSpan span, const float* weight, int64_t weight_stride, float* sum,
          int64_t sum_stride) {
  constexpr int64_t most = kSumTokens / kTrellisBlock;
  const int64_t last = span.last / kTrellisBlock;
  with_rows(span.rows, [&](auto rows) {
    for (int64_t n = span.first / kTrellisBlock; n < last; n += most, weight += kSumTokens)
      add_sums<rows>(*static_cast<const Side*>(own), n, last - n < most ? last : n + most, weight, weight_stride, sum,
                     sum_stride);
  });
}

}  // namespace

const TrellisKernel& trellis_kernel_avx2() {
  static constexpr TrellisKernel kernel = {prepare, scores, sums};
  return kernel;
}

}  // namespace tersekv
