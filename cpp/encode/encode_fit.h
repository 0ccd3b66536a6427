// Fits on a prompt: weighted sums over vectors (kernels/weighted_sums.py), and the Karhunen-Loève basis that follows
// from them (fitted_basis in kernels/basis.py).
#pragma once

#include "doubles.h"
#include "encoders.h"
#include "inverse.h"
#include "native_vectors.h"
#include "symmetric.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// Tokens whose products are summed in float32.
constexpr int64_t kSummedAtOnce = 128;
// Rows of a tile of products whose sums fit into registers.
constexpr int kSummedRows = 8;

// Add the sums of one register of channels.
[[gnu::always_inline]] inline void add_floats(double* to, FloatVector sums) {
  RoundedVector half[2];
  std::memcpy(half, &sums, sizeof(half));
  for (const RoundedVector& x : half) {
    DoubleVector total;
    std::memcpy(&total, to, sizeof(total));
    total += __builtin_convertvector(x, DoubleVector);
    std::memcpy(to, &total, sizeof(total));
    to += kVectorDoubles;
  }
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
    for (int64_t i = 0; i < kLanes; i += kVectorFloats) {
      FloatVector sum = {};
      for (int64_t t = 0; t < n; t++) sum += load_vector(x + t * D + from + i) * w[t];
      add_floats(total + i, sum);
    }
    for (int64_t j = from; j < D; j += kVectorFloats)
      for (int64_t i = from; i < from + kLanes; i += kSummedRows) {
        FloatVector sums[kSummedRows] = {};
        for (int64_t t = 0; t < n; t++) {
          const FloatVector weighted = load_vector(x + t * D + j) * w[t];
          repeat<kSummedRows>([&](auto r) TERSEKV_INLINE { sums[r] += weighted * x[t * D + i + r]; });
        }
        repeat<kSummedRows>([&](auto r) TERSEKV_INLINE { add_floats(squares + (i + r) * D + j, sums[r]); });
      }
  }
  for (int64_t i = from; i < from + kLanes; i++)
    for (int64_t j = i + 1; j < D; j++) squares[j * D + i] = squares[i * D + j];
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
