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
  static const Kernels kernels = [] {
    Kernels own =
        kernels_of<Lanes>(TERSEKV_BUILD(grid_product), TERSEKV_BUILD(encode_trellis), TERSEKV_BUILD(basis_product));
#if TERSEKV_avx2 || TERSEKV_avx512
    own.trellis = &TERSEKV_BUILD(trellis_kernel)();
#endif
    return own;
  }();
  return kernels;
}

}  // namespace tersekv
