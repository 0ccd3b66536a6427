// Numbers of any float type as float32.
#pragma once

#include "build.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// Write n numbers, `step` elements apart, as float32.
inline void to_floats(Float type, const char* from, int64_t step, int64_t n, float* to) {
  int64_t i = 0;
  with_type(type, [&](auto of) TERSEKV_INLINE {
    for (; step == 1 && i + kLanes <= n; i += kLanes)
      Lanes::store(to + i, Lanes::template load_as<of>(from + i * bytes_of(of)));
  });
  for (; i < n; i++) to[i] = float_at(type, from, i * step);
}

}  // namespace
}  // namespace tersekv
