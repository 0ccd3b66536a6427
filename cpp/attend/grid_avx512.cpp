#include "grid_product.h"
#include "isa.h"
#include "simd_avx512.h"

namespace tersekv {
GridFn grid_product_avx512(const GridView& view, int rows) { return product_of<Avx512>(view, rows); }
}  // namespace tersekv
