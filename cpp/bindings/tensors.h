// Arguments from Python: torch tensors, whose type, shape and strides are checked against the
// contract.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>

#include "contract.h"

namespace nb = nanobind;

namespace tersekv {

constexpr int kMaxDims = 6;
constexpr int64_t kMostElements = int64_t{1} << 56;  // so that products of a few sizes fit 64 bits

// Element types that kernels read; `other` is any other type.
enum class Type : int { f64, f32, f16, bf16, i64, i32, i16, i8, u8, b8, other };

// Sets of types, as bits.
constexpr unsigned one(Type type) { return 1u << static_cast<int>(type); }
constexpr unsigned kFloat64 = one(Type::f64), kFloat32 = one(Type::f32), kHalves = one(Type::f16) | one(Type::bf16),
                   kFloats = kFloat32 | kHalves, kInt32 = one(Type::i32), kInt64 = one(Type::i64),
                   kInt16 = one(Type::i16), kUint8 = one(Type::u8), kBool = one(Type::b8),
                   kIntegers = kInt64 | kInt32 | kInt16 | one(Type::i8) | kUint8;

// The kernels do not support an argument; the torch reference does.
struct NotTaken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A tensor's memory was replaced after an object was built from it.
struct Moved : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Tensor {
  uintptr_t address = 0;
  int dims = -1;  // -1: no tensor
  Type type = Type::other;
  int64_t shape[kMaxDims] = {}, stride[kMaxDims] = {};

  bool given() const { return dims >= 0; }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(address);
  }
  // Return `type`, which must be one of float32, float16 and bfloat16.
  Float float_type() const { return type == Type::f32 ? Float::f32 : type == Type::f16 ? Float::f16 : Float::bf16; }
  int64_t last_stride() const { return dims > 0 && shape[dims - 1] > 1 ? stride[dims - 1] : 1; }
};

// Look up torch's objects; called once, when the extension is loaded.
void import_torch();

// Return a dense CPU tensor of one of `types`; `name` names it in errors. Its shape and strides are
// within its storage, which torch guarantees. Throw NotTaken for another device or type, or if it
// needs a gradient.
Tensor tensor_of(const std::string& name, nb::handle x, unsigned types);

// Return the same, or no tensor for None.
Tensor optional_tensor(const std::string& name, nb::handle x, unsigned types);

// Return the current address of a tensor's first element.
uintptr_t address_of(nb::handle x);

int64_t as_int(PyObject* o);
PyObject* item(nb::handle tuple, Py_ssize_t i);

struct Size {
  const char* name;
  int64_t value;
};

// Throw "what: expected [B, H, ...] with B = 2, got 3" for a wrong size. Also throw if an axis
// from `packed` on has a stride that a contiguous tensor would not have.
void expect(const std::string& side, const char* what, const Tensor& x, std::initializer_list<Size> sizes, int packed);

// Return `value` if it is from 1 to `most`; otherwise throw "name what: expected 1 to 8, got 9".
int64_t in_range(const std::string& name, const char* what, int64_t value, int64_t most);

// Throw a ValueError with the text `name` + `text`.
[[noreturn]] void fail(const std::string& name, const std::string& text);

}  // namespace tersekv
