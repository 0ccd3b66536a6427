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
  Rotate call{x.as<char>(), x.float_type(), x.shape[0], x.shape[1], output<float>(out)};
  for (const auto& [name, tensor] : {std::pair{"x", &x}, std::pair{"out", &out}})
    expect("", name, *tensor, {{"rows", call.rows}, {"D", call.D}}, 0);
  expect("", "matrix", matrix, {{"D", call.D}, {"D", call.D}}, 0);
  return call;
}

// x and out [rows, D], matrix [D, D], contiguous.
void py_rotate_dense(nb::handle x, nb::handle matrix, nb::handle out, int threads) {
  const Tensor entries = tensor_of("matrix", matrix, kFloat32);
  Rotate call = rotation(tensor_of("x", x, kFloats), entries, tensor_of("out", out, kFloat32));
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
  Rotate call = rotation(tensor_of("x", x, kFloats), entries, tensor_of("out", out, kFloat32));
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

}  // namespace

void define_vector_encoders(nb::module_& m) {
  m.def("encode_signs", &py_encode_signs);
  m.def("encode_polar", &py_encode_polar);
  m.def("rotate_dense", &py_rotate_dense);
  m.def("rotate_hadamard", &py_rotate_hadamard);
}

}  // namespace tersekv
