#include "basis_product.h"

namespace tersekv {

void basis_product_baseline(const BasisProduct& call, int64_t head) { multiply_head(call, head); }

}  // namespace tersekv
