// Vectors of eight doubles and sixteen floats, and sums over rows of doubles.
#pragma once

#include "contract.h"

namespace tersekv {
namespace {  // internal to each build

constexpr int64_t kWide = 8;
using Doubles = double __attribute__((vector_size(8 * kWide), aligned(8), may_alias));
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Floats& floats(float* x) { return *reinterpret_cast<Floats*>(x); }
inline Floats floats(const float* x) { return *reinterpret_cast<const Floats*>(x); }
inline Doubles& at(double* x) { return *reinterpret_cast<Doubles*>(x); }
inline Doubles at(const double* x) { return *reinterpret_cast<const Doubles*>(x); }

inline double sum_of(const Doubles& x) {
  double sum = 0.0;
  for (int64_t i = 0; i < kWide; i++) sum += x[i];
  return sum;
}

// Σ a·b over [first, n), whole vectors.
inline double dot(const double* a, const double* b, int64_t first, int64_t n) {
  Doubles sums = {};
  for (int64_t i = first; i < n; i += kWide) sums += at(a + i) * at(b + i);
  return sum_of(sums);
}

// to[first, n) += factor · from[first, n), whole vectors.
inline void add_scaled(double* to, double factor, const double* from, int64_t first, int64_t n) {
  for (int64_t i = first; i < n; i += kWide) at(to + i) += factor * at(from + i);
}

// to[first, n) += Σ factor·row over `rows` rows from `from` on, n apart, whole vectors.
inline void add_rows(double* to, const double* factors, const double* from, int64_t rows, int64_t first, int64_t n) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, from += 4 * n)
    for (int64_t i = first; i < n; i += kWide)
      at(to + i) += (factors[r] * at(from + i) + factors[r + 1] * at(from + n + i)) +
                    (factors[r + 2] * at(from + 2 * n + i) + factors[r + 3] * at(from + 3 * n + i));
  for (; r < rows; r++, from += n) add_scaled(to, factors[r], from, first, n);
}

inline double root(double x) { return __builtin_sqrt(x); }

inline void exchange(double* a, double* b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const double kept = a[i];
    a[i] = b[i];
    b[i] = kept;
  }
}

}  // namespace
}  // namespace tersekv
