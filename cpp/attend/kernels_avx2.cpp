#include "attend.h"
#include "basis.h"
#include "bytes_avx2.h"
#include "encode_trellis.h"
#include "isa.h"

namespace tersekv {
const Kernels& kernels_avx2() {
  static constexpr Kernels kernels = kernels_of<Avx2Bytes>(grid_product_avx2, encode_trellis_avx2, basis_product_avx2);
  return kernels;
}
}  // namespace tersekv
