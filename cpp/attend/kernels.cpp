// The kernels of one instruction set; CMakeLists.txt compiles this file once for each.
#include "attend.h"
#include "basis.h"
#include "build.h"
#include "encode_trellis.h"
#include "isa.h"
#include "row_product.h"
#include "trellis_kernel.h"

namespace tersekv {

const Kernels& TERSEKV_BUILD(kernels)() {
#if TERSEKV_avx512bf16
  // Grids of up to 4 bits are multiplied in bfloat16. Trellis codes and polar coordinates are
  // multiplied in integers if the CPU has the instructions. Everything else is as in
  // kernels_avx512.
  static const Kernels kernels = {Lanes::kName,
                                  Lanes::kNsPerProduct,
                                  kernels_avx512().attend,
                                  kernels_avx512().merge,
                                  kernels_avx512().mean_scores,
                                  kernels_avx512().decode,
                                  grid_product_avx512bf16,
                                  true,
                                  &row_product_avx512bf16(),
                                  encode_trellis_avx512,
                                  basis_product_avx512,
                                  trellis_kernel(),
                                  polar_kernel(),
                                  rope_kernel()};
#elif TERSEKV_avx2
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
