// Binding: calls are checked against the contract (operands.h), and the GIL is released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "basis.h"
#include "driver.h"
#include "encode_trellis.h"
#include "isa.h"
#include "operands.h"
#include "pool.h"

namespace tersekv {

void define_grid_encoders(nb::module_& m);    // module_grid.cpp
void define_vector_encoders(nb::module_& m);  // module_vectors.cpp

namespace {

// query (address, shape, strides)
Call common(nb::handle query, double scaling, double softcap) {
  Call call;
  const Tensor q = tensor_at(query, 0);
  if (q.dims != 4) throw nb::value_error("query: expected [B, H, R, D]");
  call.B = q.shape[0];
  call.H = q.shape[1];
  call.R = q.shape[2];
  call.D = q.shape[3];
  in_range("query: ", "D", call.D, kMostChannels);
  if (std::max(call.B, call.H) > kMostHeads) throw nb::value_error("query: expected fewer batch rows and heads");
  expect("", "query", q, {{"B", call.B}, {"H", call.H}, {"R", call.R}, {"D", call.D}}, 0);
  call.query = reinterpret_cast<const float*>(q.address);
  call.scores.scaling = static_cast<float>(scaling);
  call.scores.softcap = static_cast<float>(softcap);
  return call;
}

// Whether a view's tokens may lie anywhere: not where a table or a list follows their order.
bool pageable(const View& view) {
  if (view.kind == Kind::roped || view.kind == Kind::turned || view.kind == Kind::sparse) return false;
  for (int64_t i = 0; i < view.count; i++)
    if (!pageable(view.parts[i])) return false;
  return true;
}

// (table 3x, tokens per page): int32 [B, n] of pages of a segment of T tokens.
Pages read_pages(nb::handle packed, const View& keys, const View& values, int64_t B, int64_t unit, int64_t& T) {
  const Tensor x = tensor_at(packed, 0);
  Pages pages{x.as<int32_t>(), x.stride[0], as_int(item(packed, 3))};
  const int64_t n = x.dims == 2 ? x.shape[1] : 0;
  expect("", "pages", x, {{"B", B}, {"n", n}}, 1);
  if (!pageable(keys) || !pageable(values)) throw nb::value_error("pages: expected views without RoPE and outliers");
  if (pages.tokens < 1 || pages.tokens % unit || T % pages.tokens)
    throw nb::value_error(("pages: expected tokens per page to be a multiple of " + std::to_string(unit) +
                           " and to divide T = " + std::to_string(T) + ", got " + std::to_string(pages.tokens))
                              .c_str());
  const int64_t count = T / pages.tokens;
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < n; i++)
      if (const int32_t at = pages.at[b * pages.stride_b + i]; at < -1 || at >= count)
        throw nb::value_error(
            ("pages: expected -1 to " + std::to_string(count - 1) + ", got " + std::to_string(at)).c_str());
  if (__builtin_mul_overflow(n, pages.tokens, &T) || T > kMostElements)
    throw nb::value_error("pages: expected fewer tokens in a row");
  return pages;
}

// mask like query, or None
void read_mask(Call& call, nb::handle mask) {
  if (mask.is_none()) return;
  const Tensor m = tensor_at(mask, 0);
  if (m.dims < 3) throw nb::value_error("mask: expected [B, q, T] or [B, H, q, T]");
  const int64_t rows = m.shape[m.dims - 2];
  if (m.dims == 3) {
    expect("", "mask", m, {{"B", call.B}, {"q", rows}, {"T", call.T}}, 2);
  } else {
    expect("", "mask", m, {{"B", call.B}, {"H", call.H}, {"q", rows}, {"T", call.T}}, 3);
    call.scores.stride_h = m.stride[1];
  }
  if (rows < 1 || call.R % rows != 0)
    throw nb::value_error(
        ("mask: expected q to divide R = " + std::to_string(call.R) + ", got q = " + std::to_string(rows)).c_str());
  call.scores.mask = reinterpret_cast<const uint8_t*>(m.address);
  call.scores.stride_b = m.stride[0];
  call.scores.stride_q = m.stride[m.dims - 2];
  call.scores.q = rows;
}

// (keys, values, mask or None), and where tokens lie in pages (table 3x, tokens per page)
void read_segment(Call& call, Operands& operands, nb::handle segment) {
  const View *keys = operands.read("keys", item(segment, 0), call.D),
             *values = operands.read("values", item(segment, 1), -1);
  if (values->T != keys->T)
    throw nb::value_error(
        ("values: expected T = " + std::to_string(keys->T) + " tokens like the keys, got " + std::to_string(values->T))
            .c_str());
  const int64_t unit =
      in_range("", "tokens that blocks of keys and values divide", std::lcm(keys->t, values->t), kMostBlockTokens);
  call.Dv = values->D;
  call.T = keys->T;
  call.keys = keys;
  call.values = values;
  call.tokens_per_unit = unit;
  const nb::handle pages = PyTuple_GET_SIZE(segment.ptr()) > 3 ? item(segment, 3) : nb::handle(Py_None);
  if (!pages.is_none()) call.pages = read_pages(pages, *keys, *values, call.B, unit, call.T);
  if (call.T % call.tokens_per_unit)
    throw nb::value_error(("keys and values: expected a multiple of " + std::to_string(call.tokens_per_unit) +
                           " tokens, got " + std::to_string(call.T))
                              .c_str());
  read_mask(call, item(segment, 2));
}

// segments: a tuple of at least one; out and lse: addresses of fresh contiguous tensors for values of Dv channels.
void py_attend(nb::handle query, nb::handle segments, double scaling, double softcap, int64_t Dv, uintptr_t out,
               uintptr_t lse, int threads) {
  const Call one = common(query, scaling, softcap);
  const Py_ssize_t n = PyTuple_Check(segments.ptr()) ? PyTuple_GET_SIZE(segments.ptr()) : 0;
  if (n == 0) throw nb::value_error("segments: expected at least one");
  Operands operands(one.B, one.H);
  std::vector<Call> calls(n, one);
  for (Py_ssize_t i = 0; i < n; i++) {
    read_segment(calls[i], operands, item(segments, i));
    if (calls[i].Dv != Dv)
      throw nb::value_error(
          ("values: expected head_dim " + std::to_string(Dv) + " in all segments, got " + std::to_string(calls[i].Dv))
              .c_str());
  }
  nb::gil_scoped_release release;
  attend(calls, threads, reinterpret_cast<float*>(out), reinterpret_cast<float*>(lse));
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

// windows: address of a fresh contiguous uint8 [R, n, D].
void py_encode_trellis(nb::handle y, nb::handle weight, nb::handle bits, nb::handle tables, uintptr_t windows,
                       int threads) {
  const Tensor x = tensor_at(y, 0), w = tensor_at(weight, 0), b = tensor_at(bits, 0), t = tensor_at(tables, 0);
  if (x.dims != 3) throw nb::value_error("y: expected [R, n, D]");
  EncodeTrellis call;
  call.R = x.shape[0];
  call.n = x.shape[1];
  call.D = x.shape[2];
  expect("", "weight", w, {{"R", call.R}, {"D", call.D}}, 0);
  expect("", "bits", b, {{"R", call.R}, {"D", call.D}}, 0);
  expect("", "tables", t, {{"9", kTrellisRates}, {"256", kTrellisStates}}, 0);
  call.y = x.as<float>();
  call.y_r = x.stride[0];
  call.y_n = x.stride[1];
  call.y_d = x.stride[2];
  call.weight = w.as<float>();
  call.bits = b.as<uint8_t>();
  call.tables = t.as<float>();
  call.windows = reinterpret_cast<uint8_t*>(windows);
  for (int64_t i = 0; i < call.R * call.D; i++)
    if (call.bits[i] >= kTrellisRates) fail("bits: ", "expected 0 to 8, got " + std::to_string(call.bits[i]));
  nb::gil_scoped_release release;
  encode_trellis(call, threads);
}

// x [B, H, R, D], codes [1 or B, H, 3·D²/4], channels [1 or B, H, D]; out: address of a fresh contiguous [B, H, R, D].
void py_basis_product(nb::handle x, nb::handle codes, nb::handle channels, bool combine, uintptr_t out) {
  const Tensor vectors = tensor_at(x, 0), c = tensor_at(codes, 0), scale = tensor_at(channels, 0);
  if (vectors.dims != 4) throw nb::value_error("x: expected [B, H, R, D]");
  const int64_t B = vectors.shape[0], H = vectors.shape[1], R = vectors.shape[2], D = vectors.shape[3];
  if (D % 16) throw nb::value_error(("x: expected a multiple of 16 channels, got " + std::to_string(D)).c_str());
  expect("", "x", vectors, {{"B", B}, {"H", H}, {"R", R}, {"D", D}}, 0);
  const int64_t rows = c.dims == 3 && c.shape[0] == 1 ? 1 : B;
  expect("", "basis", c, {{"B", rows}, {"H", H}, {"bytes", D * D * 3 / 4}}, 0);
  expect("", "channels", scale, {{"B", rows}, {"H", H}, {"D", D}}, 0);
  const BasisProduct call{B,
                          H,
                          R,
                          D,
                          combine,
                          rows == 1,
                          vectors.as<float>(),
                          c.as<uint8_t>(),
                          scale.as<float>(),
                          reinterpret_cast<float*>(out)};
  nb::gil_scoped_release release;
  for (int64_t head = 0; head < B * H; head++) current().basis_product(call, head);
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
  m.def("attend", &py_attend);
  m.def("merge_segments", &py_merge);
  m.def("encode_trellis", &py_encode_trellis);
  m.def("basis_product", &py_basis_product);
  define_grid_encoders(m);
  define_vector_encoders(m);
  m.def("isa", [] { return std::string(current().name); }, "Instruction set in use.");
  m.def("isas", &py_isas, "(name, missing CPU features) per build of the kernels, best first.");
  m.def("set_isa", &set_isa, nb::arg("name"), "Use one instruction set, or `auto` for the best.");
  // At exit, while the interpreter is still whole: threads must not outlive what they run.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { shutdown_pool(); }));
}
