// Sixteen lanes in the compilers' vector extension: SSE2 or NEON, depending on the target; look-ups
// one by one.
#pragma once

#include <cstring>

#include "simd_float32.h"

namespace tersekv {

struct Baseline : Float32Codes<Baseline> {
  static constexpr const char* kName = "scalar";
  static constexpr double kNsPerProduct = 0.15;
  static constexpr int kExactTokens = 1;
  static constexpr int max_groups(int) { return 1; }
  static constexpr bool split(int) { return false; }
  static constexpr bool kSmallTables = false;

  typedef float F __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
  typedef uint32_t U __attribute__((vector_size(64)));
  typedef uint16_t H __attribute__((vector_size(32)));

  template <int BITS>
  struct Table {
    float entry[1 << BITS];
    explicit Table(const float* table) { std::memcpy(entry, table, sizeof(entry)); }
    F at(U index) const {
      F out;
      for (int i = 0; i < kLanes; i++) out[i] = entry[index[i] & ((1u << BITS) - 1)];
      return out;
    }
  };
  using Words = U;

  static F zero() { return F{}; }
  static F set1(float x) { return F{} + x; }
  static F load(const float* p) {
    F out;
    std::memcpy(&out, p, sizeof(out));
    return out;
  }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof(x)); }
  static F add(F a, F b) { return a + b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }  // b if one is NaN
  static F abs(F a) { return (F)((U)a & 0x7fffffffu); }
  static F with_sign(F magnitude, F sign) { return (F)((U)magnitude | ((U)sign & 0x80000000u)); }
  static float hsum(F a) {
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = a[i] + a[i + 8];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
  static float hmax(F a) {
    float m = a[0];
    for (int i = 1; i < kLanes; i++) m = a[i] > m ? a[i] : m;
    return m;
  }

  static Words load_words(const int32_t* p) {
    Words out;
    std::memcpy(&out, p, sizeof(out));
    return out;
  }
  template <int N>
  static Words shr(Words w) {
    return w >> N;
  }
  static Words no_words() { return U{}; }
  // Return bits 15 and 31 of w, and those of earlier words one bit further down.
  static Words spare(Words earlier, Words w) { return earlier >> 1 | (w & 0x80008000u); }

  static F from_half(H h) {
    const U wide = __builtin_convertvector(h, U);
    const U sign = (wide & 0x8000u) << 16, rest = wide & 0x7fffu;
    // A multiplication adjusts the exponents, which also handles subnormals; inf and nan keep
    // theirs.
    const F scaled = (F)(rest << 13) * 0x1p112f;
    const U special = (rest << 13) | 0x7f800000u;
    return (F)(sign | (rest >= 0x7c00u ? special : (U)scaled));
  }
  template <Float T>
  static F load_as(const void* p) {
    if constexpr (T == Float::f32) return load(static_cast<const float*>(p));
    H h;
    std::memcpy(&h, p, sizeof(h));
    if constexpr (T == Float::f16) return from_half(h);
    return (F)(__builtin_convertvector(h, U) << 16);
  }
  // Load the first n of sixteen elements, zeros after them.
  template <Float T>
  static F load_as_n(const void* p, int64_t n) {
    alignas(64) unsigned char buffer[64] = {};
    std::memcpy(buffer, p, n * (T == Float::f32 ? 4 : 2));
    return load_as<T>(buffer);
  }
  static F hide(F x, const uint8_t* seen) {
    for (int i = 0; i < kLanes; i++) x[i] = seen[i] ? x[i] : -__builtin_inff();
    return x;
  }
  // x = whole(x) + fraction(x, whole(x)), with a fraction from 0 to 1, for x > -127.
  static F whole(F x) { return max((x - 0.5f + 12582912.0f) - 12582912.0f, set1(-127.0f)); }
  static F fraction(F x, F n) { return x - n; }
  // x·2^n for integral n in [-126, 127].
  static F scale2(F x, F n) { return x * (F)((__builtin_convertvector(n, I) + 127) << 23); }
  static F zero_below(F x, F value, float limit) { return x < limit ? F{} : value; }
};

}  // namespace tersekv
