// Packed keys of a tile of tokens, for products with many query rows: decoded with tokens on lanes, mapped back to the
// model's channels, and packed into panels.
#pragma once

#include "basis_rows.h"
#include "layouts.h"
#include "row_product.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Query rows whose scores of a tile nearly fit the L1 cache, a multiple of the rows that are multiplied at once.
#if TERSEKV_avx2
constexpr int64_t kTileRows = 30;
#else
constexpr int64_t kTileRows = 32;
#endif

template <class S>
struct KeyTiles {
  const Call& call;
  const RowProduct& product;
  Node& node;
  int64_t D, width, K, stride;
  float *turned, *mapped, *tile, *panels = nullptr, *matrix = nullptr, *channel = nullptr;

  // node: of the keys. most: tokens of a tile, a multiple of kLanes.
  KeyTiles(const Call& call, const RowProduct& product, Node& node, int64_t most)
      : call(call), product(product), node(node), D(call.D), width(round_up(call.D, kLanes)) {
    stride = most + kLanes;  // rows would share cache sets if it were a multiple of the page size
    turned = scratch(width * stride);
    mapped = turned;
    tile = scratch((node.view->D + kTileSlack) * kLanes);
    K = round_up(call.mapped, kLanes);
    if (!call.map) return;
    mapped = scratch(width * stride);
    panels = scratch(K * most);
    matrix = scratch(K * K);
    channel = scratch(K);
    for (int64_t i = 0; i < K * K; i++) matrix[i] = 0.0f;
    unpack_matrix(*call.map, false, node.b, node.h, call.mapped, K, matrix);
    for (int64_t c = 0; c < call.mapped; c++) channel[c] = channel_of(*call.map, node.b, node.h, c);
  }

  // Pack the keys of tokens [first, last) of the view. words: room for kTileRows rows of queries.
  void pack(int64_t first, int64_t last, float* words, float* out) {
    const int64_t count = last - first, tokens = round_up(count, kLanes);
    const Node& inner = call.adds_mean ? node.parts[0] : node;
    each_tile(inner, first, last, [&](float* to, const float* from) { S::store(to, S::load(from)); }, turned);
    for (int64_t d = D; d < width; d++) clear(turned + d * stride, tokens);
    if (call.map) map(tokens, words);
    if (call.adds_mean)
      each_tile(
          node.parts[1], first, last,
          [&](float* to, const float* from) { S::store(to, S::add(S::load(to), S::load(from))); }, mapped);
    if (count < tokens)
      for (int64_t d = 0; d < D; d++) clear(mapped + d * stride + count, tokens - count);
    product.pack_values(mapped, stride, tokens, width, out);
  }

 private:
  // Decode sixteen tokens at a time, and call put(to, from) for each channel's row `to` of `rows`.
  template <class Put>
  void each_tile(const Node& of, int64_t first, int64_t last, Put&& put, float* rows) {
    for (int64_t token = first; token < last; token += kLanes) {
      layout_of<S>(of).decode_tile(of, token, last - token < kLanes ? last - token : kLanes, tile);
      for (int64_t d = 0; d < D; d++) put(rows + d * stride + token - first, tile + d * kLanes);
    }
  }

  // mapped[c] = channel[c] · Σ_d matrix[c][d] · turned[d], of the first channels; the others are copied.
  void map(int64_t tokens, float* words) {
    const int64_t count = call.mapped;
    product.pack_values(turned, stride, tokens, K, panels);
    for (int64_t c = 0; c < count; c += kTileRows) {
      const int64_t rows = count - c < kTileRows ? count - c : kTileRows;
      product.multiply(matrix + c * K, K, rows, K, {panels, K}, tokens, false, words, mapped + c * stride, stride);
    }
    for (int64_t c = 0; c < width; c++)
      for (int64_t i = 0; i < tokens; i += kLanes) {
        float* to = mapped + c * stride + i;
        S::store(to, c < count ? S::mul(S::load(to), S::set1(channel[c])) : S::load(turned + c * stride + i));
      }
  }
};

}  // namespace
}  // namespace tersekv
