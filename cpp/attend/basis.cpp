// Products with a basis, compiled once per instruction set.
#include "basis.h"

#include "build.h"
#include "node.h"

namespace tersekv {
namespace {  // internal to each build

constexpr int kOffset = 32;

using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

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

}  // namespace

void TERSEKV_BUILD(basis_product)(const BasisProduct& call, int64_t head) { multiply_head(call, head); }

}  // namespace tersekv
