// Encoding of trellis codes; see kernels/trellis.py for the contract.
#pragma once

#include <array>

#include "contract.h"

namespace tersekv {

// Constants of kernels/trellis.py and trellis_search.py.
constexpr int64_t kTrellisWarmUpBits = 48, kTrellisLookAheadBits = 40, kTrellisRenormalise = 16;
constexpr float kTrellisTypicalCost = 3.0f, kTrellisMargin = 4096.0f;
constexpr int kTrellisLargest = 32767;
constexpr int kTrellisLeastNear = 3;  // bits of components that take near entries only, and of those after them
constexpr int kTrellisBins = 63, kTrellisLeastFactor = 2048;
constexpr int kGainSteps = 16, kUnitGain = 144;  // steps per factor of two, and the code of gain 1

constexpr int64_t kTrellisTask = 16;  // vectors that one task encodes

// Near entries of a group before a component of `next` bits, see near_count in kernels/trellis_search.py.
constexpr int near_count(int next) { return next < 6 ? 4 : 1 << (next - 3); }

// Near entries of one bin. As many marks follow them, see trellis_search.h.
constexpr int near_lanes(int next) { return near_count(next) * (kTrellisStates >> next); }

// A component with at least one bit.
struct Component {
  const int16_t* entries;  // scaled codebook, states in reverse
  const int16_t* near;     // near entries and marks of each bin; null where all entries are taken
  int bits, next;          // next: bits of the component after it in the ring
  int brought;             // bits of the components before it
  int factor;              // of its entries
  int place;               // of its choices
  int64_t d;
};

// The components of a row that have bits, and of each one what vectors of floats are computed with. There are zeros
// after these up to a multiple of 16.
struct TrellisRow {
  const Component* components = nullptr;
  int64_t count = 0;
  int64_t choices = 0;           // of a vector
  const float* unit = nullptr;   // factor of a component in units of costs
  const float* limit = nullptr;  // largest absolute value in these
  const float* per_bin = nullptr;
  const float* weight = nullptr;
  const float* reach = nullptr;      // see first_gains in kernels/trellis.py
  const int32_t* tables = nullptr;   // place of the component's codebook among all entries
  const uint64_t* newest = nullptr;  // newest bits of eight windows each
};

// n vectors of D components in each of R rows. Strides count elements.
struct EncodeTrellis {
  int64_t R = 0, n = 0, D = 0;
  const float* y = nullptr;  // [R, n, D]: components, or vectors if there is an inverse
  int64_t y_r = 0, y_n = 0, y_d = 0;
  const float* weight = nullptr;   // [R, D], contiguous
  const uint8_t* bits = nullptr;   // [R, D], contiguous
  const float* entries = nullptr;  // tables [9, 256], in the order of windows
  uint8_t* windows = nullptr;      // [R, n, D], contiguous; null where vectors are packed
  // Vectors x become components (x - shift)·inverse.
  const float* inverse = nullptr;  // [K, D, columns], contiguous, or null
  const int64_t* of = nullptr;     // [R], the inverse of each row
  const float* shift = nullptr;    // [R, D], contiguous
  int64_t columns = 0;             // D, rounded up to a multiple of 16
  // Packed vectors: a gain is fitted for each one, and its windows are written as a stream.
  const int64_t* steps = nullptr;  // [tries], gains beyond that of least squares with which codes are searched again
  int64_t tries = 0;
  const float* enough = nullptr;  // [R], error at a gain of 1 below which no other gain is tried
  int64_t words = 0;
  uint16_t* stream = nullptr;  // [R, n, words], contiguous
  uint8_t* gain = nullptr;     // [R, n], contiguous
  float* length = nullptr;     // [R, n], contiguous: root mean square of components, or null
  // Set by encode_trellis.
  const float* gains = nullptr;      // [256], by code
  const double* bounds = nullptr;    // [16], gains from 1 to 2 between two codes
  const TrellisRow* rows = nullptr;  // [R]
};

// Gains float32 [256] by code, and gains from 1 to 2 between two codes, float64 [16].
const float* trellis_gains();
const double* trellis_gain_bounds();

// Encode vectors [first, last) of a row, at most kTrellisTask.
void encode_trellis_baseline(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last);
void encode_trellis_avx2(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last);
void encode_trellis_avx512(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last);

// Encode with the instruction set in use, on up to `threads` threads.
void encode_trellis(EncodeTrellis call, int threads);

// The bits of each byte in reverse order.
inline constexpr auto kReversed = [] {
  std::array<uint8_t, kTrellisStates> out{};
  for (int x = 0; x < kTrellisStates; x++)
    for (int i = 0; i < 8; i++) out[x] = static_cast<uint8_t>(out[x] | (x >> i & 1) << (7 - i));
  return out;
}();

}  // namespace tersekv
