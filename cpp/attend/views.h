// Functions of a task for views of any kind: prepare, add scores, add sums, decode into a tile.
#pragma once

#include "exact.h"
#include "grid_tile.h"
#include "polar.h"
#include "roped_grid.h"
#include "rotated_mean.h"
#include "scaled.h"
#include "signs.h"
#include "sparse.h"
#include "trellis.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

template <class S>
void prepare(Node& node);

// Prepare the nodes of a view's parts; the channels of `concat` parts are consecutive. Kernels
// write sums in whole vectors. A part whose size is not a multiple of 16 has sums of its own, which
// are added to the view's.
template <class S>
void prepare_parts(Node& node) {
  const View& view = *node.view;
  node.parts = scratch_of<Node>(view.count);
  int64_t channel = 0;
  for (int64_t i = 0; i < view.count; i++) {
    Node& part = node.parts[i];
    part = node;
    part.view = view.parts + i;
    if (node.query) part.query = node.query + channel;
    if (node.sum) part.sum = node.sum + channel;
    if (view.kind == Kind::concat) {
      channel += part.view->D;
      if (node.sum && part.view->D % kLanes) {
        part.sum_stride = round_up(part.view->D, kLanes);
        part.sum = scratch(node.rows * part.sum_stride);
      }
    }
    prepare<S>(part);
  }
}

// Prepare the node of a view of keys (with query) or of values (with sums).
template <class S>
void prepare(Node& node) {
  switch (node.view->kind) {
    case Kind::grid:
      return grid_prepare<S>(node);
    case Kind::signs:
      return signs_prepare<S>(node);
    case Kind::polar:
      return polar_prepare<S>(node);
    case Kind::roped:
      prepare_parts<S>(node);
      roped_prepare<S>(node);
      {
        auto& own = *static_cast<RopedOwn*>(node.own);
        own.grid = roped_grid(node);
        if (!own.grid || !own.grid->fast) rope_tables<S>(node, own.column, own.cos, own.columns);
      }
      return;
    case Kind::rotated:
      prepare_parts<S>(node);
      node.own = scratch((node.view->D + kTileSlack) * kLanes);
      return;
    case Kind::scaled:
      prepare_parts<S>(node);
      return scaled_prepare(node);
    case Kind::sum:
    case Kind::concat:
      prepare_parts<S>(node);
      node.own = scratch((node.view->D + kTileSlack) * kLanes);
      return;
    case Kind::sparse:
      return sparse_prepare(node);
    case Kind::trellis:
      return trellis_prepare<S>(node);
    case Kind::rotated_mean:
      return rotated_mean_prepare<S>(node);
    case Kind::exact:
      return;
  }
}

// Decode x̂ of `count` (at most 16) tokens from `token` on into a tile [D][16], and overwrites it.
template <class S>
void decode_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  const View& view = *node.view;
  auto* own = static_cast<float*>(node.own);
  switch (view.kind) {
    case Kind::exact:
      return exact_fill<S>(node, token, count, tile);
    case Kind::grid:
      return grid_fill<S>(node, token / view.t, token % view.t / kLanes, tile);
    case Kind::signs:
      return signs_fill<S>(node, token, tile);
    case Kind::polar:
      return polar_fill<S>(node, token, tile);
    case Kind::trellis:
      return trellis_fill<S>(node, token, tile);
    case Kind::sparse:
      clear(tile, view.D * kLanes);
      return sparse_add<S>(node, token, tile);
    case Kind::sum:
      decode_tile<S>(node.parts[0], token, count, tile);
      for (int64_t i = 1; i < view.count; i++) {
        if (view.parts[i].kind == Kind::sparse) {
          sparse_add<S>(node.parts[i], token, tile);
        } else {
          decode_tile<S>(node.parts[i], token, count, own);
          for (int64_t k = 0; k < view.D * kLanes; k += kLanes)
            S::store(tile + k, S::add(S::load(tile + k), S::load(own + k)));
        }
      }
      return;
    case Kind::concat:
      for (int64_t i = 0; i < view.count; i++) {
        decode_tile<S>(node.parts[i], token, count, tile);
        tile += node.parts[i].view->D * kLanes;
      }
      return;
    case Kind::rotated: {
      decode_tile<S>(node.parts[0], token, count, own);
      clear(tile, view.D * kLanes);
      const float* rotation = view.rotation + node.b * view.rotation_stride_b + node.h * view.rotation_stride_h;
      return tile_dot<S>(own, view.D, rotation, 1, view.D, view.D, tile, kLanes);
    }
    case Kind::scaled:
      return scaled_fill<S>(node, token, tile);
    case Kind::roped:
      return;  // RoPE is only ever outermost
    case Kind::rotated_mean:
      return;  // views above it need no tiles
  }
}

template <class S>
void roped_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const Task& task = *node.task;
  const RopedOwn& own = *static_cast<RopedOwn*>(node.own);
  if (own.grid) return roped_grid_scores<S>(node, *own.grid, span, score, score_stride);
  const int64_t unit = node.call->tokens_per_unit, first = task.first * unit, tokens = task.last * unit - first;
  for (int64_t token = span.first; token < span.last; token += kRopedTiles * kLanes) {
    int64_t tiles = 0;
    for (int64_t at = token; at < span.last && tiles < kRopedTiles; at += kLanes, tiles++)
      decode_tile<S>(node.parts[0], at, span.last - at < kLanes ? span.last - at : kLanes,
                     own.tile + tiles * own.tile_floats);
    const float* tables = node.lanes + token - *node.shift - first;
    float* out = score + token - span.first;
    with_rows(span.rows, [&](auto rows) {
      if (tiles == kRopedTiles)
        return roped_tile_scores<S, rows, kRopedTiles>(node, tables, tokens, span, out, score_stride);
      roped_tile_scores<S, rows, 1>(node, tables, tokens, span, out, score_stride);
    });
  }
}

// score[r][i] += query[r] · x̂[i] for the span's rows and tokens. score has room up to a multiple
// of 16 tokens.
template <class S>
void add_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  switch (node.view->kind) {
    case Kind::exact:
      return exact_scores<S>(node, span, score, score_stride);
    case Kind::grid:
      return grid_scores<S>(node, span, score, score_stride);
    case Kind::signs:
      return signs_scores<S>(node, span, score, score_stride);
    case Kind::polar:
      return polar_scores<S>(node, span, score, score_stride);
    case Kind::sparse:
      return sparse_scores<S>(node, span, score, score_stride);
    case Kind::trellis:
      return trellis_scores<S>(node, span, score, score_stride);
    case Kind::rotated_mean:
      return rotated_mean_scores<S>(node, span, score, score_stride);
    case Kind::scaled:
      return scaled_scores<S>(node, span, score, score_stride);
    case Kind::sum:
    case Kind::concat:
      for (int64_t i = 0; i < node.view->count; i++) add_scores<S>(node.parts[i], span, score, score_stride);
      return;
    case Kind::roped:
      return roped_scores<S>(node, span, score, score_stride);
    case Kind::rotated:
      return;  // only ever under RoPE
  }
}

template <class S>
void joined_sums(const Node& node, Span span, const float* weight, int64_t weight_stride);

// sum[r] += Σ weight[r][i] · x̂[i] over the span's tokens. Weights are 0 up to a multiple of 16
// tokens.
template <class S>
void add_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  switch (node.view->kind) {
    case Kind::exact:
      return exact_sums<S>(node, span, weight, weight_stride);
    case Kind::grid:
      return grid_sums<S>(node, span, weight, weight_stride);
    case Kind::signs:
      return signs_sums<S>(node, span, weight, weight_stride);
    case Kind::polar:
      return polar_sums<S>(node, span, weight, weight_stride);
    case Kind::sparse:
      return sparse_sums<S>(node, span, weight, weight_stride);
    case Kind::trellis:
      return trellis_sums<S>(node, span, weight, weight_stride);
    case Kind::scaled:
      return scaled_sums<S>(node, span, weight, weight_stride);
    case Kind::sum:
      for (int64_t i = 0; i < node.view->count; i++) add_sums<S>(node.parts[i], span, weight, weight_stride);
      return;
    case Kind::concat:
      return joined_sums<S>(node, span, weight, weight_stride);
    case Kind::roped:
    case Kind::rotated:
    case Kind::rotated_mean:
      return;  // never values
  }
}

template <class S>
void joined_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  int64_t channel = 0;
  for (int64_t i = 0; i < node.view->count; i++) {
    const Node& part = node.parts[i];
    const int64_t D = part.view->D;
    const bool apart = D % kLanes != 0;
    for (int64_t r = 0; apart && r < span.rows; r++) clear(part.sum_row(span.row + r), part.sum_stride);
    add_sums<S>(part, span, weight, weight_stride);
    for (int64_t r = 0; apart && r < span.rows; r++)
      for (int64_t d = 0; d < D; d++) node.sum_row(span.row + r)[channel + d] += part.sum_row(span.row + r)[d];
    channel += D;
  }
}

}  // namespace
}  // namespace tersekv
