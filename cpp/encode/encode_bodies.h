// The bodies of all encoders, compiled once per instruction set.
#pragma once

#include "encode_lanes.h"
#include "encode_polar.h"
#include "encode_rotate.h"
#include "encode_signs.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

constexpr Encoders kEncoders = {find_ranges, grid_codes,   lane_codes,     sketch_signs,
                                polar_block, rotate_dense, rotate_hadamard};

}  // namespace
}  // namespace tersekv
