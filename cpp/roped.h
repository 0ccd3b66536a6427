// Keys that were coded before RoPE: decoded into a tile, turned by each token's angles, and attended to from there.
// cos and sin come with tokens on rows; a task turns them once so that tokens are lanes, and tasks of other heads that
// follow on the same thread find them there.
#pragma once

#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// y[a] = x[a]·cos[a] - x[b]·sin[a], y[b] = x[b]·cos[b] + x[a]·sin[b]: channels and rows of the turned tables.
struct RopePair {
  int32_t a, b, cos_a, sin_a, cos_b, sin_b;
};

struct RopedOwn {
  RopePair* pairs;
  int32_t* plain;  // channels that do not turn
  int64_t pair_count, plain_count, columns;
  float* tile;
};

// Columns of cos and sin that are read, each once: cos in front.
struct RopeColumns {
  int32_t* column;
  int64_t cos = 0, count = 0;

  int32_t add(int32_t wanted, int64_t from) {
    for (int64_t i = from; i < count; i++)
      if (column[i] == wanted) return static_cast<int32_t>(i);
    column[count] = wanted;
    return static_cast<int32_t>(count++);
  }
};

// [first, last) of cos or sin as [columns][tokens].
inline void turn(const float* rows, int64_t stride_t, const int32_t* columns, int64_t count, int64_t tokens,
                 float* out) {
  for (int64_t t0 = 0; t0 < tokens; t0 += kLanes)
    for (int64_t c = 0; c < count; c++)
      for (int64_t t = t0; t < t0 + kLanes && t < tokens; t++) out[c * tokens + t] = rows[t * stride_t + columns[c]];
}

inline void roped_prepare(Node& node) {
  const View& view = *node.view;
  const int64_t D = view.D;
  auto* own = reinterpret_cast<RopedOwn*>(scratch(ceil_div(sizeof(RopedOwn), sizeof(float))));
  node.own = own;
  own->pairs = reinterpret_cast<RopePair*>(scratch(D / 2 * (sizeof(RopePair) / sizeof(float))));
  own->plain = reinterpret_cast<int32_t*>(scratch(D));
  own->tile = scratch((D + kTileSlack) * kLanes);
  own->pair_count = own->plain_count = 0;
  RopeColumns columns{reinterpret_cast<int32_t*>(scratch(2 * D))};
  const RopeChannel* channels = view.rope.channels;
  for (int32_t d = 0; d < D; d++) {
    const RopeChannel& a = channels[d];
    if (a.partner < 0) own->plain[own->plain_count++] = d;
    if (a.partner < 0 || a.sign > 0) continue;
    const RopeChannel& b = channels[a.partner];
    RopePair& pair = own->pairs[own->pair_count++];
    pair = {d, a.partner, columns.add(a.cos_column, 0), a.sin_column, columns.add(b.cos_column, 0), b.sin_column};
  }
  columns.cos = columns.count;
  for (int64_t i = 0; i < own->pair_count; i++) {
    RopePair& pair = own->pairs[i];
    pair.sin_a = columns.add(pair.sin_a, columns.cos);
    pair.sin_b = columns.add(pair.sin_b, columns.cos);
  }
  own->columns = columns.count;
  const RopeView& rope = view.rope;
  const Task& task = *node.task;
  const int64_t first = task.first * node.call->tokens_per_unit,
                tokens = task.last * node.call->tokens_per_unit - first;
  const int64_t of_b = rope.stride_b ? node.b : 0, of_h = rope.stride_h ? node.h : 0;
  bool filled = false;
  float* tables = kept_scratch({node.call->id, of_b, of_h, first}, own->columns * tokens, filled);
  node.lanes = tables;
  if (filled) return;
  const int64_t at = of_b * rope.stride_b + of_h * rope.stride_h + first * rope.stride_t;
  turn(rope.cos + at, rope.stride_t, columns.column, columns.cos, tokens, tables);
  turn(rope.sin + at, rope.stride_t, columns.column + columns.cos, columns.count - columns.cos, tokens,
       tables + columns.cos * tokens);
}

template <class S, int R>
void roped_tile_scores(const Node& node, const float* tables, int64_t stride, Span span, float* score,
                       int64_t score_stride) {
  using F = typename S::F;
  const RopedOwn& own = *static_cast<RopedOwn*>(node.own);
  const float *query = node.query_row(span.row), *tile = own.tile;
  F even[R], odd[R];
  repeat<R>([&](auto r) TERSEKV_INLINE {
    even[r] = S::load(score + r * score_stride);
    odd[r] = S::zero();
  });
  for (int64_t i = 0; i < own.pair_count; i++) {
    const RopePair& pair = own.pairs[i];
    const F xa = S::load(tile + pair.a * kLanes), xb = S::load(tile + pair.b * kLanes);
    const F ya =
        S::negative_fma(xb, S::load(tables + pair.sin_a * stride), S::mul(xa, S::load(tables + pair.cos_a * stride)));
    const F yb = S::fma(xa, S::load(tables + pair.sin_b * stride), S::mul(xb, S::load(tables + pair.cos_b * stride)));
    repeat<R>([&](auto r) TERSEKV_INLINE {
      even[r] = S::fma(S::set1(query[r * node.query_stride + pair.a]), ya, even[r]);
      odd[r] = S::fma(S::set1(query[r * node.query_stride + pair.b]), yb, odd[r]);
    });
  }
  for (int64_t i = 0; i < own.plain_count; i++) {
    const int32_t d = own.plain[i];
    const F x = S::load(tile + d * kLanes);
    repeat<R>([&](auto r) TERSEKV_INLINE { even[r] = S::fma(S::set1(query[r * node.query_stride + d]), x, even[r]); });
  }
  repeat<R>([&](auto r) TERSEKV_INLINE { S::store(score + r * score_stride, S::add(even[r], odd[r])); });
}

}  // namespace
}  // namespace tersekv
