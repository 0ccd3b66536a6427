// Unpacked tokens, rows of floats: dot products with queries, weighted sums, and a transposed tile
// of them.
#pragma once

#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

inline const char* dense_row(const DenseView& v, int64_t b, int64_t h, int64_t t) {
  const int64_t size = v.type == Float::f32 ? 4 : 2;
  if (v.rows) b = v.rows[b];
  return static_cast<const char*>(v.data) + (b * v.stride_b + h * v.stride_h + t * v.stride_t) * size;
}

// Rows of tokens, `step` bytes apart, that are prefetched while scores are computed: keys some tokens ahead, and the
// values of the same tokens.
struct DenseAhead {
  static constexpr int64_t kTokens = 8;
  const char *key = nullptr, *value = nullptr;
  int64_t key_step = 0, value_step = 0, key_bytes = 0, value_bytes = 0, keys = 0, values = 0;

  [[gnu::always_inline]] inline void fetch(int64_t tokens) {
    for (int64_t end = keys - tokens; keys > end && keys > 0; keys--, key += key_step)
      for (int64_t at = 0; at < key_bytes; at += 64) __builtin_prefetch(key + at, 0, 3);
    for (int64_t end = values - tokens; values > end && values > 0; values--, value += value_step)
      for (int64_t at = 0; at < value_bytes; at += 64) __builtin_prefetch(value + at, 0, 3);
  }
};

// score[r][i] += query[r] · key[i] for i < count.
template <class S, Float T, int R, int TOKENS>
void dense_scores(const char* key, int64_t step, int64_t count, int64_t D, const float* query, int64_t query_stride,
                  float* score, int64_t score_stride, DenseAhead ahead = {}) {
  using F = typename S::F;
  constexpr int64_t size = T == Float::f32 ? 4 : 2;
  const int64_t whole = D / kLanes * kLanes;
  for (int64_t i = 0; i + TOKENS <= count; i += TOKENS, key += TOKENS * step) {
    ahead.fetch(TOKENS);
    F acc[TOKENS][R];
    repeat<TOKENS>([&](auto k) TERSEKV_INLINE { repeat<R>([&](auto r) TERSEKV_INLINE { acc[k][r] = S::zero(); }); });
    auto add = [&](int64_t d, auto load) TERSEKV_INLINE {
      F x[TOKENS];
      repeat<TOKENS>([&](auto k) TERSEKV_INLINE { x[k] = load(key + k * step + d * size); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const F q = S::load(query + r * query_stride + d);
        repeat<TOKENS>([&](auto k) TERSEKV_INLINE { acc[k][r] = S::fma(q, x[k], acc[k][r]); });
      });
    };
    for (int64_t d = 0; d < whole; d += kLanes)
      add(d, [](const char* p) TERSEKV_INLINE { return S::template load_as<T>(p); });
    if (whole < D) add(whole, [&](const char* p) TERSEKV_INLINE { return S::template load_as_n<T>(p, D - whole); });
    repeat<TOKENS>([&](auto k) TERSEKV_INLINE {
      repeat<R>([&](auto r) TERSEKV_INLINE { score[r * score_stride + i + k] += S::hsum(acc[k][r]); });
    });
  }
  if constexpr (TOKENS > 1) {
    const int64_t done = count / TOKENS * TOKENS;
    if (done < count)
      dense_scores<S, T, R, 1>(key, step, count - done, D, query, query_stride, score + done, score_stride);
  }
}

// sum[r][d] += weight[r][i] * value[i][d] over i < count.
template <class S, Float T, int R>
void dense_sums(const char* value, int64_t step, int64_t count, int64_t D, const float* weight, int64_t weight_stride,
                float* sum, int64_t sum_stride) {
  using F = typename S::F;
  constexpr int64_t size = T == Float::f32 ? 4 : 2;
  auto lanes = [&](auto groups, int64_t d, auto load) TERSEKV_INLINE {
    constexpr int NG = groups;
    F acc[NG][R];
    repeat<R>([&](auto r) TERSEKV_INLINE {
      repeat<NG>([&](auto g) TERSEKV_INLINE { acc[g][r] = S::load(sum + r * sum_stride + d + g * kLanes); });
    });
    for (int64_t i = 0; i < count; i++) {
      const char* row = value + i * step + d * size;
      F x[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE { x[g] = load(row + g * kLanes * size); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const F p = S::set1(weight[r * weight_stride + i]);
        repeat<NG>([&](auto g) TERSEKV_INLINE { acc[g][r] = S::fma(p, x[g], acc[g][r]); });
      });
    }
    repeat<R>([&](auto r) TERSEKV_INLINE {
      repeat<NG>([&](auto g) TERSEKV_INLINE { S::store(sum + r * sum_stride + d + g * kLanes, acc[g][r]); });
    });
  };
  const auto whole = [](const char* p) TERSEKV_INLINE { return S::template load_as<T>(p); };
  int64_t d = 0;
  if constexpr (S::max_groups(R) >= 4)
    for (; d + 4 * kLanes <= D; d += 4 * kLanes) lanes(Index<4>{}, d, whole);
  for (; d + kLanes <= D; d += kLanes) lanes(Index<1>{}, d, whole);
  if (d < D) lanes(Index<1>{}, d, [&](const char* p) TERSEKV_INLINE { return S::template load_as_n<T>(p, D - d); });
}

template <class S>
void exact_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const DenseView& v = node.view->dense;
  const int64_t size = v.type == Float::f32 ? 4 : 2, step = v.stride_t * size;
  DenseAhead ahead;
  const View& values = *node.call->values;
  if (!span.row && values.kind == Kind::exact) {
    const DenseView& of = values.dense;
    const int64_t value_size = of.type == Float::f32 ? 4 : 2,
                  skip = span.tokens() < DenseAhead::kTokens ? span.tokens() : DenseAhead::kTokens;
    ahead = {dense_row(v, node.b, node.h, span.first + skip),
             dense_row(of, node.b, node.h, span.first),
             step,
             of.stride_t * value_size,
             node.view->D * size,
             values.D * value_size,
             span.tokens() - skip,
             span.tokens()};
  }
  with_type(v.type, [&](auto type) {
    with_rows(span.rows, [&](auto rows) {
      dense_scores<S, type, rows, S::kExactTokens>(dense_row(v, node.b, node.h, span.first), step, span.tokens(),
                                                   node.view->D, node.query_row(span.row), node.query_stride, score,
                                                   score_stride, ahead);
    });
  });
}

// Load x of `count` tokens transposed into a tile [D][16], with zeros for the other lanes.
template <class S>
void exact_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  const DenseView& v = node.view->dense;
  const int64_t D = node.view->D;
  clear(tile, D * kLanes);
  with_type(v.type, [&](auto type) {
    alignas(64) float row[kLanes];
    for (int64_t i = 0; i < count; i++) {
      const char* x = dense_row(v, node.b, node.h, token + i);
      for (int64_t d = 0; d < D; d += kLanes) {
        const int64_t n = D - d < kLanes ? D - d : kLanes;
        const char* at = x + d * (v.type == Float::f32 ? 4 : 2);
        S::store(row, n == kLanes ? S::template load_as<type>(at) : S::template load_as_n<type>(at, n));
        for (int64_t k = 0; k < n; k++) tile[(d + k) * kLanes + i] = row[k];
      }
    }
  });
}

template <class S>
void exact_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const DenseView& v = node.view->dense;
  const int64_t step = v.stride_t * (v.type == Float::f32 ? 4 : 2);
  with_type(v.type, [&](auto type) {
    with_rows(span.rows, [&](auto rows) {
      dense_sums<S, type, rows>(dense_row(v, node.b, node.h, span.first), step, span.tokens(), node.view->D, weight,
                                weight_stride, node.sum_row(span.row), node.sum_stride);
    });
  });
}

template <class S>
constexpr Layout kExact{Kind::exact, [](Node&) {}, exact_scores<S>, exact_sums<S>, exact_tile<S>};

}  // namespace
}  // namespace tersekv
