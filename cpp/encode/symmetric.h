// Eigenvectors of a symmetric matrix.
#pragma once

#include "doubles.h"
#include "native_vectors.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// Elements of a matrix with a largest element of 1 that count as zero.
constexpr double kNone = 1e-15;

// A symmetric matrix [n, n] of elements up to 1 while its eigenvectors are searched; n is a multiple of 16.
// Householder's reduction to a tridiagonal matrix, then implicit QL steps (Golub & Van Loan, Matrix Computations,
// §8.3). Eigenvectors are turned in float32, because their entries are rounded to 6 bits.
struct Symmetric {
  int64_t n;
  double* a;         // [n, n]; overwritten
  float* vectors;    // [n, n]: rows, the eigenvectors at the end
  double* values;    // [n]: the diagonal, the eigenvalues at the end
  double* beside;    // [n]: the elements beside the diagonal
  float *cos, *sin;  // [n]: of the rotations of a step

  explicit Symmetric(int64_t n)
      : n(n),
        a(scratch_of<double>(n * n)),
        vectors(scratch(n * n)),
        values(scratch_of<double>(n)),
        beside(scratch_of<double>(n)),
        cos(scratch(n)),
        sin(scratch(n)) {}

  // Reduce columns one by one by reflections I - factor·v·vᵀ.
  void reduce() {
    auto *product = scratch_of<double>(n), *v = scratch_of<double>(n);
    float *mirrors = scratch(n * n), *factors = scratch(n);  // row k: the vector of reflection k, with zeros before it
    for (int64_t k = 0; k + 2 < n; k++) {
      const int64_t first = (k + 1) / kWide * kWide;
      double* row = a + k * n;
      for (int64_t i = 0; i < n; i++) v[i] = i > k ? row[i] : 0.0;
      const double head = v[k + 1];
      v[k + 1] = 0.0;
      const double rest = dot(v, v, first, n);
      values[k] = row[k];
      beside[k] = head;
      factors[k] = 0.0f;
      if (!(rest > kNone * kNone)) continue;
      const double length = root(rest + head * head);
      beside[k] = head > 0 ? -length : length;
      v[k + 1] = head - beside[k];
      const double factor = 2.0 / (rest + v[k + 1] * v[k + 1]), unit = 1.0 / length;
      factors[k] = static_cast<float>(factor * length * length);
      for (int64_t i = 0; i < n; i++) mirrors[k * n + i] = static_cast<float>(v[i] * unit);
      for (int64_t i = 0; i < n; i++) product[i] = 0.0;
      add_rows(product, v + k + 1, a + (k + 1) * n, n - k - 1, first, n);
      const double share = -0.5 * factor * factor * dot(product, v, first, n);
      for (int64_t i = first; i < n; i += kWide) at(product + i) = factor * at(product + i) + share * at(v + i);
      for (int64_t r = k + 1; r < n; r++) {
        const double own = v[r], other = product[r];
        double* to = a + r * n;
        for (int64_t i = first; i < n; i += kWide) at(to + i) -= own * at(product + i) + other * at(v + i);
      }
    }
    for (int64_t k = n - 2; k < n; k++) {
      values[k] = a[k * n + k];
      beside[k] = k + 1 < n ? a[k * n + k + 1] : 0.0;
    }
    for (int64_t i = 0; i < n * n; i++) vectors[i] = i % (n + 1) ? 0.0f : 1.0f;
    for (int64_t k = n - 3; k >= 0; k--) {
      if (factors[k] == 0.0f) continue;
      const int64_t first = (k + 1) / kLanes * kLanes;
      const float* mirror = mirrors + k * n;
      for (int64_t r = k + 1; r < n; r++) {
        float* to = vectors + r * n;
        Floats sums = {};
        for (int64_t i = first; i < n; i += kLanes) sums += floats(to + i) * floats(mirror + i);
        float sum = 0.0f;
        for (int64_t i = 0; i < kLanes; i++) sum += sums[i];
        for (int64_t i = first; i < n; i += kLanes) floats(to + i) -= factors[k] * sum * floats(mirror + i);
      }
    }
  }

  // Rotate rows `low` to `high` of the vectors, the last two first.
  void rotate(int64_t low, int64_t high) {
    int64_t column = 0;
    for (; column + 4 * kVectorFloats <= n; column += 4 * kVectorFloats) rotate_columns<4>(low, high, column);
    for (; column < n; column += kVectorFloats) rotate_columns<1>(low, high, column);
  }

  template <int W>
  void rotate_columns(int64_t low, int64_t high, int64_t column) {
    FloatVector kept[W];
    float* row = vectors + high * n + column;
    repeat<W>([&](auto j) TERSEKV_INLINE { kept[j] = load_vector(row + j * kVectorFloats); });
    for (int64_t i = high - 1; i >= low; i--, row -= n)
      repeat<W>([&](auto j) TERSEKV_INLINE {
        const FloatVector upper = load_vector(row - n + j * kVectorFloats);
        store_vector(row + j * kVectorFloats, sin[i] * upper + cos[i] * kept[j]);
        kept[j] = cos[i] * upper - sin[i] * kept[j];
      });
    repeat<W>([&](auto j) TERSEKV_INLINE { store_vector(row + j * kVectorFloats, kept[j]); });
  }

  // Find eigenvalues and eigenvectors of the tridiagonal matrix. Return false if that takes too many steps.
  bool diagonalise() {
    constexpr double kSmall = 1e-9;  // for entries that are rounded to 6 bits
    constexpr int kMostSteps = 60;
    for (int64_t low = 0; low < n; low++)
      for (int step = 0;; step++) {
        int64_t high = low;
        while (high + 1 < n && __builtin_fabs(beside[high]) >
                                   kSmall * (__builtin_fabs(values[high]) + __builtin_fabs(values[high + 1])) + kNone)
          high++;
        if (high == low) break;
        if (step == kMostSteps) return false;
        const double half = (values[low + 1] - values[low]) / (2.0 * beside[low]), length = root(half * half + 1.0);
        const double shift = values[low] - beside[low] / (half + (half < 0 ? -length : length));
        // The bulge is chased from the end to the beginning.
        double c = 1.0, s = 1.0, moved = 0.0, g = values[high] - shift;
        int64_t i = high - 1;
        for (; i >= low; i--) {
          const double f = s * beside[i], b = c * beside[i], r = root(f * f + g * g);
          beside[i + 1] = r;
          if (r == 0.0) break;
          const double inverse = 1.0 / r;
          s = f * inverse;
          c = g * inverse;
          sin[i] = static_cast<float>(s);
          cos[i] = static_cast<float>(c);
          const double diagonal = values[i + 1] - moved, turned = (values[i] - diagonal) * s + 2.0 * c * b;
          moved = s * turned;
          values[i + 1] = diagonal + moved;
          g = c * turned - b;
        }
        rotate(i + 1, high);
        values[i + 1] -= moved;
        if (i < low) beside[low] = g;
        beside[high] = 0.0;
      }
    return true;
  }
};

}  // namespace
}  // namespace tersekv
