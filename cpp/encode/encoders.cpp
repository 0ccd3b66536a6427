// All encoders, compiled once per instruction set.
#include "build.h"
#include "encode_fit.h"
#include "encode_lanes.h"
#include "encode_observed.h"
#include "encode_polar.h"
#include "encode_rotate.h"
#include "encode_rotated.h"
#include "encode_signs.h"

namespace tersekv {

const Encoders& TERSEKV_BUILD(encoders)() {
  static constexpr Encoders encoders = {find_ranges, grid_codes,    lane_codes,      sketch_signs,
                                        polar_block, rotate_dense,  rotate_hadamard, sum_rotated,
                                        remove_mean, weighted_sums, fit_basis,       observed_loss};
  return encoders;
}

}  // namespace tersekv
