// Keys that were encoded before RoPE: decoded into a tile, rotated by each token's angles, and
// multiplied from there. A task computes cosines and sines of its tokens once, tokens on lanes.
// Later tasks of other heads on the same thread reuse them.
#pragma once

#include "rope_row.h"
#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// y[a] = x[a]·cos[a] - x[b]·sin[a], y[b] = x[b]·cos[b] + x[a]·sin[b]: channels, and rows of the
// tables of cosines and sines.
struct RopePair {
  int32_t a, b, cos_a, sin_a, cos_b, sin_b;
};

constexpr int kRopedTiles = 2;

struct RopedGrid;

struct RopedOwn {
  RopePair* pairs;
  int32_t* plain;   // channels without rotation
  int32_t* column;  // columns of cos and sin that are read, those of cos first
  int64_t cos, columns;
  int64_t pair_count, plain_count, tile_floats;
  float* tile;      // kRopedTiles tiles
  RopedGrid* grid;  // roped_grid.h; null: decode into tiles
  RopeLanes lanes;  // without queries
};

// Columns of cos and sin that are read, each once; those of cos first.
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

// Compute cosines and sines of a task's tokens, [count][tokens], into node.lanes. column: the
// columns to read; the first `cos` are cosines.
template <class S>
void rope_tables(Node& node, const int32_t* column, int64_t cos, int64_t count) {
  const RopeView& rope = node.view->rope;
  const Task& task = *node.task;
  const int64_t first = task.first * node.call->tokens_per_unit,
                tokens = task.last * node.call->tokens_per_unit - first;
  const Marks& marks = rope.marks;
  const int64_t of_b = rope.stride_b || marks.stride_b ? node.b : 0,
                of_h = rope.stride_h || marks.stride_h ? node.h : 0;
  bool filled = false;
  float* tables = kept_scratch({node.call->id, of_b, of_h, first}, count * tokens, filled);
  node.lanes = tables;
  if (filled) return;
  const RopeLanes lanes = rope_lanes<S>(rope, column, cos, count);
  for (int64_t t0 = 0; t0 < tokens; t0 += kLanes)
    rope_angles<S>(node, lanes, first + t0, tokens - t0 < kLanes ? tokens - t0 : kLanes, tables + t0, tokens);
}

// List the pairs and the columns that the task reads.
inline RopedOwn* prepare_pairs(Node& node) {
  const View& view = *node.view;
  const int64_t D = view.D;
  auto* own = scratch_of<RopedOwn>();
  node.own = own;
  list_places(node);
  own->pairs = scratch_of<RopePair>(D / 2);
  own->plain = scratch_of<int32_t>(D);
  own->tile_floats = (D + kTileSlack) * kLanes;
  own->tile = scratch(kRopedTiles * own->tile_floats);
  own->pair_count = own->plain_count = 0;
  RopeColumns columns{scratch_of<int32_t>(2 * D)};
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
  own->column = columns.column;
  own->cos = columns.cos;
  own->columns = columns.count;
  return own;
}

// Compute scores of NG·16 tokens from consecutive tiles [NG] of [D][16].
template <class S, int R, int NG>
void roped_tile_scores(const Node& node, const float* tables, int64_t stride, Span span, float* score,
                       int64_t score_stride) {
  using F = typename S::F;
  const RopedOwn& own = *static_cast<RopedOwn*>(node.own);
  const float *query = node.query_row(span.row), *tile = own.tile;
  const int64_t q = node.query_stride, next = own.tile_floats;
  F sum[R][NG];
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = S::load(score + r * score_stride + g * kLanes); });
  });
  const auto add = [&](int64_t channel, const F(&x)[NG]) TERSEKV_INLINE {
    repeat<R>([&](auto r) TERSEKV_INLINE {
      const F factor = S::set1(query[r * q + channel]);
      repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = S::fma(factor, x[g], sum[r][g]); });
    });
  };
  for (int64_t i = 0; i < own.pair_count; i++) {
    const RopePair& pair = own.pairs[i];
    F ya[NG], yb[NG];
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      const float* at = tables + g * kLanes;
      const F xa = S::load(tile + g * next + pair.a * kLanes), xb = S::load(tile + g * next + pair.b * kLanes);
      ya[g] = S::negative_fma(xb, S::load(at + pair.sin_a * stride), S::mul(xa, S::load(at + pair.cos_a * stride)));
      yb[g] = S::fma(xa, S::load(at + pair.sin_b * stride), S::mul(xb, S::load(at + pair.cos_b * stride)));
    });
    add(pair.a, ya);
    add(pair.b, yb);
  }
  for (int64_t i = 0; i < own.plain_count; i++) {
    F x[NG];
    repeat<NG>([&](auto g) TERSEKV_INLINE { x[g] = S::load(tile + g * next + own.plain[i] * kLanes); });
    add(own.plain[i], x);
  }
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE { S::store(score + r * score_stride + g * kLanes, sum[r][g]); });
  });
}

}  // namespace
}  // namespace tersekv
