// Numbers of 32 and 16 bits: their values, and rounding to the nearest one, as torch rounds.
#pragma once

#include <bit>
#include <cstdint>

#include "contract.h"

namespace tersekv {
namespace {

constexpr uint32_t kSign = 0x80000000u;

template <Float type>
struct Number;

template <>
struct Number<Float::f32> {
  using Bits = uint32_t;
  static constexpr Bits kExponent = 0x7f800000u;
  static float value(Bits bits) { return std::bit_cast<float>(bits); }
  static Bits rounded(float x) { return std::bit_cast<uint32_t>(x); }
};

template <>
struct Number<Float::bf16> {
  using Bits = uint16_t;
  static constexpr Bits kExponent = 0x7f80u;
  static float value(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  // To the nearest, or to the even one of two. A NaN stays one.
  static Bits rounded(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    if ((bits & ~kSign) > 0x7f800000u) return static_cast<Bits>(bits >> 16 | 0x40u);
    return static_cast<Bits>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  }
};

template <>
struct Number<Float::f16> {
  using Bits = uint16_t;
  static constexpr Bits kExponent = 0x7c00u;
  static float value(Bits bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, rest = static_cast<uint32_t>(bits & 0x7fffu)
                                                                              << 13;
    // The product moves the exponent's bias, also of subnormal numbers.
    const auto size = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f);
    return std::bit_cast<float>(sign | ((bits & kExponent) == kExponent ? rest | 0x7f800000u : size));
  }
  // As bfloat16. Numbers of 65,520 and more become infinite.
  static Bits rounded(float x) {
    const auto all = std::bit_cast<uint32_t>(x);
    const uint32_t bits = all & ~kSign, sign = (all & kSign) >> 16;
    uint32_t size = 0;
    if (bits >= 0x47800000u)  // 2^16
      size = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    else if (bits < 0x38800000u)  // 2^-14: adding 1/2 leaves the bits of a subnormal number at the end
      size = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000u;
    else
      size = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13;
    return static_cast<Bits>(sign | size);
  }
};

}  // namespace
}  // namespace tersekv
