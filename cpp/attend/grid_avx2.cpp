#include "grid_product.h"
#include "isa.h"
#include "simd_avx2.h"

namespace tersekv {
GridFn grid_product_avx2(const GridView& view, int rows) { return product_of<Avx2>(view, rows); }
}  // namespace tersekv
