// Encoding of trellis codes; see kernels/trellis.py for the contract.
#pragma once

#include "contract.h"

namespace tersekv {

constexpr int64_t kTrellisWarmUp = 24;
constexpr float kTrellisTie = 1.00001f;  // costs up to this factor over the least one count as equal to it

// n vectors of D components in each of R rows. Strides count elements.
struct EncodeTrellis {
  int64_t R = 0, n = 0, D = 0;
  const float* y = nullptr;  // [R, n, D]
  int64_t y_r = 0, y_n = 0, y_d = 0;
  const float* weight = nullptr;  // [R, D], contiguous
  const uint8_t* bits = nullptr;  // [R, D], contiguous
  // [9, 256], contiguous; reordered to the kernels' order of states before they run
  const float* tables = nullptr;
  uint8_t* windows = nullptr;  // [R, n, D], contiguous; null where vectors are packed
  // Packed vectors: a gain is fitted for each one, and its windows are written as a stream.
  const float* entries = nullptr;  // tables, in the order of windows
  const float* gains = nullptr;    // [256], by code
  const int64_t* steps = nullptr;  // [tries], gains beyond that of least squares with which codes are searched again
  int64_t tries = 0;
  int64_t words = 0;
  uint16_t* stream = nullptr;  // [R, n, words], contiguous
  uint8_t* gain = nullptr;     // [R, n], contiguous
};

constexpr int kGainSteps = 16, kUnitGain = 144;  // steps per factor of two, and the code of gain 1

// Gains float32 [256] by code.
const float* trellis_gains();

// Encode vectors [first, last) of a row.
void encode_trellis_baseline(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last);
void encode_trellis_avx2(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last);
void encode_trellis_avx512(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last);

// Encode with the instruction set in use, on up to `threads` threads.
void encode_trellis(EncodeTrellis call, int threads);

// Return the bits of a window in reverse order.
static constexpr int reversed_byte(int x) {
  int out = 0;
  for (int i = 0; i < 8; i++) out |= (x >> i & 1) << (7 - i);
  return out;
}

}  // namespace tersekv
