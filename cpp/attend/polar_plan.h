// Data of a task for one side, for the integer kernel of polar coordinates.
#pragma once

#include "polar_kernel.h"
#include "unroll.h"

namespace tersekv {

constexpr int64_t kPolarBlock = 32;       // tokens
constexpr int64_t kPolarSumTokens = 512;  // tokens whose weights and codes fit the L1 cache
constexpr float kPolarOne = 32768.0f;     // 1 in the units of coordinates
constexpr float kPolarLeast = 1e-33f;     // 32768 divided by less may be infinite

struct alignas(64) Shorts {
  int16_t entry[32];
};

// Tables by code are repeated up to 32 entries.
struct PolarPlan {
  const PolarView* view;
  const uint8_t* angles;  // of this head
  const uint16_t* radii;
  int64_t D, b, h, rows;
  Shorts cos, sin;          // level 1
  Shorts cos2, sin2;        // level 2
  Shorts upper[4];          // levels 3 (low two bits) and 4: cos·cos, cos·sin, sin·cos, sin·sin
  Shorts* query;            // keys: [D/8][2 nibbles][rows], each of two pairs of byte rows
  float* unit;              // keys: [rows], value of 1 in a product of queries and weights
  int16_t *weight, *pairs;  // values: [4 rows][kPolarSumTokens], [8][kPolarSumTokens]
};

// Return the plan, or null unless the bits are 4, 2, 2 and 2 and the angles are finite.
const void* make_polar_plan(const PolarSide& side);

}  // namespace tersekv
