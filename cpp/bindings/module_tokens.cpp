// Binding of kernels/write_tokens.py: new tokens of a layer are rounded into the spare room of its window.
#include <nanobind/nanobind.h>

#include <bit>

#include "tensors.h"

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

template <Float from, Float to>
bool write_row(const Tensor& x, int64_t first, const Tensor& buffer, int64_t place, int64_t D) {
  using To = Number<to>;
  const auto* in = x.as<typename Number<from>::Bits>() + first;
  auto* out = reinterpret_cast<typename To::Bits*>(buffer.address) + place;
  bool finite = true;
  for (int64_t d = 0; d < D; d++) {
    if constexpr (from == to)
      out[d] = in[d];
    else
      out[d] = To::rounded(Number<from>::value(in[d]));
    finite &= (out[d] & To::kExponent) != To::kExponent;
  }
  return finite;
}

template <Float from>
auto row_to(Float to) {
  return to == Float::f32   ? &write_row<from, Float::f32>
         : to == Float::f16 ? &write_row<from, Float::f16>
                            : &write_row<from, Float::bf16>;
}

// Write x [B, H, n, D] to tokens `at` to `at + n` of the buffer [B, H, capacity, D].
bool write(const char* name, nb::handle tokens, nb::handle room, int64_t at) {
  const Tensor x = tensor_of(name, tokens, kFloats), buffer = tensor_of("buffer", room, kFloats);
  if (x.dims != 4) fail(name, ": expected [B, H, n, D]");
  const int64_t B = x.shape[0], H = x.shape[1], n = x.shape[2], D = x.shape[3];
  if (x.last_stride() != 1) throw NotTaken(std::string(name) + " is not contiguous along D");
  const int64_t capacity = buffer.dims == 4 ? buffer.shape[2] : 0;
  expect("", "buffer", buffer, {{"B", B}, {"H", H}, {"capacity", capacity}, {"D", D}}, 3);
  if (at < 0 || at > capacity - n)
    fail("buffer: ", "has no room for tokens " + std::to_string(at) + " to " + std::to_string(at + n));
  const Float type = buffer.float_type();
  const auto row = x.type == Type::f32   ? row_to<Float::f32>(type)
                   : x.type == Type::f16 ? row_to<Float::f16>(type)
                                         : row_to<Float::bf16>(type);
  bool finite = true;
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t t = 0; t < n; t++)
        finite &= row(x, b * x.stride[0] + h * x.stride[1] + t * x.stride[2], buffer,
                      b * buffer.stride[0] + h * buffer.stride[1] + (at + t) * buffer.stride[2], D);
  return finite;
}

bool py_write_tokens(nb::handle keys, nb::handle values, nb::handle key_buffer, nb::handle value_buffer, int64_t at) {
  const bool finite = write("keys", keys, key_buffer, at);
  return write("values", values, value_buffer, at) && finite;
}

}  // namespace

void define_tokens(nb::module_& m) { m.def("write_tokens", &py_write_tokens); }

}  // namespace tersekv
