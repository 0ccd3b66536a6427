// Encoders with the contracts of kernels/encode_grid.py, lanes.py, encode_signs.py, encode_polar.py
// and rotate.py. Each function of `Encoders` handles one block of tokens or one group of vectors.
#pragma once

#include "contract.h"

namespace tersekv {

// Blocks of t tokens of x [B, H, N·t, D], of any float type. Strides count elements.
struct TokenBlocks {
  const char* data = nullptr;
  Float type = Float::f32;
  int64_t B = 0, H = 0, N = 0, t = 0, D = 0;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0, stride_c = 0;

  int64_t count() const { return B * H * N; }
  int64_t elements() const { return count() * t * D; }
  const char* block(int64_t i) const {
    return data + (i / N / H * stride_b + i / N % H * stride_h + i % N * t * stride_t) * bytes_of(type);
  }
};

// A scale or an offset [B, H, N, rows, columns]; null for none.
struct ScalePlane {
  const float* data = nullptr;
  int64_t stride[5] = {};

  const float* block(int64_t i, const TokenBlocks& x) const {
    return data + i / x.N / x.H * stride[0] + i / x.N % x.H * stride[1] + i % x.N * stride[2];
  }
};

// Codes of b bits of P × L matrices, in `words` words per lane.
struct LaneWords {
  int64_t bits = 0, P = 0, L = 0, words = 0;
  int32_t* out = nullptr;  // [blocks, lane groups, words, 16], contiguous

  int64_t lanes() const { return round_up(L, kLanes); }
  int32_t* block(int64_t i) const { return out + i * lanes() * words; }
};

struct GroupRanges {
  TokenBlocks x;
  bool per_token = false;
  int64_t group = 1;
  float *low = nullptr, *high = nullptr;  // [B, H, N, rows, columns], contiguous
};

struct EncodeGrid {
  TokenBlocks x;
  LaneWords packed;
  bool of_keys = false, per_token = false;
  int64_t group = 1;
  ScalePlane scale, offset;
  // midpoints between entries of the table [2^bits - 1]; null: nearest integers
  const float* middles = nullptr;
};

struct PackLanes {
  const void* codes = nullptr;  // [blocks, P, L]
  int64_t item_bytes = 1, blocks = 0, stride[3] = {};
  LaneWords packed;
};

struct EncodeSigns {
  const float *x = nullptr, *sketch = nullptr;  // [blocks, t, D] and [M, D], contiguous
  int64_t blocks = 0, t = 0, D = 0, M = 0;
  float unsure = 0;        // for vectors of length 1: sums up to this size are computed again in float64
  uint8_t* out = nullptr;  // [blocks, ceil(M / 8), t]
};

constexpr int64_t kMostLevels = 16;

// Directions half-way between neighbouring entries of a level's table.
struct Boundaries {
  const float *cos = nullptr, *sin = nullptr;
  int64_t near = 0, count = 0;             // near: number of boundaries within half a circle from the seam
  float seam_cos = 1.0f, seam_sin = 0.0f;  // where the circle begins
};

struct EncodePolar {
  const float* x = nullptr;  // [rows, blocks, t, D], contiguous
  int64_t rows = 0, blocks = 0, t = 0, D = 0, levels = 0, bytes = 0;
  int64_t bits[kMostLevels] = {};
  const Boundaries* boundaries = nullptr;  // [rows, levels]
  uint8_t* angles = nullptr;               // [rows, blocks, bytes, t]
  float* radii = nullptr;                  // [rows, blocks, D >> levels, t]
};

// Vectors [rows, D] times a dense matrix, or times a Hadamard matrix in blocks of `block` channels,
// after reordering and sign changes.
struct Rotate {
  const char* x = nullptr;
  Float type = Float::f32;
  int64_t rows = 0, D = 0;
  float* out = nullptr;
  const double* matrix = nullptr;  // [D, D]
  const int32_t* order = nullptr;
  const float* signs = nullptr;
  int64_t block = 0;
  double scale = 1;
};
constexpr int64_t kVectorsAtOnce = 32;

// Tokens of any float type [B, H, T, D], whose channels are contiguous. D is a multiple of 16. Strides count bytes.
struct TokenRows {
  const char* data = nullptr;
  Float type = Float::f32;
  int64_t B = 0, H = 0, T = 0, D = 0, stride_b = 0, stride_h = 0, stride_t = 0;

  const char* row(int64_t head, int64_t t) const {
    return data + head / H * stride_b + head % H * stride_h + t * stride_t;
  }
};

// Tokens next to a vector of each head that RoPE rotates, see kernels/rotated_mean.py.
struct RotatedTokens {
  TokenRows x;
  const float *cos = nullptr, *sin = nullptr;      // [1 or B, 1 or H, T, D]
  int64_t angles_b = 0, angles_h = 0;              // strides, 0 of one row or head
  const float *mean = nullptr, *across = nullptr;  // [1 or B, H, D], of the difference
  int64_t mean_b = 0;
  float *first = nullptr, *second = nullptr;  // sums [B, H, D]; first: or the difference [B, H, T, D]

  int64_t tasks_of_head() const { return ceil_div(x.T, kRotatedAtOnce); }
  static constexpr int64_t kRotatedAtOnce = 256;
};

// Sums over vectors of rows, each with a weight. D is a multiple of 16.
struct WeightedSums {
  const float *x = nullptr, *weights = nullptr;  // [rows, T, D] and [rows, T], contiguous
  int64_t rows = 0, T = 0, D = 0;
  double *total = nullptr, *squares = nullptr;  // [rows, D] and [rows, D, D]
};

// Bases of heads. D is a multiple of 16, all numbers are finite.
struct FitBasis {
  const double* covariance = nullptr;                   // [heads, D, D]
  const double *metric = nullptr, *channels = nullptr;  // [heads, D, D] or its diagonal [heads, D], and [heads, D]
  int64_t heads = 0, D = 0;
  bool whole = false;                             // the metric is a matrix
  double most_condition = 0;                      // MOST_CONDITION
  uint8_t* basis = nullptr;                       // [heads, 3·D²/4]
  double *variance = nullptr, *weight = nullptr;  // [heads, D]
};

// What R query rows of each head show of errors in its tokens. D and Dv are multiples of 16.
struct ObservedLoss {
  const float* query = nullptr;                           // [heads, R, D]
  TokenRows keys, values;                                 // without data: only weights are summed, to of_values
  int64_t heads = 0, H = 0, R = 0, T = 0, D = 0, Dv = 0;  // H: KV heads of a batch row
  const uint8_t* mask = nullptr;  // [masks, q, T]; row r is one of position r % q; null: all tokens are seen
  int64_t masks = 1, q = 1;
  const RowProduct* product = nullptr;       // of scores; null: that of the build
  const TileRegisters* registers = nullptr;  // that it needs; null: none
  const float* counts = nullptr;             // [of_counts, T]
  int64_t of_counts = 1;
  const float* sinks = nullptr;  // [H, R], logits, or null
  float scaling = 1, softcap = 0;
  float *of_keys = nullptr, *of_values = nullptr;  // [heads, tasks_of_head, T]
  float* shares = nullptr;                         // [heads, R]

  // Rows of a task, whose scores of all tokens it holds.
  int64_t rows_at_once() const { return (T <= 4096 ? 48 : 16) * (values.data ? 1 : 2); }
  int64_t tasks_of_head() const { return ceil_div(R, rows_at_once()); }
  int64_t widest() const { return D > Dv ? D : Dv; }
};

// Encoders of one instruction set. The integer argument is a block's number; for rotations, that of
// a group of kVectorsAtOnce vectors.
struct Encoders {
  void (*group_ranges)(const GroupRanges&, int64_t);
  void (*encode_grid)(const EncodeGrid&, int64_t);
  void (*pack_lanes)(const PackLanes&, int64_t);
  void (*encode_signs)(const EncodeSigns&, int64_t);
  void (*encode_polar)(const EncodePolar&, int64_t);
  void (*rotate_dense)(const Rotate&, int64_t);
  void (*rotate_hadamard)(const Rotate&, int64_t);
  void (*rotated_sums)(const RotatedTokens&, int64_t);
  void (*without_rotated_mean)(const RotatedTokens&, int64_t);
  void (*weighted_sums)(const WeightedSums&, int64_t);
  void (*fit_basis)(const FitBasis&, int64_t);
  void (*observed_loss)(const ObservedLoss&, int64_t);
};

const Encoders& encoders_baseline();
const Encoders& encoders_avx2();
const Encoders& encoders_avx512();
const Encoders& encoders();  // of the instruction set in use

}  // namespace tersekv
