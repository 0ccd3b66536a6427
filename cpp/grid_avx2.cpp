#include "isa.h"
#include "lut.h"
#include "simd_avx2.h"

namespace tersekv {
BlockFn grid_product_avx2(const GridView& view, int rows) { return block_product<Avx2>(view, rows); }
}  // namespace tersekv
