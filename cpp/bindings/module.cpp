// The extension module: views, attention, encoders, and the choice of the instruction set.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "driver.h"
#include "encode_trellis.h"
#include "isa.h"
#include "operands.h"
#include "pool.h"
#include "rounding.h"

namespace tersekv {

using namespace nb::literals;

void define_views(nb::module_& m);            // operands.cpp
void define_byte_views(nb::module_& m);       // operands_bytes.cpp
void define_rope_views(nb::module_& m);       // operands_rope.cpp
void define_trellis_views(nb::module_& m);    // operands_trellis.cpp
void define_attention(nb::module_& m);        // module_attend.cpp
void define_grid_encoders(nb::module_& m);    // module_grid.cpp
void define_vector_encoders(nb::module_& m);  // module_vectors.cpp
void define_fits(nb::module_& m);             // module_fit.cpp
void define_tokens(nb::module_& m);           // module_tokens.cpp
void define_merge(nb::module_& m);            // module_merge.cpp

namespace {

// Merge outs float32 [B, H, R, D] and lses [B, H, R], contiguous, to one of each.
void py_merge(const std::vector<nb::object>& outs, const std::vector<nb::object>& lses, nb::handle out,
              nb::handle lse) {
  const Tensor to = tensor_of("out", out, kFloat32), sum = tensor_of("lse", lse, kFloat32);
  if (to.dims != 4) fail("out: ", "expected [B, H, R, D]");
  const int64_t B = to.shape[0], H = to.shape[1], R = to.shape[2], D = to.shape[3];
  expect("", "out", to, {{"B", B}, {"H", H}, {"R", R}, {"D", D}}, 0);
  expect("", "lse", sum, {{"B", B}, {"H", H}, {"R", R}}, 0);
  if (outs.empty() || outs.size() != lses.size()) fail("outs, lses: ", "expected equally many of both, at least one");
  std::vector<const float*> out_rows, lse_rows;
  for (size_t i = 0; i < outs.size(); i++) {
    const Tensor x = tensor_of("a segment", outs[i], kFloat32), y = tensor_of("a segment", lses[i], kFloat32);
    expect("", "outs", x, {{"B", B}, {"H", H}, {"R", R}, {"D", D}}, 0);
    expect("", "lses", y, {{"B", B}, {"H", H}, {"R", R}}, 0);
    out_rows.push_back(x.as<float>());
    lse_rows.push_back(y.as<float>());
  }
  nb::gil_scoped_release release;
  merge_segments({static_cast<int64_t>(outs.size()), B * H * R, D, out_rows.data(), lse_rows.data(),
                  reinterpret_cast<float*>(to.address), reinterpret_cast<float*>(sum.address)},
                 1);
}

// windows: a fresh contiguous uint8 [R, n, D].
EncodeTrellis trellis_call(nb::handle y, nb::handle weight, nb::handle bits, nb::handle tables) {
  const Tensor x = tensor_of("y", y, kFloat32), w = tensor_of("weight", weight, kFloat32),
               b = tensor_of("bits", bits, kUint8), t = tensor_of("tables", tables, kFloat32);
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
  call.entries = t.as<float>();
  for (int64_t i = 0; i < call.R * call.D; i++)
    if (call.bits[i] >= kTrellisRates) fail("bits: ", "expected 0 to 8, got " + std::to_string(call.bits[i]));
  return call;
}

void py_encode_trellis(nb::handle y, nb::handle weight, nb::handle bits, nb::handle tables, nb::handle windows,
                       int threads) {
  EncodeTrellis call = trellis_call(y, weight, bits, tables);
  const Tensor out = tensor_of("windows", windows, kUint8);
  expect("", "windows", out, {{"R", call.R}, {"n", call.n}, {"D", call.D}}, 0);
  call.windows = reinterpret_cast<uint8_t*>(out.address);
  nb::gil_scoped_release release;
  encode_trellis(call, threads);
}

// Take the outputs of packed vectors: stream int16 [R, n, words] and gain uint8 [R, n], fresh and
// contiguous.
void packed_outputs(EncodeTrellis& call, const std::vector<int64_t>& steps, nb::handle enough, nb::handle stream,
                    nb::handle gain) {
  const Tensor words = tensor_of("stream", stream, kInt16), codes = tensor_of("gain", gain, kUint8),
               errors = tensor_of("enough", enough, kFloat32);
  if (words.dims != 3) throw nb::value_error("stream: expected [R, n, words]");
  call.words = words.shape[2];
  expect("", "stream", words, {{"R", call.R}, {"n", call.n}, {"words", call.words}}, 0);
  expect("", "gain", codes, {{"R", call.R}, {"n", call.n}}, 0);
  expect("", "enough", errors, {{"R", call.R}}, 0);
  for (int64_t r = 0; r < call.R; r++) {
    int64_t sum = 0;
    for (int64_t d = 0; d < call.D; d++) sum += call.bits[r * call.D + d];
    if (sum % 16 || sum > 16 * call.words)
      fail("bits: ",
           "expected a multiple of 16 up to " + std::to_string(16 * call.words) + ", got " + std::to_string(sum));
  }
  call.steps = steps.data();
  call.tries = static_cast<int64_t>(steps.size());
  call.enough = errors.as<float>();
  call.stream = reinterpret_cast<uint16_t*>(words.address);
  call.gain = reinterpret_cast<uint8_t*>(codes.address);
}

void py_pack_trellis(nb::handle y, nb::handle weight, nb::handle bits, nb::handle tables,
                     const std::vector<int64_t>& steps, nb::handle enough, nb::handle stream, nb::handle gain,
                     int threads) {
  EncodeTrellis call = trellis_call(y, weight, bits, tables);
  packed_outputs(call, steps, enough, stream, gain);
  nb::gil_scoped_release release;
  encode_trellis(call, threads);
}

// x [R, n, D]; shift [R, D], inverse [K, D, columns] and of [R], contiguous; length float32 [R, n], fresh and
// contiguous.
void py_pack_vectors(nb::handle x, nb::handle shift, nb::handle inverse, nb::handle of, nb::handle weight,
                     nb::handle bits, nb::handle tables, const std::vector<int64_t>& steps, nb::handle enough,
                     nb::handle stream, nb::handle gain, nb::handle length, int threads) {
  EncodeTrellis call = trellis_call(x, weight, bits, tables);
  const Tensor means = tensor_of("shift", shift, kFloat32), matrix = tensor_of("inverse", inverse, kFloat32),
               rows = tensor_of("of", of, kInt64), lengths = tensor_of("length", length, kFloat32);
  call.columns = round_up(call.D, kLanes);
  expect("", "shift", means, {{"R", call.R}, {"D", call.D}}, 0);
  const int64_t K = matrix.dims == 3 ? matrix.shape[0] : 0;
  expect("", "inverse", matrix, {{"K", K}, {"D", call.D}, {"columns", call.columns}}, 0);
  expect("", "of", rows, {{"R", call.R}}, 0);
  expect("", "length", lengths, {{"R", call.R}, {"n", call.n}}, 0);
  call.shift = means.as<float>();
  call.inverse = matrix.as<float>();
  call.of = rows.as<int64_t>();
  for (int64_t r = 0; r < call.R; r++)
    if (call.of[r] < 0 || call.of[r] >= K)
      fail("of: ", "expected 0 to " + std::to_string(K - 1) + ", got " + std::to_string(call.of[r]));
  call.length = reinterpret_cast<float*>(lengths.address);
  packed_outputs(call, steps, enough, stream, gain);
  nb::gil_scoped_release release;
  encode_trellis(call, threads);
}

// x and out [B, H, R, D], fresh and contiguous; codes [1 or B, H, 3·D²/4], channels [1 or B, H, D].
BasisProduct basis_call(nb::handle x, nb::handle codes, nb::handle channels, nb::handle out) {
  const Tensor vectors = tensor_of("x", x, kFloat32), c = tensor_of("basis", codes, kUint8),
               scale = tensor_of("channels", channels, kFloats), to = tensor_of("out", out, kFloat32);
  if (vectors.dims != 4) throw nb::value_error("x: expected [B, H, R, D]");
  const int64_t B = vectors.shape[0], H = vectors.shape[1], R = vectors.shape[2], D = vectors.shape[3];
  if (D % 4) throw NotTaken("x has " + std::to_string(D) + " channels, not a multiple of 4");
  expect("", "x", vectors, {{"B", B}, {"H", H}, {"R", R}, {"D", D}}, 0);
  expect("", "out", to, {{"B", B}, {"H", H}, {"R", R}, {"D", D}}, 0);
  expect("", "basis", c, {{"B", c.dims == 3 && c.shape[0] == 1 ? 1 : B}, {"H", H}, {"bytes", D * D * 3 / 4}}, 2);
  expect("", "channels", scale, {{"B", scale.dims == 3 && scale.shape[0] == 1 ? 1 : B}, {"H", H}, {"D", D}}, 2);
  HeadMatrix matrix;
  matrix.codes = c.as<uint8_t>();
  matrix.codes_b = batch_stride(c);
  matrix.codes_h = c.stride[1];
  matrix.type = scale.float_type();
  matrix.channels = scale.as<void>();
  matrix.channels_b = batch_stride(scale);
  matrix.channels_h = scale.stride[1];
  return {B, H, R, D, false, matrix, vectors.as<float>(), D, reinterpret_cast<float*>(to.address), D};
}

void py_basis_product(nb::handle x, nb::handle codes, nb::handle channels, bool combine, nb::handle out, int threads) {
  BasisProduct call = basis_call(x, codes, channels, out);
  call.combine = combine;
  nb::gil_scoped_release release;
  multiply(call, threads);
}

void py_basis_components(nb::handle x, nb::handle codes, nb::handle channels, nb::handle out, int threads) {
  BasisProduct call = basis_call(x, codes, channels, out);
  if (call.D % 16) throw NotTaken("x has " + std::to_string(call.D) + " channels, not a multiple of 16");
  call.invert = true;
  nb::gil_scoped_release release;
  multiply(call, threads);
}

// basis and channels as of a product; scale and weight float16, bits uint8 [B, H, D], error float32 [9]; matrix
// [B, H, D, D], own [B, H, D] and expected [B, H], float32, fresh. All are contiguous.
void py_search_arguments(nb::handle basis, nb::handle channels, nb::handle scale, nb::handle weight, nb::handle bits,
                         nb::handle error, nb::handle matrix, nb::handle own, nb::handle expected, int threads) {
  BasisProduct call = basis_call(matrix, basis, channels, matrix);
  const int64_t B = call.B, H = call.H, D = call.D;
  if (D % 16) throw NotTaken("the basis has " + std::to_string(D) + " channels, not a multiple of 16");
  const Tensor scales = tensor_of("scale", scale, one(Type::f16)),
               weights = tensor_of("weight", weight, one(Type::f16)), rates = tensor_of("bits", bits, kUint8),
               errors = tensor_of("error", error, kFloat32), loss = tensor_of("own", own, kFloat32),
               sums = tensor_of("expected", expected, kFloat32);
  expect("", "matrix", tensor_of("matrix", matrix, kFloat32), {{"B", B}, {"H", H}, {"D", D}, {"D", D}}, 0);
  for (const auto& [name, x] :
       {std::pair{"scale", &scales}, std::pair{"weight", &weights}, std::pair{"bits", &rates}, std::pair{"own", &loss}})
    expect("", name, *x, {{"B", B}, {"H", H}, {"D", D}}, 0);
  expect("", "error", errors, {{"bits", 9}}, 0);
  expect("", "expected", sums, {{"B", B}, {"H", H}}, 0);
  std::vector<float> units(B * H * D);
  auto *weighed = reinterpret_cast<float*>(loss.address), *sum = reinterpret_cast<float*>(sums.address);
  for (int64_t i = 0; i < B * H * D; i++) {
    const int64_t rate = rates.as<uint8_t>()[i];
    if (rate > 8) fail("bits: ", "expected at most 8, got " + std::to_string(rate));
    units[i] = Number<Float::f16>::value(scales.as<uint16_t>()[i]);
    weighed[i] = Number<Float::f16>::value(weights.as<uint16_t>()[i]) * (units[i] * units[i]);
    if (i % D == 0) sum[i / D] = 0.0f;
    sum[i / D] += weighed[i] * errors.as<float>()[rate];
  }
  call.invert = true;
  call.units = units.data();
  nb::gil_scoped_release release;
  multiply(call, threads);
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
  nb::set_leak_warnings(false);  // objects that live as long as the interpreter are not leaks
  import_torch();
  nb::exception<Moved>(m, "Moved");
  static PyObject* not_taken = nb::module_::import_("tersekv.kernels.registry").attr("NotTaken").inc_ref().ptr();
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const NotTaken& reason) {
      PyErr_SetString(not_taken, reason.what());
    }
  });
  define_views(m);
  define_byte_views(m);
  define_trellis_views(m);
  define_rope_views(m);
  define_attention(m);
  m.def("merge_segments", &py_merge);
  m.def("encode_trellis", &py_encode_trellis);
  m.def("pack_trellis", &py_pack_trellis);
  m.def("pack_vectors", &py_pack_vectors);
  m.def("basis_product", &py_basis_product);
  m.def("basis_components", &py_basis_components);
  m.def("search_arguments", &py_search_arguments);
  define_grid_encoders(m);
  define_vector_encoders(m);
  define_fits(m);
  define_tokens(m);
  define_merge(m);
  m.def("isa", [] { return std::string(current().name); }, "Instruction set in use.");
  m.def("isas", &py_isas, "(name, missing CPU features) per build of the kernels, best first.");
  m.def("set_isa", &set_isa, nb::arg("name"), "Use one instruction set, or `auto` for the best.");
  m.def("mkl_threads", &mkl_threads, "The calling thread's number of threads in MKL, 0 for the process's.");
  m.def("set_torch_threads", &set_torch_threads, "Set the calling thread's number of threads in torch.");
  // Join the threads at exit, while the interpreter still exists: they must not outlive the code
  // that they run.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { shutdown_pool(); }));
}
