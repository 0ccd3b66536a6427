#include "grid_product.h"
#include "isa.h"
#include "simd_baseline.h"

namespace tersekv {
GridFn grid_product_baseline(const GridView& view, int rows) { return product_of<Baseline>(view, rows); }
}  // namespace tersekv
