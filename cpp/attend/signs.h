// Signs of a sketch S·x. A score is norm·factor·Σ_m ±(S·q)_m. Partial sums of four entries of S·q
// have 16 values, looked up with a nibble of signs. Value sums are computed in the sketch's space
// and mapped back by Sᵀ.
#pragma once

#include "grid.h"
#include "sketch.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

struct SignTokens {
  const uint8_t* signs;
  const uint16_t* norms;
};

inline SignTokens sign_tokens(const Node& node, int64_t token) {
  const SignsView& v = node.view->signs;
  const int64_t n = token / kSignTokens, lane = token % kSignTokens;
  return {v.signs + node.b * v.stride_b + node.h * v.stride_h + n * v.stride_n + lane,
          plane_at(v.norms, node.b, node.h, n) + lane};
}

// tables [R, 2·bytes, 16]. Not inlined, because the compiler would then keep more sums in memory.
template <class S, int R>
[[gnu::noinline]] void sign_scores(const Node& node, const float* tables, const float*, int64_t first, int64_t last,
                                   float* score, int64_t score_stride, const PrefetchRanges& ahead) {
  using F = typename S::F;
  const SignsView& v = node.view->signs;
  const int64_t bytes = static_cast<SignsOwn*>(node.own)->bytes, table_stride = 2 * bytes * kLanes;
  ahead.fetch(0, 1);
  for (int64_t token = first; token < last; token += kLanes) {
    const SignTokens at = sign_tokens(node, token);
    F even[R], odd[R];
    repeat<R>([&](auto r) TERSEKV_INLINE { even[r] = odd[r] = S::zero(); });
    for (int64_t i = 0; i < bytes; i++) {
      const typename S::Words low = S::load_bytes(at.signs + i * kSignTokens), high = S::template shr<4>(low);
      const float* entries = tables + 2 * i * kLanes;
      repeat<R>([&](auto r) TERSEKV_INLINE { even[r] = S::add(even[r], S::look_up(entries + r * table_stride, low)); });
      repeat<R>([&](auto r)
                    TERSEKV_INLINE { odd[r] = S::add(odd[r], S::look_up(entries + r * table_stride + kLanes, high)); });
    }
    const F norm = S::mul(load_half<S>(v.half, at.norms), S::set1(v.factor));
    repeat<R>([&](auto r) TERSEKV_INLINE {
      float* out = score + r * score_stride + token - first;
      S::store(out, S::fma(norm, S::add(even[r], odd[r]), S::load(out)));
    });
  }
}

// tables [R, 2·bytes, 32] of int16, in units of steps [R].
template <class S, int R>
void short_sign_scores(const Node& node, const float* tables, const float* steps, int64_t first, int64_t last,
                       float* score, int64_t score_stride, const PrefetchRanges& ahead) {
  using F = typename S::F;
  using Short = typename S::Short;
  constexpr int64_t kBytes = kShortSigns / 8;
  const SignsView& v = node.view->signs;
  const int64_t bytes = static_cast<SignsOwn*>(node.own)->bytes, table_stride = 2 * bytes * kLanes;
  for (int64_t token = first; token < last; token += kSignTokens) {
    const SignTokens at = sign_tokens(node, token);
    typename S::Sum sum[R] = {};
    const auto add = [&](int64_t from, auto count) TERSEKV_INLINE {
      Short part[R];
      repeat<count>([&](auto i) TERSEKV_INLINE {
        const Short low = S::load_shorts(at.signs + (from + i) * kSignTokens), high = S::high_nibble(low);
        const float* entries = tables + 2 * (from + i) * kLanes;
        repeat<R>([&](auto r) TERSEKV_INLINE {
          const Short both = S::add_short(S::look_up_short(entries + r * table_stride, low),
                                          S::look_up_short(entries + r * table_stride + kLanes, high));
          part[r] = i == 0 ? both : S::add_short(part[r], both);
        });
      });
      repeat<R>([&](auto r) TERSEKV_INLINE { sum[r] = S::add_wide(sum[r], part[r]); });
    };
    int64_t i = 0;
    for (; i + kBytes <= bytes; i += kBytes) {
      add(i, Index<kBytes>{});
      ahead.fetch(i / kBytes, bytes / kBytes);
    }
    for (; i < bytes; i++) add(i, Index<1>{});
    const F factor = S::set1(v.factor);
    const F low = S::mul(load_half<S>(v.half, at.norms), factor);
    const F high = S::mul(load_half<S>(v.half, at.norms + kLanes), factor);
    repeat<R>([&](auto r) TERSEKV_INLINE {
      float* out = score + r * score_stride + token - first;
      const F step = S::set1(steps[r]);
      S::store(out, S::fma(S::mul(low, step), S::low_float(sum[r]), S::load(out)));
      S::store(out + kLanes, S::fma(S::mul(high, step), S::high_float(sum[r]), S::load(out + kLanes)));
    });
  }
}

template <class S>
void signs_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const SignsOwn& own = *static_cast<SignsOwn*>(node.own);
  const int64_t table_stride = 2 * own.bytes * kLanes;
  with_rows(span.rows, [&](auto rows) {
    const auto scores = [&](int64_t row, int64_t first, const PrefetchRanges& ahead) {
      const int64_t last = first + kSignTokens;
      const float *tables = own.tables + row * table_stride, *steps = own.steps + row;
      float* out = score + first - span.first;
      if constexpr (S::kShortTables) {
        short_sign_scores<S, rows>(node, tables, steps, first, last, out, score_stride, ahead);
      } else {
        sign_scores<S, rows>(node, tables, steps, first, last, out, score_stride, ahead);
      }
    };
    const bool rebuilt = varies(node.view->signs);
    for (int64_t token = span.first; token < span.last; token += kSignTokens) {
      PrefetchRanges ahead;
      ahead.add(*node.view, node.b, node.h, token + 2 * kSignTokens, kSignTokens);
      ahead.add_values(node, span, token, kSignTokens);
      if (rebuilt) {
        sketch_block<S>(node, token / kSignTokens, span.row, rows);
        for (int64_t r = 0; r < rows; r++)
          sign_tables<S>(own.space + r * 8 * own.bytes, 2 * own.bytes, own.tables + r * table_stride, own.steps + r);
      }
      scores(rebuilt ? 0 : span.row, token, ahead);
    }
  });
}

// Write ±norm·factor for every row of the sketch to a tile: [8·bytes][16].
template <class S>
void sketch_tile(const Node& node, int64_t token, float* tile) {
  const SignsView& v = node.view->signs;
  const SignTokens at = sign_tokens(node, token);
  const typename S::F norm = S::mul(load_half<S>(v.half, at.norms), S::set1(v.factor));
  for (int64_t i = 0; i < static_cast<SignsOwn*>(node.own)->bytes; i++) {
    const typename S::Words byte = S::load_bytes(at.signs + i * kSignTokens);
    for (int bit = 0; bit < 8; bit++, tile += kLanes) S::store(tile, S::signed_by(norm, byte, bit));
  }
}

// Add Sᵀ·(rows in the sketch's space) to the value sums, on the channels of block n.
template <class S>
void bring_back(const Node& node, int64_t n, Span span) {
  const SignsView& v = node.view->signs;
  const SignsOwn& own = *static_cast<SignsOwn*>(node.own);
  const int64_t *channels = channels_at(node, n), *dropped = dropped_at(node, n), stride = round_up(v.n, kLanes);
  clear(own.vectors, span.rows * stride);
  with_rows(span.rows, [&](auto rows) {
    dense_sums<S, Float::f32, rows>(reinterpret_cast<const char*>(v.sketch), v.n * 4, v.M, v.n, own.space,
                                    8 * own.bytes, own.vectors, stride);
  });
  for (int64_t r = 0; r < span.rows; r++) {
    for (int64_t i = 0; dropped && i < v.drops; i++) own.vectors[r * stride + dropped[i]] = 0.0f;
    for (int64_t i = 0; i < v.n; i++)
      node.sum_row(span.row + r)[channels ? channels[i] : i] += own.vectors[r * stride + i];
  }
}

template <class S>
void signs_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const SignsOwn& own = *static_cast<SignsOwn*>(node.own);
  const int64_t M = 8 * own.bytes, step = varies(node.view->signs) ? kSignTokens : span.tokens();
  for (int64_t first = span.first; first < span.last; first += step) {
    clear(node.lanes, span.rows * M * kLanes);
    for (int64_t token = first; token < first + step; token += kLanes) {
      sketch_tile<S>(node, token, own.tile);
      for (int64_t r = 0; r < span.rows; r++)
        tile_accumulate<S>(own.tile, M, S::load(weight + r * weight_stride + token - span.first),
                           node.lanes + r * M * kLanes);
    }
    for (int64_t i = 0; i < span.rows * M; i++) own.space[i] = S::hsum(S::load(node.lanes + i * kLanes));
    bring_back<S>(node, first / kSignTokens, span);
  }
}

template <class S>
void signs_tile(const Node& node, int64_t token, int64_t, float* tile) {
  const SignsView& v = node.view->signs;
  const SignsOwn& own = *static_cast<SignsOwn*>(node.own);
  const int64_t n = token / kSignTokens, *channels = channels_at(node, n), *dropped = dropped_at(node, n);
  sketch_tile<S>(node, token, own.tile);
  if (channels) clear(tile, node.view->D * kLanes);
  float* out = channels ? own.vectors : tile;  // [n][16]
  clear(out, v.n * kLanes);
  tile_dot<S>(own.tile, v.M, v.sketch, 1, v.n, v.n, out, kLanes);
  for (int64_t i = 0; channels && i < v.n; i++) S::store(tile + channels[i] * kLanes, S::load(out + i * kLanes));
  for (int64_t i = 0; dropped && i < v.drops; i++) clear(tile + dropped[i] * kLanes, kLanes);
}

template <class S>
constexpr Layout kSigns{Kind::signs, signs_prepare<S>, signs_scores<S>, signs_sums<S>, signs_tile<S>};

}  // namespace
}  // namespace tersekv
