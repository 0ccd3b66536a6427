#include "isa.h"
#include "lut.h"
#include "simd_baseline.h"

namespace tersekv {
BlockFn grid_product_baseline(const GridView& view, int rows) { return block_product<Baseline>(view, rows); }
}  // namespace tersekv
