#include "attend.h"
#include "basis.h"
#include "bytes_avx512.h"
#include "encode_trellis.h"
#include "isa.h"

namespace tersekv {
const Kernels& kernels_avx512() {
  static constexpr Kernels kernels =
      kernels_of<Avx512Bytes>(grid_product_avx512, encode_trellis_avx512, basis_product_avx512);
  return kernels;
}
}  // namespace tersekv
