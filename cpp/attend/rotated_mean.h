// The rotated mean: one vector, rotated by RoPE at every token. It is the mean that was removed
// from keys before they were encoded. A score is a sum over the columns of cos and sin; a task
// computes the coefficients once from query and vector. If positions are consecutive, cosines and
// sines of some hundred steps serve all tokens. Those of the first token are folded into the
// coefficients: cos(n + m) = cos n · cos m - sin n · sin m. Columns that rotate slowly share a
// polynomial.
#pragma once

#include "rope_kernel.h"
#include "rope_row.h"
#include "roped.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

struct RotatedMeanOwn {
  // [rows][columns that are read]; with offsets [rows][2][width], those of cos and of sin by pair
  float* coefficients;
  int64_t width;      // pairs of the offsets, rounded up to whole vectors
  float* rotated;     // [4][width]: cos and sin of a token, and coefficients rotated by it
  float* constant;    // [rows], score of the channels without rotation
  float* stepped;     // [kRowTile][rows of the offset table], for one block of tokens
  int16_t* words;     // the same as int16, or null
  float* block;       // [kRowTile][M], scores of a block of positions, or null if tokens are consecutive
  float* row;         // [2][columns]: room for cosines and sines of a token
  const float* mean;  // [D]
  RopeLanes lanes;    // without queries
};

// Compute the coefficients of steps from a position on.
template <class S>
void step_coefficients(const Node& node, Span span, int64_t place) {
  const RopeView& rope = node.view->rope;
  const RopeOffsets& offsets = *rope.offsets;
  const RotatedMeanOwn& own = *static_cast<RotatedMeanOwn*>(node.own);
  const int64_t pairs = offsets.pairs(), width = own.width;
  const RopeRow at = rope_row<S>(rope, place, own.row);
  const float *cos = at.cos, *sin = at.sin;
  if (!offsets.in_order) {
    for (int64_t i = 0; i < pairs; i++) {
      own.rotated[i] = cos[offsets.column[i]];
      own.rotated[width + i] = sin[offsets.column[i]];
    }
    cos = own.rotated;
    sin = own.rotated + width;
  }
  float *with_cos = own.rotated + 2 * width, *with_sin = with_cos + width;
  for (int64_t r = 0; r < span.rows; r++) {
    const float *a = own.coefficients + (span.row + r) * 2 * width, *b = a + width;
    for (int64_t i = 0; i < width; i += kLanes) {
      const auto c = S::load(cos + i), s = S::load(sin + i), x = S::load(a + i), y = S::load(b + i);
      S::store(with_cos + i, S::fma(x, c, S::mul(y, s)));
      S::store(with_sin + i, S::fma(y, c, S::mul(S::mul(x, s), S::set1(-1.0f))));
    }
    float* out = own.stepped + r * offsets.rows;
    for (int64_t i = 0; i < offsets.fast; i++) {
      out[i] = with_cos[i];
      out[offsets.fast + i] = with_sin[i];
    }
    if (offsets.slow == 0) continue;
    const float *cosines = offsets.matrix, *sines = cosines + offsets.slow * kLanes;
    auto from_cos = S::zero(), from_sin = S::zero();
    for (int64_t i = 0; i < offsets.slow; i++) {
      from_cos = S::fma(S::set1(with_cos[offsets.fast + i]), S::load(cosines + i * kLanes), from_cos);
      from_sin = S::fma(S::set1(with_sin[offsets.fast + i]), S::load(sines + i * kLanes), from_sin);
    }
    S::store(out + 2 * offsets.fast, S::add(from_cos, from_sin));
  }
}

template <class S>
void rotated_mean_prepare(Node& node) {
  const View& view = *node.view;
  const RopeView& rope = view.rope;
  auto* own = scratch_of<RotatedMeanOwn>();
  node.own = own;
  list_places(node);
  const float* x = float_row<S>(view.dense.type, view.dense.data,
                                node.b * view.dense.stride_b + node.h * view.dense.stride_h, view.D);
  own->mean = x;
  if (!node.query) {
    own->lanes = rope_lanes<S>(rope, rope.read, rope.reads_cos, rope.reads);
    return;
  }
  own->width = rope.offsets ? round_up(rope.offsets->pairs(), kLanes) : 0;
  own->words = nullptr;
  const int64_t reads = rope.offsets ? 2 * own->width : rope.reads;
  own->coefficients = scratch(node.rows * reads);
  own->constant = scratch(node.rows);
  for (int64_t r = 0; r < node.rows; r++) {
    float *of = own->coefficients + r * reads, constant = 0.0f;
    clear(of, reads);
    for (int64_t d = 0; d < view.D; d++) {
      const float q = node.query_row(r)[d];
      const RotatedChannel& columns = rope.rotated[d];
      if (columns.cos < 0) {
        constant += q * x[d];
        continue;
      }
      const RopeChannel& channel = rope.channels[d];
      if (rope.offsets) {
        const int32_t pair = rope.offsets->pair[channel.cos_column];
        of[pair] += q * x[d];
        of[own->width + pair] += q * static_cast<float>(channel.sign) * x[channel.partner];
        continue;
      }
      of[columns.cos] += q * x[d];
      of[columns.sin] += q * static_cast<float>(channel.sign) * x[channel.partner];
    }
    own->constant[r] = constant;
  }
  if (rope.offsets) {
    own->stepped = scratch(kRowTile * rope.offsets->rows);
    if (node.call->rope && rope.offsets->words) own->words = scratch_of<int16_t>(kRowTile * rope.offsets->rows);
    own->block = rope.consecutive ? nullptr : scratch(kRowTile * rope.offsets->M);
    own->row = scratch(2 * rope.columns);
    own->rotated = scratch(4 * own->width);
    clear(own->rotated, 4 * own->width);
  } else {
    rope_tables<S>(node, rope.read, rope.reads_cos, rope.reads);
  }
}

// Compute scores of NG·16 tokens. of: [R][reads]; tables: [reads], `stride` apart.
template <class S, int R, int NG>
void rotated_mean_tile_scores(const float* of, const float* constant, int64_t reads, const float* tables,
                              int64_t stride, float* score, int64_t score_stride) {
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

// Add the scores of `count` columns of the tables from `start` on, a multiple of kLanes.
template <class S>
void add_table_scores(const Node& node, Span span, int64_t start, int64_t count, float* score, int64_t score_stride) {
  const RotatedMeanOwn& own = *static_cast<RotatedMeanOwn*>(node.own);
  const RopeView& rope = node.view->rope;
  const int64_t unit = node.call->tokens_per_unit;
  const int64_t stride = rope.offsets ? rope.offsets->M : (node.task->last - node.task->first) * unit;
  const int64_t reads = rope.offsets ? rope.offsets->rows : rope.reads;
  const float *of = rope.offsets ? own.stepped : own.coefficients + span.row * reads,
              *tables = (rope.offsets ? rope.offsets->table : node.lanes) + start, *constant = own.constant + span.row;
  if (own.words)
    return node.call->rope->rotated_mean({rope.offsets->words + 2 * start, reads, stride, count, span.rows, of,
                                          constant, own.words, score, score_stride});
  constexpr int kTiles = S::max_groups(4) >= 4 ? 4 : 1;
  with_rows(span.rows, [&](auto rows) {
    int64_t i = 0;
    for (; count - i >= kTiles * kLanes; i += kTiles * kLanes)
      rotated_mean_tile_scores<S, rows, kTiles>(of, constant, reads, tables + i, stride, score + i, score_stride);
    for (; i < count; i += kLanes)
      rotated_mean_tile_scores<S, rows, 1>(of, constant, reads, tables + i, stride, score + i, score_stride);
  });
}

// Add the scores of tokens in order of position, with gaps. Scores of all positions of a block are
// computed at once, and those of the tokens are gathered.
template <class S>
void gathered_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const RotatedMeanOwn& own = *static_cast<RotatedMeanOwn*>(node.own);
  const RopeView& rope = node.view->rope;
  const int64_t M = rope.offsets->M;
  const int32_t* places = node.places ? node.places - node.task->first * node.call->tokens_per_unit
                                      : rope.places + node.b * rope.stride_b + node.h * rope.stride_h;
  for (int64_t token = span.first; token < span.last;) {
    const int64_t begin = places[token] / M * M, from = (places[token] - begin) / kLanes * kLanes;
    int64_t end = token + 1;
    while (end < span.last && places[end] < begin + M && places[end] >= places[end - 1]) end++;
    const int64_t count = round_up(places[end - 1] - begin + 1, kLanes) - from;
    step_coefficients<S>(node, span, begin);
    for (int64_t r = 0; r < span.rows; r++) clear(own.block + r * M, count);
    add_table_scores<S>(node, span, from, count, own.block, M);
    for (int64_t r = 0; r < span.rows; r++) {
      const float* __restrict block = own.block + r * M - begin - from;
      float* __restrict out = score + r * score_stride - span.first;
      for (int64_t t = token; t < end; t++) out[t] += block[places[t]];
    }
    token = end;
  }
}

template <class S>
void rotated_mean_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const RopeView& rope = node.view->rope;
  span.first -= *node.shift;  // the mean has no page: only positions in the row matter
  span.last -= *node.shift;
  if (rope.offsets && !rope.consecutive) return gathered_scores<S>(node, span, score, score_stride);
  const int64_t first = node.task->first * node.call->tokens_per_unit;
  for (int64_t token = span.first; token < span.last;) {
    const int64_t begin = rope.offsets ? token / rope.offsets->M * rope.offsets->M : first;
    const int64_t end = rope.offsets && span.last - begin > rope.offsets->M ? begin + rope.offsets->M : span.last;
    if (rope.offsets) step_coefficients<S>(node, span, place_of(rope, node.b, node.h, begin));
    add_table_scores<S>(node, span, token - begin, end - token, score + token - span.first, score_stride);
    token = end;
  }
}

template <class S>
void rotated_mean_tile(const Node& node, int64_t token, int64_t count, float* tile) {
  const RotatedMeanOwn& own = *static_cast<RotatedMeanOwn*>(node.own);
  const RopeView& rope = node.view->rope;
  const float *mean = own.mean, *angles = own.lanes.tile;
  rope_angles<S>(node, own.lanes, token - *node.shift, count, own.lanes.tile, kLanes);
  for (int64_t d = 0; d < node.view->D; d++, tile += kLanes) {
    const RopeChannel& channel = rope.channels[d];
    auto x = S::set1(mean[d]);
    if (channel.partner >= 0) {
      const auto across = S::set1(static_cast<float>(channel.sign) * mean[channel.partner]);
      x = S::fma(across, S::load(angles + rope.rotated[d].sin * kLanes),
                 S::mul(x, S::load(angles + rope.rotated[d].cos * kLanes)));
    }
    S::store(tile, x);
  }
}

// Never values.
template <class S>
constexpr Layout kRotatedMean{Kind::rotated_mean, rotated_mean_prepare<S>, rotated_mean_scores<S>, nullptr,
                              rotated_mean_tile<S>};

}  // namespace
}  // namespace tersekv
