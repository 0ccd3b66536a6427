// The tasks of attend_grid and attend_exact: scores of a chunk of tokens, softmax, value sums, chunk after chunk.
#pragma once

#include "lut.h"
#include "online_softmax.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kRowTile = 4;

// Calls body(row, rows) for tiles of at most four rows of even size.
template <class Body>
void row_tiles(int64_t rows, Body&& body) {
  const int64_t size = ceil_div(rows, ceil_div(rows, kRowTile));
  for (int64_t row = 0; row < rows; row += size) body(row, rows - row < size ? rows - row : size);
}

// Working memory of a task: scaled queries, scores of a chunk, sums of values, one softmax state per row.
struct Workspace {
  int64_t query_stride, score_stride, sum_stride;
  float *query, *score, *sum, *coef;
  RowState* state;

  Workspace(const Call& call, const Task& task, int64_t chunk, int64_t coef_floats) {
    query_stride = round_up(call.D, kLanes);
    score_stride = round_up(chunk, kLanes) + kLanes;  // not a multiple of the page: rows would share cache sets
    sum_stride = round_up(call.Dv, kLanes);
    const int64_t rows = task.rows;
    const int64_t states = round_up(rows * 2, kLanes);
    query = thread_scratch(rows * (query_stride + score_stride + sum_stride) + states + coef_floats);
    score = query + rows * query_stride;
    sum = score + rows * score_stride;
    state = reinterpret_cast<RowState*>(sum + rows * sum_stride);
    coef = sum + rows * sum_stride + states;
    const float* in = call.query + ((task.b * call.H + task.h) * call.R + task.row) * call.D;
    for (int64_t r = 0; r < rows; r++) {
      state[r] = RowState{};
      for (int64_t d = 0; d < query_stride; d++)
        query[r * query_stride + d] = d < call.D ? in[r * call.D + d] * call.scores.scaling : 0.0f;
      for (int64_t d = 0; d < sum_stride; d++) sum[r * sum_stride + d] = 0.0f;
    }
  }

  // Softmax of a chunk; false where no row sees any of its tokens, so that the values need not be read.
  template <class S>
  bool weigh_chunk(const Call& call, const Task& task, int64_t token, int64_t count) {
    const Scores& how = call.scores;
    bool any = false;
    for (int64_t r = 0; r < task.rows; r++) {
      const uint8_t* mask = nullptr;
      if (how.mask) mask = how.mask + task.b * how.stride_b + (task.row + r) % how.q * how.stride_q + token;
      const float factor = weigh<S>(how, mask, score + r * score_stride, count, state[r], any);
      rescale<S>(sum + r * sum_stride, sum_stride, factor);
    }
    return any;
  }

  void finish(const Call& call, const Task& task) const {
    for (int64_t r = 0; r < task.rows; r++) {
      const int64_t row = (task.b * call.H + task.h) * call.R + task.row + r;
      task.lse[row] = finish_row(sum + r * sum_stride, call.Dv, state[r], task.out + row * call.Dv);
    }
  }
};

inline Block block_at(const GridView& v, int64_t b, int64_t h, int64_t n) {
  const auto at = [&](const Plane& p) {
    return p.data ? p.data + b * p.stride_b + h * p.stride_h + n * p.stride_n : nullptr;
  };
  return {v.codes + b * v.stride_b + h * v.stride_h + n * v.stride_n, at(v.scale), at(v.offset)};
}

template <class S>
void attend_grid(const Call& call, const Task& task) {
  const GridView &keys = call.grid_keys, &values = call.grid_values;
  const int64_t t = call.tokens_per_unit, per_chunk = t >= 512 ? 1 : 512 / t;
  const int64_t key_slots = packed_slots(keys.bits, keys.words), value_slots = packed_slots(values.bits, values.words);
  const int64_t coef_stride = round_up(key_slots > value_slots ? key_slots : value_slots, kLanes) + 2 * kLanes;
  Workspace w(call, task, per_chunk * t, kRowTile * coef_stride);
  for (int64_t n0 = task.first; n0 < task.last; n0 += per_chunk) {
    const int64_t n1 = n0 + per_chunk < task.last ? n0 + per_chunk : task.last;
    row_tiles(task.rows, [&](int64_t row, int64_t rows) {
      const BlockFn product = block_product<S>(keys, static_cast<int>(rows));
      float* score = w.score + row * w.score_stride;
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < (n1 - n0) * t; i++) score[r * w.score_stride + i] = 0.0f;
      for (int64_t n = n0; n < n1; n++)
        product(keys, block_at(keys, task.b, task.h, n), w.query + row * w.query_stride, w.query_stride,
                score + (n - n0) * t, w.score_stride, w.coef, coef_stride);
    });
    if (!w.weigh_chunk<S>(call, task, n0 * t, (n1 - n0) * t)) continue;
    row_tiles(task.rows, [&](int64_t row, int64_t rows) {
      const BlockFn product = block_product<S>(values, static_cast<int>(rows));
      for (int64_t n = n0; n < n1; n++)
        product(values, block_at(values, task.b, task.h, n), w.score + row * w.score_stride + (n - n0) * t,
                w.score_stride, w.sum + row * w.sum_stride, w.sum_stride, w.coef, coef_stride);
    });
  }
  w.finish(call, task);
}

template <Float T>
const char* dense_row(const DenseView& v, int64_t b, int64_t h, int64_t t) {
  constexpr int64_t size = T == Float::f32 ? 4 : 2;
  return static_cast<const char*>(v.data) + (b * v.stride_b + h * v.stride_h + t * v.stride_t) * size;
}

// score[r][i] = query[r] · key[i] for i < count.
template <class S, Float T, int R, int TOKENS>
void dense_scores(const char* key, int64_t step, int64_t count, int64_t D, const float* query, int64_t query_stride,
                  float* score, int64_t score_stride) {
  using F = typename S::F;
  constexpr int64_t size = T == Float::f32 ? 4 : 2;
  const int64_t whole = D / kLanes * kLanes;
  for (int64_t i = 0; i + TOKENS <= count; i += TOKENS, key += TOKENS * step) {
    F acc[TOKENS][R];
    repeat<TOKENS>([&](auto k) TERSEKV_INLINE { repeat<R>([&](auto r) TERSEKV_INLINE { acc[k][r] = S::zero(); }); });
    auto add = [&](int64_t d, auto load) TERSEKV_INLINE {
      F x[TOKENS];
      repeat<TOKENS>([&](auto k) TERSEKV_INLINE { x[k] = load(key + k * step + d * size); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const F q = S::load(query + r * query_stride + d);
        repeat<TOKENS>([&](auto k) TERSEKV_INLINE { acc[k][r] = S::fma(q, x[k], acc[k][r]); });
      });
    };
    for (int64_t d = 0; d < whole; d += kLanes)
      add(d, [](const char* p) TERSEKV_INLINE { return S::template load_as<T>(p); });
    if (whole < D) add(whole, [&](const char* p) TERSEKV_INLINE { return S::template load_as_n<T>(p, D - whole); });
    repeat<TOKENS>([&](auto k) TERSEKV_INLINE {
      repeat<R>([&](auto r) TERSEKV_INLINE { score[r * score_stride + i + k] = S::hsum(acc[k][r]); });
    });
  }
  if constexpr (TOKENS > 1) {
    const int64_t done = count / TOKENS * TOKENS;
    if (done < count)
      dense_scores<S, T, R, 1>(key, step, count - done, D, query, query_stride, score + done, score_stride);
  }
}

// sum[r][d] += weight[r][i] * value[i][d] over i < count.
template <class S, Float T, int R>
void dense_sums(const char* value, int64_t step, int64_t count, int64_t D, const float* weight, int64_t weight_stride,
                float* sum, int64_t sum_stride) {
  using F = typename S::F;
  constexpr int64_t size = T == Float::f32 ? 4 : 2;
  auto lanes = [&](auto groups, int64_t d, auto load) TERSEKV_INLINE {
    constexpr int NG = groups;
    F acc[NG][R];
    repeat<R>([&](auto r) TERSEKV_INLINE {
      repeat<NG>([&](auto g) TERSEKV_INLINE { acc[g][r] = S::load(sum + r * sum_stride + d + g * kLanes); });
    });
    for (int64_t i = 0; i < count; i++) {
      const char* row = value + i * step + d * size;
      F x[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE { x[g] = load(row + g * kLanes * size); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const F p = S::set1(weight[r * weight_stride + i]);
        repeat<NG>([&](auto g) TERSEKV_INLINE { acc[g][r] = S::fma(p, x[g], acc[g][r]); });
      });
    }
    repeat<R>([&](auto r) TERSEKV_INLINE {
      repeat<NG>([&](auto g) TERSEKV_INLINE { S::store(sum + r * sum_stride + d + g * kLanes, acc[g][r]); });
    });
  };
  const auto whole = [](const char* p) TERSEKV_INLINE { return S::template load_as<T>(p); };
  int64_t d = 0;
  if constexpr (S::max_groups(R) >= 4)
    for (; d + 4 * kLanes <= D; d += 4 * kLanes) lanes(Index<4>{}, d, whole);
  for (; d + kLanes <= D; d += kLanes) lanes(Index<1>{}, d, whole);
  if (d < D) lanes(Index<1>{}, d, [&](const char* p) TERSEKV_INLINE { return S::template load_as_n<T>(p, D - d); });
}

template <class S, Float T, int R>
void exact_scores(const Call& call, const Task& task, Workspace& w, int64_t row, int64_t t0, int64_t count) {
  const DenseView& keys = call.dense_keys;
  constexpr int64_t size = T == Float::f32 ? 4 : 2;
  dense_scores<S, T, R, S::kExactTokens>(dense_row<T>(keys, task.b, task.h, t0), keys.stride_t * size, count, call.D,
                                         w.query + row * w.query_stride, w.query_stride, w.score + row * w.score_stride,
                                         w.score_stride);
}

template <class S, Float T, int R>
void exact_sums(const Call& call, const Task& task, Workspace& w, int64_t row, int64_t t0, int64_t count) {
  const DenseView& values = call.dense_values;
  constexpr int64_t size = T == Float::f32 ? 4 : 2;
  dense_sums<S, T, R>(dense_row<T>(values, task.b, task.h, t0), values.stride_t * size, count, call.Dv,
                      w.score + row * w.score_stride, w.score_stride, w.sum + row * w.sum_stride, w.sum_stride);
}

using ExactFn = void (*)(const Call&, const Task&, Workspace&, int64_t, int64_t, int64_t);

template <class S, int R>
ExactFn exact_step(Float type, bool scores) {
  switch (type) {
    case Float::f32:
      return scores ? exact_scores<S, Float::f32, R> : exact_sums<S, Float::f32, R>;
    case Float::f16:
      return scores ? exact_scores<S, Float::f16, R> : exact_sums<S, Float::f16, R>;
    default:
      return scores ? exact_scores<S, Float::bf16, R> : exact_sums<S, Float::bf16, R>;
  }
}

template <class S>
ExactFn exact_step(Float type, bool scores, int64_t rows) {
  switch (rows) {
    case 1:
      return exact_step<S, 1>(type, scores);
    case 2:
      return exact_step<S, 2>(type, scores);
    case 3:
      return exact_step<S, 3>(type, scores);
    default:
      return exact_step<S, 4>(type, scores);
  }
}

template <class S>
void attend_exact(const Call& call, const Task& task) {
  constexpr int64_t kChunk = 256;
  Workspace w(call, task, kChunk, 0);
  for (int64_t t0 = task.first; t0 < task.last; t0 += kChunk) {
    const int64_t count = task.last - t0 < kChunk ? task.last - t0 : kChunk;
    row_tiles(task.rows, [&](int64_t row, int64_t rows) {
      exact_step<S>(call.dense_keys.type, true, rows)(call, task, w, row, t0, count);
    });
    if (!w.weigh_chunk<S>(call, task, t0, count)) continue;
    row_tiles(task.rows, [&](int64_t row, int64_t rows) {
      exact_step<S>(call.dense_values.type, false, rows)(call, task, w, row, t0, count);
    });
  }
  w.finish(call, task);
}

template <class S>
constexpr Kernels kernels_of() {
  return {S::kName, S::kNsPerProduct, attend_grid<S>, attend_exact<S>, merge_rows<S>};
}

}  // namespace
}  // namespace tersekv
