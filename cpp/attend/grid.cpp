// Products with packed codes, compiled once per instruction set.
#include "build.h"
#if TERSEKV_vbmi
#include "lut_vbmi.h"
#elif TERSEKV_amx
#include "lut_amx.h"
#endif
#include "grid_product.h"
#include "isa.h"

namespace tersekv {
GridFn TERSEKV_BUILD(grid_product)(const GridView& view, int rows) {
#if TERSEKV_vbmi || TERSEKV_amx
  // Coefficients are read four at a time, and a unit of 3-bit codes that is not whole has ten per word.
  if (!has_whole_units(view)) return grid_product_avx512(view, rows);
#endif
#if TERSEKV_amx
  // A product takes as long with one row as with eight.
  if (rows < kRowTile && holds_codes(view)) return grid_product_vbmi(view, rows);
  return product_of<Lanes, kCodeRows>(view, rows);
#endif
#if TERSEKV_vbmi
  if (!holds_codes(view)) return grid_product_avx512(view, rows);
#endif
  return product_of<Lanes, kRowTile>(view, rows);
}
}  // namespace tersekv
