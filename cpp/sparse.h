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
[[gnu::always_inline]] inline void each_of(const Entries& entries, int64_t D, Body&& body) {
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

// Other heads' entries stand between those of two blocks, which hardware does not foresee.
inline void fetch_ahead(const Node& node, int64_t n) {
  const SparseView& v = node.view->sparse;
  if (n >= v.N) return;
  const Entries entries = entries_of(node, n);
  for (int64_t i = 0; i < entries.count; i += 32) {
    __builtin_prefetch(entries.places + i);
    __builtin_prefetch(entries.values + i);
  }
}

template <class S, class Body>
[[gnu::always_inline]] inline void each_entry(const Node& node, int64_t n, Body&& body) {
  fetch_ahead(node, n + 2);
  each_of<S>(entries_of(node, n), node.view->D, body);
}

// Four rows of one place side by side, so that an entry is one multiply-add for all of them.
typedef float Rows __attribute__((vector_size(16)));
static_assert(kRowTile == 4);

// x [rows, stride] to [n][4], zeros for missing rows.
inline void interleave(const float* x, int64_t stride, int64_t rows, int64_t n, Rows* out) {
  for (int64_t i = 0; i < n; i++) {
    Rows row = {};
    for (int64_t r = 0; r < rows; r++) row[r] = x[r * stride + i];
    out[i] = row;
  }
}

// x [rows, stride] += [n][4].
inline void add_interleaved(const Rows* in, int64_t stride, int64_t rows, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t r = 0; r < rows; r++) x[r * stride + i] += in[i][r];
}

struct SparseOwn {
  Rows *channels, *tokens;  // [D][4], and the tokens of a span
};

inline void sparse_prepare(Node& node) {
  const int64_t unit = node.call->tokens_per_unit;
  auto* own = reinterpret_cast<SparseOwn*>(scratch(kLanes));
  node.own = own;
  own->channels = reinterpret_cast<Rows*>(scratch(4 * node.view->D));
  own->tokens = reinterpret_cast<Rows*>(scratch(4 * (unit > kChunkTokens ? unit : kChunkTokens)));
}

template <class S>
void sparse_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const SparseOwn& own = *static_cast<SparseOwn*>(node.own);
  interleave(node.query_row(span.row), node.query_stride, span.rows, node.view->D, own.channels);
  clear(reinterpret_cast<float*>(own.tokens), 4 * span.tokens());
  for (int64_t token = span.first; token < span.last; token += kSparseTokens) {
    Rows* out = own.tokens + token - span.first;
    each_entry<S>(node, token / kSparseTokens, [&](int64_t at, int64_t channel, float value) TERSEKV_INLINE {
      out[at] += own.channels[channel] * value;
    });
  }
  add_interleaved(own.tokens, score_stride, span.rows, span.tokens(), score);
}

template <class S>
void sparse_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const SparseOwn& own = *static_cast<SparseOwn*>(node.own);
  interleave(weight, weight_stride, span.rows, span.tokens(), own.tokens);
  clear(reinterpret_cast<float*>(own.channels), 4 * node.view->D);
  for (int64_t token = span.first; token < span.last; token += kSparseTokens) {
    const Rows* in = own.tokens + token - span.first;
    each_entry<S>(node, token / kSparseTokens, [&](int64_t at, int64_t channel, float value) TERSEKV_INLINE {
      own.channels[channel] += in[at] * value;
    });
  }
  add_interleaved(own.channels, node.sum_stride, span.rows, node.view->D, node.sum_row(span.row));
}

// Adds the entries of sixteen tokens to a tile [D][16].
template <class S>
void sparse_add(const Node& node, int64_t token, float* tile) {
  const int64_t first = token % kSparseTokens;
  Entries entries = entries_of(node, token / kSparseTokens);
  // Entries ascend by token: those of earlier and of later tokens are cut off.
  const auto before = [&](int64_t limit) {
    int64_t low = 0, high = entries.count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (entries.places[middle] >> kChannelBits < limit) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int64_t begin = before(first), end = before(first + kLanes);
  entries = {entries.places + begin, entries.values + begin, end - begin};
  each_of<S>(entries, node.view->D, [&](int64_t at, int64_t channel, float value) TERSEKV_INLINE {
    const int64_t lane = at - first;
    if (lane >= 0 && lane < kLanes) tile[channel * kLanes + lane] += value;
  });
}

}  // namespace
}  // namespace tersekv
