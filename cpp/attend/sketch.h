// Data of a task for the signs of a sketch: the sketched queries, as tables of partial sums.
#pragma once

#include "exact.h"
#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kSignTokens = 32;

struct SignsOwn {
  int64_t bytes;      // bytes of signs per token
  float* tables;      // keys: [rows, 2·bytes, 16], partial sums of a nibble, or [rows, 2·bytes, 32] of int16
  float* steps;       // keys: [rows], unit of int16 tables
  float* transposed;  // if channels differ per block: [n, 8·bytes], Sᵀ
  float* base;        // keys, if channels differ per block: [rows, 8·bytes], S·q of all channels
  float* space;       // [kRowTile, 8·bytes] in the sketch's space
  float* vectors;     // [kRowTile, n] on the sketch's channels
  float* tile;
};

inline bool varies(const SignsView& v) { return v.channels_n != 0 || v.dropped_n != 0; }

inline const int64_t* channels_at(const Node& node, int64_t n) {
  const SignsView& v = node.view->signs;
  return v.channels ? v.channels + node.b * v.channels_b + node.h * v.channels_h + n * v.channels_n : nullptr;
}

inline const int64_t* dropped_at(const Node& node, int64_t n) {
  const SignsView& v = node.view->signs;
  return v.dropped ? v.dropped + node.b * v.dropped_b + node.h * v.dropped_h + n * v.dropped_n : nullptr;
}

constexpr int64_t kShortSigns = 32;  // signs whose partial sums are added in int16
constexpr float kMostShort = 32760.0f;

// Compute the sixteen sums ±s[0] ±s[1] ±s[2] ±s[3] of each nibble; bit i of an entry's index is
// the sign of s[i].
template <class S>
void sign_tables(const float* s, int64_t nibbles, float* tables, float* step) {
  using F = typename S::F;
  float most = 0.0f;
  for (int64_t m = 0; m < 4 * nibbles; m += kShortSigns) {
    float sum = 0.0f;
    for (int64_t k = m; k < m + kShortSigns && k < 4 * nibbles; k++) sum += __builtin_fabsf(s[k]);
    most = most < sum || sum != sum ? sum : most;
  }
  *step = most / kMostShort;
  const F inverse = S::set1(most == 0.0f ? 0.0f : kMostShort / most);
  F sign[4];
  for (int bit = 0; bit < 4; bit++) {
    alignas(64) float plus[kLanes];
    for (int i = 0; i < kLanes; i++) plus[i] = i >> bit & 1 ? 1.0f : -1.0f;
    sign[bit] = S::load(plus);
  }
  for (int64_t i = 0; i < nibbles; i++, s += 4) {
    const F low = S::fma(S::set1(s[1]), sign[1], S::mul(S::set1(s[0]), sign[0]));
    const F high = S::fma(S::set1(s[3]), sign[3], S::mul(S::set1(s[2]), sign[2]));
    if constexpr (S::kShortTables) {
      S::store_shorts(tables + i * kLanes, S::mul(S::add(low, high), inverse));
    } else {
      S::store(tables + i * kLanes, S::add(low, high));
    }
  }
}

// Compute S·q of rows from `row` on, into own.space.
template <class S>
void sketch_rows(const Node& node, int64_t row, int64_t rows) {
  const SignsView& v = node.view->signs;
  const SignsOwn& own = *static_cast<SignsOwn*>(node.own);
  const int64_t *channels = channels_at(node, 0), *dropped = dropped_at(node, 0), stride = round_up(v.n, kLanes);
  clear(own.vectors, rows * stride);  // dot products read whole vectors
  for (int64_t r = 0; r < rows; r++) {
    float* q = own.vectors + r * stride;
    for (int64_t i = 0; i < v.n; i++) q[i] = node.query_row(row + r)[channels ? channels[i] : i];
    for (int64_t i = 0; dropped && i < v.drops; i++) q[dropped[i]] = 0.0f;
  }
  clear(own.space, rows * 8 * own.bytes);
  with_rows(rows, [&](auto count) {
    dense_scores<S, Float::f32, count, S::kExactTokens>(reinterpret_cast<const char*>(v.sketch), v.n * 4, v.M, v.n,
                                                        own.vectors, stride, own.space, 8 * own.bytes);
  });
}

// Compute the same for block n if channels differ per block: all channels except the dropped ones,
// or only `channels`.
template <class S>
void sketch_block(const Node& node, int64_t n, int64_t row, int64_t rows) {
  const SignsView& v = node.view->signs;
  const SignsOwn& own = *static_cast<SignsOwn*>(node.own);
  const int64_t M = 8 * own.bytes, *channels = channels_at(node, n), *dropped = dropped_at(node, n);
  for (int64_t r = 0; r < rows; r++) {
    const float* q = node.query_row(row + r);
    for (int64_t m = 0; m < M; m++) own.space[r * M + m] = channels ? 0.0f : own.base[(row + r) * M + m];
    const auto add = [&](const float* column, float factor) {
      int64_t m = 0;
      for (; m + kLanes <= M; m += kLanes) {
        float* out = own.space + r * M + m;
        S::store(out, S::fma(S::set1(factor), S::load(column + m), S::load(out)));
      }
      for (; m < M; m++) own.space[r * M + m] += factor * column[m];
    };
    if (channels)
      for (int64_t i = 0; i < v.n; i++) add(own.transposed + i * M, q[channels[i]]);
    for (int64_t i = 0; dropped && i < v.drops; i++) add(own.transposed + dropped[i] * M, -q[dropped[i]]);
  }
}

template <class S>
void signs_prepare(Node& node) {
  const SignsView& v = node.view->signs;
  auto* own = scratch_of<SignsOwn>();
  node.own = own;
  own->bytes = ceil_div(v.M, 8);
  const int64_t M = 8 * own->bytes;
  own->space = scratch(kRowTile * M);
  own->vectors = scratch((kRowTile > kLanes ? kRowTile : kLanes) * (v.n + kLanes));
  own->tile = scratch((M + kTileSlack) * kLanes);
  own->tables = own->transposed = own->base = nullptr;
  if (node.sum) node.lanes = scratch(kRowTile * M * kLanes);
  if (!node.query) return;
  own->tables = scratch((varies(v) ? kRowTile : node.rows) * 2 * own->bytes * kLanes);
  own->steps = scratch(node.rows + kRowTile);
  if (varies(v)) {
    own->transposed = scratch(v.n * M);
    for (int64_t i = 0; i < v.n; i++)
      for (int64_t m = 0; m < M; m++) own->transposed[i * M + m] = m < v.M ? v.sketch[m * v.n + i] : 0.0f;
    own->base = scratch(node.rows * M);
    if (v.channels) return;
    clear(own->base, node.rows * M);
    for (int64_t r = 0; r < node.rows; r++)
      dense_scores<S, Float::f32, 1, S::kExactTokens>(reinterpret_cast<const char*>(v.sketch), v.n * 4, v.M, v.n,
                                                      node.query_row(r), node.query_stride, own->base + r * M, M);
    return;
  }
  for (int64_t row = 0; row < node.rows; row += kRowTile) {
    const int64_t rows = node.rows - row < kRowTile ? node.rows - row : kRowTile;
    sketch_rows<S>(node, row, rows);
    for (int64_t r = 0; r < rows; r++)
      sign_tables<S>(own->space + r * M, 2 * own->bytes, own->tables + (row + r) * 2 * own->bytes * kLanes,
                     own->steps + row + r);
  }
}

}  // namespace
}  // namespace tersekv
