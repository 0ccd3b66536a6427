// The task of a call: for each chunk of tokens compute scores, softmax and value sums.
#pragma once

#include <optional>

#include "build.h"
#include "decode.h"
#include "key_tiles.h"
#include "marked_mean.h"
#include "online_softmax.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kLeastTileTokens = 64;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Return the largest power of two that is not above |x|; 1 for 0 and subnormal numbers.
inline float power_of_two(float x) {
  const auto exponent = __builtin_bit_cast(uint32_t, x) & 0x7f800000u;
  return exponent ? __builtin_bit_cast(float, exponent) : 1.0f;
}

// Number of tokens that a row of a causal call sees.
inline int64_t seen_tokens(const Call& call, int64_t row) { return call.T - call.scores.q + row % call.scores.q + 1; }

// Mask of a row of a task, or null.
inline const uint8_t* mask_row(const Call& call, const Task& task, int64_t r) {
  const Scores& how = call.scores;
  if (!how.mask) return nullptr;
  return how.mask + task.b * how.stride_b + task.h * how.stride_h + (task.row + r) % how.q * how.stride_q;
}

// Working memory of a task: scaled queries, scores of a chunk, value sums, one softmax state per
// row.
struct Workspace {
  int64_t query_stride, score_stride, sum_stride;
  float *query, *score, *sum;
  RowState* state;

  // scored: number of rows whose scores are held at a time. scaling: factor of the queries.
  Workspace(const Call& call, const Task& task, int64_t chunk, int64_t scored, float scaling) {
    query_stride = round_up(call.D, kLanes);
    // One vector more: rows would share cache sets if their stride were a multiple of the page size.
    score_stride = round_up(chunk, kLanes) + kLanes;
    sum_stride = round_up(call.Dv, kLanes);
    const int64_t rows = task.rows;
    query = scratch(rows * query_stride);
    score = scratch(scored * score_stride);
    sum = scratch(rows * sum_stride);
    state = scratch_of<RowState>(rows);
    const float* in = call.query + ((task.b * call.H + task.h) * call.R + task.row) * call.D;
    for (int64_t r = 0; r < rows; r++) {
      state[r] = RowState{};
      for (int64_t d = 0; d < query_stride; d++)
        query[r * query_stride + d] = d < call.D ? in[r * call.D + d] * scaling : 0.0f;
      for (int64_t d = 0; d < sum_stride; d++) sum[r * sum_stride + d] = 0.0f;
    }
  }

  // Apply softmax to the scores of `count` tokens from `token` on, of some rows of the task. Scores are
  // multiplied by `factor`. Return false if no row sees any of the tokens, so that the values need not be read.
  // rounded: weights will be rounded to bfloat16.
  template <class S>
  bool weigh_chunk(const Call& call, const Task& task, int64_t row, int64_t rows, int64_t token, int64_t count,
                   float factor, bool rounded = false) const {
    const Scores& how = call.scores;
    bool any = false;
    for (int64_t r = row; r < row + rows; r++) {
      float* own = score + (r - row) * score_stride;
      const int64_t seen = how.causal ? least(seen_tokens(call, task.row + r) - token, count) : count;
      for (int64_t i = seen < 0 ? 0 : round_up(seen, kLanes); i < round_up(count, kLanes); i++) own[i] = 0.0f;
      if (seen <= 0) continue;
      const uint8_t* mask = mask_row(call, task, r);
      const auto weigh_row = rounded ? weigh<S, true> : weigh<S, false>;
      const float share = weigh_row(how, mask ? mask + token : nullptr, own, seen, factor, state[r], any);
      rescale<S>(sum + r * sum_stride, sum_stride, share);
    }
    return any;
  }

  void finish(const Call& call, const Task& task) const {
    for (int64_t r = 0; r < task.rows; r++) {
      const int64_t row = (task.b * call.H + task.h) * call.R + task.row + r;
      task.lse[row] = finish_row(sum + r * sum_stride, call.Dv, state[r], task.out + row * call.Dv);
    }
  }

  // Add the bias of a call's scores, times `sign`, to the maxima. It is the same for all scores of a row, so maxima
  // without it can be compared with scores without it.
  void shift(const Call& call, const Task& task, float sign) const {
    if (!call.scores.bias) return;
    const float* bias = call.scores.bias + (task.b * call.H + task.h) * call.R + task.row;
    for (int64_t r = 0; r < task.rows; r++) state[r].max += sign * bias[r];
  }
};

// The tokens that a task reads next. They end at t1; in the views they are `shift` tokens further
// on.
struct Chunk {
  int64_t t1 = 0, shift = 0;
  bool there = true;

  Chunk(const Call& call, const Task& task, int64_t t0, int64_t end, int64_t most) {
    t1 = end - t0 < most ? end : t0 + most;
    if (!call.pages.at) return;
    const int64_t tokens = call.pages.tokens, page = t0 / tokens, page_end = (page + 1) * tokens;
    const int64_t at = call.pages.at[task.b * call.pages.stride_b + page];
    if (page_end < t1) t1 = page_end;
    shift = (at - page) * tokens;
    there = at >= 0;
  }
};

// The tokens of a chunk, without those at its ends that no row from `row` to `row + rows` of the task sees. The first
// one is a whole number of vectors further on, so that sums have the order that they have with all tokens.
struct Visible {
  int64_t first, last;

  Visible(const Call& call, const Task& task, int64_t row, int64_t rows, int64_t t0, int64_t t1) : first(t0), last(t1) {
    const Scores& how = call.scores;
    if (!how.mask && !how.causal) return;
    first = t1;
    last = t0;
    rows = least(how.q, rows);
    for (int64_t r = row; r < row + rows; r++) {
      int64_t from = t0, to = t1;
      if (how.causal) {
        to = least(to, seen_tokens(call, task.row + r));
      } else {
        const uint8_t* mask = mask_row(call, task, r);
        while (from + 8 <= first && !eight(mask + from)) from += 8;
        while (from < first && !mask[from]) from++;
        while (to - 8 >= last && !eight(mask + to - 8)) to -= 8;
        while (to > last && !mask[to - 1]) to--;
      }
      first = least(first, from);
      if (to > last) last = to;
    }
    if (first >= last) first = last = t0;
    first -= (first - t0) % kLanes;
  }
  bool any() const { return first < last; }

 private:
  static uint64_t eight(const uint8_t* mask) {
    uint64_t out;
    __builtin_memcpy(&out, mask, sizeof(out));
    return out;
  }
};

// Set the first scores of tokens [t0, t1) of a row. Reads and writes whole vectors.
inline void start_scores(const Call& call, const Task& task, int64_t row, int64_t t0, int64_t t1, float* score) {
  const int64_t count = round_up(t1 - t0, kLanes);
  if (!call.start) return clear(score, count);
  const HeadMarks marks = marks_of(*call.start_marks, task.b, task.h);
  const MarkedScores& of = call.start[marks.flip ? 0 : 1];
  const float* from = of.score + ((task.b * call.H + task.h) * call.R + task.row + row) * of.stride + marks.skip + t0;
  for (int64_t i = 0; i < count; i++) score[i] = from[i];
}

// True if the values are the first channels of the keys.
inline bool are_shared(const Call& call) {
  if (call.adds_mean) return false;
  const DenseView *keys = floats_of(*call.keys), &values = call.values->dense;
  if (call.shared || !keys || call.values->kind != Kind::exact || call.Dv > call.D) return call.shared;
  return keys->data == values.data && keys->type == values.type && keys->stride_b == values.stride_b &&
         keys->stride_h == values.stride_h && keys->stride_t == values.stride_t;
}

inline const RowProduct& tile_product(const Call& call) {
  return rounds_tiles(call) ? *call.rounded_rows : TERSEKV_BUILD(row_product)();
}

// Number of tokens of a tile, a multiple of the call's units.
inline int64_t tile_tokens(const Call& call) {
  const int64_t channels = round_up(call.D, kLanes) + round_up(call.Dv, kLanes), unit = call.tokens_per_unit;
  const RowProduct& product = tile_product(call);
  int64_t wanted = least(product.tile_tokens, product.tile_elements / channels / kLanes * kLanes);
  if (wanted < kLeastTileTokens) wanted = kLeastTileTokens;
  return unit >= wanted ? unit : wanted / unit * unit;
}

// Attend to the tokens of one call, see `attend_tiles`. factor: of the scores, see `Workspace::weigh_chunk`.
template <class S>
void add_tiles(const Call& call, const Task& task, const Workspace& w, float factor) {
  const bool shared = are_shared(call), packed = !shared && call.keys->kind != Kind::exact;
  const bool rounded = rounds_tiles(call);
  const int64_t unit = call.tokens_per_unit, D = call.D, Dv = call.Dv;
  const int64_t width = round_up(D, kLanes), out_width = round_up(Dv, kLanes);
  const int64_t chunk = tile_tokens(call), most = round_up(chunk, kLanes);
  const RowProduct& product = tile_product(call);
  const Span later{};
  int64_t shift = 0;
  Node keys = node_of(call.keys, call, task, shift, later), values = node_of(call.values, call, task, shift, later);
  layout_of<S>(keys).prepare(keys);
  if (!shared) layout_of<S>(values).prepare(values);
  const int64_t widest = width > out_width ? width : out_width;
  float *tile = scratch(((widest > unit ? widest : unit) + kTileSlack) * kLanes), *rows = scratch(most * widest);
  float *key_panels = scratch(most * width), *value_panels = scratch(most * out_width);
  float* words = scratch(kTileRows * (width > most ? width : most));
  std::optional<KeyTiles<S>> turned;
  if (packed) turned.emplace(call, product, keys, most);
  const int64_t end = task.last * unit;
  const auto decode = [&](const Node& node, bool of_keys, int64_t t0, int64_t t1, int64_t D, int64_t stride) {
    if (D < stride) clear(rows, (t1 - t0) * stride);
    decode_rows<S>(node, of_keys, t0 + shift, t1 + shift, false, tile, rows, stride);
    clear(rows + (t1 - t0) * stride, (round_up(t1 - t0, kLanes) - (t1 - t0)) * stride);
  };
  for (int64_t t0 = task.first * unit, t1; t0 < end; t0 = t1) {
    const Chunk now(call, task, t0, end, chunk);
    t1 = now.t1;
    if (!now.there || !Visible(call, task, 0, task.rows, t0, t1).any()) continue;
    shift = now.shift;
    const int64_t count = t1 - t0, tokens = round_up(count, kLanes);
    if (packed) {
      turned->pack(t0 + shift, t1 + shift, words, key_panels);
    } else {
      decode(keys, !shared, t0, t1, D, width);
      product.pack_keys(rows, width, tokens, width, key_panels);
    }
    if (!shared) decode(values, false, t0, t1, Dv, out_width);
    product.pack_values(rows, shared ? width : out_width, out_width, tokens, value_panels);
    for (int64_t row = 0; row < task.rows; row += kTileRows) {
      const int64_t some = least(kTileRows, task.rows - row);
      const Visible seen(call, task, row, some, t0, t1);
      if (!seen.any()) continue;
      const int64_t from = (seen.first - t0) / kPanelColumns * kPanelColumns, own = seen.last - t0 - from;
      const int64_t columns = least(round_up(own, kPanelColumns), tokens - from);
      product.multiply(w.query + row * w.query_stride, w.query_stride, some, width, {key_panels, width, 0, from},
                       columns, false, words, w.score, w.score_stride);
      if (!w.weigh_chunk<S>(call, task, row, some, t0 + from, own, factor, rounded)) continue;
      product.multiply(w.score, w.score_stride, some, round_up(own, kLanes), {value_panels, tokens, from}, out_width,
                       true, words, w.sum + row * w.sum_stride, w.sum_stride);
    }
  }
}

// Attend tile by tile: decode a tile of tokens of any layout, and multiply it with all query rows of the task. Hidden
// tokens of a tile must be finite. Values that are the first channels of their keys are decoded once. Products are of
// bfloat16 where the model's are, and with latents, because a code of up to 8 bits is further from its number than
// bfloat16 is. All calls add to the same sums.
template <class S>
void attend_tiles(const Part* parts, int64_t count) {
  const Call& any = *parts->call;
  // Queries of bfloat16 are scaled by a power of two, so that they are not rounded again.
  const bool twice = rounds_tiles(any) && any.rounded_query;
  const float scaling = twice ? power_of_two(any.scores.scaling) : any.scores.scaling;
  const float factor = twice ? any.scores.scaling / scaling : 1.0f;
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++)
    if (const int64_t own = tile_tokens(*parts[i].call); own > most) most = own;
  const Workspace w(any, parts->task, most, least(kTileRows, parts->task.rows), scaling);
  const TileScope tiles(rounds_tiles(any) ? any.registers : nullptr, kLanes);
  for (int64_t i = 0; i < count; i++) {
    const Part& part = parts[i];
    if (part.task.first == part.task.last) continue;
    const ScratchScope scope;
    w.shift(*part.call, part.task, -1.0f);
    add_tiles<S>(*part.call, part.task, w, factor);
    w.shift(*part.call, part.task, 1.0f);
  }
  w.finish(any, parts->task);
}

template <class S>
void attend_task(const Part* parts, int64_t count) {
  reset_scratch();
  if (parts->call->tiles) return attend_tiles<S>(parts, count);
  const Call& call = *parts->call;
  const Task& task = parts->task;
  const int64_t unit = call.tokens_per_unit, chunk = unit >= kChunkTokens ? unit : kChunkTokens / unit * unit;
  Workspace w(call, task, chunk, task.rows, call.scores.scaling);
  if (task.first == task.last) return w.finish(call, task);  // views without tokens may have no memory at all
  Span later{};
  int64_t shift = 0;
  Node keys = node_of(call.keys, call, task, shift, later), values = node_of(call.values, call, task, shift, later);
  keys.rows = values.rows = task.rows;
  keys.query = w.query;
  keys.query_stride = w.query_stride;
  values.sum = w.sum;
  values.sum_stride = w.sum_stride;
  const Layout &key_layout = layout_of<S>(keys), &value_layout = layout_of<S>(values);
  key_layout.prepare(keys);
  value_layout.prepare(values);
  const bool dense = call.keys->kind == Kind::exact && call.values->kind == Kind::exact;
  const int64_t key_rows = row_tile(call, *call.keys, task.rows), value_rows = row_tile(call, *call.values, task.rows);
  // Sums of trellis codes fill a tile where there are many rows.
  const TileScope tiles(dense ? nullptr : call.registers, task.rows > kRowTile ? kLanes : 2 * task.rows);
  const int64_t end = task.last * unit;
  for (int64_t t0 = task.first * unit, t1; t0 < end; t0 = t1) {
    const Chunk now(call, task, t0, end, chunk);
    t1 = now.t1;
    if (!now.there) continue;
    const Visible seen(call, task, 0, task.rows, t0, t1);
    if (!seen.any()) continue;
    const int64_t from = dense ? seen.first : t0, to = dense ? seen.last : t1;
    shift = now.shift;
    const int64_t first = from + shift, last = to + shift;
    later = Span{};
    if (t1 < end) {
      const Chunk next(call, task, t1, end, chunk);
      if (next.there) later = {0, 0, t1 + next.shift, next.t1 + next.shift};
    }
    row_tiles(task.rows, key_rows, [&](int64_t row, int64_t rows) {
      float* score = w.score + row * w.score_stride;
      for (int64_t r = 0; r < rows; r++) start_scores(call, task, row + r, from, to, score + r * w.score_stride);
      key_layout.add_scores(keys, {row, rows, first, last}, score, w.score_stride);
    });
    if (!w.weigh_chunk<S>(call, task, 0, task.rows, from, to - from, 1.0f)) continue;
    row_tiles(task.rows, value_rows, [&](int64_t row, int64_t rows) {
      value_layout.add_sums(values, {row, rows, first, last}, w.score + row * w.score_stride, w.score_stride);
    });
  }
  w.shift(call, task, 1.0f);
  w.finish(call, task);
}

template <class S>
constexpr Kernels kernels_of(GridFn (*grid_product)(const GridView&, int rows),
                             decltype(Kernels::encode_trellis) encode_trellis,
                             decltype(Kernels::basis_product) basis_product) {
  return {S::kName,     S::kNsPerProduct, attend_task<S>, merge_rows<S>, mean_scores<S>, decode_task<S>,
          grid_product, kRowTile,         false,          nullptr,       encode_trellis, basis_product,
          nullptr,      nullptr,          nullptr,        nullptr};
}

}  // namespace
}  // namespace tersekv
