// How lut.h multiplies codes in float32, written over what the wrapper S has anyway.
#pragma once

#include "contract.h"

namespace tersekv {

template <class S>
struct Float32Codes {
  static constexpr int kCodes = 1;  // codes of one lane that a look-up serves
  using Coef = float;

  static auto factor(const float* coef) { return S::set1(*coef); }
  template <class F>
  static F dot(F factor, F value, F sum) {
    return S::fma(factor, value, sum);
  }
  // Sixteen coefficients from the p-th of a row on.
  template <class F>
  static void store_coefs(float* row, int64_t p, F x) {
    S::store(row + p, x);
  }
  // Thirty-two of them.
  template <class F>
  static void store_coef_pair(float* row, int64_t p, F x, F y) {
    S::store(row + p, x);
    S::store(row + p + kLanes, y);
  }
  // Each vector becomes the sum of its lanes, in every lane.
  template <class F, int R>
  static void spread(F (&x)[R]) {
    for (int r = 0; r < R; r++) x[r] = S::set1(S::hsum(x[r]));
  }
};

}  // namespace tersekv
