// Products with a basis, compiled once per instruction set.
#include "basis.h"

#include "build.h"
#include "node.h"

namespace tersekv {
namespace {  // internal to each build

constexpr int kOffset = 32;

using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline void swap(double& a, double& b) {
  const double kept = a;
  a = b;
  b = kept;
}

inline Floats& at(float* x) { return *reinterpret_cast<Floats*>(x); }
inline const Floats& at(const float* x) { return *reinterpret_cast<const Floats*>(x); }

// Unpack sixteen entries of 6 bits from twelve bytes.
inline Floats unpack(const uint8_t* codes) {
  constexpr Ints shift = {0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18};
  const auto word = [&](int i) { return codes[3 * i] | codes[3 * i + 1] << 8 | codes[3 * i + 2] << 16; };
  const int a = word(0), b = word(1), c = word(2), d = word(3);
  const Ints words = {a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
  return __builtin_convertvector((words >> shift & 63) - kOffset, Floats);
}

inline float dot(const float* x, const float* row, int64_t D) {
  Floats sum = {};
  for (int64_t c = 0; c < D; c += kLanes) sum += at(x + c) * at(row + c);
  float out = 0.0f;
  for (int i = 0; i < kLanes; i++) out += sum[i];
  return out;
}

// Multiply one head of one batch row.
void multiply_head(const BasisProduct& call, int64_t head) {
  const int64_t R = call.R, D = call.D, width = round_up(D, kLanes), b = head / call.H, h = head % call.H;
  const HeadMatrix& of = call.matrix;
  const float *x = call.x + head * R * call.x_stride, *dense = of.dense + b * of.dense_b + h * of.dense_h;
  float* out = call.out + head * R * call.out_stride;
  const uint8_t* codes = of.codes + b * of.codes_b + h * of.codes_h;
  reset_scratch();
  float *row = scratch(width), *channel = scratch(width), *scaled = scratch(R * width);
  for (int64_t c = 0; c < width; c++) {
    row[c] = 0.0f;
    channel[c] = c < D && of.codes ? float_at(of.type, of.channels, b * of.channels_b + h * of.channels_h + c) : 1.0f;
  }
  for (int64_t r = 0; r < R; r++)
    for (int64_t c = 0; c < width; c++)
      scaled[r * width + c] = call.combine || c >= D ? 0.0f : x[r * call.x_stride + c] * channel[c];
  for (int64_t d = 0; d < D; d++) {
    if (of.codes)
      for (int64_t c = 0; c < D; c += kLanes) at(row + c) = unpack(codes + (d * D + c) * 3 / 4);
    else
      for (int64_t c = 0; c < D; c++) row[c] = dense[d * D + c];
    for (int64_t r = 0; r < R; r++) {
      float* sums = scaled + r * width;
      if (call.combine)
        for (int64_t c = 0; c < width; c += kLanes) at(sums + c) += x[r * call.x_stride + d] * at(row + c);
      else
        out[r * call.out_stride + d] = dot(sums, row, width);
    }
  }
  for (int64_t r = 0; call.combine && r < R; r++)
    for (int64_t c = 0; c < D; c++) out[r * call.out_stride + c] = scaled[r * width + c] * channel[c];
}

constexpr int64_t kWide = 8;
using Doubles = double __attribute__((vector_size(8 * kWide), aligned(8), may_alias));

inline Doubles& at(double* x) { return *reinterpret_cast<Doubles*>(x); }

// to[first, width) -= factor · from[first, width), whole vectors.
inline void subtract(double* to, double factor, double* from, int64_t first, int64_t width) {
  for (int64_t i = first; i < width; i += kWide) at(to + i) -= factor * at(from + i);
}

// Components of some vectors of a head, by Gauss's elimination with row pivots in float64. Each vector is a column, so
// that its result does not depend on the others.
void invert_head(const BasisProduct& call, int64_t task) {
  const int64_t D = call.D, head = task / call.tasks(), first = task % call.tasks() * kSolvedAtOnce;
  const int64_t n = call.R - first < kSolvedAtOnce ? call.R - first : kSolvedAtOnce, width = round_up(n, kWide);
  const int64_t b = head / call.H, h = head % call.H;
  const HeadMatrix& of = call.matrix;
  const float* x = call.x + (head * call.R + first) * call.x_stride;
  float* out = call.out + (head * call.R + first) * call.out_stride;
  const uint8_t* codes = of.codes + b * of.codes_b + h * of.codes_h;
  reset_scratch();
  auto* matrix = reinterpret_cast<double*>(scratch(2 * D * D));       // [channel, component]
  auto* vectors = reinterpret_cast<double*>(scratch(2 * D * width));  // [channel, vector], then [component, vector]
  for (int64_t d = 0; d < D; d++)
    for (int64_t c = 0; c < D; c += kLanes) {
      const Floats entries = unpack(codes + (d * D + c) * 3 / 4);
      for (int i = 0; i < kLanes; i++) matrix[(c + i) * D + d] = static_cast<double>(entries[i]);
    }
  for (int64_t c = 0; c < D; c++) {
    const double channel = float_at(of.type, of.channels, b * of.channels_b + h * of.channels_h + c);
    for (int64_t i = 0; i < width; i++)
      vectors[c * width + i] = i < n ? static_cast<double>(x[i * call.x_stride + c]) / channel : 0.0;
  }
  for (int64_t k = 0; k < D; k++) {
    int64_t pivot = k;
    for (int64_t r = k + 1; r < D; r++)
      if (__builtin_fabs(matrix[r * D + k]) > __builtin_fabs(matrix[pivot * D + k])) pivot = r;
    if (pivot != k) {
      for (int64_t d = k; d < D; d++) swap(matrix[k * D + d], matrix[pivot * D + d]);
      for (int64_t i = 0; i < width; i++) swap(vectors[k * width + i], vectors[pivot * width + i]);
    }
    const double inverse = 1.0 / matrix[k * D + k];
    for (int64_t r = k + 1; r < D; r++) {
      const double factor = matrix[r * D + k] * inverse;
      if (factor == 0.0) continue;
      subtract(matrix + r * D, factor, matrix + k * D, k / kWide * kWide, D);
      subtract(vectors + r * width, factor, vectors + k * width, 0, width);
    }
  }
  for (int64_t k = D - 1; k >= 0; k--) {
    double* own = vectors + k * width;
    const double inverse = 1.0 / matrix[k * D + k];
    for (int64_t i = 0; i < width; i += kWide) at(own + i) *= inverse;
    for (int64_t r = 0; r < k; r++) subtract(vectors + r * width, matrix[r * D + k], own, 0, width);
  }
  for (int64_t i = 0; i < n; i++)
    for (int64_t d = 0; d < D; d++) out[i * call.out_stride + d] = static_cast<float>(vectors[d * width + i]);
}

}  // namespace

void TERSEKV_BUILD(basis_product)(const BasisProduct& call, int64_t task) {
  call.invert ? invert_head(call, task) : multiply_head(call, task);
}

}  // namespace tersekv
