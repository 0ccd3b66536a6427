// A grid times a second scale: one factor per token of the keys, or per block and channel of the
// values. A factor is multiplied with the scores, or with a block's sums, never with elements.
#pragma once

#include "composed.h"
#include "grid_tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

struct ScaledOwn {
  float* score;  // of keys: scores of a span before the factor
  int64_t stride;
};

// The part has scores or sums of its own, to which the factor is applied.
template <class S>
void scaled_prepare(Node& node) {
  prepare_parts<S>(node);
  Node& part = node.parts[0];
  auto* own = scratch_of<ScaledOwn>();
  *own = {};
  node.own = own;
  if (node.query) {
    const int64_t unit = node.call->tokens_per_unit;
    own->stride = round_up(unit > kChunkTokens ? unit : kChunkTokens, kLanes) + kLanes;
    own->score = scratch(kRowTile * own->stride);
  }
  if (node.sum) {
    part.sum_stride = round_up(node.view->D, kLanes);
    part.sum = scratch(node.rows * part.sum_stride);
  }
}

inline const uint16_t* factors_at(const Node& node, int64_t block) {
  return plane_at(node.view->factor, node.b, node.h, block);
}

// Decode x̂ of sixteen keys.
template <class S>
void scaled_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  const int64_t t = node.view->t;
  grid_tile<S>(node.parts[0], token, count, tile);
  const auto factor = load_half_n<S>(node.view->factor_type, factors_at(node, token / t) + token % t, kLanes);
  for (int64_t k = 0; k < node.view->D * kLanes; k += kLanes) S::store(tile + k, S::mul(S::load(tile + k), factor));
}

template <class S>
void scaled_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const ScaledOwn& own = *static_cast<ScaledOwn*>(node.own);
  const int64_t t = node.view->t;
  for (int64_t r = 0; r < span.rows; r++) clear(own.score + r * own.stride, span.tokens());
  grid_scores<S>(node.parts[0], span, own.score, own.stride);
  for (int64_t token = span.first; token < span.last; token += kLanes) {
    const auto factor = load_half_n<S>(node.view->factor_type, factors_at(node, token / t) + token % t, kLanes);
    for (int64_t r = 0; r < span.rows; r++) {
      float* out = score + r * score_stride + token - span.first;
      S::store(out, S::fma(factor, S::load(own.score + r * own.stride + token - span.first), S::load(out)));
    }
  }
}

template <class S>
void scaled_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const int64_t t = node.view->t, D = node.view->D;
  const Span none{};
  Node part = node.parts[0];
  for (int64_t token = span.first; token < span.last; token += t) {
    for (int64_t r = 0; r < span.rows; r++) clear(part.sum_row(span.row + r), part.sum_stride);
    grid_sums<S>(part, {span.row, span.rows, token, token + t}, weight + token - span.first, weight_stride);
    part.later = &none;  // the first block has prefetched the keys that are read next
    const uint16_t* factors = factors_at(node, token / t);
    for (int64_t d = 0; d < D; d += kLanes) {
      const auto factor = load_half_n<S>(node.view->factor_type, factors + d, D - d);
      for (int64_t r = 0; r < span.rows; r++) {
        float* out = node.sum_row(span.row + r) + d;
        S::store(out, S::fma(factor, S::load(part.sum_row(span.row + r) + d), S::load(out)));
      }
    }
  }
}

template <class S>
constexpr Layout kScaled{Kind::scaled, scaled_prepare<S>, scaled_scores<S>, scaled_sums<S>, scaled_tile<S>};

}  // namespace
}  // namespace tersekv
