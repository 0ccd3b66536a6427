// Binding of the encoders of kernels/encode_signs.py, encode_polar.py and rotate.py. Calls are
// validated, then blocks are distributed over threads.
#include <nanobind/nanobind.h>

#include <cmath>
#include <numbers>
#include <vector>

#include "run_blocks.h"

namespace tersekv {
namespace {

// x [blocks, t, D] and sketch [M, D], contiguous.
void py_encode_signs(nb::handle x, nb::handle sketch, nb::handle out, int threads) {
  const Tensor vectors = tensor_of("x", x, kFloat32), rows = tensor_of("sketch", sketch, kFloat32),
               bytes = tensor_of("signs", out, kUint8);
  if (vectors.dims != 3) fail("x: ", "expected [blocks, t, D]");
  if (rows.dims != 2) fail("sketch: ", "expected [M, D]");
  EncodeSigns call{vectors.as<float>(), rows.as<float>(), vectors.shape[0],
                   vectors.shape[1],    vectors.shape[2], rows.shape[0]};
  expect("", "x", vectors, {{"blocks", call.blocks}, {"t", call.t}, {"D", call.D}}, 0);
  expect("", "sketch", rows, {{"M", call.M}, {"D", call.D}}, 0);
  expect("", "signs", bytes, {{"blocks", call.blocks}, {"bytes", ceil_div(call.M, 8)}, {"t", call.t}}, 0);
  call.out = output<uint8_t>(bytes);
  double longest = 0;
  for (int64_t m = 0; m < call.M; m++) {
    double squares[8] = {};
    const float* row = call.sketch + m * call.D;
    for (int64_t d = 0; d < call.D; d++) squares[d % 8] += static_cast<double>(row[d]) * row[d];
    double sum = 0;
    for (const double square : squares) sum += square;
    longest = sum > longest || sum != sum ? sum : longest;
  }
  // Bound of the rounding error: each of D sums is rounded to 24 bits, and no partial sum of
  // products exceeds the product of the two vectors' lengths.
  call.unsure = static_cast<float>(std::sqrt(longest) * static_cast<double>(call.D + 4) * 0x1p-24 * 1.1);
  const double products = static_cast<double>(call.blocks * call.t) * static_cast<double>(call.D * call.M);
  if (call.blocks * call.t * call.M > 0)
    run_blocks(encoders().encode_signs, call, call.blocks, 0.05 * products, threads);
}

// Compute the boundaries between the entries of one level's table; the first level is on a circle.
void find_boundaries(const float* entry, int64_t entries, bool circle, Boundaries& level, float* cos, float* sin) {
  constexpr auto kCircle = static_cast<float>(2 * std::numbers::pi);
  const float seam = circle ? (entry[entries - 1] - kCircle + entry[0]) / 2 : 0.0f;
  level = {cos, sin, 0, entries - 1, std::cos(seam), std::sin(seam)};
  for (int64_t i = 0; i + 1 < entries; i++) {
    const float middle = ((entry[i] - seam) + (entry[i + 1] - seam)) / 2;
    level.near += middle < static_cast<float>(std::numbers::pi) ? 1 : 0;
    const double angle = static_cast<double>(middle) + static_cast<double>(seam);
    cos[i] = static_cast<float>(std::cos(angle));
    sin[i] = static_cast<float>(std::sin(angle));
  }
}

// x [rows, blocks, t, D], contiguous. level_bits and tables: tuples, a table is [2^bits] or
// [rows, 2^bits].
void py_encode_polar(nb::handle x, nb::handle level_bits, nb::handle tables, nb::handle angles, nb::handle radii,
                     int threads) {
  const Tensor vectors = tensor_of("x", x, kFloat32), bytes = tensor_of("angles", angles, kUint8),
               lengths = tensor_of("radii", radii, kFloat32);
  if (vectors.dims != 4) fail("x: ", "expected [rows, blocks, t, D]");
  EncodePolar call{vectors.as<float>(), vectors.shape[0], vectors.shape[1], vectors.shape[2], vectors.shape[3]};
  expect("", "x", vectors, {{"rows", call.rows}, {"blocks", call.blocks}, {"t", call.t}, {"D", call.D}}, 0);
  call.levels = PyTuple_Check(level_bits.ptr()) ? NB_TUPLE_GET_SIZE(level_bits.ptr()) : 0;
  in_range("level_bits: ", "levels", call.levels, kMostLevels);
  if (call.D % (int64_t{1} << call.levels))
    fail("x: ", "expected D to be a multiple of 2^" + std::to_string(call.levels) + ", got " + std::to_string(call.D));
  int64_t stream = 0, entries = 0;
  for (int64_t i = 0; i < call.levels; i++) {
    call.bits[i] = in_range("level_bits: ", "bits", as_int(item(level_bits, i)), 8);
    stream += call.bits[i] * (call.D >> (i + 1));
    entries += int64_t{1} << call.bits[i];
  }
  call.bytes = ceil_div(stream, 8);
  const int64_t count = call.D >> call.levels;
  expect("", "angles", bytes, {{"rows", call.rows}, {"blocks", call.blocks}, {"bytes", call.bytes}, {"t", call.t}}, 0);
  expect("", "radii", lengths, {{"rows", call.rows}, {"blocks", call.blocks}, {"D/2^L", count}, {"t", call.t}}, 0);
  std::vector<Boundaries> boundaries(call.rows * call.levels);
  std::vector<float> directions(call.rows * entries * 2);
  float* at = directions.data();
  for (int64_t i = 0; i < call.levels; i++) {
    const Tensor table = tensor_of("a table", item(tables, i), kFloat32);
    const int64_t n = int64_t{1} << call.bits[i];
    if (table.dims == 2)
      expect("", "table", table, {{"rows", call.rows}, {"entries", n}}, 0);
    else
      expect("", "table", table, {{"entries", n}}, 0);
    for (int64_t row = 0; row < call.rows; row++, at += 2 * n)
      find_boundaries(table.as<float>() + (table.dims == 2 ? row * n : 0), n, i == 0, boundaries[row * call.levels + i],
                      at, at + n);
  }
  call.boundaries = boundaries.data();
  call.angles = output<uint8_t>(bytes);
  call.radii = output<float>(lengths);
  const int64_t blocks = call.rows * call.blocks;
  const double ns = 2.0 * static_cast<double>(blocks * call.t * call.D);
  if (blocks * call.t * call.D > 0) run_blocks(encoders().encode_polar, call, blocks, ns, threads);
}

Rotate rotation(const Tensor& x, const Tensor& matrix, const Tensor& out) {
  if (x.dims != 2) fail("x: ", "expected [rows, D]");
  Rotate call{x.as<float>(), x.shape[0], x.shape[1], output<float>(out)};
  for (const auto& [name, tensor] : {std::pair{"x", &x}, std::pair{"out", &out}})
    expect("", name, *tensor, {{"rows", call.rows}, {"D", call.D}}, 0);
  expect("", "matrix", matrix, {{"D", call.D}, {"D", call.D}}, 0);
  return call;
}

// x and out [rows, D], matrix [D, D], contiguous.
void py_rotate_dense(nb::handle x, nb::handle matrix, nb::handle out, int threads) {
  const Tensor entries = tensor_of("matrix", matrix, kFloat32);
  Rotate call = rotation(tensor_of("x", x, kFloat32), entries, tensor_of("out", out, kFloat32));
  if (call.rows * call.D == 0) return;
  const std::vector<double> wide(entries.as<float>(), entries.as<float>() + call.D * call.D);
  call.matrix = wide.data();
  const double products = static_cast<double>(call.rows * call.D) * static_cast<double>(call.D);
  run_blocks(encoders().rotate_dense, call, ceil_div(call.rows, kVectorsAtOnce), 0.05 * products, threads);
}

// The same with order int32 [D] and signs [D]. The matrix's elements are 0 or have one absolute
// value.
void py_rotate_hadamard(nb::handle x, nb::handle matrix, nb::handle order, nb::handle signs, nb::handle out,
                        int threads) {
  const Tensor entries = tensor_of("matrix", matrix, kFloat32), from = tensor_of("order", order, kInt32),
               sign = tensor_of("signs", signs, kFloat32);
  Rotate call = rotation(tensor_of("x", x, kFloat32), entries, tensor_of("out", out, kFloat32));
  for (const auto& [name, tensor] : {std::pair{"order", &from}, std::pair{"signs", &sign}})
    expect("", name, *tensor, {{"D", call.D}}, 0);
  call.order = from.as<int32_t>();
  call.signs = sign.as<float>();
  for (int64_t d = 0; d < call.D; d++)
    if (call.order[d] < 0 || call.order[d] >= call.D)
      fail("order: ", "expected channels below " + std::to_string(call.D) + ", got " + std::to_string(call.order[d]));
  if (call.rows * call.D == 0) return;
  call.block = call.D & -call.D;
  call.scale = std::fabs(entries.as<float>()[call.order[0]]);
  const double elements = static_cast<double>(call.rows * call.D);
  run_blocks(encoders().rotate_hadamard, call, ceil_div(call.rows, kVectorsAtOnce), elements, threads);
}

// x [rows, T, D] and weights [rows, T], contiguous; total [rows, D] and squares [rows, D, D], float64.
void py_weighted_sums(nb::handle x, nb::handle weights, nb::handle total, nb::handle squares, int threads) {
  const Tensor vectors = tensor_of("x", x, kFloat32), w = tensor_of("weights", weights, kFloat32),
               sums = tensor_of("total", total, kFloat64), products = tensor_of("squares", squares, kFloat64);
  if (vectors.dims != 3) fail("x: ", "expected [rows, T, D]");
  WeightedSums call{vectors.as<float>(), w.as<float>(), vectors.shape[0], vectors.shape[1], vectors.shape[2]};
  if (call.D % kLanes) throw NotTaken("x has " + std::to_string(call.D) + " channels, not a multiple of 16");
  expect("", "x", vectors, {{"rows", call.rows}, {"T", call.T}, {"D", call.D}}, 0);
  expect("", "weights", w, {{"rows", call.rows}, {"T", call.T}}, 0);
  expect("", "total", sums, {{"rows", call.rows}, {"D", call.D}}, 0);
  expect("", "squares", products, {{"rows", call.rows}, {"D", call.D}, {"D", call.D}}, 0);
  call.total = output<double>(sums);
  call.squares = output<double>(products);
  const double elements = static_cast<double>(call.rows * call.T) * static_cast<double>(call.D);
  if (call.rows * call.D > 0)
    run_blocks(encoders().weighted_sums, call, call.rows * call.D / kLanes,
               0.02 * elements * static_cast<double>(call.D), threads);
}

// covariance [heads, D, D], metric and channels [heads, D]; basis uint8 [heads, bytes], variance and weight
// [heads, D]. All are contiguous, and float64 but for the basis.
void py_fitted_basis(nb::handle covariance, nb::handle metric, nb::handle channels, double most_condition,
                     nb::handle basis, nb::handle variance, nb::handle weight, int threads) {
  const Tensor form = tensor_of("covariance", covariance, kFloat64), loss = tensor_of("metric", metric, kFloat64),
               factors = tensor_of("channels", channels, kFloat64), codes = tensor_of("basis", basis, kUint8),
               spread = tensor_of("variance", variance, kFloat64), cost = tensor_of("weight", weight, kFloat64);
  if (form.dims != 3) fail("covariance: ", "expected [heads, D, D]");
  FitBasis call;
  call.covariance = form.as<double>();
  call.metric = loss.as<double>();
  call.channels = factors.as<double>();
  call.heads = form.shape[0];
  call.D = form.shape[2];
  call.whole = loss.dims == 3;
  call.most_condition = most_condition;
  call.basis = output<uint8_t>(codes);
  call.variance = output<double>(spread);
  call.weight = output<double>(cost);
  if (call.D % kLanes) throw NotTaken("covariance has " + std::to_string(call.D) + " channels, not a multiple of 16");
  expect("", "covariance", form, {{"heads", call.heads}, {"D", call.D}, {"D", call.D}}, 0);
  if (call.whole)
    expect("", "metric", loss, {{"heads", call.heads}, {"D", call.D}, {"D", call.D}}, 0);
  else
    expect("", "metric", loss, {{"heads", call.heads}, {"D", call.D}}, 0);
  for (const auto& [name, tensor] :
       {std::pair{"channels", &factors}, std::pair{"variance", &spread}, std::pair{"weight", &cost}})
    expect("", name, *tensor, {{"heads", call.heads}, {"D", call.D}}, 0);
  expect("", "basis", codes, {{"heads", call.heads}, {"bytes", call.D * call.D * 3 / 4}}, 0);
  double odd = 0;  // NaN if a number is not finite
  for (int64_t i = 0; i < call.heads * call.D * call.D; i++) odd += call.covariance[i] - call.covariance[i];
  for (int64_t i = 0; i < call.heads * call.D * (call.whole ? call.D : 1); i++) odd += call.metric[i] - call.metric[i];
  if (odd != 0) throw NotTaken("covariance or metric is not finite");
  const double cubes = static_cast<double>(call.heads * call.D * call.D) * static_cast<double>(call.D);
  if (call.heads * call.D > 0) run_blocks(encoders().fit_basis, call, call.heads, cubes, threads);
}

// query [heads, R, D], keys [heads, T, D], values [heads, T, Dv], mask bool [masks, q, T], counts [1 or B, T], sinks
// [H, R] or None; of_keys and of_values [heads, blocks, T], shares [heads, R]. All are contiguous, and float32 but for
// the mask.
void py_observed_loss(nb::handle query, nb::handle keys, nb::handle values, nb::handle mask, nb::handle counts,
                      nb::handle sinks, int64_t H, double scaling, double softcap, nb::handle of_keys,
                      nb::handle of_values, nb::handle shares, int threads) {
  const Tensor q = tensor_of("query", query, kFloat32), k = tensor_of("keys", keys, kFloat32),
               v = tensor_of("values", values, kFloat32), seen = tensor_of("mask", mask, kBool),
               coded = tensor_of("counts", counts, kFloat32), logits = optional_tensor("sinks", sinks, kFloat32),
               first = tensor_of("of_keys", of_keys, kFloat32), second = tensor_of("of_values", of_values, kFloat32),
               sums = tensor_of("shares", shares, kFloat32);
  for (const auto& [name, tensor] : {std::pair{"query", &q}, std::pair{"values", &v}, std::pair{"mask", &seen}})
    if (tensor->dims != 3) fail(std::string(name) + ": ", "expected three dimensions");
  if (coded.dims != 2) fail("counts: ", "expected [1 or B, T]");
  ObservedLoss call;
  call.heads = q.shape[0];
  call.H = in_range("", "H", H, call.heads);
  call.R = q.shape[1];
  call.D = q.shape[2];
  call.T = v.shape[1];
  call.Dv = v.shape[2];
  call.masks = seen.shape[0];
  call.q = seen.shape[1];
  call.of_counts = coded.shape[0];
  if (call.D % kLanes || call.Dv % kLanes) throw NotTaken("heads are not a multiple of 16 channels wide");
  const int64_t B = call.heads / call.H;
  for (const int64_t of : {call.masks, call.of_counts})
    if (of != 1 && of != B) fail("mask or counts: ", "expected 1 or " + std::to_string(B) + " batch rows");
  if (call.q < 1 || call.R % call.q) fail("mask: ", "expected positions that divide the rows of the query");
  expect("", "query", q, {{"heads", call.heads}, {"R", call.R}, {"D", call.D}}, 0);
  expect("", "keys", k, {{"heads", call.heads}, {"T", call.T}, {"D", call.D}}, 0);
  expect("", "values", v, {{"heads", call.heads}, {"T", call.T}, {"Dv", call.Dv}}, 0);
  expect("", "mask", seen, {{"masks", call.masks}, {"q", call.q}, {"T", call.T}}, 0);
  expect("", "counts", coded, {{"B", call.of_counts}, {"T", call.T}}, 0);
  if (logits.given()) expect("", "sinks", logits, {{"H", call.H}, {"R", call.R}}, 0);
  for (const auto& [name, tensor] : {std::pair{"of_keys", &first}, std::pair{"of_values", &second}})
    expect("", name, *tensor, {{"heads", call.heads}, {"blocks", call.tasks_of_head()}, {"T", call.T}}, 0);
  expect("", "shares", sums, {{"heads", call.heads}, {"R", call.R}}, 0);
  call.query = q.as<float>();
  call.keys = k.as<float>();
  call.values = v.as<float>();
  call.mask = seen.as<uint8_t>();
  call.counts = coded.as<float>();
  call.sinks = logits.given() ? logits.as<float>() : nullptr;
  call.scaling = static_cast<float>(scaling);
  call.softcap = static_cast<float>(softcap);
  call.of_keys = output<float>(first);
  call.of_values = output<float>(second);
  call.shares = output<float>(sums);
  const double products =
      static_cast<double>(call.heads * call.R) * static_cast<double>(call.T * (call.D + 2 * call.Dv));
  if (call.heads * call.R * call.T > 0)
    run_blocks(encoders().observed_loss, call, call.heads * call.tasks_of_head(), 0.03 * products, threads);
}

}  // namespace

void define_vector_encoders(nb::module_& m) {
  m.def("encode_signs", &py_encode_signs);
  m.def("encode_polar", &py_encode_polar);
  m.def("rotate_dense", &py_rotate_dense);
  m.def("rotate_hadamard", &py_rotate_hadamard);
  m.def("observed_rows", [](int64_t T) {
    ObservedLoss call;
    call.T = T;
    return call.rows_at_once();
  });
  m.def("observed_loss", &py_observed_loss, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  m.def("weighted_sums", &py_weighted_sums);
  m.def("fitted_basis", &py_fitted_basis);
}

}  // namespace tersekv
