// Packed codes of 1 to 4 bits, multiplied block by block with the micro-kernel of lut.h.
#pragma once

#include "prefetch_ranges.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

inline Block block_at(const GridView& v, int64_t b, int64_t h, int64_t n) {
  return {v.codes + b * v.stride_b + h * v.stride_h + n * v.stride_n, plane_at(v.scale, b, h, n),
          plane_at(v.offset, b, h, n)};
}

// Floats per row of coefficients for the blocks of a span.
inline int64_t coef_stride(const Node& node) {
  const int64_t t = node.view->t, unit = node.call->tokens_per_unit;
  return coef_floats(node.grid, (unit > kChunkTokens ? unit : kChunkTokens) / t);
}

// Return the grid in a view: the view itself, its part before RoPE or a factor, or the first part
// of a sum; else null.
inline const View* grid_in(const View& view) {
  if (view.kind == Kind::sum || view.kind == Kind::roped || view.kind == Kind::scaled) return grid_in(view.parts[0]);
  return view.kind == Kind::grid ? &view : nullptr;
}

// Prefetch the values of tokens [token, token + tokens) while keys other than grids are
// multiplied.
inline void fetch_values(const Node& keys, Span span, int64_t token, int64_t tokens) {
  PrefetchRanges ahead;
  ahead.add_values(keys, span, token, tokens);
  ahead.fetch(0, 1);
}

// Let `product` prefetch tokens of the other side while the first rows of `span` are multiplied.
inline void fetch_later(Product& product, const Node& node, const View& other, Span span, Span tokens) {
  const View* view = grid_in(other);
  if (!view || span.row || tokens.first % view->t) return;
  product.later_view = &view->grid;
  product.later = block_at(view->grid, node.b, node.h, tokens.first / view->t);
  product.later_blocks = ceil_div(tokens.tokens(), view->t);
}

inline void lut_scores(const Node& node, Span span, float* coef, float* score, int64_t score_stride) {
  const int64_t t = node.view->t, first = span.first / t;
  Product product;
  product.first = block_at(node.grid, node.b, node.h, first);
  product.blocks = ceil_div(span.tokens(), t);
  product.x = node.query_row(span.row);
  product.x_stride = node.query_stride;
  product.y = score;
  product.y_stride = score_stride;
  product.y_step = t;
  product.coef = coef;
  product.coef_stride = coef_stride(node);
  fetch_later(product, node, *node.call->values, span, span);
  node.call->grid_product(node.grid, static_cast<int>(span.rows))(node.grid, product);
}

inline void lut_sums(const Node& node, Span span, float* coef, const float* weight, int64_t weight_stride) {
  const int64_t t = node.view->t;
  Product product;
  product.first = block_at(node.grid, node.b, node.h, span.first / t);
  product.blocks = ceil_div(span.tokens(), t);
  product.x = weight;
  product.x_stride = weight_stride;
  product.y = node.sum_row(span.row);
  product.y_stride = node.sum_stride;
  product.coef = coef;
  product.coef_stride = coef_stride(node);
  fetch_later(product, node, *node.call->keys, span, *node.later);
  node.call->grid_product(node.grid, static_cast<int>(span.rows))(node.grid, product);
}

}  // namespace
}  // namespace tersekv
