// The inverse of a matrix, and its Cholesky factor.
#pragma once

#include "doubles.h"

namespace tersekv {
namespace {  // internal to each build

// Replace a matrix [n, n] by its inverse, by Gauss's elimination with row pivots, four columns at a time. Return false
// if there is none.
inline bool invert(double* matrix, int64_t n) {
  constexpr int64_t b = 4;
  auto* from = scratch_of<int64_t>(n);
  auto *panel = scratch_of<double>(n * b), *rows = scratch_of<double>(b * n);
  for (int64_t k = 0; k < n; k += b) {
    // Columns k to k + 4 of the rows left are eliminated in a copy, which finds the pivots.
    for (int64_t r = k; r < n; r++)
      for (int64_t j = 0; j < b; j++) panel[r * b + j] = matrix[r * n + k + j];
    for (int64_t j = 0; j < b; j++) {
      int64_t pivot = k + j;
      for (int64_t r = pivot + 1; r < n; r++)
        if (__builtin_fabs(panel[r * b + j]) > __builtin_fabs(panel[pivot * b + j])) pivot = r;
      from[k + j] = pivot;
      if (pivot != k + j) {
        exchange(panel + (k + j) * b, panel + pivot * b, b);
        exchange(matrix + (k + j) * n, matrix + pivot * n, n);
      }
      const double* own = panel + (k + j) * b;
      if (own[j] == 0.0) return false;
      for (int64_t r = k + j + 1; r < n; r++) {
        const double factor = panel[r * b + j] / own[j];
        for (int64_t i = j; i < b; i++) panel[r * b + i] -= factor * own[i];
      }
    }
    // With the block P of these rows and columns: they become P⁻¹ times the rows, and P⁻¹ in these columns.
    double block[b][b];
    for (int64_t i = 0; i < b; i++)
      for (int64_t j = 0; j < b; j++) {
        block[i][j] = matrix[(k + i) * n + k + j];
        matrix[(k + i) * n + k + j] = i == j ? 1.0 : 0.0;
      }
    for (int64_t j = 0; j < b; j++) {
      // Rows are in the order of pivots, so that none is zero here.
      double* own = matrix + (k + j) * n;
      const double inverse = 1.0 / block[j][j];
      for (int64_t i = 0; i < n; i += kWide) at(own + i) *= inverse;
      for (double& x : block[j]) x *= inverse;
      for (int64_t r = 0; r < b; r++) {
        if (r == j) continue;
        const double factor = -block[r][j];
        add_scaled(matrix + (k + r) * n, factor, own, 0, n);
        for (int64_t i = 0; i < b; i++) block[r][i] += factor * block[j][i];
      }
    }
    __builtin_memcpy(rows, matrix + k * n, b * n * sizeof(double));
    for (int64_t r = 0; r < n; r++) {
      if (r >= k && r < k + b) continue;
      double factors[b], *to = matrix + r * n + k;
      for (int64_t j = 0; j < b; j++) {
        factors[j] = -to[j];
        to[j] = 0.0;
      }
      add_rows(matrix + r * n, factors, rows, b, 0, n);
    }
  }
  for (int64_t k = n - 1; k >= 0; k--)
    if (from[k] != k)
      for (int64_t r = 0; r < n; r++) {
        const double kept = matrix[r * n + k];
        matrix[r * n + k] = matrix[r * n + from[k]];
        matrix[r * n + from[k]] = kept;
      }
  return true;
}

// Find the lower triangle with M = L·Lᵀ (Cholesky), zeros above it. Return false if M is not positive definite.
inline bool triangle(const double* metric, double* lower, int64_t n) {
  for (int64_t i = 0; i < n * n; i++) lower[i] = 0.0;
  for (int64_t i = 0; i < n; i++) {
    double* row = lower + i * n;
    for (int64_t j = 0; j <= i; j++) {
      // Elements that are not found yet are zeros, so whole vectors may be multiplied.
      const double left = metric[i * n + j] - dot(row, lower + j * n, 0, n);
      if (i == j && !(left > 0)) return false;
      row[j] = i == j ? root(left) : left / lower[j * n + j];
    }
  }
  return true;
}

}  // namespace
}  // namespace tersekv
