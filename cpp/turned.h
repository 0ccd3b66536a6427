// The same vector at every token, turned by RoPE as keys are: the part of keys that was taken off before they were
// coded. A score is a sum over the columns of cos and sin, with coefficients that a task makes once from query and
// vector. Where positions are consecutive, cosines and sines of some hundred steps serve all tokens: those of a token
// are put into the coefficients, cos(n + m) = cos n · cos m - sin n · sin m.
#pragma once

#include "roped.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

struct TurnedOwn {
  float* coefficients;  // [rows][columns that are read]
  float* constant;      // [rows], of channels that do not turn
  float* stepped;       // [rows at once][columns that are read], of a token
};

// Cosines and sines of 0 to rope.steps - 1 steps, into node.lanes: what the first tokens have, less the first one's.
template <class S>
void step_tables(Node& node) {
  const RopeView& rope = node.view->rope;
  const int64_t cos = rope.reads_cos, steps = rope.steps;
  bool filled = false;
  float* tables = kept_scratch({node.call->id, -1, -1, -1}, rope.reads * steps, filled);
  node.lanes = tables;
  if (filled) return;
  turn<S>(rope.cos, rope.stride_t, rope.read, cos, steps, tables);
  turn<S>(rope.sin, rope.stride_t, rope.read, cos, steps, tables + cos * steps);
  for (int64_t i = 0; i < cos; i++) {
    float *c = tables + i * steps, *s = c + cos * steps;
    const float square = c[0] * c[0] + s[0] * s[0], c0 = c[0] / square, s0 = s[0] / square;
    for (int64_t m = 0; m < steps; m++) {
      const float x = c[m], y = s[m];
      c[m] = x * c0 + y * s0;
      s[m] = y * c0 - x * s0;
    }
  }
}

// Coefficients of steps from a token on.
inline void step_coefficients(const Node& node, Span span, int64_t token) {
  const RopeView& rope = node.view->rope;
  const TurnedOwn& own = *static_cast<TurnedOwn*>(node.own);
  const int64_t at = node.b * rope.stride_b + node.h * rope.stride_h + token * rope.stride_t, cos = rope.reads_cos;
  for (int64_t r = 0; r < span.rows; r++) {
    const float* of = own.coefficients + (span.row + r) * rope.reads;
    float* out = own.stepped + r * rope.reads;
    for (int64_t i = 0; i < cos; i++) {
      const float c = rope.cos[at + rope.read[i]], s = rope.sin[at + rope.read[i]];
      out[i] = of[i] * c + of[cos + i] * s;
      out[cos + i] = of[cos + i] * c - of[i] * s;
    }
  }
}

template <class S>
void turned_prepare(Node& node) {
  const View& view = *node.view;
  const RopeView& rope = view.rope;
  auto* own = reinterpret_cast<TurnedOwn*>(scratch(ceil_div(sizeof(TurnedOwn), sizeof(float))));
  node.own = own;
  own->coefficients = scratch(node.rows * rope.reads);
  own->constant = scratch(node.rows);
  const auto* x =
      static_cast<const float*>(view.dense.data) + node.b * view.dense.stride_b + node.h * view.dense.stride_h;
  for (int64_t r = 0; r < node.rows; r++) {
    float *of = own->coefficients + r * rope.reads, constant = 0.0f;
    clear(of, rope.reads);
    for (int64_t d = 0; d < view.D; d++) {
      const float q = node.query_row(r)[d];
      const TurnedChannel& columns = rope.turned[d];
      if (columns.cos < 0) {
        constant += q * x[d];
        continue;
      }
      const RopeChannel& channel = rope.channels[d];
      of[columns.cos] += q * x[d];
      of[columns.sin] += q * static_cast<float>(channel.sign) * x[channel.partner];
    }
    own->constant[r] = constant;
  }
  if (rope.steps == 0) return rope_tables<S>(node, rope.read, rope.reads_cos, rope.reads);
  own->stepped = scratch(kRowTile * rope.reads);
  step_tables<S>(node);
}

// Scores of NG·16 tokens. of: [R][reads]; tables: [reads], `stride` apart.
template <class S, int R, int NG>
void turned_tile_scores(const float* of, const float* constant, int64_t reads, const float* tables, int64_t stride,
                        float* score, int64_t score_stride) {
  using F = typename S::F;
  F sum[R][NG];
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      sum[r][g] = S::add(S::load(score + r * score_stride + g * kLanes), S::set1(constant[r]));
    });
  });
  for (int64_t c = 0; c < reads; c++, tables += stride) {
    F x[NG];
    repeat<NG>([&](auto g) TERSEKV_INLINE { x[g] = S::load(tables + g * kLanes); });
    repeat<R>([&](auto r) TERSEKV_INLINE {
      const F factor = S::set1(of[r * reads + c]);
      repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = S::fma(factor, x[g], sum[r][g]); });
    });
  }
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE { S::store(score + r * score_stride + g * kLanes, sum[r][g]); });
  });
}

template <class S>
void turned_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const TurnedOwn& own = *static_cast<TurnedOwn*>(node.own);
  const RopeView& rope = node.view->rope;
  const int64_t unit = node.call->tokens_per_unit, first = node.task->first * unit;
  const int64_t stride = rope.steps ? rope.steps : node.task->last * unit - first;
  const float *of = rope.steps ? own.stepped : own.coefficients + span.row * rope.reads,
              *constant = own.constant + span.row;
  constexpr int kTiles = S::max_groups(4) >= 4 ? 4 : 1;
  for (int64_t token = span.first; token < span.last;) {
    const int64_t begin = first + (token - first) / stride * stride;
    const int64_t end = span.last - begin < stride ? span.last : begin + stride;
    if (rope.steps) step_coefficients(node, span, begin);
    with_rows(span.rows, [&](auto rows) {
      for (; end - token >= kTiles * kLanes; token += kTiles * kLanes)
        turned_tile_scores<S, rows, kTiles>(of, constant, rope.reads, node.lanes + token - begin, stride,
                                            score + token - span.first, score_stride);
      for (; token < end; token += kLanes)
        turned_tile_scores<S, rows, 1>(of, constant, rope.reads, node.lanes + token - begin, stride,
                                       score + token - span.first, score_stride);
    });
  }
}

}  // namespace
}  // namespace tersekv
