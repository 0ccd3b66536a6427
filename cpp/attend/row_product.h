// Products of query rows with a tile of decoded tokens.
#pragma once

#include "contract.h"

namespace tersekv {

constexpr int64_t kPanelColumns = 2 * kLanes;  // panels of any build begin at multiples of it

// Packed b [K, columns], from row `k` and column `column` on, which is a multiple of kPanelColumns.
struct Panels {
  const float* data;
  int64_t K, k = 0, column = 0;
};

// out[r][n] = Σ_k a[r][k]·b[k][n] for the rows r of queries or weights. b is packed first: 16 or 32 columns are one
// panel, in which the columns of k follow those of k - 1. Words are floats, or two bfloat16 of consecutive k.
// Columns and k are counted in multiples of 16, and what is read beyond the data must be finite.
struct RowProduct {
  // b[k][n] = rows[n][k]: columns are tokens, for scores.
  void (*pack_keys)(const float* rows, int64_t stride, int64_t columns, int64_t K, float* panels);
  // b[k][n] = rows[k][n]: columns are channels, for sums.
  void (*pack_values)(const float* rows, int64_t stride, int64_t columns, int64_t K, float* panels);
  // Sum over K rows of b. Add to out, or overwrite it. words: room for `rows`·K floats.
  void (*multiply)(const float* a, int64_t a_stride, int64_t rows, int64_t K, const Panels& b, int64_t columns,
                   bool add, float* words, float* out, int64_t out_stride);
  // Most keys and values, in elements, and most tokens that are decoded at a time.
  int64_t tile_elements = 1 << 15, tile_tokens = 256;
};

// Configures the tile registers, if there are some, and releases them.
struct TileScope {
  const TileRegisters* of;
  TileScope(const TileRegisters* registers, int64_t rows) : of(registers) {
    if (of) of->configure(rows);
  }
  ~TileScope() {
    if (of) of->release();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

const RowProduct& row_product_baseline();
const RowProduct& row_product_avx2();
const RowProduct& row_product_avx512();
const RowProduct& row_product_avx512bf16();
const TileRegisters& tile_registers_amx();
const RowProduct& row_product_amx();  // without functions that pack: they are those of AVX512-BF16

}  // namespace tersekv
