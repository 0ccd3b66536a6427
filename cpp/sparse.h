// A few elements apart, entry by entry. Places come from memory that nobody has checked: starts are kept within the
// entries, and channels within the head.
#pragma once

#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kSparseTokens = 32;
constexpr int kChannelBits = 11;
constexpr int64_t kMostEntries = kSparseTokens << kChannelBits;

struct Entries {
  const uint16_t *places, *values;
  int64_t count;
};

// Entries of block n: up to where those of the next block begin, in the order block, row, head.
inline Entries entries_of(const Node& node, int64_t n) {
  const SparseView& v = node.view->sparse;
  const auto start = [&](int64_t index) {  // of block, row and head as one number
    if (index >= v.N * v.B * v.H) return v.entries;
    const int64_t h = index % v.H, b = index / v.H % v.B;
    const int64_t begin = v.starts[b * v.stride_b + h * v.stride_h + index / (v.H * v.B) * v.stride_n] - v.base;
    return begin < 0 ? 0 : begin < v.entries ? begin : v.entries;
  };
  const int64_t index = (n * v.B + node.b) * v.H + node.h, begin = start(index), end = start(index + 1);
  const int64_t count = end - begin;
  return {v.places + begin, v.values + begin, count < 0 ? 0 : count < kMostEntries ? count : kMostEntries};
}

// body(token in block, channel, value) for each entry.
template <class S, class Body>
[[gnu::always_inline]] inline void each_entry(const Node& node, int64_t n, Body&& body) {
  const Entries entries = entries_of(node, n);
  const int64_t D = node.view->D;
  alignas(64) float value[kLanes];
  for (int64_t i = 0; i < entries.count; i += kLanes) {
    const int64_t count = entries.count - i < kLanes ? entries.count - i : kLanes;
    S::store(value, count == kLanes ? S::template load_as<Float::f16>(entries.values + i)
                                    : S::template load_as_n<Float::f16>(entries.values + i, count));
    for (int64_t k = 0; k < count; k++) {
      const int64_t place = entries.places[i + k], channel = place & ((1 << kChannelBits) - 1);
      if (channel < D) body(place >> kChannelBits, channel, value[k]);
    }
  }
}

template <class S>
void sparse_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  with_rows(span.rows, [&](auto rows) {
    constexpr int R = rows;
    const float* query = node.query_row(span.row);
    for (int64_t token = span.first; token < span.last; token += kSparseTokens) {
      float* out = score + token - span.first;
      each_entry<S>(node, token / kSparseTokens, [&](int64_t at, int64_t channel, float value) TERSEKV_INLINE {
        repeat<R>([&](auto r)
                      TERSEKV_INLINE { out[r * score_stride + at] += value * query[r * node.query_stride + channel]; });
      });
    }
  });
}

template <class S>
void sparse_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  with_rows(span.rows, [&](auto rows) {
    constexpr int R = rows;
    float* sum = node.sum_row(span.row);
    for (int64_t token = span.first; token < span.last; token += kSparseTokens) {
      const float* in = weight + token - span.first;
      each_entry<S>(node, token / kSparseTokens, [&](int64_t at, int64_t channel, float value) TERSEKV_INLINE {
        repeat<R>([&](auto r)
                      TERSEKV_INLINE { sum[r * node.sum_stride + channel] += value * in[r * weight_stride + at]; });
      });
    }
  });
}

// Adds the entries of sixteen tokens to a tile [D][16].
template <class S>
void sparse_add(const Node& node, int64_t token, float* tile) {
  const int64_t first = token % kSparseTokens;
  each_entry<S>(node, token / kSparseTokens, [&](int64_t at, int64_t channel, float value) TERSEKV_INLINE {
    const int64_t lane = at - first;
    if (lane >= 0 && lane < kLanes) tile[channel * kLanes + lane] += value;
  });
}

}  // namespace
}  // namespace tersekv
