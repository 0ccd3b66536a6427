// Online softmax over chunks of scores, and the merge of partial results by log-sum-exp.
#pragma once

#include "contract.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr float kInfinity = __builtin_inff();

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0; 0 below 2^-126, nan at nan. The polynomial is 2^x from 0 to 1 with a relative error of 8e-8, or 3e-6
// if the result is rounded to bfloat16.
template <class S, bool ROUNDED = false>
[[gnu::always_inline]] inline typename S::F exp2_negative(typename S::F x) {
  using F = typename S::F;
  const F n = S::whole(x), r = S::fraction(x, n);
  F p;
  if constexpr (ROUNDED) {
    p = S::set1(0.013426688f);
    p = S::fma(p, r, S::set1(0.05224247f));
    p = S::fma(p, r, S::set1(0.24128021f));
    p = S::fma(p, r, S::set1(0.69304484f));
  } else {
    p = S::set1(0.0018671305f);
    p = S::fma(p, r, S::set1(0.00901703f));
    p = S::fma(p, r, S::set1(0.055799913f));
    p = S::fma(p, r, S::set1(0.24016444f));
    p = S::fma(p, r, S::set1(0.6931513f));
  }
  p = S::fma(p, r, S::set1(1.0f));
  return S::zero_below(x, S::scale2(p, n), -126.0f);
}

template <class S>
[[gnu::always_inline]] inline typename S::F tanh(typename S::F x) {
  const typename S::F one = S::set1(1.0f), e = exp2_negative<S>(S::mul(S::abs(x), S::set1(-2.0f * kLog2E)));
  return S::with_sign(S::div(S::fma(e, S::set1(-1.0f), one), S::add(one, e)), x);
}

struct RowState {
  float max = -kInfinity, sum = 0.0f;
};

// Convert raw scores of `count` tokens of one row, multiplied by `factor`, to weights relative to the new maximum, in
// place. Scores must have room up to a multiple of 16; weights there become 0. Return the factor
// for the earlier sums. Set `any` if some weight is not zero. ROUNDED: weights will be rounded to bfloat16.
template <class S, bool ROUNDED>
float weigh(const Scores& how, const uint8_t* mask, float* score, int64_t count, float factor, RowState& state,
            bool& any) {
  using F = typename S::F;
  for (int64_t i = count; i < round_up(count, kLanes); i++) score[i] = -kInfinity;
  F top = S::set1(-kInfinity);
  if (mask || how.softcap != 0.0f || factor <= 0.0f) {
    const F times = S::set1(factor), cap = S::set1(how.softcap),
            inverse = S::set1(how.softcap ? 1.0f / how.softcap : 0.0f);
    factor = 1.0f;
    for (int64_t i = 0; i < count; i += kLanes) {
      F s = S::mul(S::load(score + i), times);
      if (how.softcap != 0.0f) s = S::mul(cap, tanh<S>(S::mul(s, inverse)));
      if (mask && count - i >= kLanes) {
        s = S::hide(s, mask + i);
      } else if (count - i < kLanes) {
        uint8_t seen[kLanes] = {};
        for (int64_t k = 0; k < count - i; k++) seen[k] = mask ? mask[i + k] : 1;
        s = S::hide(s, seen);
      }
      S::store(score + i, s);
      top = S::max(top, s);
    }
  } else {
    for (int64_t i = 0; i < count; i += kLanes) top = S::max(top, S::load(score + i));
  }
  const float chunk_max = S::hmax(top) * factor;
  const float max = chunk_max > state.max ? chunk_max : state.max;
  // A row that has seen no token must not compute -inf - -inf.
  const float safe = max == -kInfinity ? 0.0f : max;
  const F minus = S::set1(-safe), times = S::set1(factor), base = S::set1(kLog2E);
  F sum = S::zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    // The maximum is rounded, and the product here is not: of huge scores it would be more.
    const F below = S::min(S::zero(), S::fma(S::load(score + i), times, minus));
    const F weight = exp2_negative<S, ROUNDED>(S::mul(below, base));
    S::store(score + i, weight);
    sum = S::add(sum, weight);
  }
  const float share = state.max == -kInfinity ? 0.0f : max == state.max ? 1.0f : __builtin_expf(state.max - max);
  const float added = S::hsum(sum);
  any |= !(added == 0.0f);
  state.sum = state.sum * share + added;
  state.max = max;
  return share;
}

template <class S>
void rescale(float* row, int64_t padded, float factor) {
  if (factor == 1.0f) return;
  const typename S::F f = S::set1(factor);
  for (int64_t i = 0; i < padded; i += kLanes) S::store(row + i, S::mul(S::load(row + i), f));
}

// row and out must not overlap, so that compilers use vectors.
inline void scale_row(const float* __restrict row, int64_t D, float factor, float* __restrict out) {
  for (int64_t d = 0; d < D; d++) out[d] = row[d] * factor;
}

inline void add_times(const float* __restrict row, int64_t D, float factor, float* __restrict out) {
  for (int64_t d = 0; d < D; d++) out[d] += row[d] * factor;
}

inline float finish_row(const float* row, int64_t D, const RowState& state, float* out) {
  if (state.sum == 0.0f) {
    for (int64_t d = 0; d < D; d++) out[d] = 0.0f;
    return -kInfinity;
  }
  scale_row(row, D, 1.0f / state.sum, out);
  return state.max + __builtin_logf(state.sum);
}

template <class S>
void merge_rows(const Merge& call, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row++) {
    float max = -kInfinity, sum = 0.0f;
    for (int64_t s = 0; s < call.segments; s++) max = call.lses[s][row] > max ? call.lses[s][row] : max;
    const float safe = max == -kInfinity ? 0.0f : max;
    for (int64_t s = 0; s < call.segments; s++) sum += __builtin_expf(call.lses[s][row] - safe);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    float* out = call.out + row * call.D;
    for (int64_t s = 0; s < call.segments; s++) {
      const float weight = __builtin_expf(call.lses[s][row] - safe) * inverse;
      const float* in = call.outs[s] + row * call.D;
      s ? add_times(in, call.D, weight, out) : scale_row(in, call.D, weight, out);
    }
    call.lse[row] = sum == 0.0f ? -kInfinity : max + __builtin_logf(sum);
  }
}

}  // namespace
}  // namespace tersekv
