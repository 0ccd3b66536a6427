// The kernels of the baseline, of AVX2 and of AVX-512, for each of which this file is compiled. isa.cpp makes those of
// their extensions.
#include "attend.h"
#include "basis.h"
#include "build.h"
#include "encode_trellis.h"
#include "isa.h"
#include "trellis_kernel.h"

namespace tersekv {

const Kernels& TERSEKV_BUILD(kernels)() {
#if TERSEKV_avx2
  static const Kernels kernels = [] {
    Kernels own = kernels_of<Lanes>(grid_product_avx2, encode_trellis_avx2, basis_product_avx2);
    own.trellis = &trellis_kernel_avx2();
    return own;
  }();
#else
  static constexpr Kernels kernels =
      kernels_of<Lanes>(TERSEKV_BUILD(grid_product), TERSEKV_BUILD(encode_trellis), TERSEKV_BUILD(basis_product));
#endif
  return kernels;
}

}  // namespace tersekv
