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

inline int64_t coef_stride(const GridView& v) { return round_up(packed_slots(v.bits, v.words), kLanes) + 2 * kLanes; }

inline void lut_scores(const Node& node, Span span, float* coef, float* score, int64_t score_stride) {
  const BlockFn product = node.call->grid_product(node.grid, static_cast<int>(span.rows));
  const int64_t t = node.view->t;
  for (int64_t token = span.first; token < span.last; token += t)
    product(node.grid, block_at(node.grid, node.b, node.h, token / t), node.query_row(span.row), node.query_stride,
            score + token - span.first, score_stride, coef, coef_stride(node.grid));
}

inline void lut_sums(const Node& node, Span span, float* coef, const float* weight, int64_t weight_stride) {
  const BlockFn product = node.call->grid_product(node.grid, static_cast<int>(span.rows));
  const int64_t t = node.view->t;
  for (int64_t token = span.first; token < span.last; token += t)
    product(node.grid, block_at(node.grid, node.b, node.h, token / t), weight + token - span.first, weight_stride,
            node.sum_row(span.row), node.sum_stride, coef, coef_stride(node.grid));
}

}  // namespace
}  // namespace tersekv
