// Products with packed codes, compiled once per instruction set.
#include "build.h"
#include "grid_product.h"
#include "isa.h"

namespace tersekv {
GridFn TERSEKV_BUILD(grid_product)(const GridView& view, int rows) { return product_of<Lanes>(view, rows); }
}  // namespace tersekv
