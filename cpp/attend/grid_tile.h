// Decode the codes of any grid into a tile: sixteen lanes of the packed axis, [P][16]. This serves
// grids that the micro-kernel of lut.h does not support: 5 to 8 bits, and keys to which RoPE must
// be applied.
#pragma once

#include "grid.h"
#include "half_words.h"
#include "rounded.h"
#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Return code p of sixteen lanes, whose words are `words` [W][16].
template <class S>
typename S::Words code_at(const HalfWords& how, const int32_t* words, int64_t p) {
  const int half = p % 2 * 16;
  const int64_t unit = p / 2 / how.unit_codes, i = p / 2 % how.unit_codes;
  words += unit * how.unit_words * kLanes;
  if (i < how.unit_words * how.direct) {
    const int shift = half + static_cast<int>(i % how.direct) * how.bits;
    return S::with(S::shift_right(S::load_words(words + i / how.direct * kLanes), shift), (1u << how.bits) - 1);
  }
  const int64_t first = (i - how.unit_words * how.direct) * how.bits;
  typename S::Words code = S::with(S::load_words(words), 0);
  for (int bit = 0; bit < how.bits; bit++) {
    const int64_t word = (first + bit) / how.spare_bits, at = (first + bit) % how.spare_bits;
    const int shift = half + how.direct * how.bits + static_cast<int>(at);
    const typename S::Words one = S::with(S::shift_right(S::load_words(words + word * kLanes), shift), 1);
    code = S::either(code, S::shift_left(one, bit));
  }
  return code;
}

// Repeat a table of at most 4 bits up to sixteen entries, so that higher bits of an index need no
// masking.
inline void repeat_entries(const float* table, int bits, float* entries) {
  for (int i = 0; i < 1 << kLutBits; i++) entries[i] = table[i & ((1 << bits) - 1)];
}

// Call body with such entries as a table for look-ups of S.
template <class S, class Body>
[[gnu::always_inline]] inline void with_table(const float* entries, int bits, Body&& body) {
  if constexpr (S::kSmallTables)
    if (bits <= 3) return body(typename S::template Table<3>(entries));
  body(typename S::template Table<kLutBits>(entries));
}

// Call put(p, entry) for all codes of at most 4 bits in `count` words, p ascending. p may exceed P
// by fewer than 32. table: repeated entries.
template <class S, class Put>
[[gnu::always_inline]] inline void each_code(const float* table, int bits, const int32_t* words, int64_t count,
                                             Put&& put) {
  using Words = typename S::Words;
  with_table<S>(table, bits, [&](const auto& entries) TERSEKV_INLINE {
    int64_t p = 0, direct = direct_codes(bits), spare_words = 0;
    Words spare = S::no_words();
    const auto pairs = [&](Words word, int64_t codes) TERSEKV_INLINE {
      for (; codes > 0; codes--, p += 2) {
        put(p, entries.at(word));
        put(p + 1, entries.at(S::template shr<16>(word)));
        word = S::shift_right(word, bits);
      }
    };
    for (int64_t at = 0; at < count; at++) {
      const Words word = S::load_words(words + at * kLanes);
      pairs(word, direct);
      if (bits != 3) continue;
      // Bits 15 and 31 of three words are a sixteenth code of each parity.
      spare = S::spare(spare, word);
      if (++spare_words < 3) continue;
      pairs(S::template shr<13>(spare), 1);
      spare = S::no_words();
      spare_words = 0;
    }
  });
}

template <class S, class Put>
[[gnu::always_inline]] inline void each_entry_of(const GridView& v, const float* table, const int32_t* words,
                                                 Put&& put) {
  if (v.bits <= kLutBits) return each_code<S>(table, v.bits, words, v.words, put);
  const HalfWords how(v.bits);
  for (int64_t p = 0; p < v.P; p++) put(p, S::gather(table, code_at<S>(how, words, p)));
}

struct GridOwn {
  float *coef, *scale, *offset, *tile;
  const float* table;  // up to 4 bits: repeated entries
};

// Load scales and offsets per packed position for the lanes from `lane` on, float32, into
// own.scale and own.offset.
template <class S>
void grid_ranges(const Node& node, const Block& block, int64_t lane) {
  const GridView& v = node.grid;
  const GridOwn& own = *static_cast<GridOwn*>(node.own);
  const int64_t at = lane / v.group * v.P;
  for (int64_t p = 0; p < v.P; p += kLanes) {
    const int64_t left = v.P - p;
    S::store(own.scale + p, load_half_n<S>(v.half, block.scale + at + p, left));
    S::store(own.offset + p, block.offset ? load_half_n<S>(v.half, block.offset + at + p, left) : S::zero());
  }
}

// Decode x̂ of lane group g of block n: [P][16]. Rows are `stride` floats apart. Up to P rounded up to 32 are written.
template <class S>
void grid_lanes(const Node& node, int64_t n, int64_t g, float* tile, int64_t stride = kLanes) {
  using F = typename S::F;
  const GridView& v = node.grid;
  const GridOwn& own = *static_cast<GridOwn*>(node.own);
  const Block block = block_at(v, node.b, node.h, n);
  const int32_t* words = block.codes + g * v.words * kLanes;
  const int64_t lane = g * kLanes;
  if (v.lane_scaled) {
    each_entry_of<S>(v, own.table, words,
                     [&](int64_t p, F entry) TERSEKV_INLINE { S::store(tile + p * stride, entry); });
    for (int64_t p0 = 0; p0 < v.P; p0 += v.group) {
      const int64_t at = p0 / v.group * v.L + lane;
      const F scale = load_half_n<S>(v.half, block.scale + at, v.L - lane);
      const F offset = block.offset ? load_half_n<S>(v.half, block.offset + at, v.L - lane) : S::zero();
      for (int64_t p = p0; p < p0 + v.group; p++)
        S::store(tile + p * stride, S::fma(S::load(tile + p * stride), scale, offset));
    }
    return;
  }
  grid_ranges<S>(node, block, lane);
  each_entry_of<S>(v, own.table, words, [&](int64_t p, F entry) TERSEKV_INLINE {
    S::store(tile + p * stride, S::fma(entry, S::set1(own.scale[p]), S::set1(own.offset[p])));
  });
}

// Decode x̂ of sixteen keys.
template <class S>
void grid_tile(const Node& node, int64_t token, int64_t, float* tile) {
  grid_lanes<S>(node, token / node.view->t, token % node.view->t / kLanes, tile);
}

// Return the mean of errors[code] over a sample of the task's codes. The sampled columns are evenly
// spaced. With pages, the mean is over all codes: a result must not depend on other rows' pages.
template <class S>
float mean_error(const Node& node, const float* errors) {
  using F = typename S::F;
  constexpr int64_t kCodes = 4096;
  const GridView& v = node.grid;
  const int64_t unit = node.call->tokens_per_unit, t = node.view->t, groups = v.L / kLanes;
  if (node.call->pages.at) {
    float sum = 0.0f;
    for (int i = 0; i < 1 << v.bits; i++) sum += errors[i];
    return sum / static_cast<float>(1 << v.bits);
  }
  const int64_t first = node.task->first * unit / t, blocks = node.task->last * unit / t - first;
  if (blocks == 0 || groups == 0) return 0.0f;
  const int64_t wanted = ceil_div(kCodes, v.P * kLanes), columns = wanted < blocks ? wanted : blocks;
  F sum = S::zero();
  for (int64_t i = 0; i < columns; i++) {
    const Block block = block_at(v, node.b, node.h, first + i * blocks / columns);
    each_entry_of<S>(v, errors, block.codes + i % groups * v.words * kLanes, [&](int64_t p, F entry) TERSEKV_INLINE {
      if (p < v.P) sum = S::add(sum, entry);
    });
  }
  return S::hsum(sum) / static_cast<float>(columns * v.P * kLanes);
}

// Round the table for bfloat16 products. The mean rounding error over the codes is added to
// `middle`, because in a sum over many tokens it would not average out.
template <class S>
void round_table(Node& node) {
  GridView& v = node.grid;
  const int size = 1 << v.bits;
  const Rounded& rounded = rounded_table(v.table, size, v.offset.data != nullptr);
  float* entries = scratch(kRoundedEntries);
  float errors[kRoundedEntries] = {};
  bool exact = true;
  for (int i = 0; i < size; i++) {
    entries[i] = rounded.entry[i];
    errors[i] = v.table[i] - (rounded.unit * rounded.entry[i] + rounded.middle);
    exact = exact && errors[i] == 0.0f;
  }
  repeat_entries(errors, v.bits, errors);
  v.entries = entries;
  v.unit = rounded.unit;
  v.middle = rounded.middle + (exact ? 0.0f : mean_error<S>(node, errors));
}

template <class S>
void grid_prepare(Node& node) {
  node.grid = node.view->grid;
  node.grid.table += node.b * node.grid.table_stride_b;
  node.grid.entries = node.grid.table;
  if (node.call->rounds && node.grid.bits <= kLutBits) round_table<S>(node);
  auto* own = scratch_of<GridOwn>();
  node.own = own;
  const GridView& v = node.grid;
  own->coef = v.bits <= kLutBits ? scratch(node.call->code_rows * coef_stride(node)) : nullptr;
  own->table = v.table;
  if (v.bits <= kLutBits) {
    float* entries = scratch(1 << kLutBits);
    repeat_entries(v.table, v.bits, entries);
    own->table = entries;
  }
  own->scale = scratch(v.P + kTileSlack);
  own->offset = scratch(v.P + kTileSlack);
  own->tile = v.bits <= kLutBits ? nullptr : scratch((v.P + kTileSlack) * kLanes);
}

template <class S>
void grid_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const GridOwn& own = *static_cast<GridOwn*>(node.own);
  if (node.grid.bits <= kLutBits) return lut_scores(node, span, own.coef, score, score_stride);
  tile_scores<S>(node, span, score, score_stride, own.tile, grid_tile<S>);
}

template <class S>
void grid_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const GridOwn& own = *static_cast<GridOwn*>(node.own);
  if (node.grid.bits <= kLutBits) return lut_sums(node, span, own.coef, weight, weight_stride);
  const int64_t t = node.view->t;
  for (int64_t token = span.first; token < span.last; token += t)
    for (int64_t g = 0; g < ceil_div(node.grid.L, kLanes); g++) {
      grid_lanes<S>(node, token / t, g, own.tile);
      tile_dot<S>(own.tile, node.grid.P, weight + token - span.first, weight_stride, 1, span.rows,
                  node.sum_row(span.row) + g * kLanes, node.sum_stride);
    }
}

template <class S>
constexpr Layout kGrid{Kind::grid, grid_prepare<S>, grid_scores<S>, grid_sums<S>, grid_tile<S>};

}  // namespace
}  // namespace tersekv
