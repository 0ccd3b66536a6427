// Attention over trellis codes with AVX2, or with AVX-512 where VBMI is missing. Products are in float32, so results
// differ from those of decoded tokens by rounding alone. Nothing decoded is stored: scores and sums stay in registers.
#include "trellis_bytes.h"

#include "build.h"

namespace tersekv {
namespace {

#if TERSEKV_avx512
using V = Wide;
#else
using V = Narrow;
#endif
constexpr int kTokens = 2 * V::kFloats;  // in one register
constexpr int64_t kSumTokens = 512;      // whose weights fit the L1 cache

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

// Add the scores of kTokens tokens for R rows.
template <int R>
void add_scores(const Side& side, const uint16_t* block, const uint8_t* codes, int64_t row, float* score,
                int64_t score_stride) {
  const TrellisPlan& plan = *side.plan;
  const float* query = side.query + row;
  V::F sum[R][2];
  repeat<2 * R>([&](auto i) TERSEKV_INLINE { sum[i / 2][i % 2] = V::zero(); });
  each_quad<V>(plan, [&](auto neighbours, const ByteTable<V>& table, const TrellisQuad& quad, int64_t) TERSEKV_INLINE {
    repeat<2>([&](auto I) TERSEKV_INLINE {
      const auto two = decoded<V, neighbours, I>(table, block, quad);
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const auto low = V::set1(query[r]), high = V::set1(query[plan.rows + r]);
        repeat<2>([&](auto i)
                      TERSEKV_INLINE { sum[r][i] = V::fma(low, two.low[i], V::fma(high, two.high[i], sum[r][i])); });
      });
      query += 2 * plan.rows;
    });
  });
  repeat<2>([&](auto i) TERSEKV_INLINE {
    const auto gain = V::gather(plan.view->gains, V::load_bytes(codes + V::kFloats * i));
    repeat<R>([&](auto r) TERSEKV_INLINE {
      float* out = score + r * score_stride + V::kFloats * i;
      V::store(out, V::fma(sum[r][i], gain, V::load(out)));
    });
  });
}

void scores(const void* own, TrellisSpan span, float* score, int64_t score_stride, const TrellisSide* values) {
  const auto& side = *static_cast<const Side*>(own);
  const TrellisPlan& plan = *side.plan;
  with_rows(span.rows, [&](auto rows) {
    for (int64_t n = span.first / kTrellisBlock; n < span.last / kTrellisBlock; n++) {
      prefetch_after(plan, span, n, values);
      for (int64_t lane = 0; lane < kTrellisBlock; lane += kTokens, score += kTokens)
        add_scores<rows>(side, plan.stream + n * plan.view->stride_n + lane, plan.gain + n * plan.view->gain_n + lane,
                         span.row, score, score_stride);
    }
  });
}

// Add the sums of blocks [first, last) for R rows.
template <int R>
void add_sums(const Side& side, int64_t first, int64_t last, const float* weight, int64_t weight_stride, float* sum,
              int64_t sum_stride) {
  const TrellisPlan& plan = *side.plan;
  const int64_t tokens = (last - first) * kTrellisBlock;
  for (int64_t t = 0; t < tokens; t += V::kFloats) {
    const uint8_t* codes = plan.gain + (first + t / kTrellisBlock) * plan.view->gain_n + t % kTrellisBlock;
    const auto gain = V::gather(plan.view->gains, V::load_bytes(codes));
    repeat<R>([&](auto r) TERSEKV_INLINE {
      V::store(side.weight + r * kSumTokens + t, V::mul(V::load(weight + r * weight_stride + t), gain));
    });
  }
  const uint16_t* stream = plan.stream + first * plan.view->stride_n;
  each_quad<V>(plan,
               [&](auto neighbours, const ByteTable<V>& table, const TrellisQuad& quad, int64_t slot) TERSEKV_INLINE {
                 repeat<2>([&](auto I) TERSEKV_INLINE {
                   V::F low[R], high[R];
                   repeat<R>([&](auto r) TERSEKV_INLINE { low[r] = high[r] = V::zero(); });
                   for (int64_t t = 0; t < tokens; t += kTokens) {
                     const uint16_t* block = stream + t / kTrellisBlock * plan.view->stride_n + t % kTrellisBlock;
                     const auto two = decoded<V, neighbours, I>(table, block, quad);
                     repeat<R>([&](auto r) TERSEKV_INLINE {
                       repeat<2>([&](auto i) TERSEKV_INLINE {
                         const auto p = V::load(side.weight + r * kSumTokens + t + V::kFloats * i);
                         low[r] = V::fma(p, two.low[i], low[r]);
                         high[r] = V::fma(p, two.high[i], high[r]);
                       });
                     });
                   }
                   const int64_t at = slot + 2 * I;
                   repeat<R>([&](auto r) TERSEKV_INLINE {
                     sum[r * sum_stride + plan.d[at]] += V::hsum(low[r]) * side.scale[at];
                     sum[r * sum_stride + plan.d[at + 1]] += V::hsum(high[r]) * side.scale[at + 1];
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

const TrellisKernel& TERSEKV_BUILD(trellis_kernel)() {
  static constexpr TrellisKernel kernel = {prepare, scores, sums};
  return kernel;
}

}  // namespace tersekv
