// Operations with which lut.h multiplies codes in float32, built on the other operations of the
// wrapper S.
#pragma once

#include "contract.h"

namespace tersekv {

template <class S>
struct Float32Codes {
  static constexpr int kCodes = 1;  // number of codes per lane and look-up
  using Coef = float;

  static auto factor(const float* coef) { return S::set1(*coef); }
  template <class F>
  static F dot(F factor, F value, F sum) {
    return S::fma(factor, value, sum);
  }
  // Store sixteen coefficients from the p-th of a row on.
  template <class F>
  static void store_coefs(float* row, int64_t p, F x) {
    S::store(row + p, x);
  }
  // Store thirty-two coefficients.
  template <class F>
  static void store_coef_pair(float* row, int64_t p, F x, F y) {
    S::store(row + p, x);
    S::store(row + p + kLanes, y);
  }
  // Store the lanes whose bits are set one after the other. Nothing after them is written.
  template <class F>
  static void store_marked(float* p, F x, unsigned bits) {
    alignas(64) float lanes[kLanes];
    S::store(lanes, x);
    for (; bits; bits &= bits - 1) *p++ = lanes[__builtin_ctz(bits)];
  }
  // Replace each vector by the sum of its lanes, in every lane.
  template <class F, int R>
  static void spread(F (&x)[R]) {
    for (int r = 0; r < R; r++) x[r] = S::set1(S::hsum(x[r]));
  }
};

}  // namespace tersekv
