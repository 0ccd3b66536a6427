// The task of a call: for each chunk of tokens compute scores, softmax and value sums.
#pragma once

#include "build.h"
#include "decode.h"
#include "marked_mean.h"
#include "online_softmax.h"
#include "row_product.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kSharedTokens = 64;  // whose decoded rows and panels fit the L2 cache
constexpr int64_t kSharedFloatRows = 32;

// Call body(row, rows) for tiles of at most four rows; tiles are as equal in size as possible.
template <class Body>
void row_tiles(int64_t rows, Body&& body) {
  const int64_t size = ceil_div(rows, ceil_div(rows, kRowTile));
  for (int64_t row = 0; row < rows; row += size) body(row, rows - row < size ? rows - row : size);
}

// Working memory of a task: scaled queries, scores of a chunk, value sums, one softmax state per
// row.
struct Workspace {
  int64_t query_stride, score_stride, sum_stride;
  float *query, *score, *sum;
  RowState* state;

  Workspace(const Call& call, const Task& task, int64_t chunk) {
    query_stride = round_up(call.D, kLanes);
    // One vector more: rows would share cache sets if their stride were a multiple of the page size.
    score_stride = round_up(chunk, kLanes) + kLanes;
    sum_stride = round_up(call.Dv, kLanes);
    const int64_t rows = task.rows;
    query = scratch(rows * query_stride);
    score = scratch(rows * score_stride);
    sum = scratch(rows * sum_stride);
    state = scratch_of<RowState>(rows);
    const float* in = call.query + ((task.b * call.H + task.h) * call.R + task.row) * call.D;
    for (int64_t r = 0; r < rows; r++) {
      state[r] = RowState{};
      for (int64_t d = 0; d < query_stride; d++)
        query[r * query_stride + d] = d < call.D ? in[r * call.D + d] * call.scores.scaling : 0.0f;
      for (int64_t d = 0; d < sum_stride; d++) sum[r * sum_stride + d] = 0.0f;
    }
  }

  // Apply softmax to a chunk. Return false if no row sees any of its tokens, so that the values
  // need not be read.
  template <class S>
  bool weigh_chunk(const Call& call, const Task& task, int64_t token, int64_t count) {
    const Scores& how = call.scores;
    bool any = false;
    for (int64_t r = 0; r < task.rows; r++) {
      const uint8_t* mask = nullptr;
      if (how.mask)
        mask = how.mask + task.b * how.stride_b + task.h * how.stride_h + (task.row + r) % how.q * how.stride_q + token;
      const float factor = weigh<S>(how, mask, score + r * score_stride, count, state[r], any);
      rescale<S>(sum + r * sum_stride, sum_stride, factor);
    }
    return any;
  }

  void finish(const Call& call, const Task& task) const {
    for (int64_t r = 0; r < task.rows; r++) {
      const int64_t row = (task.b * call.H + task.h) * call.R + task.row + r;
      task.lse[row] = finish_row(sum + r * sum_stride, call.Dv, state[r], task.out + row * call.Dv);
      // A bias of all scores of a row changes the row's log-sum-exp only.
      if (call.scores.bias) task.lse[row] += call.scores.bias[row];
    }
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

// The tokens of a chunk, without those at its ends that no row of the task sees. The first one is a
// whole number of vectors further on, so that sums have the order that they have with all tokens.
struct Visible {
  int64_t first, last;

  Visible(const Call& call, const Task& task, int64_t t0, int64_t t1) : first(t0), last(t1) {
    const Scores& how = call.scores;
    if (!how.mask) return;
    first = t1;
    last = t0;
    const int64_t rows = how.q < task.rows ? how.q : task.rows;
    for (int64_t r = 0; r < rows; r++) {
      const uint8_t* mask =
          how.mask + task.b * how.stride_b + task.h * how.stride_h + (task.row + r) % how.q * how.stride_q;
      int64_t from = t0, to = t1;
      while (from < first && !mask[from]) from++;
      while (to > last && !mask[to - 1]) to--;
      if (from < first) first = from;
      if (to > last) last = to;
    }
    if (first >= last) first = last = t0;
    first -= (first - t0) % kLanes;
  }
  bool any() const { return first < last; }
};

// Set the first scores of tokens [t0, t1) of a row. Reads and writes whole vectors.
inline void start_scores(const Call& call, const Task& task, int64_t row, int64_t t0, int64_t t1, float* score) {
  const int64_t count = round_up(t1 - t0, kLanes);
  if (!call.start) return clear(score, count);
  const float* from = call.start + ((task.b * call.H + task.h) * call.R + task.row + row) * call.start_stride + t0;
  for (int64_t i = 0; i < count; i++) score[i] = from[i];
}

// Floats that a view, or the first part of a view, consists of; null if it is packed.
inline const DenseView* floats_of(const View& view) {
  const View& first = view.kind == Kind::concat ? view.parts[0] : view;
  return first.kind == Kind::exact ? &first.dense : nullptr;
}

// True if the values are the first channels of the keys. Floats need enough rows that packing a tile for them pays.
inline bool are_shared(const Call& call, const Task& task) {
  if (call.shared || task.rows < kSharedFloatRows || call.start || call.values->kind != Kind::exact) return call.shared;
  const DenseView *keys = floats_of(*call.keys), &values = call.values->dense;
  return keys && keys->data == values.data && keys->type == values.type && keys->stride_b == values.stride_b &&
         keys->stride_h == values.stride_h && keys->stride_t == values.stride_t;
}

// Attend to tokens whose values are the first channels of their keys. Each token is decoded once, to a row
// that serves as both, whatever its layout is. Products are of bfloat16 where the model's are, and where tokens
// are packed, because a code of up to 8 bits is further from its number than bfloat16 is.
template <class S>
void attend_shared(const Call& call, const Task& task) {
  const int64_t unit = call.tokens_per_unit, chunk = unit >= kSharedTokens ? unit : kSharedTokens / unit * unit;
  const int64_t D = call.D, width = round_up(D, kLanes), most = round_up(chunk, kLanes);
  Workspace w(call, task, chunk);
  if (task.first == task.last) return w.finish(call, task);
  const DenseView* floats = floats_of(*call.keys);
  const bool rounds = call.rounded_rows && (!floats || call.rounded_query);
  const RowProduct& product = rounds ? *call.rounded_rows : TERSEKV_BUILD(row_product)();
  const Span later{};
  int64_t shift = 0;
  Node node = node_of(call.keys, call, task, shift, later);
  layout_of<S>(node).prepare(node);
  float *tile = scratch(((D > unit ? D : unit) + kTileSlack) * kLanes), *rows = scratch(most * width);
  float *panels = scratch(most * width), *words = scratch(task.rows * (width > most ? width : most));
  clear(rows, most * width);
  const int64_t end = task.last * unit;
  for (int64_t t0 = task.first * unit, t1; t0 < end; t0 = t1) {
    const Chunk now(call, task, t0, end, chunk);
    t1 = now.t1;
    if (!now.there || !Visible(call, task, t0, t1).any()) continue;
    shift = now.shift;
    const int64_t count = t1 - t0, tokens = round_up(count, kLanes);
    decode_rows<S>(node, false, t0 + shift, t1 + shift, false, tile, rows, width);
    clear(rows + count * width, (tokens - count) * width);
    product.pack_keys(rows, width, tokens, width, panels);
    product.multiply(w.query, w.query_stride, task.rows, width, panels, tokens, false, words, w.score, w.score_stride);
    if (!w.weigh_chunk<S>(call, task, t0, count)) continue;
    product.pack_values(rows, width, w.sum_stride, tokens, panels);
    product.multiply(w.score, w.score_stride, task.rows, tokens, panels, w.sum_stride, true, words, w.sum,
                     w.sum_stride);
  }
  w.finish(call, task);
}

template <class S>
void attend_task(const Call& call, const Task& task) {
  reset_scratch();
  if (are_shared(call, task)) return attend_shared<S>(call, task);
  const int64_t unit = call.tokens_per_unit, chunk = unit >= kChunkTokens ? unit : kChunkTokens / unit * unit;
  Workspace w(call, task, chunk);
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
  const int64_t end = task.last * unit;
  for (int64_t t0 = task.first * unit, t1; t0 < end; t0 = t1) {
    const Chunk now(call, task, t0, end, chunk);
    t1 = now.t1;
    if (!now.there) continue;
    const Visible seen(call, task, t0, t1);
    if (!seen.any()) continue;
    const int64_t from = dense ? seen.first : t0, to = dense ? seen.last : t1;
    shift = now.shift;
    const int64_t first = from + shift, last = to + shift;
    later = Span{};
    if (t1 < end) {
      const Chunk next(call, task, t1, end, chunk);
      if (next.there) later = {0, 0, t1 + next.shift, next.t1 + next.shift};
    }
    row_tiles(task.rows, [&](int64_t row, int64_t rows) {
      float* score = w.score + row * w.score_stride;
      for (int64_t r = 0; r < rows; r++) start_scores(call, task, row + r, from, to, score + r * w.score_stride);
      key_layout.add_scores(keys, {row, rows, first, last}, score, w.score_stride);
    });
    if (!w.weigh_chunk<S>(call, task, from, to - from)) continue;
    row_tiles(task.rows, [&](int64_t row, int64_t rows) {
      value_layout.add_sums(values, {row, rows, first, last}, w.score + row * w.score_stride, w.score_stride);
    });
  }
  w.finish(call, task);
}

template <class S>
constexpr Kernels kernels_of(GridFn (*grid_product)(const GridView&, int rows),
                             decltype(Kernels::encode_trellis) encode_trellis,
                             decltype(Kernels::basis_product) basis_product) {
  return {S::kName, S::kNsPerProduct, attend_task<S>, merge_rows<S>, mean_scores<S>, decode_task<S>, grid_product,
          false,    nullptr,          encode_trellis, basis_product, nullptr,        nullptr,        nullptr};
}

}  // namespace
}  // namespace tersekv
