#include "attend.h"
#include "basis.h"
#include "bytes_baseline.h"
#include "encode_trellis.h"
#include "isa.h"

namespace tersekv {
const Kernels& kernels_baseline() {
  static constexpr Kernels kernels =
      kernels_of<BaselineBytes>(grid_product_baseline, encode_trellis_baseline, basis_product_baseline);
  return kernels;
}
}  // namespace tersekv
