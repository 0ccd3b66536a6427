// Plain structs between the binding, the driver and the kernels. Shapes: B batch, H key-value heads, N blocks,
// t tokens per block, T = N*t, R query rows per head, D head dim of keys, Dv of values. Strides count elements.
#pragma once

#include <cstdint>

namespace tersekv {

enum class Float : int { f32 = 0, f16 = 1, bf16 = 2 };

// static: kernels are compiled with other flags, and the linker must not share their copies of inline functions.
constexpr int kLanes = 16;
static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Codes of one parity in a 16-bit half-word, not counting the code that 3-bit units keep in their spare bits.
static constexpr int direct_codes(int bits) { return 16 / bits; }

// 32-bit words per lane for `packed` codes; repeats ops/lanes.py for bits 1 to 4.
static constexpr int64_t packed_words(int bits, int64_t packed) {
  const int64_t half = ceil_div(packed, 2);
  if (bits != 3) return ceil_div(half, direct_codes(bits));
  const int64_t rest = ceil_div(half % 16, 5);
  return half / 16 * 3 + (rest < 3 ? rest : 3);
}

// Coefficients that a kernel reads for `words` words: at least the number of codes, the excess must be zero.
static constexpr int64_t packed_slots(int bits, int64_t words) {
  return bits == 3 ? words / 3 * 32 + words % 3 * 10 : words * 2 * direct_codes(bits);
}

struct Plane {
  const uint16_t* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;
};

// One side of a packed segment as a matrix [P, L] per block: keys have P = D, L = t; values P = t, L = Dv.
struct GridView {
  int bits = 0;
  bool lane_scaled = false;  // scale is [P/group, L]; otherwise [L/group, P]
  Float half = Float::f16;
  int64_t group = 0, P = 0, L = 0, words = 0;
  const int32_t* codes = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;
  Plane scale, offset;
  const float* table = nullptr;
};

struct DenseView {
  Float type = Float::f32;
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0;
};

struct Scores {
  float scaling = 1.0f, softcap = 0.0f;  // softcap 0: none
  const uint8_t* mask = nullptr;         // [B, q, T], last axis contiguous; null: every token is seen
  int64_t stride_b = 0, stride_q = 0, q = 1;
};

// `tokens_per_unit` is t for packed segments and 1 for exact ones; the driver splits tokens by whole units.
struct Call {
  int64_t B = 0, H = 0, R = 0, T = 0, D = 0, Dv = 0, tokens_per_unit = 1;
  const float* query = nullptr;  // [B, H, R, D], contiguous
  Scores scores;
  GridView grid_keys, grid_values;
  DenseView dense_keys, dense_values;
  float* out = nullptr;  // [B, H, R, Dv]
  float* lse = nullptr;  // [B, H, R]
};

// Rows [row, row + rows) of one head over units [first, last), written to out and lse laid out as in Call.
struct Task {
  int64_t b = 0, h = 0, row = 0, rows = 0, first = 0, last = 0;
  float* out = nullptr;
  float* lse = nullptr;
};

struct Merge {
  int64_t segments = 0, rows = 0, D = 0;
  const float* const* outs = nullptr;  // [segments] of [rows, D]
  const float* const* lses = nullptr;  // [segments] of [rows]
  float* out = nullptr;
  float* lse = nullptr;
};

// One instruction set's build of the kernels. ns_per_product: rough cost of one query-code product, for threading.
struct Kernels {
  const char* name;
  double ns_per_product;
  void (*attend_grid)(const Call&, const Task&);
  void (*attend_exact)(const Call&, const Task&);
  void (*merge)(const Merge&);
};

// 64-byte aligned memory of the calling thread, valid until its next call from the same thread.
float* thread_scratch(int64_t floats);

}  // namespace tersekv
