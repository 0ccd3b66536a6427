// Products with tiles of tokens by AMX: 16 rows of 32 bfloat16 times 32 rows of 16. Panels are those of AVX512-BF16: a
// row of an AMX tile of b is one vector of a panel.
#include <immintrin.h>

#include "contract.h"
#include "row_product.h"

namespace tersekv {
namespace {

constexpr int64_t kRows = 16, kWords = 16;  // of an AMX tile

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// One configuration serves a whole task: loading one takes as long as products of a tenth of a tile of tokens.
void configure(int64_t rows) {
  Config made;
  for (int i = 0; i < 8; i++) {
    made.row_bytes[i] = kWords * sizeof(float);
    made.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kRows);
  }
  asm volatile("" : : "r"(&made) : "memory");  // the intrinsic of GCC 12 does not say that it reads all of it
  _tile_loadconfig(&made);
}

void release() { _tile_release(); }

// out[r][n] (+)= Σ a·b for 16 or 32 rows and one or two vectors of columns. Strides in bytes; `words` counts pairs of
// k.
template <bool BOTH_ROWS, bool BOTH_COLUMNS>
void multiply_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t words, bool add,
                    float* out, int64_t out_stride) {
  const float *lower = a + kRows * a_stride / 4, *right = b + kLanes;
  float* below = out + kRows * out_stride / 4;
  if (add) {
    _tile_loadd(0, out, out_stride);
    if constexpr (BOTH_COLUMNS) _tile_loadd(1, out + kLanes, out_stride);
    if constexpr (BOTH_ROWS) _tile_loadd(2, below, out_stride);
    if constexpr (BOTH_ROWS && BOTH_COLUMNS) _tile_loadd(3, below + kLanes, out_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < words; k += kWords, b += kWords * b_stride / 4, right += kWords * b_stride / 4) {
    _tile_loadd(4, a + k, a_stride);
    _tile_loadd(6, b, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (BOTH_COLUMNS) {
      _tile_loadd(7, right, b_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (BOTH_ROWS) {
      _tile_loadd(5, lower + k, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (BOTH_COLUMNS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_stride);
  if constexpr (BOTH_COLUMNS) _tile_stored(1, out + kLanes, out_stride);
  if constexpr (BOTH_ROWS) _tile_stored(2, below, out_stride);
  if constexpr (BOTH_ROWS && BOTH_COLUMNS) _tile_stored(3, below + kLanes, out_stride);
}

void multiply_block(int64_t rows, int64_t width, const float* a, int64_t a_stride, const float* b, int64_t words,
                    bool add, float* out, int64_t out_stride) {
  const auto call = [&](auto body) { body(a, a_stride, b, width * 4, words, add, out, out_stride); };
  if (rows > kRows)
    width > kLanes ? call(multiply_block<true, true>) : call(multiply_block<true, false>);
  else
    width > kLanes ? call(multiply_block<false, true>) : call(multiply_block<false, false>);
}

void multiply(const float* a, int64_t a_stride, int64_t rows, int64_t K, const Panels& b, int64_t columns, bool add,
              float* words, float* out, int64_t out_stride) {
  // A last tile of eight pairs is filled up with zeros, in a and in b.
  const int64_t count = K / 2, whole = count / kWords * kWords, padded = round_up(count, kWords);
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t k = 0; k < K; k += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + r * padded + k / 2),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(a + r * a_stride + k))));
    if (whole < count)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + r * padded + count), _mm256_setzero_si256());
  }
  alignas(64) float last[kWords * kPanelColumns], part[2 * kRows * kPanelColumns];
  for (int64_t n = 0; n < columns; n += kPanelColumns) {
    const int64_t width = columns - n < kPanelColumns ? columns - n : kPanelColumns;
    const float* panel = b.data + ((b.column + n) * b.K + b.k * width) / 2;
    if (whole < count)
      for (int64_t i = 0; i < kWords * width; i++)
        last[i] = i < (count - whole) * width ? panel[whole * width + i] : 0.0f;
    for (int64_t row = 0; row < rows; row += 2 * kRows) {
      const int64_t own = rows - row < 2 * kRows ? rows - row : 2 * kRows;
      const bool fits = own % kRows == 0;
      float *to = out + row * out_stride + n, *sums = fits ? to : part;
      const int64_t stride = (fits ? out_stride : kPanelColumns) * 4;
      if (!fits && add)
        for (int64_t r = 0; r < own; r++)
          for (int64_t i = 0; i < width; i += kLanes)
            _mm512_store_ps(part + r * kPanelColumns + i, _mm512_loadu_ps(to + r * out_stride + i));
      const float* from = words + row * padded;
      if (whole) multiply_block(own, width, from, padded * 4, panel, whole, add, sums, stride);
      if (whole < count) multiply_block(own, width, from + whole, padded * 4, last, kWords, add || whole, sums, stride);
      if (!fits)
        for (int64_t r = 0; r < own; r++)
          for (int64_t i = 0; i < width; i += kLanes)
            _mm512_storeu_ps(to + r * out_stride + i, _mm512_load_ps(part + r * kPanelColumns + i));
    }
  }
}

}  // namespace

const RowProduct& row_product_amx() {
  // CPUs with AMX have an L2 cache of 2 MB. A constant, because every CPU calls this, and the file is compiled for AMX.
  static constexpr RowProduct made{nullptr, nullptr, multiply, 1 << 18, 1024};
  return made;
}

const TileRegisters& tile_registers_amx() {
  static constexpr TileRegisters made{configure, release};
  return made;
}

}  // namespace tersekv
