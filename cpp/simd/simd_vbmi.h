// AVX-512 with integer products: four codes per lane become bytes by one shift (VBMI), and a dot product (VNNI) adds
// their products with coefficients of 16 bits, which are two bytes each. For integers alone: cut to bytes, entries of
// other tables have errors that do not average out.
#pragma once

#include "bytes_avx512.h"

namespace tersekv {

struct Avx512Vbmi : Avx512Bytes {
  using Coef = uint16_t;
  static constexpr int max_groups(int rows) { return rows > 2 ? 2 : 4; }  // each has two sums per row

  template <int BITS>
  struct Table {
    explicit Table(const float*) {}
  };
};

}  // namespace tersekv
