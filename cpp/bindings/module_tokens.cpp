// Binding of kernels/write_tokens.py: new tokens of a layer are rounded into the spare room of its window, or checked.
#include <nanobind/nanobind.h>

#include "rounding.h"
#include "tensors.h"

namespace tersekv {
namespace {

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

template <Float type>
bool finite_row(const Tensor& x, int64_t first, int64_t D) {
  using Bits = typename Number<type>::Bits;
  constexpr Bits exponent = Number<type>::kExponent;
  const auto* row = x.as<Bits>() + first;
  Bits odd = 0;
  for (int64_t d = 0; d < D; d++) odd |= static_cast<Bits>((row[d] & exponent) == exponent);
  return odd == 0;
}

// x [B, H, n, D] whose channels are contiguous.
bool py_all_finite(nb::handle tokens) {
  const Tensor x = tensor_of("x", tokens, kFloats);
  if (x.dims != 4) fail("x: ", "expected [B, H, n, D]");
  if (x.last_stride() != 1) throw NotTaken("x is not contiguous along D");
  const auto row = x.type == Type::f32   ? &finite_row<Float::f32>
                   : x.type == Type::f16 ? &finite_row<Float::f16>
                                         : &finite_row<Float::bf16>;
  bool finite = true;
  for (int64_t b = 0; b < x.shape[0]; b++)
    for (int64_t h = 0; h < x.shape[1]; h++)
      for (int64_t t = 0; t < x.shape[2]; t++)
        finite &= row(x, b * x.stride[0] + h * x.stride[1] + t * x.stride[2], x.shape[3]);
  return finite;
}

}  // namespace

void define_tokens(nb::module_& m) {
  m.def("write_tokens", &py_write_tokens);
  m.def("all_finite", &py_all_finite);
}

}  // namespace tersekv
