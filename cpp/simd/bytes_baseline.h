// Operations for packed bytes and long tables in addition to the float lanes: the compilers' vector
// extension.
#pragma once

#include "simd_baseline.h"

namespace tersekv {

struct BaselineBytes : Baseline {
  static constexpr bool kShortTables = false;

  // Load sixteen bytes, one per lane.
  static Words load_bytes(const uint8_t* p) {
    Words out;
    for (int i = 0; i < kLanes; i++) out[i] = p[i];
    return out;
  }
  // Load sixteen uint16, one per lane.
  static Words load_halves(const uint16_t* p) {
    Words out;
    for (int i = 0; i < kLanes; i++) out[i] = p[i];
    return out;
  }
  static Words shift_right(Words w, int n) { return w >> n; }
  static Words shift_left(Words w, int n) { return w << n; }
  static Words with(Words w, uint32_t bits) { return w & bits; }
  static Words either(Words a, Words b) { return a | b; }
  // table[index & 15] for sixteen floats.
  static F look_up(const float* table, Words index) { return gather(table, index & 15u); }
  static F gather(const float* table, Words index) {
    F out;
    for (int i = 0; i < kLanes; i++) out[i] = table[index[i]];
    return out;
  }
  static F negative_fma(F a, F b, F c) { return c - a * b; }
  // out[c·out_stride + t] = in[t·stride + c] for t, c < 16.
  static void transpose(const float* in, int64_t stride, float* out, int64_t out_stride) {
    for (int c = 0; c < kLanes; c++)
      for (int t = 0; t < kLanes; t++) out[c * out_stride + t] = in[t * stride + c];
  }
  // x if bit `bit` of w is 1, else -x.
  static F signed_by(F x, Words w, int bit) { return (F)((U)x ^ (~(w << (31 - bit)) & 0x80000000u)); }
};

}  // namespace tersekv
