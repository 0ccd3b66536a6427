// Packed tokens as rows of channels, for products that read them many times.
#pragma once

#include "layouts.h"
#include "transposed.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// rows[i] = x̂ of the tokens [first, last), or rows[i] += x̂ if `add`. Rows are `stride` floats apart.
// first, last: multiples of the view's unit. tile: room for the larger of D and t, and for slack.
template <class S>
void decode_rows(const Node& node, bool of_keys, int64_t first, int64_t last, bool add, float* tile, float* rows,
                 int64_t stride) {
  const View& view = *node.view;
  const int64_t D = view.D, t = view.t;
  const auto at = [&](int64_t token) { return rows + (token - first) * stride; };
  if (view.kind == Kind::exact && !add) {
    with_type(view.dense.type, [&](auto type) {
      const int64_t size = type == Float::f32 ? 4 : 2, whole = D / kLanes * kLanes;
      for (int64_t token = first; token < last; token++) {
        const char* from = dense_row(view.dense, node.b, node.h, token);
        for (int64_t d = 0; d < whole; d += kLanes) S::store(at(token) + d, S::template load_as<type>(from + d * size));
        alignas(64) float rest[kLanes];
        if (whole < D) S::store(rest, S::template load_as_n<type>(from + whole * size, D - whole));
        for (int64_t d = whole; d < D; d++) at(token)[d] = rest[d - whole];
      }
    });
    return;
  }
  if (!of_keys && view.kind == Kind::grid) {  // lanes are channels
    for (int64_t token = first; token < last; token += t)
      for (int64_t d = 0; d < D; d += kLanes) {
        if (!add && D - d >= kLanes && t % 32 == 0) {
          grid_lanes<S>(node, token / t, d / kLanes, at(token) + d, stride);
          continue;
        }
        grid_lanes<S>(node, token / t, d / kLanes, tile);
        const int64_t n = D - d < kLanes ? D - d : kLanes;
        for (int64_t i = 0; i < t; i++) {
          float* row = at(token + i) + d;
          for (int64_t k = 0; k < n; k++) row[k] = tile[i * kLanes + k] + (add ? row[k] : 0.0f);
        }
      }
    return;
  }
  if (!of_keys && view.kind == Kind::scaled) {
    float* factor = scratch(round_up(D, kLanes));
    float* own = add ? scratch(t * D) : nullptr;
    for (int64_t token = first; token < last; token += t) {
      float* part = own ? own : at(token);
      const int64_t part_stride = own ? D : stride;
      decode_rows<S>(node.parts[0], false, token, token + t, false, tile, part, part_stride);
      for (int64_t d = 0; d < D; d += kLanes)
        S::store(factor + d, load_half_n<S>(view.factor_type, factors_at(node, token / t) + d, D - d));
      for (int64_t i = 0; i < t; i++)
        for (int64_t d = 0; d < D; d++)
          at(token + i)[d] = part[i * part_stride + d] * factor[d] + (add ? at(token + i)[d] : 0.0f);
    }
    return;
  }
  if (!of_keys && (view.kind == Kind::sum || view.kind == Kind::concat)) {
    int64_t channel = 0;
    for (int64_t i = 0; i < view.count; i++) {
      const bool onto = add || (view.kind == Kind::sum && i > 0);
      decode_rows<S>(node.parts[i], false, first, last, onto, tile, rows + channel, stride);
      if (view.kind == Kind::concat) channel += view.parts[i].D;
    }
    return;
  }
  for (int64_t token = first; token < last; token += kLanes) {
    const int64_t count = last - token < kLanes ? last - token : kLanes;
    layout_of<S>(node).decode_tile(node, token, count, tile);
    int64_t whole = 0;  // channels that are transposed in registers
    if (count == kLanes && !add)
      for (; whole + kLanes <= D; whole += kLanes) transpose(tile + whole * kLanes, kLanes, at(token) + whole, stride);
    for (int64_t i = 0; i < count; i++) {
      float* row = at(token + i);
      for (int64_t d = whole; d < D; d++) row[d] = tile[d * kLanes + i] + (add ? row[d] : 0.0f);
    }
  }
}

inline uint16_t to_bfloat16(float x) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Decode the tokens of one task, see `Decode`.
template <class S>
void decode_task(const Decode& of, int64_t index) {
  reset_scratch();
  const int64_t span = index % of.spans(), head = index / of.spans(), D = of.view->D;
  Call call;  // what decoders ask of a call
  call.B = of.B;
  call.H = of.H;
  call.T = of.view->T;
  call.tokens_per_unit = of.view->t;
  const int64_t first = span * of.span_tokens, last = first + of.span_tokens < call.T ? first + of.span_tokens : call.T;
  Task task;
  task.b = head / of.H;
  task.h = head % of.H;
  task.first = first / of.view->t;
  task.last = last / of.view->t;
  const int64_t shift = 0;
  const Span later{};
  Node node = node_of(of.view, call, task, shift, later);
  layout_of<S>(node).prepare(node);
  float* tile = scratch(((D > of.view->t ? D : of.view->t) + kTileSlack) * kLanes);
  const int64_t at = (head * call.T + first) * D, n = (last - first) * D;
  if (of.type == Float::f32) {
    decode_rows<S>(node, of.of_keys, first, last, false, tile, static_cast<float*>(of.out) + at, D);
    return;
  }
  float* rows = scratch(n);
  decode_rows<S>(node, of.of_keys, first, last, false, tile, rows, D);
  auto* out = static_cast<uint16_t*>(of.out) + at;
  for (int64_t i = 0; i < n; i++) out[i] = to_bfloat16(rows[i]);
}

}  // namespace
}  // namespace tersekv
