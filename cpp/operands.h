// From Python to the kernels' structs: tensors arrive as (address, shape, strides) and are checked against the
// contract.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "contract.h"

namespace nb = nanobind;

namespace tersekv {

constexpr int kMaxDims = 6;

struct Tensor {
  uintptr_t address = 0;
  int dims = 0;
  int64_t shape[kMaxDims] = {}, stride[kMaxDims] = {};

  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(address);
  }
};

int64_t as_int(PyObject* o);
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

// The views of a call, which live as long as this object.
class Operands {
 public:
  Operands(int64_t B, int64_t H) : B_(B), H_(H) {}

  // A view packed by tersekv.ops.cpu.pack: (kind, ...). D: channels it must have, or -1.
  const View* read(const char* name, nb::handle packed, int64_t D);

 private:
  struct Storage;
  View parse(const std::string& name, nb::handle packed);
  void parse_exact(View& v, const std::string& name, nb::handle packed);
  void parse_grid(View& v, const std::string& name, nb::handle packed);
  void parse_parts(View& v, const std::string& name, nb::handle packed, Py_ssize_t first);
  Plane plane(const std::string& name, const char* what, const Tensor& x, std::initializer_list<Size> sizes);

  int64_t B_, H_;
  std::vector<std::unique_ptr<View[]>> views_;
};

}  // namespace tersekv
