#include "attend.h"
#include "isa.h"
#include "simd_baseline.h"

namespace tersekv {
const Kernels& kernels_baseline() {
  static constexpr Kernels kernels = kernels_of<Baseline>(grid_product_baseline);
  return kernels;
}
}  // namespace tersekv
