// Sums over tokens times their cosines and sines, and tokens without a rotated mean, see kernels/rotated_mean.py.
#pragma once

#include "encoders.h"
#include "floats.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// Tokens whose products are summed in float32.
constexpr int64_t kRotatedSummed = 128;

// Write `n` tokens of a head as float32 rows.
inline void float_rows(const TokenRows& x, int64_t head, int64_t first, int64_t n, float* to) {
  for (int64_t t = 0; t < n; t++) to_floats(x.type, x.row(head, first + t), 1, x.D, to + t * x.D);
}

// The sums of 16 channels of a head.
void sum_rotated(const RotatedTokens& call, int64_t task) {
  using S = Lanes;
  const TokenRows& x = call.x;
  const int64_t stripes = x.D / kLanes, head = task / stripes, d = task % stripes * kLanes,
                angles = head / x.H * call.angles_b + head % x.H * call.angles_h + d;
  const float *cos = call.cos + angles, *sin = call.sin + angles;
  double sums[2][kLanes] = {};
  alignas(64) float lanes[kLanes];
  with_type(x.type, [&](auto type) TERSEKV_INLINE {
    for (int64_t first = 0; first < x.T; first += kRotatedSummed) {
      const int64_t end = x.T - first < kRotatedSummed ? x.T : first + kRotatedSummed;
      S::F along = S::zero(), across = S::zero();
      for (int64_t t = first; t < end; t++) {
        const S::F part = S::template load_as<type>(x.row(head, t) + d * bytes_of(type));
        along = S::fma(part, S::load(cos + t * x.D), along);
        across = S::fma(part, S::load(sin + t * x.D), across);
      }
      S::store(lanes, along);
      for (int64_t i = 0; i < kLanes; i++) sums[0][i] += static_cast<double>(lanes[i]);
      S::store(lanes, across);
      for (int64_t i = 0; i < kLanes; i++) sums[1][i] += static_cast<double>(lanes[i]);
    }
  });
  for (int64_t i = 0; i < kLanes; i++) {
    call.first[head * x.D + d + i] = static_cast<float>(sums[0][i]);
    call.second[head * x.D + d + i] = static_cast<float>(sums[1][i]);
  }
}

// Some tokens of a head without the mean.
void remove_mean(const RotatedTokens& call, int64_t task) {
  using S = Lanes;
  const TokenRows& x = call.x;
  const int64_t parts = call.tasks_of_head(), head = task / parts, first = task % parts * call.kRotatedAtOnce,
                end = x.T - first < call.kRotatedAtOnce ? x.T : first + call.kRotatedAtOnce,
                angles = head / x.H * call.angles_b + head % x.H * call.angles_h,
                of_head = head / x.H * call.mean_b + head % x.H * x.D;
  with_type(x.type, [&](auto type) TERSEKV_INLINE {
    for (int64_t t = first; t < end; t++) {
      const char* row = x.row(head, t);
      const float *cos = call.cos + angles + t * x.D, *sin = call.sin + angles + t * x.D;
      float* to = call.first + (head * x.T + t) * x.D;
      for (int64_t d = 0; d < x.D; d += kLanes) {
        const S::F along = S::mul(S::load(call.mean + of_head + d), S::load(cos + d)),
                   rotated = S::fma(S::load(call.across + of_head + d), S::load(sin + d), along);
        S::store(to + d, S::fma(rotated, S::set1(-1.0f), S::template load_as<type>(row + d * bytes_of(type))));
      }
    }
  });
}

}  // namespace
}  // namespace tersekv
