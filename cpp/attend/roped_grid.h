// Keys before RoPE whose codes are a grid with scales per channel, maybe with outliers. They are
// decoded, rotated and multiplied in registers, a pair of channels at a time. Each outlier is
// multiplied with the query rotated to its position.
#pragma once

#include "composed.h"
#include "grid_tile.h"
#include "rope_kernel.h"
#include "roped.h"
#include "sparse.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

struct RopedGrid {
  const Node *grid, *sparse;  // sparse: null if there are no outliers
  Rows *with_cos, *with_sin;  // for outliers: [D][4], factors of cosines and of sines of the tokens
  Rows* plain;                // query rows before rotation
  int32_t* place;             // [D]: index of a channel's cosines in the offset table
  int64_t row;                // first of the query rows in `with_cos` or `plain`, or -1
  void* fast;                 // data of the call's RopeKernel, or null
  float* angles;              // [2][columns]: room for cosines and sines of a token
};

// True if channels d and d + D/2 are pairs that rotate by the same angle. The D/2 channels are
// whole units of codes.
inline bool rotates_halves(const Node& node) {
  const RopedOwn& own = *static_cast<RopedOwn*>(node.own);
  const int64_t half = node.view->D / 2;
  if (2 * own.pair_count != node.view->D) return false;
  for (int64_t i = 0; i < half; i++) {
    const RopePair& pair = own.pairs[i];
    if (pair.a != i || pair.b != i + half || pair.cos_a != pair.cos_b || pair.sin_a != pair.sin_b) return false;
  }
  return true;
}

// Return null if keys must be decoded into a tile.
inline RopedGrid* roped_grid(const Node& node) {
  if (!roped_codes(*node.parts[0].view) || !rotates_halves(node)) return nullptr;
  const Node& keys = node.parts[0];
  const bool added = keys.view->kind == Kind::sum;
  const Node& grid = added ? keys.parts[0] : keys;
  auto* out = scratch_of<RopedGrid>();
  *out = {&grid, added ? &keys.parts[1] : nullptr, nullptr, nullptr, nullptr, nullptr, -1, nullptr, nullptr};
  const RopeView& rope = node.view->rope;
  if (node.call->rope && rope.int16_offsets)
    out->fast =
        node.call->rope->prepare({&rope, &grid.grid, node.b, node.h, node.call->values, node.query, node.query_stride});
  if (added) {
    out->angles = scratch(2 * rope.columns);
    out->with_cos = scratch_of<Rows>(node.view->D);
    out->with_sin = scratch_of<Rows>(node.view->D);
    out->plain = scratch_of<Rows>(node.view->D);
    out->place = scratch_of<int32_t>(node.view->D);
    for (int64_t d = 0; d < node.view->D; d++) {
      const int64_t pair = d % (node.view->D / 2);
      out->place[d] = static_cast<int32_t>(pair / 2 * 4 * kInt16Offsets + pair % 2);
    }
  }
  return out;
}

// Compute scores of NG·16 tokens whose codes begin at `words`; tables: cosines and sines of their
// first token.
template <class S, int R, int NG>
void roped_grid_tiles(const Node& node, const Node& grid, const int32_t* words, const float* tables, int64_t stride,
                      int64_t row, float* score, int64_t score_stride) {
  using F = typename S::F;
  using Words = typename S::Words;
  const GridOwn& ranges = *static_cast<GridOwn*>(grid.own);
  const RopePair* pairs = static_cast<RopedOwn*>(node.own)->pairs;
  const float *query = node.query_row(row), *scale = ranges.scale, *offset = ranges.offset;
  const int bits = grid.grid.bits;
  const CodeUnit unit(bits);
  const int64_t direct = direct_codes(bits), runs = bits == 3 ? 4 : 1;
  const int64_t q = node.query_stride, half = node.view->D / 2, group = grid.grid.words * kLanes;
  // distance from a channel's word to its partner's
  const int64_t across = (half >> unit.shift) * unit.words * kLanes;
  F sum[R][NG];
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = S::load(score + r * score_stride + g * kLanes); });
  });
  with_table<S>(ranges.table, bits, [&](const auto& entries) TERSEKV_INLINE {
    Words first[NG], second[NG], spare[NG], more[NG];
    // Add a channel and its partner. Their codes are in the low bits of `first` and `second`,
    // shifted by `shift`.
    const auto add = [&](int64_t a, auto shift) TERSEKV_INLINE {
      const int64_t b = a + half;
      const F scale_a = S::set1(scale[a]), scale_b = S::set1(scale[b]);
      const F offset_a = S::set1(offset[a]), offset_b = S::set1(offset[b]);
      const float *cos = tables + pairs[a].cos_a * stride, *sin = tables + pairs[a].sin_a * stride;
      F ya[NG], yb[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        const F xa = S::fma(entries.at(S::template shr<shift>(first[g])), scale_a, offset_a);
        const F xb = S::fma(entries.at(S::template shr<shift>(second[g])), scale_b, offset_b);
        const F c = S::load(cos + g * kLanes), s = S::load(sin + g * kLanes);
        ya[g] = S::negative_fma(xb, s, S::mul(xa, c));
        yb[g] = S::fma(xa, s, S::mul(xb, c));
      });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const F qa = S::set1(query[r * q + a]), qb = S::set1(query[r * q + b]);
        repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = S::fma(qb, yb[g], S::fma(qa, ya[g], sum[r][g])); });
      });
    };
    for (int64_t a = 0; a < half;) {
      repeat<NG>([&](auto g) TERSEKV_INLINE { spare[g] = more[g] = S::no_words(); });
      // The words of a unit. For 3 bits, bits 15 and 31 of its three words act as a fourth word.
      for (int64_t k = 0; k < runs; k++) {
        int64_t codes = direct;
        if (k < unit.words) {
          repeat<NG>([&](auto g) TERSEKV_INLINE {
            first[g] = S::load_words(words + g * group);
            second[g] = S::load_words(words + g * group + across);
          });
          if (bits == 3)
            repeat<NG>([&](auto g) TERSEKV_INLINE {
              spare[g] = S::spare(spare[g], first[g]);
              more[g] = S::spare(more[g], second[g]);
            });
          words += kLanes;
        } else {
          codes = 1;
          repeat<NG>([&](auto g) TERSEKV_INLINE {
            first[g] = S::template shr<13>(spare[g]);
            second[g] = S::template shr<13>(more[g]);
          });
        }
        for (; codes > 0; codes--, a += 2) {
          add(a, Index<0>{});
          add(a + 1, Index<16>{});
          repeat<NG>([&](auto g) TERSEKV_INLINE {
            first[g] = S::shift_right(first[g], bits);
            second[g] = S::shift_right(second[g], bits);
          });
        }
      }
    }
  });
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE { S::store(score + r * score_stride + g * kLanes, sum[r][g]); });
  });
}

// Add the outliers: value·(q[d]·cos + (the partner's q, with its sign)·sin).
template <class S>
void roped_entries(const Node& node, RopedGrid& own, const float* tables, int64_t stride, Span span, float* score,
                   int64_t score_stride) {
  const RopedOwn& roped = *static_cast<RopedOwn*>(node.own);
  const SparseOwn& sparse = *static_cast<SparseOwn*>(own.sparse->own);
  const int64_t half = node.view->D / 2;
  if (own.row != span.row) {
    interleave(node.query_row(span.row), node.query_stride, span.rows, node.view->D, own.with_cos);
    for (int64_t d = 0; d < half; d++) {
      own.with_sin[d] = own.with_cos[d + half];
      own.with_sin[d + half] = -own.with_cos[d];
    }
    own.row = span.row;
  }
  Rows *tokens = sparse.tokens, *with_cos = own.with_cos, *with_sin = own.with_sin;
  const RopePair* pairs = roped.pairs;
  clear(tokens, span.tokens());
  each_entry<S>(*own.sparse, span, [=](int64_t at, int64_t channel, float value, auto) TERSEKV_INLINE {
    const RopePair& pair = pairs[channel < half ? channel : channel - half];
    const float cos = tables[pair.cos_a * stride + at], sin = tables[pair.sin_a * stride + at];
    tokens[at] += with_cos[channel] * (value * cos) + with_sin[channel] * (value * sin);
  });
  add_interleaved(tokens, score_stride, span.rows, span.tokens(), score);
}

template <class S, int R>
void roped_grid_blocks(const Node& node, const Node& grid, const float* tables, int64_t stride, Span span, float* score,
                       int64_t score_stride) {
  constexpr int kTiles = S::max_groups(R) >= 2 ? 2 : 1;
  const GridView& v = grid.grid;
  const int64_t t = v.L, groups = t / kLanes;
  const bool fixed = v.scale.stride_n == 0 && v.offset.stride_n == 0;
  for (int64_t token = span.first; token < span.last; token += t) {
    const Block block = block_at(v, node.b, node.h, token / t);
    if (token == span.first || !fixed) grid_ranges<S>(grid, block, 0);
    fetch_values(node, span, token, t);
    const int64_t at = token - span.first, words = v.words * kLanes;
    int64_t g = 0;
    for (; g + kTiles <= groups; g += kTiles)
      roped_grid_tiles<S, R, kTiles>(node, grid, block.codes + g * words, tables + at + g * kLanes, stride, span.row,
                                     score + at + g * kLanes, score_stride);
    for (; g < groups; g++)
      roped_grid_tiles<S, R, 1>(node, grid, block.codes + g * words, tables + at + g * kLanes, stride, span.row,
                                score + at + g * kLanes, score_stride);
  }
}

// Rotate queries back by the angles of `token`, for keys at steps from it on. They are in units of
// the offset table and are written to own.with_cos and own.with_sin.
template <class S>
void rotate_rows(const Node& node, RopedGrid& own, const Span& span, int64_t token) {
  const RopeView& rope = node.view->rope;
  const int64_t half = node.view->D / 2;
  const RopeRow at = rope_row<S>(rope, place_of(rope, node.b, node.h, token), own.angles);
  const float *cos = at.cos, *sin = at.sin;
  if (own.row != span.row) interleave(node.query_row(span.row), node.query_stride, span.rows, 2 * half, own.plain);
  own.row = span.row;
  const Rows *plain = own.plain, *partner = plain + half;
  for (int64_t i = 0; i < half; i++) {
    const int32_t column = rope.channels[i].cos_column;
    const float c = cos[column] * (1.0f / 32767), s = sin[column] * (1.0f / 32767);
    const Rows a = plain[i] * c + partner[i] * s, b = partner[i] * c - plain[i] * s;
    own.with_cos[i] = a;
    own.with_cos[i + half] = own.with_sin[i] = b;
    own.with_sin[i + half] = -a;
  }
}

// Compute scores with the call's RopeKernel; outliers use the cosines and sines of its offset
// table.
template <class S>
void stepped_scores(const Node& node, RopedGrid& own, Span span, float* score, int64_t score_stride) {
  const int16_t* int16_offsets = node.view->rope.int16_offsets;
  node.call->rope->scores(own.fast, {span.row, span.rows, span.first, span.last, *node.shift}, score, score_stride);
  if (!own.sparse) return;
  Rows* tokens = static_cast<SparseOwn*>(own.sparse->own)->tokens;
  clear(tokens, span.tokens());
  for (int64_t token = span.first; token < span.last; token += kInt16Offsets, tokens += kInt16Offsets) {
    const int64_t last = token + kInt16Offsets < span.last ? token + kInt16Offsets : span.last;
    rotate_rows<S>(node, own, span, token - *node.shift);
    const Rows *with_cos = own.with_cos, *with_sin = own.with_sin;
    const int32_t* place = own.place;
    each_entry<S>(*own.sparse, {span.row, span.rows, token, last},
                  [=](int64_t at, int64_t channel, float value, auto) TERSEKV_INLINE {
                    const int16_t* cos = int16_offsets + place[channel] + 2 * at;
                    tokens[at] +=
                        with_cos[channel] * (value * cos[0]) + with_sin[channel] * (value * cos[2 * kInt16Offsets]);
                  });
  }
  add_interleaved(static_cast<SparseOwn*>(own.sparse->own)->tokens, score_stride, span.rows, span.tokens(), score);
}

template <class S>
void roped_grid_scores(const Node& node, RopedGrid& own, Span span, float* score, int64_t score_stride) {
  if (own.fast) return stepped_scores<S>(node, own, span, score, score_stride);
  const Task& task = *node.task;
  const int64_t unit = node.call->tokens_per_unit, first = task.first * unit, stride = task.last * unit - first;
  const float* tables = node.lanes + span.first - *node.shift - first;
  with_rows(span.rows,
            [&](auto rows) { roped_grid_blocks<S, rows>(node, *own.grid, tables, stride, span, score, score_stride); });
  if (own.sparse) roped_entries<S>(node, own, tables, stride, span, score, score_stride);
}

template <class S>
void roped_prepare(Node& node) {
  prepare_parts<S>(node);
  RopedOwn& own = *prepare_pairs(node);
  if (!node.query) {
    own.lanes = rope_lanes<S>(node.view->rope, own.column, own.cos, own.columns);
    return;
  }
  own.grid = roped_grid(node);
  if (!own.grid || !own.grid->fast) rope_tables<S>(node, own.column, own.cos, own.columns);
}

template <class S>
void roped_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const Task& task = *node.task;
  const RopedOwn& own = *static_cast<RopedOwn*>(node.own);
  if (own.grid) return roped_grid_scores<S>(node, *own.grid, span, score, score_stride);
  const Layout& layout = layout_of<S>(node.parts[0]);
  const int64_t unit = node.call->tokens_per_unit, first = task.first * unit, tokens = task.last * unit - first;
  for (int64_t token = span.first; token < span.last; token += kRopedTiles * kLanes) {
    int64_t tiles = 0;
    for (int64_t at = token; at < span.last && tiles < kRopedTiles; at += kLanes, tiles++)
      layout.decode_tile(node.parts[0], at, span.last - at < kLanes ? span.last - at : kLanes,
                         own.tile + tiles * own.tile_floats);
    const float* tables = node.lanes + token - *node.shift - first;
    float* out = score + token - span.first;
    with_rows(span.rows, [&](auto rows) {
      if (tiles == kRopedTiles)
        return roped_tile_scores<S, rows, kRopedTiles>(node, tables, tokens, span, out, score_stride);
      roped_tile_scores<S, rows, 1>(node, tables, tokens, span, out, score_stride);
    });
  }
}

template <class S>
void roped_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  const RopedOwn& own = *static_cast<RopedOwn*>(node.own);
  layout_of<S>(node.parts[0]).decode_tile(node.parts[0], token, count, own.tile);
  const float* angles = own.lanes.tile;
  rope_angles<S>(node, own.lanes, token - *node.shift, count, own.lanes.tile, kLanes);
  const auto angle = [&](int32_t column) TERSEKV_INLINE { return S::load(angles + column * kLanes); };
  for (int64_t i = 0; i < own.pair_count; i++) {
    const RopePair& pair = own.pairs[i];
    const auto a = S::load(own.tile + pair.a * kLanes), b = S::load(own.tile + pair.b * kLanes);
    S::store(tile + pair.a * kLanes, S::negative_fma(b, angle(pair.sin_a), S::mul(a, angle(pair.cos_a))));
    S::store(tile + pair.b * kLanes, S::fma(a, angle(pair.sin_b), S::mul(b, angle(pair.cos_b))));
  }
  for (int64_t i = 0; i < own.plain_count; i++)
    S::store(tile + own.plain[i] * kLanes, S::load(own.tile + own.plain[i] * kLanes));
}

// RoPE is outermost, and never of values.
template <class S>
constexpr Layout kRoped{Kind::roped, roped_prepare<S>, roped_scores<S>, nullptr, roped_tile<S>};

}  // namespace
}  // namespace tersekv
