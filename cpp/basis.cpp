#include "basis.h"

#include "node.h"

namespace tersekv {
namespace {

constexpr int64_t kAtOnce = 16;
constexpr int kOffset = 32;

// Sixteen entries of 6 bits in twelve bytes.
inline void unpack(const uint8_t* codes, float* entry) {
  for (int i = 0; i < 4; i++, codes += 3, entry += 4) {
    const int word = codes[0] | codes[1] << 8 | codes[2] << 16;
    for (int k = 0; k < 4; k++) entry[k] = static_cast<float>((word >> 6 * k & 63) - kOffset);
  }
}

// y = x·row, in sixteen sums that the compiler keeps in registers.
inline float dot(const float* x, const float* row, int64_t D) {
  float sum[kAtOnce] = {};
  for (int64_t c = 0; c < D; c += kAtOnce)
    for (int64_t i = 0; i < kAtOnce; i++) sum[i] += x[c + i] * row[c + i];
  for (int64_t half = kAtOnce / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) sum[i] += sum[i + half];
  return sum[0];
}

void multiply_head(const BasisProduct& call, const float* x, const uint8_t* codes, const float* channels, float* out) {
  const int64_t R = call.R, D = call.D;
  reset_scratch();
  float *row = scratch(D), *scaled = scratch(R * D);
  for (int64_t r = 0; r < R; r++)
    for (int64_t c = 0; c < D; c++) scaled[r * D + c] = call.combine ? 0.0f : x[r * D + c] * channels[c];
  for (int64_t d = 0; d < D; d++, codes += D * 3 / 4) {
    for (int64_t c = 0; c < D; c += kAtOnce) unpack(codes + c * 3 / 4, row + c);
    for (int64_t r = 0; r < R; r++) {
      float* of = scaled + r * D;
      if (call.combine)
        for (int64_t c = 0; c < D; c++) of[c] += x[r * D + d] * row[c];
      else
        out[r * D + d] = dot(of, row, D);
    }
  }
  for (int64_t r = 0; call.combine && r < R; r++)
    for (int64_t c = 0; c < D; c++) out[r * D + c] = scaled[r * D + c] * channels[c];
}

}  // namespace

void basis_product(const BasisProduct& call) {
  const int64_t vectors = call.R * call.D, bytes = call.D * call.D * 3 / 4;
  for (int64_t i = 0; i < call.B * call.H; i++) {
    const int64_t of = call.shared ? i % call.H : i;
    multiply_head(call, call.x + i * vectors, call.codes + of * bytes, call.channels + of * call.D,
                  call.out + i * vectors);
  }
}

}  // namespace tersekv
