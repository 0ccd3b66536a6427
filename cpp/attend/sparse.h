// Outliers as sparse entries, one by one. Their starts and places are not validated. Starts are
// therefore clamped to the entries, and entries whose channel is outside the head are skipped.
// A view with equally many entries in each block has no starts.
#pragma once

#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kSparseTokens = 32;
constexpr int kChannelBits = 11;
constexpr int64_t kAheadBlocks = 16;  // prefetch distance: dense products run before the entries are read
constexpr int64_t kMostEntries = kSparseTokens << kChannelBits;

struct SparseEntries {
  const uint16_t *places, *values;
  int64_t count;
};

// Four query rows of one token or channel, so that an entry is one multiply-add for all of them.
typedef float Rows __attribute__((vector_size(16)));
static_assert(kRowTile == 4);

struct SparseOwn {
  const uint16_t *places, *values;  // of this head's first block, if blocks have equally many entries
  const int32_t *begin, *end;       // starts of this head's blocks, and of the block that follows each of them
  int64_t ends;  // number of blocks that have an `end`; the entries of the last block may end with the array
  Rows *channels, *more, *tokens;  // [D][4], [D][4], and the tokens of a span
  int64_t row;                     // of keys: first of the query rows in `channels`, or -1
};

// Return the entries of block n. They end where those of the next block begin, in the order block,
// batch row, head. Heads that share all blocks count as one.
inline SparseEntries entries_of(const Node& node, int64_t n) {
  const SparseView& v = node.view->sparse;
  const SparseOwn& own = *static_cast<SparseOwn*>(node.own);
  if (v.per_block) return {own.places + n * v.place.stride_n, own.values + n * v.value.stride_n, v.per_block};
  const auto inside = [&](int64_t start) {
    start -= v.base;
    return start < 0 ? 0 : start < v.entries ? start : v.entries;
  };
  const int64_t begin = inside(own.begin[n * v.stride_n]),
                end = n < own.ends ? inside(own.end[n * v.stride_n]) : v.entries;
  const int64_t count = end - begin;
  return {v.places + begin, v.values + begin, count < 0 ? 0 : count < kMostEntries ? count : kMostEntries};
}

// Call body(token in block, channel, value, 0 or 1 alternately) for each entry.
template <class S, class Body>
[[gnu::always_inline]] inline void each_of(const SparseEntries& entries, int64_t D, Body&& body) {
  alignas(64) float value[kLanes];
  const auto one = [&](const uint16_t* places, int64_t k, auto odd) TERSEKV_INLINE {
    const int64_t place = places[k], channel = place & ((1 << kChannelBits) - 1);
    if (channel < D) body(place >> kChannelBits, channel, value[k], odd);
  };
  int64_t i = 0;
  for (; i + kLanes <= entries.count; i += kLanes) {
    S::store(value, S::template load_as<Float::f16>(entries.values + i));
    repeat<kLanes>([&](auto k) TERSEKV_INLINE { one(entries.places + i, k, Index<k % 2>{}); });
  }
  if (i == entries.count) return;
  S::store(value, S::template load_as_n<Float::f16>(entries.values + i, entries.count - i));
  for (int64_t k = 0; k < entries.count - i; k++) one(entries.places + i, k, Index<0>{});
}

// Prefetch block n's entries. SparseEntries of other heads are between those of two blocks, so hardware
// does not prefetch.
inline void fetch_ahead(const Node& node, int64_t n) {
  if (n >= node.view->sparse.N) return;
  const SparseEntries entries = entries_of(node, n);
  for (int64_t i = 0; i < entries.count + 31; i += 32) {
    __builtin_prefetch(entries.places + i, 0, 2);
    __builtin_prefetch(entries.values + i, 0, 2);
  }
}

// Call body(token in span, channel, value, odd) for the entries of a span.
template <class S, class Body>
[[gnu::always_inline]] inline void each_entry(const Node& node, Span span, Body&& body) {
  for (int64_t token = span.first; token < span.last; token += kSparseTokens) {
    const int64_t n = token / kSparseTokens, from = token - span.first;
    fetch_ahead(node, n + kAheadBlocks);
    each_of<S>(entries_of(node, n), node.view->D,
               [&](int64_t at, int64_t channel, float value, auto odd)
                   TERSEKV_INLINE { body(from + at, channel, value, odd); });
  }
}

// Transpose a 4 × 4 matrix.
[[gnu::always_inline]] inline void transpose(Rows (&x)[4]) {
  const Rows a = {x[0][0], x[1][0], x[0][1], x[1][1]}, b = {x[0][2], x[1][2], x[0][3], x[1][3]};
  const Rows c = {x[2][0], x[3][0], x[2][1], x[3][1]}, d = {x[2][2], x[3][2], x[2][3], x[3][3]};
  x[0] = Rows{a[0], a[1], c[0], c[1]};
  x[1] = Rows{a[2], a[3], c[2], c[3]};
  x[2] = Rows{b[0], b[1], d[0], d[1]};
  x[3] = Rows{b[2], b[3], d[2], d[3]};
}

// Convert x [rows, stride] to [n][4], zeros for missing rows.
inline void interleave(const float* x, int64_t stride, int64_t rows, int64_t n, Rows* out) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    Rows tile[4] = {};
    for (int64_t r = 0; r < rows; r++) __builtin_memcpy(&tile[r], x + r * stride + i, sizeof(Rows));
    transpose(tile);
    for (int k = 0; k < 4; k++) out[i + k] = tile[k];
  }
  for (; i < n; i++) {
    Rows row = {};
    for (int64_t r = 0; r < rows; r++) row[r] = x[r * stride + i];
    out[i] = row;
  }
}

// Add [n][4] to x [rows, stride].
inline void add_interleaved(const Rows* in, int64_t stride, int64_t rows, int64_t n, float* x) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    Rows tile[4] = {in[i], in[i + 1], in[i + 2], in[i + 3]}, sum;
    transpose(tile);
    for (int64_t r = 0; r < rows; r++) {
      __builtin_memcpy(&sum, x + r * stride + i, sizeof(Rows));
      sum += tile[r];
      __builtin_memcpy(x + r * stride + i, &sum, sizeof(Rows));
    }
  }
  for (; i < n; i++)
    for (int64_t r = 0; r < rows; r++) x[r * stride + i] += in[i][r];
}

inline void sparse_prepare(Node& node) {
  const SparseView& v = node.view->sparse;
  const int64_t unit = node.call->tokens_per_unit, D = node.view->D;
  auto* own = scratch_of<SparseOwn>();
  node.own = own;
  if (v.per_block) {
    own->places = v.place.data + node.b * v.place.stride_b + node.h * v.place.stride_h;
    own->values = v.value.data + node.b * v.value.stride_b + node.h * v.value.stride_h;
  } else {
    const bool last_head = node.h + 1 == v.H, shared = v.stride_b == 0 && v.stride_h == 0,
               last = shared || (last_head && node.b + 1 == v.B);
    own->begin = v.starts + node.b * v.stride_b + node.h * v.stride_h;
    own->end = last        ? v.starts + v.stride_n
               : last_head ? v.starts + (node.b + 1) * v.stride_b
                           : own->begin + v.stride_h;
    own->ends = last ? v.N - 1 : v.N;
  }
  own->channels = scratch_of<Rows>(D);
  own->more = scratch_of<Rows>(D);
  own->tokens = scratch_of<Rows>(unit > kChunkTokens ? unit : kChunkTokens);
  own->row = -1;
}

inline void clear(Rows* rows, int64_t n) { clear(reinterpret_cast<float*>(rows), 4 * n); }

template <class S>
void sparse_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  SparseOwn& own = *static_cast<SparseOwn*>(node.own);
  if (own.row != span.row)
    interleave(node.query_row(span.row), node.query_stride, span.rows, node.view->D, own.channels);
  own.row = span.row;
  Rows *tokens = own.tokens, *channels = own.channels;
  clear(tokens, span.tokens());
  each_entry<S>(node, span, [=](int64_t at, int64_t channel, float value, auto) TERSEKV_INLINE {
    tokens[at] += channels[channel] * value;
  });
  add_interleaved(own.tokens, score_stride, span.rows, span.tokens(), score);
}

template <class S>
void sparse_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const SparseOwn& own = *static_cast<SparseOwn*>(node.own);
  interleave(weight, weight_stride, span.rows, span.tokens(), own.tokens);
  clear(own.channels, node.view->D);
  clear(own.more, node.view->D);
  // Two alternating sums, because outliers are in few channels, and each addition would wait for
  // the previous one.
  Rows *tokens = own.tokens, *sums = own.channels, *more = own.more;
  each_entry<S>(node, span, [=](int64_t at, int64_t channel, float value, auto odd) TERSEKV_INLINE {
    (odd ? more : sums)[channel] += tokens[at] * value;
  });
  for (int64_t d = 0; d < node.view->D; d++) own.channels[d] += own.more[d];
  add_interleaved(own.channels, node.sum_stride, span.rows, node.view->D, node.sum_row(span.row));
}

// Add the entries of sixteen tokens to a tile [D][16].
template <class S>
void sparse_add(const Node& node, int64_t token, float* tile) {
  const int64_t first = token % kSparseTokens;
  SparseEntries entries = entries_of(node, token / kSparseTokens);
  // SparseEntries ascend by token: skip those of earlier and of later tokens.
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
  each_of<S>(entries, node.view->D, [&](int64_t at, int64_t channel, float value, auto) TERSEKV_INLINE {
    const int64_t lane = at - first;
    if (lane >= 0 && lane < kLanes) tile[channel * kLanes + lane] += value;
  });
}

template <class S>
void sparse_tile(const Node& node, int64_t token, int64_t, float* tile) {
  clear(tile, node.view->D * kLanes);
  sparse_add<S>(node, token, tile);
}

template <class S>
constexpr Layout kSparse{Kind::sparse, sparse_prepare, sparse_scores<S>, sparse_sums<S>, sparse_tile<S>};

}  // namespace
}  // namespace tersekv
