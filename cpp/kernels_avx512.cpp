#include "attend.h"
#include "isa.h"
#include "simd_avx512.h"

namespace tersekv {
const Kernels& kernels_avx512() {
  static constexpr Kernels kernels = kernels_of<Avx512>(grid_product_avx512);
  return kernels;
}
}  // namespace tersekv
