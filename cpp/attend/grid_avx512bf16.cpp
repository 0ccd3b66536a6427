#include "grid_product.h"
#include "isa.h"
#include "simd_avx512bf16.h"

namespace tersekv {
GridFn grid_product_avx512bf16(const GridView& view, int rows) { return product_of<Avx512Bf16>(view, rows); }
}  // namespace tersekv
