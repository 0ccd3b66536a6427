// Arguments from Python: tensors arrive as (address, shape, strides) and are checked against the contract.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>

#include "contract.h"

namespace nb = nanobind;

namespace tersekv {

constexpr int kMaxDims = 6;
constexpr int64_t kMostElements = int64_t{1} << 56;  // so that products of a few sizes stay in 64 bits

struct Tensor {
  uintptr_t address = 0;  // 0 without dimensions: no tensor
  int dims = 0;
  int64_t shape[kMaxDims] = {}, stride[kMaxDims] = {};

  bool given() const { return dims > 0 || address != 0; }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(address);
  }
};

int64_t as_int(PyObject* o);
double as_double(PyObject* o);
PyObject* item(nb::handle tuple, Py_ssize_t i);

// Items i, i + 1, i + 2 of a tuple: address, shape, strides.
Tensor tensor_at(nb::handle tuple, Py_ssize_t i);

struct Size {
  const char* name;
  int64_t value;
};

// Throws "what: expected [B, H, ...] with B = 2, got 3" on a wrong size, and names the first axis from `packed` on
// whose stride is not that of a contiguous tensor.
void expect(const std::string& side, const char* what, const Tensor& x, std::initializer_list<Size> sizes, int packed);

// `value`, from 1 to `most`; throws "name what: expected 1 to 8, got 9".
int64_t in_range(const std::string& name, const char* what, int64_t value, int64_t most);

// Throws a ValueError of `name` and `text`.
[[noreturn]] void fail(const std::string& name, const std::string& text);

// float16 or bfloat16 from its number.
Float half_type(const std::string& name, int64_t half);

}  // namespace tersekv
