// Plain structs that the bindings, the driver and the kernels share. Shapes: B batch, H key-value
// heads, N blocks, t tokens per block, T = N*t, R query rows per head, D head dim of keys, Dv of
// values. Strides count elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rope_view.h"

namespace tersekv {

enum class Float : int { f32 = 0, f16 = 1, bf16 = 2 };
enum class Kind : int {
  exact,
  grid,
  signs,
  polar,
  sparse,
  sum,
  concat,
  roped,
  rotated,
  trellis,
  rotated_mean,
  scaled,
  count
};

// static: kernels are compiled with different flags, and the linker must not merge their copies of
// inline functions.
constexpr int kLanes = 16;
static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

static constexpr int64_t bytes_of(Float type) { return type == Float::f32 ? 4 : 2; }

// Return element i of an array of `type` as float32.
static inline float float_at(Float type, const void* data, int64_t i) {
  if (type == Float::f32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if (type == Float::f16) return static_cast<float>(__builtin_bit_cast(_Float16, bits));
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

// Number of codes of one parity in a 16-bit half-word, without the code that 3-bit units keep in
// their spare bits.
static constexpr int direct_codes(int bits) { return 16 / bits; }

// Number of coefficients that a kernel reads for `words` words. It is at least the number of codes;
// the excess must be zero.
static constexpr int64_t packed_slots(int bits, int64_t words) {
  return bits == 3 ? words / 3 * 32 + words % 3 * 10 : words * 2 * direct_codes(bits);
}

struct Plane {
  const uint16_t* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;
};

constexpr int64_t kCodeRows = 8;  // most query rows of one product with a grid or trellis codes
constexpr int kLutBits = 4;       // of codes that are multiplied by tables in registers; codes of more bits are decoded

// Keys or values of a packed segment as a matrix [P, L] per block: keys have P = D, L = t; values P
// = t, L = Dv.
struct GridView {
  int bits = 0;
  bool lane_scaled = false;  // scale is [P/group, L]; otherwise [L/group, P]
  Float half = Float::f16;
  int64_t group = 0, P = 0, L = 0, words = 0;
  const int32_t* codes = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;
  Plane scale, offset;
  const float* table = nullptr;
  int64_t table_stride_b = 0;
  // Table that a task multiplies with: table[code] ≈ unit · entries[code] + middle. Exact unless
  // rounded to bfloat16.
  const float* entries = nullptr;
  float unit = 1.0f, middle = 0.0f;
};

// True if the words are whole units, see CodeUnit. Kernels in integers need it.
static inline bool has_whole_units(const GridView& view) { return view.bits != 3 || view.words % 3 == 0; }

// One block of a GridView.
struct Block {
  const int32_t* codes = nullptr;
  const uint16_t* scale = nullptr;
  const uint16_t* offset = nullptr;
};

// Blocks of a GridView times rows. For keys (y_step > 0) all blocks share x, and each has its own
// y, `y_step` after the previous one. For values (y_step 0) each block has its own x, P after the
// previous one, and all blocks share y. Rows of y have room up to a multiple of 16, rows of coef
// for coef_floats().
struct Product {
  Block first;
  int64_t blocks = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0, y_step = 0;
  float* coef = nullptr;
  int64_t coef_stride = 0;
  const GridView* later_view = nullptr;  // blocks from `later` on are read next; prefetch them
  Block later;
  int64_t later_blocks = 0;
};

// Function that adds the product to y; see grid_product.h.
using GridFn = void (*)(const GridView&, const Product&);

// Coefficients of one group of a lane-scaled view, with room for codes of the neighbouring groups
// in its first and last unit.
static inline int64_t group_slots(const GridView& view) {
  return round_up(view.group + 2 * packed_slots(view.bits, view.bits == 3 ? 3 : 1), kLanes);
}

// Floats per row that Product::coef needs for `blocks` blocks.
static inline int64_t coef_floats(const GridView& view, int64_t blocks) {
  const int64_t lane_scaled = view.P / view.group * (group_slots(view) + 1);
  const int64_t packed_scaled = packed_slots(view.bits, view.words) * blocks;
  return round_up(view.lane_scaled ? lane_scaled : packed_scaled, kLanes) + 2 * kLanes;
}

struct DenseView {
  Float type = Float::f32;
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0;
  const int64_t* rows = nullptr;  // [B]: index along the first axis of each batch row; null: its number
};

// One sketch of `signs`: x = factor * norms * S^T * signs on n channels, blocks of 32 tokens.
struct SignsView {
  int64_t M = 0, n = 0;
  Float half = Float::f16;
  float factor = 1.0f;
  const uint8_t* signs = nullptr;  // [B, H, N, ceil(M/8), 32]
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;
  Plane norms;                                             // [B, H, N, 32]
  const float* sketch = nullptr;                           // [M, n]
  const int64_t *channels = nullptr, *dropped = nullptr;   // [B, H, 1 or N, n or any]; null: all, none
  int64_t channels_b = 0, channels_h = 0, channels_n = 0;  // strides
  int64_t dropped_b = 0, dropped_h = 0, dropped_n = 0, drops = 0;
};

constexpr int kMaxLevels = 16;

// Recursive polar coordinates, blocks of 32 tokens. cos, sin: tables [2^bits] of each level.
struct PolarView {
  int levels = 0;
  int bits[kMaxLevels] = {};
  Float half = Float::f16;
  float unit = 1.0f;
  const uint8_t* angles = nullptr;  // [B, H, N, bytes, 32]
  int64_t bytes = 0, stride_b = 0, stride_h = 0, stride_n = 0;
  Plane radii;  // [B, H, N, D / 2^levels, 32]
  const float *cos[kMaxLevels] = {}, *sin[kMaxLevels] = {};
  int64_t table_stride_b = 0;
};

// Sparse entries [ token : 5 ][ channel : 11 ] of blocks of 32 tokens. They are a list, ordered by
// block, batch row, head, whose starts count from `base`. With `per_block` each block has as many
// entries, in its own place.
struct SparseView {
  const int32_t* starts = nullptr;  // [B, H, N]
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;
  int64_t B = 0, H = 0, N = 0, base = 0, entries = 0;
  const uint16_t *places = nullptr, *values = nullptr;
  int64_t per_block = 0;
  Plane place, value;  // [B, H, N, per_block]
};

constexpr int kTrellisStates = 256;
constexpr int kTrellisRates = 9;  // 0 to 8 bits

// Trellis windows in a ring of bits, blocks of 32 tokens; see layouts/trellis.py. Each head's bits
// add up to 16 * words.
struct TrellisView {
  int64_t words = 0;
  const uint16_t* stream = nullptr;  // [B, H, N, words, 32]
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;
  const uint8_t* gain = nullptr;  // [B, H, N, 32]
  int64_t gain_b = 0, gain_h = 0, gain_n = 0;
  const uint8_t* bits = nullptr;  // [1 or B, H, D]
  int64_t bits_b = 0, bits_h = 0;
  Float scale_type = Float::f32;
  const void* scale = nullptr;  // [1 or B, H, D]
  int64_t scale_b = 0, scale_h = 0;
  const float* tables = nullptr;    // [9, 256]
  const int8_t* entries = nullptr;  // [9, 256] in units of `unit`; null if the tables cannot be stored as int8
  float unit[kTrellisRates] = {};
  const float* gains = nullptr;  // gains of all 256 codes
};

// A packed segment, or a part of one. Parts belong to `sum`, `concat` (consecutive channels),
// `roped`, `rotated` and `scaled`.
struct View {
  Kind kind = Kind::exact;
  int64_t D = 0, T = 0, t = 1;  // t: kernels read the view in multiples of t tokens
  DenseView dense;              // of `rotated_mean`: one vector per head
  GridView grid;
  SignsView signs;
  PolarView polar;
  SparseView sparse;
  TrellisView trellis;
  RopeView rope;
  const float* rotation = nullptr;  // [D, D], x = rotation^T * part
  int64_t rotation_stride_b = 0, rotation_stride_h = 0;
  Plane factor;  // of `scaled`: [B, H, N, t] for keys, [B, H, N, D] for values; x = factor * part
  Float factor_type = Float::f16;
  const View* parts = nullptr;
  int64_t count = 0;
};

struct RowProduct;     // row_product.h
struct TrellisKernel;  // trellis_kernel.h
struct PolarKernel;    // polar_kernel.h
struct RopeKernel;     // rope_kernel.h
struct EncodeTrellis;  // encode_trellis.h
struct BasisProduct;   // basis.h
struct HeadMatrix;     // basis.h
struct MarkedScores;

struct Scores {
  float scaling = 1.0f, softcap = 0.0f;  // softcap 0: none
  const uint8_t* mask = nullptr;         // [B, 1 or H, q, T], last axis contiguous; null: every token is visible
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, q = 1;
  bool causal = false;          // without a mask, query i of q sees the tokens up to T - q + i
  const float* bias = nullptr;  // [B, H, R], added to all scores of a row; null: none
};

// Page table: entry [b, i] is the page with the tokens of row b from i * tokens on, or -1, whose
// tokens are invisible. Without pages, token i of a row is token i of the views. Consecutive positions of
// RoPE count a row's tokens, not the pages'.
struct Pages {
  const int32_t* at = nullptr;  // [B, n], last axis contiguous
  int64_t stride_b = 0, tokens = 0;
};

// The tile registers of AMX. A thread configures them before its first product of a task and releases them after its
// last. Tiles 0 to 5 have so many rows, at most 16, tiles 6 and 7 have 16; rows have 64 bytes.
struct TileRegisters {
  void (*configure)(int64_t rows);
  void (*release)();
};

// Attention of one query over one segment. tokens_per_unit: the driver splits tokens at multiples
// of it, because both views can be read in these units.
struct Call {
  int64_t B = 0, H = 0, R = 0, T = 0, D = 0, Dv = 0, tokens_per_unit = 1;
  const float* query = nullptr;  // [B, H, R, D], contiguous
  bool rounded_query = false;    // they were bfloat16
  Scores scores;
  Pages pages;
  // [B, H], the token where each head's own tokens end. They begin where those of the head before end, and no other
  // head sees them: planes, positions and the mask are the same for all heads. Null: all heads see all T tokens.
  const int64_t* ends = nullptr;
  const View *keys = nullptr, *values = nullptr;
  bool shared = false;  // values are the first Dv channels of the keys
  bool tiles = false;   // a tile of tokens at a time is decoded for all rows of a task
  // In tiles, packed keys are linear in the views' channels, of which the first `mapped` are components of this matrix.
  // If `adds_mean`, they are a view's channels, and a second view of as many is added to them.
  const HeadMatrix* map = nullptr;
  int64_t mapped = 0;
  bool adds_mean = false;
  // Scores that are added to those of the keys: of the tokens whose bits are 0, and 1; null: none
  const MarkedScores* start = nullptr;
  int64_t start_mean = 0;              // number of the mean that they are of
  const Marks* start_marks = nullptr;  // of the call's tokens
  GridFn (*grid_product)(const GridView&, int rows) = nullptr;
  int64_t code_rows = 0;                     // most rows that grid_product and trellis take
  bool rounds = false;                       // grid_product multiplies in bfloat16
  const RowProduct* rounded_rows = nullptr;  // products in bfloat16 with tiles; null: none
  const TileRegisters* registers = nullptr;  // that products need; null: none
  const TrellisKernel* trellis = nullptr;
  const PolarKernel* polar = nullptr;
  const RopeKernel* rope = nullptr;
  int64_t id = 0;  // unique within the process
};

// Floats that a view, or the first part of a view, consists of; null if it is packed.
static inline const DenseView* floats_of(const View& view) {
  const View& first = view.kind == Kind::concat ? view.parts[0] : view;
  return first.kind == Kind::exact ? &first.dense : nullptr;
}

// True if tiles of the call are multiplied in bfloat16.
static inline bool rounds_tiles(const Call& call) {
  return call.rounded_rows && (call.rounded_query || (call.shared && !floats_of(*call.keys)));
}

// Query rows [row, row + rows) of one head over units [first, last). Results go to out and lse,
// laid out as in Call.
struct Task {
  int64_t b = 0, h = 0, row = 0, rows = 0, first = 0, last = 0;
  float* out = nullptr;
  float* lse = nullptr;
};

// The part of a task that reads one call. Parts of a task have the same rows, out and lse.
struct Part {
  const Call* call;
  Task task;
};

// Tokens of a mask, and room for their scores [B, H, R, stride].
struct MarkedScores {
  Marks marks;
  float* score = nullptr;
  int64_t stride = 0;
};

// Scores of a rotated mean at all positions of a range, in order. They are written to the rooms of
// several sets of tokens, of which each has some of the positions.
struct MeanScores {
  Call call;                 // B, H, R, T positions, D, keys: the mean at consecutive positions
  int64_t query_stride = 0;  // call.query is [B, H, R, query_stride]
  const MarkedScores* sets = nullptr;
  int64_t count = 0;
};

struct Merge {
  int64_t segments = 0, rows = 0, D = 0;
  const float* const* outs = nullptr;  // [segments] of [rows, D]
  const float* const* lses = nullptr;  // [segments] of [rows]
  float* out = nullptr;
  float* lse = nullptr;
};

// Tokens of a view to decode as rows of channels.
struct Decode {
  const View* view;
  int64_t B, H;
  bool of_keys;
  Float type;           // f32 or bf16
  void* out;            // [B, H, T, D], contiguous
  int64_t span_tokens;  // of a task, a multiple of the view's t

  int64_t spans() const { return ceil_div(view->T, span_tokens); }
};

// The kernels of one instruction set. ns_per_product: rough cost of one product of a query element
// and a code, for threading.
struct Kernels {
  const char* name;
  double ns_per_product;
  void (*attend)(const Part* parts, int64_t count);          // more than one: of calls with tiles
  void (*merge)(const Merge&, int64_t first, int64_t last);  // of rows
  void (*mean_scores)(const MeanScores&, const Task&);       // of positions [task.first, task.last)
  void (*decode)(const Decode&, int64_t task);
  GridFn (*grid_product)(const GridView&, int rows);
  int64_t code_rows;  // most rows that grid_product and trellis take, at most kCodeRows
  bool rounds;        // grid_product multiplies in bfloat16
  const RowProduct* rounded_rows;
  void (*encode_trellis)(const EncodeTrellis&, int64_t row, int64_t first, int64_t last);
  void (*basis_product)(const BasisProduct&, int64_t task);
  const TrellisKernel* trellis;    // null: trellis.h is used
  const PolarKernel* polar;        // null: polar.h is used
  const RopeKernel* rope;          // null: roped_grid.h and rotated_mean.h are used
  const TileRegisters* registers;  // that products need; null: none
};

// Return 64-byte aligned memory of the calling thread, valid until the thread calls reset_scratch.
float* scratch(int64_t floats);
void reset_scratch();

// Returns what was taken from scratch memory since its construction.
class ScratchScope {
 public:
  ScratchScope();
  ~ScratchScope();
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

 private:
  std::size_t slab_;
  int64_t used_;
};

// Return room for `count` objects in scratch memory. They are not initialised.
template <class T>
static inline T* scratch_of(int64_t count = 1) {
  return reinterpret_cast<T*>(scratch(ceil_div(count * static_cast<int64_t>(sizeof(T)), sizeof(float))));
}

// Return memory of the calling thread that later tasks of the same call can reuse. `filled` is true
// if the thread's last request had the same key.
struct KeptKey {
  int64_t call, b, h, first;
};
float* kept_scratch(const KeptKey& key, int64_t floats, bool& filled);

}  // namespace tersekv
