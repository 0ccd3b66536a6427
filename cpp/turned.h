// The same vector at every token, turned by RoPE as keys are: the part of keys that was taken off before they were
// coded. A score is a sum over the columns of cos and sin, with coefficients that a task makes once from query and
// vector.
#pragma once

#include "roped.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

struct TurnedOwn {
  float* coefficients;  // [rows][columns that are read]
  float* constant;      // [rows], of channels that do not turn
};

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
  rope_tables<S>(node, rope.read, rope.reads_cos, rope.reads);
}

// Scores of NG·16 tokens.
template <class S, int R, int NG>
void turned_tile_scores(const TurnedOwn& own, int64_t reads, int64_t row, const float* tables, int64_t stride,
                        float* score, int64_t score_stride) {
  using F = typename S::F;
  F sum[R][NG];
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      sum[r][g] = S::add(S::load(score + r * score_stride + g * kLanes), S::set1(own.constant[row + r]));
    });
  });
  const float* of = own.coefficients + row * reads;
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
  const Task& task = *node.task;
  const int64_t reads = node.view->rope.reads;
  const int64_t unit = node.call->tokens_per_unit, first = task.first * unit, tokens = task.last * unit - first;
  constexpr int kTiles = S::max_groups(4) >= 4 ? 4 : 1;
  with_rows(span.rows, [&](auto rows) {
    for (int64_t token = span.first; token < span.last;) {
      const float* tables = node.lanes + token - first;
      float* out = score + token - span.first;
      if (span.last - token >= kTiles * kLanes) {
        turned_tile_scores<S, rows, kTiles>(own, reads, span.row, tables, tokens, out, score_stride);
        token += kTiles * kLanes;
      } else {
        turned_tile_scores<S, rows, 1>(own, reads, span.row, tables, tokens, out, score_stride);
        token += kLanes;
      }
    }
  });
}

}  // namespace
}  // namespace tersekv
