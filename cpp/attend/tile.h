// Tiles: float vectors of sixteen lanes, [P][16]. Any layout that can be decoded into a tile can be
// attended to.
#pragma once

#include "node.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kTileSlack = 64;  // rows after a tile that a decoder may overwrite

// Return `n` numbers of a tensor from element `at` on as float32: a pointer to the tensor, or to a
// copy in scratch memory.
template <class S>
const float* float_row(Float type, const void* data, int64_t at, int64_t n) {
  if (type == Float::f32) return static_cast<const float*>(data) + at;
  const auto* half = static_cast<const uint16_t*>(data) + at;
  float* row = scratch(round_up(n, kLanes));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    S::store(row + i, type == Float::f16 ? S::template load_as_n<Float::f16>(half + i, count)
                                         : S::template load_as_n<Float::bf16>(half + i, count));
  }
  return row;
}

// y[r] += Σ_p x[r·row_stride + p·step] · tile[p], with y[r] at r·y_stride.
template <class S>
void tile_dot(const float* tile, int64_t P, const float* x, int64_t row_stride, int64_t step, int64_t rows, float* y,
              int64_t y_stride) {
  using F = typename S::F;
  for (int64_t row = 0; row < rows; row += kRowTile) {
    const float* in = x + row * row_stride;
    float* out = y + row * y_stride;
    with_rows(rows - row < kRowTile ? rows - row : kRowTile, [&](auto count) {
      constexpr int R = count;
      F even[R], odd[R];
      repeat<R>([&](auto r) TERSEKV_INLINE {
        even[r] = S::load(out + r * y_stride);
        odd[r] = S::zero();
      });
      int64_t p = 0;
      for (; p + 2 <= P; p += 2) {
        const F a = S::load(tile + p * kLanes), b = S::load(tile + (p + 1) * kLanes);
        repeat<R>([&](auto r) TERSEKV_INLINE {
          even[r] = S::fma(S::set1(in[r * row_stride + p * step]), a, even[r]);
          odd[r] = S::fma(S::set1(in[r * row_stride + (p + 1) * step]), b, odd[r]);
        });
      }
      if (p < P) {
        const F a = S::load(tile + p * kLanes);
        repeat<R>([&](auto r) TERSEKV_INLINE { even[r] = S::fma(S::set1(in[r * row_stride + p * step]), a, even[r]); });
      }
      repeat<R>([&](auto r) TERSEKV_INLINE { S::store(out + r * y_stride, S::add(even[r], odd[r])); });
    });
  }
}

// sums[p] += weight · tile[p], per lane.
template <class S>
void tile_accumulate(const float* tile, int64_t P, typename S::F weight, float* sums) {
  for (int64_t p = 0; p < P * kLanes; p += kLanes)
    S::store(sums + p, S::fma(weight, S::load(tile + p), S::load(sums + p)));
}

inline void clear(float* p, int64_t floats) {
  for (int64_t i = 0; i < floats; i++) p[i] = 0.0f;
}

// Compute scores from tiles of sixteen tokens, decoded by decode_tile(node, token, 16, tile).
template <class S, class DecodeTile>
void tile_scores(const Node& node, Span span, float* score, int64_t score_stride, float* tile, DecodeTile decode_tile) {
  for (int64_t token = span.first; token < span.last; token += kLanes) {
    decode_tile(node, token, kLanes, tile);
    tile_dot<S>(tile, node.view->D, node.query_row(span.row), node.query_stride, 1, span.rows,
                score + token - span.first, score_stride);
  }
}

// Compute sums of all channels from such tiles.
template <class S, class DecodeTile>
void tile_sums(const Node& node, Span span, const float* weight, int64_t weight_stride, float* tile,
               DecodeTile decode_tile) {
  const int64_t D = node.view->D;
  for (int64_t r = 0; r < span.rows; r++) clear(node.lanes + r * D * kLanes, D * kLanes);
  for (int64_t token = span.first; token < span.last; token += kLanes) {
    decode_tile(node, token, kLanes, tile);
    for (int64_t r = 0; r < span.rows; r++)
      tile_accumulate<S>(tile, D, S::load(weight + r * weight_stride + token - span.first),
                         node.lanes + r * D * kLanes);
  }
  for (int64_t r = 0; r < span.rows; r++)
    for (int64_t d = 0; d < D; d++)
      node.sum_row(span.row + r)[d] += S::hsum(S::load(node.lanes + (r * D + d) * kLanes));
}

}  // namespace
}  // namespace tersekv
