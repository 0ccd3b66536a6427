// Products with packed codes, compiled once per instruction set.
#include "build.h"
#if TERSEKV_vbmi
#include "lut_vbmi.h"
#endif
#include "grid_product.h"
#include "isa.h"

namespace tersekv {
GridFn TERSEKV_BUILD(grid_product)(const GridView& view, int rows) {
#if TERSEKV_vbmi
  // Coefficients are read four at a time, and a unit of 3-bit codes that is not whole has ten per word.
  if (view.bits == 3 && view.words % 3) return grid_product_avx512(view, rows);
  if (!Avx512Vbmi::holds_codes(view.entries, view.bits)) return grid_product_avx512(view, rows);
#endif
  return product_of<Lanes>(view, rows);
}
}  // namespace tersekv
