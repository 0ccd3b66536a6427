// Trellis codes: each component's window is extracted from the ring of bits for sixteen tokens at
// once and looked up.
#pragma once

#include "tile.h"
#include "trellis_plan.h"
#if TERSEKV_avx2 || TERSEKV_avx512
#include "trellis_bytes.h"
#endif

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kTrellisTokens = 32;

// Position of a component's window: from bit `shift` of word `low` on, into word `high`. table:
// null if it has no bits.
struct TrellisPlace {
  const float* table;
  int64_t low, high;
  int shift;
  float scale;
};

struct TrellisOwn {
  TrellisPlace* places;  // [D]
  float* tile;
  const void* fast;          // data of the call's TrellisKernel, or null
  const float* scale;        // [D]
  const TrellisPlan* bytes;  // for trellis_bytes.h, made at first use
  const float* byte_scale;
};

template <class S>
void trellis_prepare(Node& node) {
  const TrellisView& v = node.view->trellis;
  const int64_t D = node.view->D;
  auto* own = scratch_of<TrellisOwn>();
  node.own = own;
  own->fast = nullptr;
  const float* scale = float_row<S>(v.scale_type, v.scale, node.b * v.scale_b + node.h * v.scale_h, D);
  if (node.call->trellis && v.entries)
    own->fast = node.call->trellis->prepare({&v, D, node.b, node.h, node.rows, node.query, node.query_stride, scale});
  own->scale = scale;
  own->bytes = nullptr;
  own->tile = scratch((D + kTileSlack) * kLanes);
  if (node.sum) node.lanes = scratch(kRowTile * D * kLanes);
  own->places = scratch_of<TrellisPlace>(D);
  const uint8_t* bits = v.bits + node.b * v.bits_b + node.h * v.bits_h;
  int64_t end = 0;
  for (int64_t d = 0; d < D; d++) {
    TrellisPlace& place = own->places[d];
    end += bits[d];
    const int64_t begin = end >= 8 ? end - 8 : end - 8 + 16 * v.words, word = begin / 16;
    place = {bits[d] ? v.tables + bits[d] * kTrellisStates : nullptr, word * kTrellisTokens,
             (word + 1 < v.words ? word + 1 : 0) * kTrellisTokens, static_cast<int>(begin % 16), scale[d]};
  }
}

template <class S>
void trellis_tile(const Node& node, int64_t token, int64_t, float* tile) {
  using F = typename S::F;
  using Words = typename S::Words;
  const TrellisView& v = node.view->trellis;
  TrellisOwn& own = *static_cast<TrellisOwn*>(node.own);
  const int64_t n = token / kTrellisTokens, lane = token % kTrellisTokens;
  const uint16_t* stream = v.stream + node.b * v.stride_b + node.h * v.stride_h + n * v.stride_n + lane;
  const uint8_t* codes = v.gain + node.b * v.gain_b + node.h * v.gain_h + n * v.gain_n + lane;
  const F gain = S::gather(v.gains, S::load_bytes(codes));
#if TERSEKV_avx2 || TERSEKV_avx512
  if (v.entries) {
    if (!own.bytes) {
      own.bytes = make_trellis_plan({&v, node.view->D, node.b, node.h, node.rows, nullptr, 0, own.scale});
      own.byte_scale = byte_scales(*own.bytes);
    }
    float gains[kLanes];
    S::store(gains, gain);
    trellis_bytes_tile(*own.bytes, own.byte_scale, stream, gains, tile);
    for (int64_t d = 0; d < node.view->D; d++)
      if (!own.places[d].table) S::store(tile + d * kLanes, S::zero());
    return;
  }
#endif
  for (int64_t d = 0; d < node.view->D; d++) {
    const TrellisPlace& place = own.places[d];
    F x = S::zero();
    if (place.table) {
      Words window = S::shift_right(S::load_halves(stream + place.low), place.shift);
      if (place.shift > 8)
        window = S::either(window, S::shift_left(S::load_halves(stream + place.high), 16 - place.shift));
      x = S::mul(S::mul(S::gather(place.table, S::with(window, 255)), S::set1(place.scale)), gain);
    }
    S::store(tile + d * kLanes, x);
  }
}

template <class S>
void trellis_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const TrellisOwn& own = *static_cast<TrellisOwn*>(node.own);
  if (own.fast) {
    const View& values = *node.call->values;
    const TrellisSide side = {&values.trellis, values.D, node.b, node.h};
    const TrellisSpan of = {span.row, span.rows, span.first, span.last, node.later->first, node.later->last};
    return node.call->trellis->scores(own.fast, of, score, score_stride,
                                      values.kind == Kind::trellis ? &side : nullptr);
  }
  tile_scores<S>(node, span, score, score_stride, own.tile, trellis_tile<S>);
}

template <class S>
void trellis_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const TrellisOwn& own = *static_cast<TrellisOwn*>(node.own);
  if (own.fast)
    return node.call->trellis->sums(own.fast, {span.row, span.rows, span.first, span.last}, weight, weight_stride,
                                    node.sum_row(span.row), node.sum_stride);
  tile_sums<S>(node, span, weight, weight_stride, own.tile, trellis_tile<S>);
}

template <class S>
constexpr Layout kTrellis{Kind::trellis, trellis_prepare<S>, trellis_scores<S>, trellis_sums<S>, trellis_tile<S>};

}  // namespace
}  // namespace tersekv
