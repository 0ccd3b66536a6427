// Packed codes of 1 to 4 bits, block by block through the micro-kernel of lut.h.
#pragma once

#include "node.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int kLutBits = 4;

inline Block block_at(const GridView& v, int64_t b, int64_t h, int64_t n) {
  return {v.codes + b * v.stride_b + h * v.stride_h + n * v.stride_n, plane_at(v.scale, b, h, n),
          plane_at(v.offset, b, h, n)};
}

// Floats per row of coefficients of a span's blocks.
inline int64_t coef_stride(const Node& node) {
  const int64_t t = node.view->t, unit = node.call->tokens_per_unit;
  return coef_floats(node.grid, (unit > kChunkTokens ? unit : kChunkTokens) / t);
}

// The grid that a view is, or the first part of a sum.
inline const View* grid_in(const View& view) {
  const View* first = view.kind == Kind::added ? view.parts : &view;
  return first->kind == Kind::grid ? first : nullptr;
}

// Fetches the values of tokens [token, token + tokens) into the second cache, where they are a grid: while other keys
// than grids are multiplied, which take their time. begin, end: codes that lie one behind the other, left to the
// caller.
inline void fetch_values(const Node& keys, Span span, int64_t token, int64_t tokens, const char** begin = nullptr,
                         const char** end = nullptr) {
  const View* values = span.row == 0 ? grid_in(*keys.call->values) : nullptr;
  if (!values || token % values->t || tokens % values->t) return;
  const GridView& v = values->grid;
  const auto fetch = [](const void* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(data) + i, 0, 2);
  };
  const int64_t words = ceil_div(v.L, kLanes) * v.words * kLanes;
  const bool left = begin && v.stride_n == words;
  if (left) {
    *begin = reinterpret_cast<const char*>(block_at(v, keys.b, keys.h, token / values->t).codes);
    *end = *begin + tokens / values->t * words * 4;
  }
  for (int64_t n = token / values->t; n < (token + tokens) / values->t; n++) {
    const Block block = block_at(v, keys.b, keys.h, n);
    const int64_t ranges = (v.lane_scaled ? v.P / v.group * v.L : v.L / v.group * v.P) * 2;
    if (!left) fetch(block.codes, words * 4);
    fetch(block.scale, ranges);
    if (block.offset) fetch(block.offset, ranges);
  }
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
  const View* values = grid_in(*node.call->values);
  if (values && values->t == t) {
    product.next_view = &values->grid;
    product.next = block_at(values->grid, node.b, node.h, first);
  }
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
  node.call->grid_product(node.grid, static_cast<int>(span.rows))(node.grid, product);
}

}  // namespace
}  // namespace tersekv
