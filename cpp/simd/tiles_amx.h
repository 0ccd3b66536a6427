// AMX's tile registers, in inline assembly: the intrinsics of GCC 12 do not say that they read memory.
#pragma once

#include <cstdint>

namespace tersekv {
namespace {  // internal to each build

constexpr int kTileBytes = 64, kTileFours = 16;  // of a row; rows of a tile of which each has four bytes per lane

template <int TILE>
[[gnu::always_inline]] inline void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
[[gnu::always_inline]] inline void store_tile(void* rows) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(int64_t{kTileBytes}), "i"(TILE) : "memory");
}
template <int TILE>
[[gnu::always_inline]] inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
// Tile SUM += tile A · tile B, of signed bytes, and of signed with unsigned ones.
template <int SUM, int A, int B>
[[gnu::always_inline]] inline void multiply_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}
template <int SUM, int A, int B>
[[gnu::always_inline]] inline void multiply_with_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

}  // namespace
}  // namespace tersekv
