#include "attend.h"
#include "isa.h"
#include "simd_avx2.h"

namespace tersekv {
const Kernels& kernels_avx2() {
  static constexpr Kernels kernels = kernels_of<Avx2>(grid_product_avx2);
  return kernels;
}
}  // namespace tersekv
