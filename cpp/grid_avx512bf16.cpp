#include "grid_product.h"
#include "isa.h"
#include "simd_avx512bf16.h"

namespace tersekv {
GridFn grid_product_avx512bf16(const GridView& view, int rows) {
  const bool exact = Avx512Bf16::holds(view.table, 1 << view.bits, view.offset.data != nullptr);
  return exact ? product_of<Avx512Bf16>(view, rows) : grid_product_avx512(view, rows);
}
}  // namespace tersekv
