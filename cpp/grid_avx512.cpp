#include "isa.h"
#include "lut.h"
#include "simd_avx512.h"

namespace tersekv {
BlockFn grid_product_avx512(const GridView& view, int rows) { return block_product<Avx512>(view, rows); }
}  // namespace tersekv
