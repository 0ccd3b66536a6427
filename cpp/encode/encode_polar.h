// Encoding of polar coordinates. No angle is computed: two products tell on which side of a
// boundary a vector is.
#pragma once

#include "encoders.h"
#include "native_vectors.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// Return the codes of directions (x, y) on a circle: the number of boundaries between the seam and
// the direction.
inline IntVector circle_codes(FloatVector x, FloatVector y, const Boundaries& level) {
  const IntVector nothing = (x == 0.0f) & (y == 0.0f);  // the angle of a zero vector is 0
  x += __builtin_convertvector(-nothing, FloatVector);
  const IntVector beyond = y * level.seam_cos < x * level.seam_sin;  // more than half the circle from the seam
  IntVector code = {};
  for (int64_t i = 0; i < level.near; i++) code -= beyond | (y * level.cos[i] > x * level.sin[i]);
  for (int64_t i = level.near; i < level.count; i++) code -= beyond & (y * level.cos[i] > x * level.sin[i]);
  return code;
}

// Return the codes of radii x, y >= 0, that is angles up to a quarter.
inline IntVector quarter_codes(FloatVector x, FloatVector y, const Boundaries& level) {
  IntVector code = {};
  for (int64_t i = 0; i < level.count; i++) code -= y * level.cos[i] > x * level.sin[i];
  return code;
}

void polar_block(const EncodePolar& call, int64_t block) {
  reset_scratch();
  const int64_t t = call.t, lanes = round_up(t, kLanes);
  float* radii = scratch(call.D * lanes);
  auto* codes = scratch_of<int32_t>(lanes);
  transpose_vectors(call.x + block * t * call.D, call.D, t, call.D, lanes, radii);
  uint8_t* out = call.angles + block * call.bytes * t;
  std::memset(out, 0, call.bytes * t);
  int64_t bit = 0, count = call.D;
  for (int64_t level = 0; level < call.levels; level++) {
    const Boundaries& of = call.boundaries[block / call.blocks * call.levels + level];
    count /= 2;
    for (int64_t j = 0; j < count; j++, bit += call.bits[level]) {
      const float *first = radii + 2 * j * lanes, *second = first + lanes;
      for (int64_t i = 0; i < lanes; i += kVectorFloats) {
        const FloatVector x = load_vector(first + i), y = load_vector(second + i);
        store_vector(codes + i, level == 0 ? circle_codes(x, y, of) : quarter_codes(x, y, of));
      }
      uint8_t* byte = out + bit / 8 * t;
      const int64_t up = bit % 8;
      for (int64_t i = 0; i < t; i++) byte[i] |= static_cast<uint8_t>(codes[i] << up);
      if (up + call.bits[level] > 8)
        for (int64_t i = 0; i < t; i++) byte[t + i] |= static_cast<uint8_t>(codes[i] >> (8 - up));
      float* radius = radii + j * lanes;
      for (int64_t i = 0; i < lanes; i++) {
        const double x = first[i], y = second[i];
        radius[i] = static_cast<float>(__builtin_sqrt(x * x + y * y));
      }
    }
  }
  for (int64_t j = 0; j < count; j++)
    std::memcpy(call.radii + (block * count + j) * t, radii + j * lanes, t * sizeof(float));
}

}  // namespace
}  // namespace tersekv
