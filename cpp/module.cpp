// Binding: tensors arrive as (address, shape, strides), are checked against the contract, and the GIL is released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <vector>

#include "driver.h"
#include "isa.h"
#include "pool.h"

namespace nb = nanobind;

namespace tersekv {
namespace {

constexpr int kMaxDims = 6;

struct Tensor {
  uintptr_t address = 0;
  int dims = 0;
  int64_t shape[kMaxDims] = {}, stride[kMaxDims] = {};
};

int64_t as_int(PyObject* o) {
  const int64_t value = PyLong_AsLongLong(o);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

PyObject* item(nb::handle tuple, Py_ssize_t i) {
  if (!PyTuple_Check(tuple.ptr()) || i >= PyTuple_GET_SIZE(tuple.ptr()))
    throw nb::value_error("a call must be packed by tersekv.ops.cpu");
  return PyTuple_GET_ITEM(tuple.ptr(), i);
}

// Items i, i + 1, i + 2 of a tuple: address, shape, strides.
Tensor tensor_at(nb::handle tuple, Py_ssize_t i) {
  Tensor out;
  out.address = static_cast<uintptr_t>(as_int(item(tuple, i)));
  const nb::handle shape = item(tuple, i + 1), stride = item(tuple, i + 2);
  const Py_ssize_t dims = PyTuple_Check(shape.ptr()) ? PyTuple_GET_SIZE(shape.ptr()) : -1;
  if (dims < 0 || dims > kMaxDims) throw nb::value_error("a tensor of at most 6 dimensions is expected");
  out.dims = static_cast<int>(dims);
  for (Py_ssize_t k = 0; k < dims; k++) {
    out.shape[k] = as_int(item(shape, k));
    out.stride[k] = as_int(item(stride, k));
  }
  return out;
}

struct Size {
  const char* name;
  int64_t value;
};

// Throws "what: expected [B, H, ...] with B = 2, got 3" on a wrong size, and names the first axis from `packed` on
// whose stride is not that of a contiguous tensor.
void expect(const char* side, const char* what, const Tensor& x, std::initializer_list<Size> sizes, int packed) {
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

Plane plane(const char* side, const char* what, const Tensor& x, const Call& call, const GridView& v, int64_t N) {
  const int64_t rows = v.lane_scaled ? v.P / v.group : v.L / v.group;
  expect(side, what, x,
         {{"B", call.B}, {"H", call.H}, {"N", N}, {"groups", rows}, {"per group", v.lane_scaled ? v.L : v.P}}, 3);
  return {reinterpret_cast<const uint16_t*>(x.address), x.stride[0], x.stride[1], x.stride[2]};
}

// (bits, lane_scaled, half, group, P, L, codes 3x, scale 3x, offset 3x, table 3x); an offset at address 0 is none.
GridView grid_view(const char* side, nb::handle packed, const Call& call, int64_t N) {
  const auto fail = [&](const std::string& detail) { throw nb::value_error((side + detail).c_str()); };
  GridView v;
  v.bits = static_cast<int>(as_int(item(packed, 0)));
  v.lane_scaled = as_int(item(packed, 1)) != 0;
  const int64_t half = as_int(item(packed, 2));
  v.group = as_int(item(packed, 3));
  v.P = as_int(item(packed, 4));
  v.L = as_int(item(packed, 5));
  if (v.bits < 1 || v.bits > 4) fail("bits: expected 1 to 4, got " + std::to_string(v.bits));
  if (half != 1 && half != 2) fail("scale: expected float16 or bfloat16");
  v.half = static_cast<Float>(half);
  const int64_t grouped = v.lane_scaled ? v.P : v.L;
  if (v.group < 1 || grouped % v.group != 0)
    fail("group: expected a divisor of " + std::to_string(grouped) + ", got " + std::to_string(v.group));
  if (!v.lane_scaled && v.group % kLanes != 0 && v.group != v.L)
    fail("group: expected a multiple of 16 or " + std::to_string(v.L) + ", got " + std::to_string(v.group));
  v.words = packed_words(v.bits, v.P);
  const Tensor codes = tensor_at(packed, 6), scale = tensor_at(packed, 9), offset = tensor_at(packed, 12);
  expect(side, "codes", codes,
         {{"B", call.B}, {"H", call.H}, {"N", N}, {"Lg", ceil_div(v.L, kLanes)}, {"W", v.words}, {"16", kLanes}}, 3);
  v.codes = reinterpret_cast<const int32_t*>(codes.address);
  v.stride_b = codes.stride[0];
  v.stride_h = codes.stride[1];
  v.stride_n = codes.stride[2];
  v.scale = plane(side, "scale", scale, call, v, N);
  if (offset.dims) v.offset = plane(side, "offset", offset, call, v, N);
  const Tensor table = tensor_at(packed, 15);
  expect(side, "table", table, {{"2**bits", int64_t{1} << v.bits}}, 0);
  v.table = reinterpret_cast<const float*>(table.address);
  return v;
}

// query (address, shape, strides) with out and lse as addresses of fresh contiguous tensors; mask like query or None.
Call common(nb::handle query, nb::handle mask, int64_t Dv, int64_t T, double scaling, double softcap, uintptr_t out,
            uintptr_t lse) {
  Call call;
  const Tensor q = tensor_at(query, 0);
  if (q.dims != 4) throw nb::value_error("query: expected [B, H, R, D]");
  call.B = q.shape[0];
  call.H = q.shape[1];
  call.R = q.shape[2];
  call.D = q.shape[3];
  expect("", "query", q, {{"B", call.B}, {"H", call.H}, {"R", call.R}, {"D", call.D}}, 0);
  call.Dv = Dv;
  call.T = T;
  call.query = reinterpret_cast<const float*>(q.address);
  call.out = reinterpret_cast<float*>(out);
  call.lse = reinterpret_cast<float*>(lse);
  call.scores.scaling = static_cast<float>(scaling);
  call.scores.softcap = static_cast<float>(softcap);
  if (!mask.is_none()) {
    const Tensor m = tensor_at(mask, 0);
    const int64_t rows = m.dims == 3 ? m.shape[1] : 0;
    expect("", "mask", m, {{"B", call.B}, {"q", rows}, {"T", T}}, 2);
    if (rows < 1 || call.R % rows != 0)
      throw nb::value_error(
          ("mask: expected q to divide R = " + std::to_string(call.R) + ", got q = " + std::to_string(rows)).c_str());
    call.scores.mask = reinterpret_cast<const uint8_t*>(m.address);
    call.scores.stride_b = m.stride[0];
    call.scores.stride_q = m.stride[1];
    call.scores.q = rows;
  }
  return call;
}

void py_attend_grid(nb::handle query, nb::handle keys, nb::handle values, int64_t N, int64_t t, nb::handle mask,
                    double scaling, double softcap, uintptr_t out, uintptr_t lse, int threads) {
  if (N < 0 || t < 1 || t % kLanes != 0)
    throw nb::value_error(("block_tokens: expected a multiple of 16, got " + std::to_string(t)).c_str());
  Call call = common(query, mask, as_int(item(values, 5)), N * t, scaling, softcap, out, lse);
  call.tokens_per_unit = t;
  call.grid_keys = grid_view("keys.", keys, call, N);
  call.grid_values = grid_view("values.", values, call, N);
  if (call.grid_keys.P != call.D || call.grid_keys.L != t)
    throw nb::value_error("keys: expected head_dim and block_tokens of the query and the call");
  if (call.grid_values.P != t) throw nb::value_error("values: expected block_tokens equal to the keys'");
  nb::gil_scoped_release release;
  attend_grid(call, threads);
}

DenseView dense_view(const char* name, nb::handle packed, const Call& call, int64_t D) {
  const int64_t type = as_int(item(packed, 0));
  if (type < 0 || type > 2) throw nb::value_error("expected float32, float16 or bfloat16");
  const Tensor x = tensor_at(packed, 1);
  expect("", name, x, {{"B", call.B}, {"H", call.H}, {"T", call.T}, {"D", D}}, 3);
  return {static_cast<Float>(type), reinterpret_cast<const void*>(x.address), x.stride[0], x.stride[1], x.stride[2]};
}

void py_attend_exact(nb::handle query, nb::handle key, nb::handle value, nb::handle mask, double scaling,
                     double softcap, uintptr_t out, uintptr_t lse, int threads) {
  const Tensor v = tensor_at(value, 1);
  if (v.dims != 4) throw nb::value_error("value: expected [B, H, T, D]");
  Call call = common(query, mask, v.shape[3], v.shape[2], scaling, softcap, out, lse);
  call.dense_keys = dense_view("key", key, call, call.D);
  call.dense_values = dense_view("value", value, call, call.Dv);
  nb::gil_scoped_release release;
  attend_exact(call, threads);
}

// outs and lses: tuples of addresses of contiguous float32 [rows, D] and [rows]; sizes are the caller's to check.
void py_merge(nb::handle outs, nb::handle lses, int64_t rows, int64_t D, uintptr_t out, uintptr_t lse) {
  const Py_ssize_t n = PyTuple_Check(outs.ptr()) ? PyTuple_GET_SIZE(outs.ptr()) : 0;
  std::vector<const float*> out_rows(n), lse_rows(n);
  for (Py_ssize_t s = 0; s < n; s++) {
    out_rows[s] = reinterpret_cast<const float*>(as_int(item(outs, s)));
    lse_rows[s] = reinterpret_cast<const float*>(as_int(item(lses, s)));
  }
  nb::gil_scoped_release release;
  merge_segments(
      {n, rows, D, out_rows.data(), lse_rows.data(), reinterpret_cast<float*>(out), reinterpret_cast<float*>(lse)});
}

nb::list py_isas() {
  nb::list rows;
  for (const Isa& isa : isas()) rows.append(nb::make_tuple(isa.kernels->name, isa.missing));
  return rows;
}

}  // namespace
}  // namespace tersekv

NB_MODULE(_native, m) {
  using namespace tersekv;
  m.def("attend_grid", &py_attend_grid, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  m.def("attend_exact", &py_attend_exact, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg());
  m.def("merge_segments", &py_merge);
  m.def("isa", [] { return std::string(current().name); }, "Instruction set in use.");
  m.def("isas", &py_isas, "(name, missing CPU features) per build of the kernels, best first.");
  m.def("set_isa", &set_isa, nb::arg("name"), "Use one instruction set, or `auto` for the best.");
  // At exit, while the interpreter is still whole: threads must not outlive what they run.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { shutdown_pool(); }));
}
