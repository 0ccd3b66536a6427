// Products with a basis, compiled once per instruction set.
#include "basis_rows.h"
#include "build.h"
#include "inverse.h"

namespace tersekv {
namespace {  // internal to each build

constexpr int kColumns = Lanes::max_groups(kRowTile) >= 2 ? 2 : 1;  // vectors of columns whose sums stay in registers

// out[r][j] = Σ_k x[r][k] · w[k][j] for R vectors and NG·16 columns. The order of each sum does not depend on R and NG.
template <int R, int NG>
void multiply_tile(const float* x, int64_t x_stride, const float* w, int64_t D, int64_t width, float* out,
                   int64_t out_stride) {
  Lanes::F sum[R][NG];
  repeat<R>([&](auto r) TERSEKV_INLINE { repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = Lanes::zero(); }); });
  for (int64_t k = 0; k < D; k++, w += width)
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      const Lanes::F column = Lanes::load(w + g * kLanes);
      repeat<R>([&](auto r)
                    TERSEKV_INLINE { sum[r][g] = Lanes::fma(Lanes::set1(x[r * x_stride + k]), column, sum[r][g]); });
    });
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE { Lanes::store(out + r * out_stride + g * kLanes, sum[r][g]); });
  });
}

// Multiply vectors of one head, of the batch rows of a task.
void multiply_head(const BasisProduct& call, int64_t task) {
  const int64_t R = call.R, D = call.D, width = round_up(D, kLanes), h = task % call.H;
  const int64_t from = task / call.H / call.parts() * call.batch_rows();
  const int64_t to = call.B - from < call.batch_rows() ? call.B : from + call.batch_rows();
  const HeadMatrix& of = call.matrix;
  reset_scratch();
  float *room = scratch(D * width), *channel = scratch(width);
  float *in = scratch(kRowTile * D), *out = scratch(kRowTile * width);
  const float* w = unpack_matrix(of, call.combine, from, h, D, width, room);
  for (int64_t c = 0; c < width; c++) channel[c] = c < D ? channel_of(of, from, h, c) : 1.0f;
  const auto vector = [&](int64_t i) { return ((from + i / R) * call.H + h) * R + i % R; };
  const int64_t all = (to - from) * R, begin = task / call.H % call.parts() * kMostAtOnce;
  const int64_t end = call.parts() > 1 && begin + kMostAtOnce < all ? begin + kMostAtOnce : all;
  for (int64_t first = begin; first < end; first += kRowTile) {
    const int64_t rows = end - first < kRowTile ? end - first : kRowTile;
    for (int64_t r = 0; r < rows; r++) {
      const float* x = call.x + vector(first + r) * call.x_stride;
      for (int64_t c = 0; c < D; c++) in[r * D + c] = call.combine ? x[c] : x[c] * channel[c];
    }
    with_rows(rows, [&](auto n) {
      int64_t c = 0;
      for (; c + kColumns * kLanes <= width; c += kColumns * kLanes)
        multiply_tile<n, kColumns>(in, D, w + c, D, width, out + c, width);
      for (; c < width; c += kLanes) multiply_tile<n, 1>(in, D, w + c, D, width, out + c, width);
    });
    for (int64_t r = 0; r < rows; r++) {
      float* y = call.out + vector(first + r) * call.out_stride;
      for (int64_t c = 0; c < D; c++) y[c] = call.combine ? out[r * width + c] * channel[c] : out[r * width + c];
    }
  }
}

// Components of some vectors of a head, in float64; NaN if the rows have no inverse.
void invert_head(const BasisProduct& call, int64_t task) {
  const int64_t D = call.D, parts = ceil_div(call.R, kSolvedAtOnce), head = task / parts;
  const int64_t first = task % parts * kSolvedAtOnce;
  const int64_t n = call.R - first < kSolvedAtOnce ? call.R - first : kSolvedAtOnce;
  const int64_t b = head / call.H, h = head % call.H;
  const HeadMatrix& of = call.matrix;
  const uint8_t* codes = of.codes + b * of.codes_b + h * of.codes_h;
  reset_scratch();
  auto *rows = scratch_of<double>(D * D), *vector = scratch_of<double>(D), *made = scratch_of<double>(D);
  for (int64_t i = 0; i < D * D; i += kLanes) {
    float entries[kLanes];
    unpack(codes + i * 3 / 4, entries);
    for (int k = 0; k < kLanes; k++) rows[i + k] = static_cast<double>(entries[k]);
  }
  if (!invert(rows, D))
    for (int64_t i = 0; i < D * D; i++) rows[i] = __builtin_nan("");
  for (int64_t i = 0; i < n; i++) {
    float* out = call.out + (head * call.R + first + i) * call.out_stride;
    if (call.units) {
      const double* row = rows + (first + i) * D;
      for (int64_t d = 0; d < D; d++)
        out[d] = static_cast<float>(row[d] / channel_of(of, b, h, first + i)) / call.units[head * D + d];
      continue;
    }
    const float* x = call.x + (head * call.R + first + i) * call.x_stride;
    for (int64_t c = 0; c < D; c++) {
      vector[c] = static_cast<double>(x[c]) / channel_of(of, b, h, c);
      made[c] = 0.0;
    }
    add_rows(made, vector, rows, D, 0, D);
    for (int64_t d = 0; d < D; d++) out[d] = static_cast<float>(made[d]);
  }
}

}  // namespace

void TERSEKV_BUILD(basis_product)(const BasisProduct& call, int64_t task) {
  call.invert ? invert_head(call, task) : multiply_head(call, task);
}

}  // namespace tersekv
