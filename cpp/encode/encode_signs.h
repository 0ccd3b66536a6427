// Encoding of sign sketches. Sums are computed in float32, and again in float64 if rounding could
// have changed a sign.
#pragma once

#include "encoders.h"
#include "native_vectors.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

constexpr int kSketchRows = 4;                       // sketch rows that are summed at a time
constexpr int64_t kSketchLanes = 2 * kVectorFloats;  // tokens of a tile
constexpr float kLeastProduct = 1e-30f;              // products below it lose bits
constexpr float kLostSquares = 1e-35f;               // squares that underflow are in all less than it

// Compute the products of four rows of the sketch [4, D] with the tile's tokens, rows
// [D, kSketchLanes].
void four_sums(const float* sketch, int64_t D, int64_t count, const float* rows, float* sums) {
  FloatVector sum[kSketchRows][2] = {};
  const float* at[kSketchRows];
  for (int r = 0; r < kSketchRows; r++) at[r] = sketch + (r < count ? r : 0) * D;
  for (int64_t d = 0; d < D; d++) {
    const FloatVector low = load_vector(rows + d * kSketchLanes),
                      high = load_vector(rows + d * kSketchLanes + kVectorFloats);
    for (int r = 0; r < kSketchRows; r++) {
      sum[r][0] += low * at[r][d];
      sum[r][1] += high * at[r][d];
    }
  }
  for (int r = 0; r < kSketchRows; r++) {
    store_vector(sums + r * kSketchLanes, sum[r][0]);
    store_vector(sums + r * kSketchLanes + kVectorFloats, sum[r][1]);
  }
}

bool positive(const float* x, const float* row, int64_t D) {
  double sum = 0.0;
  for (int64_t d = 0; d < D; d++) sum += static_cast<double>(x[d]) * static_cast<double>(row[d]);
  return sum >= 0.0;
}

// Encode tokens [first, first + n) of a block.
void encode_sign_tile(const EncodeSigns& call, int64_t block, int64_t first, int64_t n, float* rows, float* sums) {
  const int64_t D = call.D;
  const float* x = call.x + (block * call.t + first) * D;
  transpose_vectors(x, D, n, D, kSketchLanes, rows);
  float unsure[kSketchLanes] = {};
  int32_t zero[kSketchLanes];  // sums of a zero vector are 0, and surely so
  for (int64_t i = 0; i < kSketchLanes; i++) zero[i] = -1;
  for (int64_t d = 0; d < D; d++)
    for (int64_t i = 0; i < kSketchLanes; i++) {
      unsure[i] += rows[d * kSketchLanes + i] * rows[d * kSketchLanes + i];
      zero[i] &= rows[d * kSketchLanes + i] == 0.0f ? -1 : 0;
    }
  for (int64_t i = 0; i < kSketchLanes; i++)
    unsure[i] = __builtin_sqrtf(unsure[i] + kLostSquares) * call.unsure + kLeastProduct;
  for (int64_t m = 0; m < call.M; m += 8) {
    const int64_t count = call.M - m < 8 ? call.M - m : 8;
    for (int64_t r = 0; r < count; r += kSketchRows)
      four_sums(call.sketch + (m + r) * D, D, count - r, rows, sums + r * kSketchLanes);
    int32_t byte[kSketchLanes] = {}, again[kSketchLanes] = {};
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = 0; i < kSketchLanes; i++) {
        const float sum = sums[r * kSketchLanes + i], size = __builtin_fabsf(sum);
        byte[i] |= (sum >= 0.0f ? 1 : 0) << r;
        again[i] |= ((size > unsure[i]) & (size < __builtin_inff()) ? 0 : 1) << r;
      }
    uint8_t* out = call.out + (block * ceil_div(call.M, 8) + m / 8) * call.t + first;
    for (int64_t i = 0; i < n; i++) {
      for (int32_t left = again[i] & ~zero[i]; left; left &= left - 1) {
        const int r = __builtin_ctz(left);
        byte[i] = (byte[i] & ~(1 << r)) | (positive(x + i * D, call.sketch + (m + r) * D, D) ? 1 : 0) << r;
      }
      out[i] = static_cast<uint8_t>(byte[i]);
    }
  }
}

void sketch_signs(const EncodeSigns& call, int64_t block) {
  reset_scratch();
  float *rows = scratch(call.D * kSketchLanes), *sums = scratch(8 * kSketchLanes);
  for (int64_t first = 0; first < call.t; first += kSketchLanes)
    encode_sign_tile(call, block, first, call.t - first < kSketchLanes ? call.t - first : kSketchLanes, rows, sums);
}

}  // namespace
}  // namespace tersekv
