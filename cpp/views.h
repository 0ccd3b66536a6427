// What a task does with a view of any kind: prepare, add scores, add sums.
#pragma once

#include "exact.h"
#include "grid.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// The node of a view of keys (its query given) or of values (its sums given).
template <class S>
void prepare(Node& node) {
  const View& view = *node.view;
  switch (view.kind) {
    case Kind::grid:
      return grid_prepare(node);
    case Kind::added:
    case Kind::joined: {
      node.parts = reinterpret_cast<Node*>(scratch(view.count * ceil_div(sizeof(Node), sizeof(float))));
      int64_t channel = 0;
      for (int64_t i = 0; i < view.count; i++) {
        Node& part = node.parts[i];
        part = node;
        part.view = view.parts + i;
        if (node.query) part.query = node.query + channel;
        if (node.sum) part.sum = node.sum + channel;
        if (view.kind == Kind::joined) channel += part.view->D;
        prepare<S>(part);
      }
      return;
    }
    default:
      return;
  }
}

// score[r][i] += query[r] · x̂[i] for the span's rows and tokens; score: up to a multiple of 16 tokens.
template <class S>
void add_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  switch (node.view->kind) {
    case Kind::exact:
      return exact_scores<S>(node, span, score, score_stride);
    case Kind::grid:
      return grid_scores(node, span, score, score_stride);
    case Kind::added:
    case Kind::joined:
      for (int64_t i = 0; i < node.view->count; i++) add_scores<S>(node.parts[i], span, score, score_stride);
      return;
    default:
      return;
  }
}

// sum[r] += Σ weight[r][i] · x̂[i] over the span's tokens; weight: 0 up to a multiple of 16 tokens.
template <class S>
void add_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  switch (node.view->kind) {
    case Kind::exact:
      return exact_sums<S>(node, span, weight, weight_stride);
    case Kind::grid:
      return grid_sums(node, span, weight, weight_stride);
    case Kind::added:
    case Kind::joined:
      for (int64_t i = 0; i < node.view->count; i++) add_sums<S>(node.parts[i], span, weight, weight_stride);
      return;
    default:
      return;
  }
}

}  // namespace
}  // namespace tersekv
