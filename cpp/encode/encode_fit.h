// Fits on a prompt: weighted sums over vectors (kernels/weighted_sums.py), and the Karhunen-Loève basis that follows
// from them (fitted_basis in kernels/basis.py).
#pragma once

#include "encoders.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

constexpr int64_t kWide = 8;
using Doubles = double __attribute__((vector_size(8 * kWide), aligned(8), may_alias));
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using HalfFloats = float __attribute__((vector_size(4 * kWide), aligned(4), may_alias));

inline Floats& floats(float* x) { return *reinterpret_cast<Floats*>(x); }
inline Floats floats(const float* x) { return *reinterpret_cast<const Floats*>(x); }
inline Doubles& at(double* x) { return *reinterpret_cast<Doubles*>(x); }
inline Doubles at(const double* x) { return *reinterpret_cast<const Doubles*>(x); }

// Tokens whose products are summed in float32.
constexpr int64_t kSummedAtOnce = 128;
// Rows of a tile of products whose sums fit into registers.
#if defined(__AVX512F__)
constexpr int kSummedRows = 8;
#else
constexpr int kSummedRows = 4;
#endif

// to[0, 16) += sums.
[[gnu::always_inline]] inline void add_floats(double* to, Floats sums) {
  HalfFloats half[kLanes / kWide];
  __builtin_memcpy(half, &sums, sizeof(half));
  for (int64_t i = 0; i < kLanes / kWide; i++) at(to + i * kWide) += __builtin_convertvector(half[i], Doubles);
}

// The sums of 16 channels of one row with themselves and the channels after them.
void weighted_sums(const WeightedSums& call, int64_t task) {
  const int64_t D = call.D, stripes = D / kLanes, row = task / stripes, from = task % stripes * kLanes;
  const float *vectors = call.x + row * call.T * D, *weights = call.weights + row * call.T;
  double *total = call.total + row * D + from, *squares = call.squares + row * D * D;
  for (int64_t i = 0; i < kLanes; i++) total[i] = 0.0;
  for (int64_t i = from; i < from + kLanes; i++)
    for (int64_t j = from; j < D; j++) squares[i * D + j] = 0.0;
  for (int64_t first = 0; first < call.T; first += kSummedAtOnce) {
    const int64_t n = call.T - first < kSummedAtOnce ? call.T - first : kSummedAtOnce;
    const float *x = vectors + first * D, *w = weights + first;
    Floats whole = {};
    for (int64_t t = 0; t < n; t++) whole += floats(x + t * D + from) * w[t];
    add_floats(total, whole);
    for (int64_t j = from; j < D; j += kLanes)
      for (int64_t i = from; i < from + kLanes; i += kSummedRows) {
        Floats sums[kSummedRows] = {};
        for (int64_t t = 0; t < n; t++) {
          const Floats weighted = floats(x + t * D + j) * w[t];
          repeat<kSummedRows>([&](auto r) TERSEKV_INLINE { sums[r] += weighted * x[t * D + i + r]; });
        }
        repeat<kSummedRows>([&](auto r) TERSEKV_INLINE { add_floats(squares + (i + r) * D + j, sums[r]); });
      }
  }
  for (int64_t i = from; i < from + kLanes; i++)
    for (int64_t j = i + 1; j < D; j++) squares[j * D + i] = squares[i * D + j];
}

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

inline void exchange(double* a, double* b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const double kept = a[i];
    a[i] = b[i];
    b[i] = kept;
  }
}

inline double root(double x) { return __builtin_sqrt(x); }

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
    for (; column + 4 * kLanes <= n; column += 4 * kLanes) rotate_columns<4>(low, high, column);
    for (; column < n; column += kLanes) rotate_columns<1>(low, high, column);
  }

  template <int W>
  void rotate_columns(int64_t low, int64_t high, int64_t column) {
    Floats kept[W];
    float* row = vectors + high * n + column;
    repeat<W>([&](auto j) TERSEKV_INLINE { kept[j] = floats(row + j * kLanes); });
    for (int64_t i = high - 1; i >= low; i--, row -= n)
      repeat<W>([&](auto j) TERSEKV_INLINE {
        const Floats upper = floats(row - n + j * kLanes);
        floats(row + j * kLanes) = sin[i] * upper + cos[i] * kept[j];
        kept[j] = cos[i] * upper - sin[i] * kept[j];
      });
    repeat<W>([&](auto j) TERSEKV_INLINE { floats(row + j * kLanes) = kept[j]; });
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

// Find the inverse of entries [n, n]. Return false where rounding made rows dependent, see quantised_rows.
inline bool invert_entries(const double* entries, double* inverse, int64_t n, double most_condition) {
  __builtin_memcpy(inverse, entries, n * n * sizeof(double));
  if (!invert(inverse, n)) return false;
  const double condition = root(dot(entries, entries, 0, n * n)) * root(dot(inverse, inverse, 0, n * n));
  return condition <= most_condition * root(static_cast<double>(n));
}

// The basis of one head. With M = F·Fᵀ, rows are F⁻ᵀ·u for the eigenvectors u of Fᵀ·C·F.
void fit_basis(const FitBasis& call, int64_t head) {
  constexpr double kLargest = 31.0, kLeast = 1e-9;
  reset_scratch();
  const int64_t D = call.D;
  const bool whole = call.whole;
  const double *covariance = call.covariance + head * D * D, *metric = call.metric + head * D * (whole ? D : 1),
               *channel = call.channels + head * D;
  auto *scale = scratch_of<double>(D), *entries = scratch_of<double>(D * D), *product = scratch_of<double>(D);
  double* factor = whole ? scratch_of<double>(D * D) : nullptr;
  auto* order = scratch_of<int64_t>(D);
  Symmetric form(D);
  bool found = true;
  if (whole) {
    found = triangle(metric, factor, D);
    for (int64_t i = 0; i < D; i++) {  // C·F
      for (int64_t d = 0; d < D; d++) entries[i * D + d] = 0.0;
      add_rows(entries + i * D, covariance + i * D, factor, D, 0, D);
    }
    for (int64_t i = 0; i < D; i++) {
      for (int64_t j = 0; j < D; j++) {
        scale[j] = factor[j * D + i];
        form.a[i * D + j] = 0.0;
      }
      add_rows(form.a + i * D, scale, entries, D, 0, D);
    }
    found = found && invert(factor, D);
  } else {
    double largest = 0.0;
    for (int64_t c = 0; c < D; c++) largest = metric[c] > largest ? metric[c] : largest;
    for (int64_t c = 0; c < D; c++) scale[c] = root(metric[c] > kLeast * largest ? metric[c] : kLeast * largest);
    for (int64_t i = 0; i < D; i++)
      for (int64_t j = 0; j < D; j++) form.a[i * D + j] = scale[i] * covariance[i * D + j] * scale[j];
  }
  double most = 0.0;
  for (int64_t i = 0; i < D * D; i++) most = __builtin_fabs(form.a[i]) > most ? __builtin_fabs(form.a[i]) : most;
  if (most > 0)
    for (int64_t i = 0; i < D * D; i++) form.a[i] /= most;
  form.reduce();
  found = form.diagonalise() && found;
  for (int64_t i = 0; i < D; i++) {  // the largest eigenvalue first
    int64_t place = i;
    for (; place > 0 && form.values[order[place - 1]] < form.values[i]; place--) order[place] = order[place - 1];
    order[place] = i;
  }
  for (int64_t d = 0; d < D; d++) {
    const float* vector = form.vectors + order[d] * D;
    double *row = entries + d * D, longest = 1e-300;
    for (int64_t c = 0; c < D; c++) row[c] = product[c] = static_cast<double>(vector[c]);
    if (whole) {
      for (int64_t c = 0; c < D; c++) row[c] = 0.0;
      add_rows(row, product, factor, D, 0, D);
    }
    for (int64_t c = 0; c < D; c++) {
      row[c] /= whole ? channel[c] : scale[c] * channel[c];
      const double size = __builtin_fabs(row[c]);
      longest = size > longest ? size : longest;
    }
    for (int64_t c = 0; c < D; c++) row[c] = __builtin_nearbyint(row[c] / longest * kLargest);
  }
  double* inverse = form.a;
  if (!(found && invert_entries(entries, inverse, D, call.most_condition)))
    for (int64_t i = 0; i < D * D; i++) {
      entries[i] = i % (D + 1) ? 0.0 : kLargest;
      inverse[i] = i % (D + 1) ? 0.0 : 1.0 / kLargest;
    }
  uint8_t* out = call.basis + head * D * D * 3 / 4;
  for (int64_t i = 0; i < D * D; i += 4) {
    uint32_t word = 0;
    for (int64_t j = 0; j < 4; j++) word |= static_cast<uint32_t>(entries[i + j] + kLargest + 1) << 6 * j;
    for (int64_t j = 0; j < 3; j++) *out++ = static_cast<uint8_t>(word >> 8 * j);
  }
  // Components have the variances of inverseᵀ·covariance·inverse, channels divided out.
  double *variance = call.variance + head * D, *weight = call.weight + head * D;
  for (int64_t d = 0; d < D; d++) variance[d] = weight[d] = 0.0;
  for (int64_t i = 0; i < D; i++) {
    for (int64_t d = 0; d < D; d++) product[d] = 0.0;
    for (int64_t j = 0; j < D; j++) scale[j] = covariance[i * D + j] / (channel[i] * channel[j]);
    add_rows(product, scale, inverse, D, 0, D);
    for (int64_t d = 0; d < D; d += kWide) at(variance + d) += at(inverse + i * D + d) * at(product + d);
  }
  for (int64_t d = 0; d < D; d++) {
    variance[d] = variance[d] > 0 ? variance[d] : 0.0;
    double* row = scale;
    for (int64_t c = 0; c < D; c++) {
      row[c] = entries[d * D + c] * channel[c];
      product[c] = whole ? 0.0 : metric[c] * row[c];
    }
    if (whole) add_rows(product, row, metric, D, 0, D);
    weight[d] = dot(product, row, 0, D);
  }
}

}  // namespace
}  // namespace tersekv
