// Loops that are unrolled by construction.
#pragma once

#include "contract.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kRowTile = 4;  // query rows that a kernel serves at once

template <int I>
struct Index {
  constexpr operator int() const { return I; }
};

// Unrolled by construction: shifts need constants and sums must stay in registers.
template <int N, int I = 0, class Body>
[[gnu::always_inline]] inline void repeat(Body&& body) {
  if constexpr (I < N) {
    body(Index<I>{});
    repeat<N, I + 1>(body);
  }
}
#define TERSEKV_INLINE __attribute__((always_inline))

// Calls body(Index<rows>) for 1 to 4 rows.
template <class Body>
inline void with_rows(int64_t rows, Body&& body) {
  switch (rows) {
    case 1:
      return body(Index<1>{});
    case 2:
      return body(Index<2>{});
    case 3:
      return body(Index<3>{});
    default:
      return body(Index<4>{});
  }
}

}  // namespace
}  // namespace tersekv
