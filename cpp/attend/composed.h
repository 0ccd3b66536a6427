// Views composed of views: sums, consecutive channels, and a rotation of one part.
#pragma once

#include "sparse.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Most rows that are multiplied with a view at once.
inline int64_t most_rows(const Call& call, const View& view) {
  int64_t most = kRowTile;
  if (view.kind == Kind::grid && view.grid.bits <= kLutBits && has_whole_units(view.grid)) most = call.code_rows;
  if (view.kind == Kind::trellis && call.trellis && view.trellis.entries) most = call.code_rows;
  const bool composed = view.kind == Kind::sum || view.kind == Kind::concat;
  for (int64_t i = 0; composed && i < view.count; i++)
    if (const int64_t own = most_rows(call, view.parts[i]); own > most) most = own;
  return most;
}

// Number of rows that are; the parts of all rows are as equal in size as possible.
inline int64_t row_tile(const Call& call, const View& view, int64_t rows) {
  return ceil_div(rows, ceil_div(rows, most_rows(call, view)));
}

// Call body(row, rows) for parts of so many rows.
template <class Body>
void row_tiles(int64_t rows, int64_t size, Body&& body) {
  for (int64_t row = 0; row < rows; row += size) body(row, rows - row < size ? rows - row : size);
}

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
    layout_of<S>(part).prepare(part);
  }
}

// The node's own data is room for a tile of a part.
template <class S>
void composed_prepare(Node& node) {
  prepare_parts<S>(node);
  node.own = scratch((node.view->D + kTileSlack) * kLanes);
}

template <class S>
void add_part_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  for (int64_t i = 0; i < node.view->count; i++) {
    const Node& part = node.parts[i];
    row_tiles(span.rows, row_tile(*node.call, *part.view, span.rows), [&](int64_t row, int64_t rows) {
      layout_of<S>(part).add_scores(part, {span.row + row, rows, span.first, span.last}, score + row * score_stride,
                                    score_stride);
    });
  }
}

template <class S>
void add_part_sums(const Node& part, Span span, const float* weight, int64_t weight_stride) {
  row_tiles(span.rows, row_tile(*part.call, *part.view, span.rows), [&](int64_t row, int64_t rows) {
    layout_of<S>(part).add_sums(part, {span.row + row, rows, span.first, span.last}, weight + row * weight_stride,
                                weight_stride);
  });
}

template <class S>
void sum_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  for (int64_t i = 0; i < node.view->count; i++) add_part_sums<S>(node.parts[i], span, weight, weight_stride);
}

template <class S>
void sum_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  auto* own = static_cast<float*>(node.own);
  layout_of<S>(node.parts[0]).decode_tile(node.parts[0], token, count, tile);
  for (int64_t i = 1; i < node.view->count; i++) {
    const Node& part = node.parts[i];
    if (part.view->kind == Kind::sparse) {
      sparse_add<S>(part, token, tile);
      continue;
    }
    layout_of<S>(part).decode_tile(part, token, count, own);
    for (int64_t k = 0; k < node.view->D * kLanes; k += kLanes)
      S::store(tile + k, S::add(S::load(tile + k), S::load(own + k)));
  }
}

template <class S>
void concat_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  int64_t channel = 0;
  for (int64_t i = 0; i < node.view->count; i++) {
    const Node& part = node.parts[i];
    const int64_t D = part.view->D;
    const bool apart = D % kLanes != 0;
    for (int64_t r = 0; apart && r < span.rows; r++) clear(part.sum_row(span.row + r), part.sum_stride);
    add_part_sums<S>(part, span, weight, weight_stride);
    for (int64_t r = 0; apart && r < span.rows; r++)
      for (int64_t d = 0; d < D; d++) node.sum_row(span.row + r)[channel + d] += part.sum_row(span.row + r)[d];
    channel += D;
  }
}

template <class S>
void concat_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  for (int64_t i = 0; i < node.view->count; i++) {
    layout_of<S>(node.parts[i]).decode_tile(node.parts[i], token, count, tile);
    tile += node.parts[i].view->D * kLanes;
  }
}

template <class S>
void rotated_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  const View& view = *node.view;
  auto* own = static_cast<float*>(node.own);
  layout_of<S>(node.parts[0]).decode_tile(node.parts[0], token, count, own);
  clear(tile, view.D * kLanes);
  const float* rotation = view.rotation + node.b * view.rotation_stride_b + node.h * view.rotation_stride_h;
  tile_dot<S>(own, view.D, rotation, 1, view.D, view.D, tile, kLanes);
}

template <class S>
constexpr Layout kSum{Kind::sum, composed_prepare<S>, add_part_scores<S>, sum_sums<S>, sum_tile<S>};
template <class S>
constexpr Layout kConcat{Kind::concat, composed_prepare<S>, add_part_scores<S>, concat_sums<S>, concat_tile<S>};
// A rotation is only ever under RoPE, which decodes it.
template <class S>
constexpr Layout kRotated{Kind::rotated, composed_prepare<S>, nullptr, nullptr, rotated_tile<S>};

}  // namespace
}  // namespace tersekv
