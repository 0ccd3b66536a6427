#include "tensors.h"

namespace tersekv {

int64_t as_int(PyObject* o) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(o, &overflow);
  if (overflow) throw nb::value_error("a whole number of 64 bits is expected");
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

PyObject* item(nb::handle tuple, Py_ssize_t i) {
  if (!PyTuple_Check(tuple.ptr()) || i >= PyTuple_GET_SIZE(tuple.ptr()))
    throw nb::value_error("a call must be packed by tersekv.kernels.cpu");
  return PyTuple_GET_ITEM(tuple.ptr(), i);
}

Tensor tensor_at(nb::handle tuple, Py_ssize_t i) {
  Tensor out;
  out.address = static_cast<uintptr_t>(as_int(item(tuple, i)));
  const nb::handle shape = item(tuple, i + 1), stride = item(tuple, i + 2);
  const Py_ssize_t dims = PyTuple_Check(shape.ptr()) ? PyTuple_GET_SIZE(shape.ptr()) : -1;
  if (dims < 0 || dims > kMaxDims) throw nb::value_error("a tensor of at most 6 dimensions is expected");
  out.dims = static_cast<int>(dims);
  int64_t elements = 1;
  for (Py_ssize_t k = 0; k < dims; k++) {
    out.shape[k] = as_int(item(shape, k));
    out.stride[k] = as_int(item(stride, k));
    const int64_t size = out.shape[k];
    if (size < 0 || (size > 0 && __builtin_mul_overflow(elements, size, &elements)) || elements > kMostElements)
      throw nb::value_error(("a tensor has a size that no memory holds: " + std::to_string(size)).c_str());
  }
  return out;
}

void expect(const std::string& side, const char* what, const Tensor& x, std::initializer_list<Size> sizes, int packed) {
  // The text is made only where it is needed: this runs at every call.
  const auto fail = [&](const std::string& detail) {
    std::string text = std::string(side).append(what).append(": expected [");
    for (const Size& size : sizes) text.append(size.name).append(&size + 1 == sizes.end() ? "] " : ", ");
    throw nb::value_error(text.append(detail).c_str());
  };
  if (x.dims != static_cast<int>(sizes.size()))
    fail("(" + std::to_string(sizes.size()) + " dimensions), got " + std::to_string(x.dims));
  int k = 0;
  for (const Size& size : sizes) {
    if (x.shape[k] != size.value)
      fail("with " + std::string(size.name) + " = " + std::to_string(size.value) + ", got " +
           std::to_string(x.shape[k]));
    k++;
  }
  int64_t step = 1;
  for (k = x.dims - 1; k >= packed; k--) {
    if (step > 0 && x.shape[k] > 1 && x.stride[k] != step)
      fail("with stride " + std::to_string(step) + " along " + (sizes.begin() + k)->name + ", got " +
           std::to_string(x.stride[k]));
    step *= x.shape[k];
  }
}

double as_double(PyObject* o) {
  const double value = PyFloat_AsDouble(o);
  if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

int64_t in_range(const std::string& name, const char* what, int64_t value, int64_t most) {
  if (value < 1 || value > most)
    fail(name, std::string(what) + ": expected 1 to " + std::to_string(most) + ", got " + std::to_string(value));
  return value;
}

void fail(const std::string& name, const std::string& text) { throw nb::value_error((name + text).c_str()); }

Float half_type(const std::string& name, int64_t half) {
  if (half != 1 && half != 2) fail(name, "expected float16 or bfloat16");
  return static_cast<Float>(half);
}

}  // namespace tersekv
