// The loss of errors in keys and values that queries show, and their squared weights, see kernels/observed_loss.py.
#pragma once

#include "build.h"
#include "encode_rotated.h"
#include "encoders.h"
#include "online_softmax.h"
#include "row_product.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// Tokens whose keys or values are packed at a time.
constexpr int64_t kObservedTokens = 256;

// The rows of a head that one task observes: tasks of a head each pack its tokens again, and hold scores of all tokens.
struct ObservedRows {
  using S = Lanes;
  using F = typename S::F;

  const ObservedLoss& call;
  const RowProduct& product = TERSEKV_BUILD(row_product)();
  int64_t head, first, n, T, padded;  // rows, tokens, and tokens up to a multiple of 16
  float *scores, *rows, *panels, *words;

  ObservedRows(const ObservedLoss& call, int64_t task)
      : call(call),
        head(task / call.tasks_of_head()),
        first(task % call.tasks_of_head() * call.rows_at_once()),
        n(call.R - first < call.rows_at_once() ? call.R - first : call.rows_at_once()),
        T(call.T),
        padded(round_up(T, kLanes)),
        scores(scratch(n * padded)),
        rows(scratch(kObservedTokens * call.widest())),
        panels(scratch(kObservedTokens * call.widest())),
        words(scratch(round_up(n, 2 * kLanes) * round_up(call.D, 2 * kLanes))) {}

  // Call body(first token, tokens, tokens up to a multiple of 16, rows) for tiles of keys or values. The last rows are
  // zeros.
  template <class Body>
  void tiles(const TokenRows& x, Body&& body) {
    const int64_t D = x.D;
    const bool floats = x.type == Float::f32 && x.stride_t == D * static_cast<int64_t>(sizeof(float));
    for (int64_t t = 0; t < T; t += kObservedTokens) {
      const int64_t count = T - t < kObservedTokens ? T - t : kObservedTokens, whole = round_up(count, kLanes);
      const float* from = reinterpret_cast<const float*>(x.row(head, t));
      if (whole != count || !floats) {
        float_rows(x, head, t, count, rows);
        for (int64_t i = count * D; i < whole * D; i++) rows[i] = 0.0f;
        from = rows;
      }
      body(t, count, whole, from);
    }
  }

  // Scores become softmax weights, times 1/factors[r].
  void weigh_rows(float* factors) {
    const int64_t D = call.D;
    const RowProduct& of_scores = call.product ? *call.product : product;
    const TileScope registers(call.registers, kLanes);
    tiles(call.keys, [&](int64_t t, int64_t, int64_t whole, const float* from) {
      of_scores.pack_keys(from, D, whole, D, panels);
      of_scores.multiply(call.query + (head * call.R + first) * D, D, n, D, {panels, D}, whole, false, words,
                         scores + t, padded);
    });
    const int64_t b = head / call.H;
    Scores how{};
    how.softcap = call.softcap;
    for (int64_t r = 0; r < n; r++) {
      const uint8_t* mask = call.mask ? call.mask + (b % call.masks * call.q + (first + r) % call.q) * T : nullptr;
      RowState state;
      if (call.sinks) state = {call.sinks[head % call.H * call.R + first + r], 1.0f};
      bool any = false;
      weigh<S, false>(how, mask, scores + r * padded, T, call.scaling, state, any);
      factors[r] = state.sum > 0 ? 1.0f / state.sum : 0.0f;
    }
  }

  // Where this task has its sums of each token.
  int64_t place() const { return (head * call.tasks_of_head() + first / call.rows_at_once()) * T; }

  void sum_squares(const float* factors) const {
    alignas(64) float lanes[kLanes];
    for (int64_t t = 0; t < T; t += kLanes) {
      F sum = S::zero();
      for (int64_t r = 0; r < n; r++) {
        const F p = S::mul(S::load(scores + r * padded + t), S::set1(factors[r]));
        sum = S::fma(p, p, sum);
      }
      S::store(lanes, sum);
      __builtin_memcpy(call.of_values + place() + t, lanes, (T - t < kLanes ? T - t : kLanes) * sizeof(float));
    }
  }

  void run() {
    float* factors = scratch(n);
    weigh_rows(factors);
    if (!call.values.data) return sum_squares(factors);
    for (int64_t r = 0; r < n; r++) rescale<S>(scores + r * padded, padded, factors[r]);
    const int64_t D = call.Dv;
    float* out = scratch(n * D);
    for (int64_t i = 0; i < n * D; i++) out[i] = 0.0f;
    tiles(call.values, [&](int64_t t, int64_t, int64_t whole, const float* from) {
      product.pack_values(from, D, D, whole, panels);
      product.multiply(scores + t, padded, n, whole, {panels, whole}, D, true, nullptr, out, D);
    });
    float *squares = scratch(n), *shares = scratch(n * kLanes), *products = scratch(n * kObservedTokens);
    for (int64_t r = 0; r < n; r++) {
      float sum = 0.0f;
      for (int64_t d = 0; d < D; d++) sum += out[r * D + d] * out[r * D + d];
      squares[r] = sum;
      S::store(shares + r * kLanes, S::zero());
    }
    const float* counts = call.counts + head / call.H % call.of_counts * T;
    alignas(64) float lanes[kLanes];
    tiles(call.values, [&](int64_t t, int64_t count, int64_t whole, const float* from) {
      product.pack_keys(from, D, whole, D, panels);
      product.multiply(out, D, n, D, {panels, D}, whole, false, nullptr, products, kObservedTokens);
      for (int64_t i = 0; i < whole; i += kLanes) {
        const int64_t left = count - i < kLanes ? count - i : kLanes;
        for (int64_t j = 0; j < kLanes; j++) {
          F sum = S::zero();
          for (int64_t d = 0; d < D; d += kLanes) {
            const F x = S::load(from + (i + j) * D + d);
            sum = S::fma(x, x, sum);
          }
          lanes[j] = S::hsum(sum);
        }
        const F length = S::load(lanes);
        for (int64_t j = 0; j < kLanes; j++) lanes[j] = j < left ? counts[t + i + j] : 0.0f;
        const F counted = S::load(lanes);
        F of_keys = S::zero(), of_values = S::zero();
        for (int64_t r = 0; r < n; r++) {
          const F p = S::load(scores + r * padded + t + i), squared = S::mul(S::mul(p, p), counted);
          of_values = S::add(of_values, squared);
          // |v - o|² = |v|² - 2·v·o + |o|²
          const F far =
              S::add(S::fma(S::load(products + r * kObservedTokens + i), S::set1(-2.0f), length), S::set1(squares[r]));
          const F lost = S::mul(squared, S::max(far, S::zero()));
          of_keys = S::add(of_keys, lost);
          S::store(shares + r * kLanes, S::add(S::load(shares + r * kLanes), lost));
        }
        const auto write = [&](float* to, F x) {
          S::store(lanes, x);
          __builtin_memcpy(to + place() + t + i, lanes, left * sizeof(float));
        };
        write(call.of_keys, of_keys);
        write(call.of_values, of_values);
      }
    });
    for (int64_t r = 0; r < n; r++) call.shares[head * call.R + first + r] = S::hsum(S::load(shares + r * kLanes));
  }
};

void observed_loss(const ObservedLoss& call, int64_t task) {
  reset_scratch();
  ObservedRows(call, task).run();
}

}  // namespace
}  // namespace tersekv
