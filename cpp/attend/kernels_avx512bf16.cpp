#include "basis.h"
#include "encode_trellis.h"
#include "isa.h"
#include "simd_avx512bf16.h"

namespace tersekv {
// Grids of up to 4 bits in bfloat16, trellis codes and polar coordinates in integers where the CPU has the
// instructions, everything else as kernels_avx512 does it.
const Kernels& kernels_avx512bf16() {
  static const Kernels kernels = {Avx512Bf16::kName,
                                  Avx512Bf16::kNsPerProduct,
                                  kernels_avx512().attend,
                                  kernels_avx512().merge,
                                  grid_product_avx512bf16,
                                  true,
                                  encode_trellis_avx512,
                                  basis_product_avx512,
                                  trellis_kernel(),
                                  polar_kernel(),
                                  rope_kernel()};
  return kernels;
}
}  // namespace tersekv
