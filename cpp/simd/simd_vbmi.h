// AVX-512 with integer products: four codes per lane become bytes by one shift (VBMI), and a dot product (VNNI) adds
// their products with coefficients of 16 bits, which are two bytes each. For evenly spaced tables.
#pragma once

#include "bytes_avx512.h"

namespace tersekv {

struct Avx512Vbmi : Avx512Bytes {
  static constexpr int kCodes = 4;
  using Coef = uint16_t;
  static constexpr int max_groups(int rows) { return rows > 2 ? 2 : 4; }  // each has two sums per row

  // table[code] = step · code + least.
  struct Spacing {
    float least, step;
    bool even;

    explicit Spacing(const float* table, int bits) {
      const int last = (1 << bits) - 1;
      least = table[0];
      step = (table[last] - least) / static_cast<float>(last);
      even = true;
      for (int i = 1; i < last; i++)
        even =
            even && __builtin_fabsf(table[i] - (least + static_cast<float>(i) * step)) <= 1e-6f * __builtin_fabsf(step);
      even = even && step - step == 0.0f;
    }
  };

  template <int BITS>
  struct Table {
    Table(const float* table, float& unit, float& middle) {
      const Spacing of(table, BITS);
      middle += unit * of.least;
      unit *= of.step;
    }
  };
};

}  // namespace tersekv
