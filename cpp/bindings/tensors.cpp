#include "tensors.h"

#include <nanobind/stl/string.h>

#include <array>

namespace tersekv {
namespace {

// Attribute names, classes and types of torch: Python objects that live as long as the process.
struct Torch {
  PyObject *tensor, *grad_enabled, *strided;
  PyObject *data_ptr, *shape, *stride, *dtype, *is_cpu, *requires_grad, *layout, *device;
  std::array<std::pair<PyObject*, Type>, 10> types;
};

Torch torch;

nb::object attribute(nb::handle x, PyObject* name) {
  PyObject* out = PyObject_GetAttr(x.ptr(), name);
  if (!out) throw nb::python_error();
  return nb::steal(out);
}

nb::object call_method(nb::handle x, PyObject* name) {
  PyObject* self = x.ptr();
  PyObject* out = PyObject_VectorcallMethod(name, &self, 1, nullptr);
  if (!out) throw nb::python_error();
  return nb::steal(out);
}

bool is_true(const nb::object& x) { return x.ptr() == Py_True; }

std::string text_of(const nb::object& x) { return nb::cast<std::string>(nb::str(x)); }

Type type_of(PyObject* dtype) {
  for (const auto& [object, type] : torch.types)
    if (object == dtype) return type;
  return Type::other;
}

std::string names_of(unsigned types) {
  std::string names;
  for (const auto& [object, type] : torch.types)
    if (types & one(type)) {
      const std::string name = text_of(nb::borrow(object)).substr(6);  // without "torch."
      names += names.empty() ? name : " or " + name;
    }
  return names;
}

}  // namespace

void import_torch() {
  const nb::module_ module = nb::module_::import_("torch");
  const auto of = [&](const char* name) { return module.attr(name).inc_ref().ptr(); };
  torch.tensor = of("Tensor");
  torch.grad_enabled = of("is_grad_enabled");
  torch.strided = of("strided");
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  torch.data_ptr = name("data_ptr");
  torch.shape = name("shape");
  torch.stride = name("stride");
  torch.dtype = name("dtype");
  torch.is_cpu = name("is_cpu");
  torch.requires_grad = name("requires_grad");
  torch.layout = name("layout");
  torch.device = name("device");
  torch.types = {{{of("float64"), Type::f64},
                  {of("float32"), Type::f32},
                  {of("float16"), Type::f16},
                  {of("bfloat16"), Type::bf16},
                  {of("int64"), Type::i64},
                  {of("int32"), Type::i32},
                  {of("int16"), Type::i16},
                  {of("int8"), Type::i8},
                  {of("uint8"), Type::u8},
                  {of("bool"), Type::b8}}};
}

uintptr_t address_of(nb::handle x) {
  const nb::object address = call_method(x, torch.data_ptr);
  const size_t value = PyLong_AsSize_t(address.ptr());
  if (value == static_cast<size_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  return value;
}

Tensor tensor_of(const std::string& name, nb::handle x, unsigned types) {
  const int is_tensor = PyObject_IsInstance(x.ptr(), torch.tensor);
  if (is_tensor < 0) throw nb::python_error();
  if (!is_tensor) throw nb::type_error((name + ": expected a tensor").c_str());
  if (!is_true(attribute(x, torch.is_cpu)))
    throw NotTaken(name + " is on " + text_of(attribute(x, torch.device)) + ", not on cpu");
  if (const nb::object layout = attribute(x, torch.layout); layout.ptr() != torch.strided)
    throw NotTaken(name + " is " + text_of(layout) + ", not strided");
  if (is_true(attribute(x, torch.requires_grad))) {
    PyObject* enabled = PyObject_CallNoArgs(torch.grad_enabled);
    if (!enabled) throw nb::python_error();
    if (is_true(nb::steal(enabled))) throw NotTaken(name + " needs a gradient");
  }
  Tensor out;
  const nb::object dtype = attribute(x, torch.dtype);
  out.type = type_of(dtype.ptr());
  if (out.type == Type::other || !(types & one(out.type)))
    throw NotTaken(name + " is " + text_of(dtype) + ", not " + names_of(types));
  const nb::object shape = attribute(x, torch.shape), stride = call_method(x, torch.stride);
  const Py_ssize_t dims = NB_TUPLE_GET_SIZE(shape.ptr());
  if (dims > kMaxDims) fail(name, ": expected at most 6 dimensions, got " + std::to_string(dims));
  out.dims = static_cast<int>(dims);
  int64_t elements = 1;
  for (Py_ssize_t k = 0; k < dims; k++) {
    out.shape[k] = as_int(item(shape, k));
    out.stride[k] = as_int(item(stride, k));
    const int64_t size = out.shape[k];
    if (size > 0 && (__builtin_mul_overflow(elements, size, &elements) || elements > kMostElements))
      fail(name, " has a size that is too large: " + std::to_string(size));
  }
  out.address = address_of(x);
  return out;
}

Tensor optional_tensor(const std::string& name, nb::handle x, unsigned types) {
  return x.is_none() ? Tensor{} : tensor_of(name, x, types);
}

int64_t as_int(PyObject* o) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(o, &overflow);
  if (overflow) throw nb::value_error("expected a 64-bit integer");
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

PyObject* item(nb::handle tuple, Py_ssize_t i) {
  if (!PyTuple_Check(tuple.ptr()) || i >= NB_TUPLE_GET_SIZE(tuple.ptr()))
    throw nb::type_error(("expected a tuple of at least " + std::to_string(i + 1) + " items").c_str());
  return NB_TUPLE_GET_ITEM(tuple.ptr(), i);
}

void expect(const std::string& side, const char* what, const Tensor& x, std::initializer_list<Size> sizes, int packed) {
  // The text is built only if needed, because this runs at every call.
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

int64_t in_range(const std::string& name, const char* what, int64_t value, int64_t most) {
  if (value < 1 || value > most)
    fail(name, std::string(what) + ": expected 1 to " + std::to_string(most) + ", got " + std::to_string(value));
  return value;
}

void fail(const std::string& name, const std::string& text) { throw nb::value_error((name + text).c_str()); }

}  // namespace tersekv
