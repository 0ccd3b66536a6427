// Binding of fits on a prompt: kernels/weighted_sums.py, fitted_basis of kernels/basis.py and kernels/observed_loss.py.
#include <nanobind/nanobind.h>

#include <vector>

#include "run_blocks.h"

namespace tersekv {
namespace {

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

// covariance [heads, D, D], metric [heads, D, D] or [heads, D], channels [heads, D]; basis uint8 [heads, bytes],
// variance and weight [heads, D]. All are contiguous, and float64 but for the basis.
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
// [H, R] or None; of_keys and of_values [heads, T], shares [heads, R]. All are contiguous, and float32 but for
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
  if (q.shape[0] * q.shape[1] * v.shape[1] == 0) throw NotTaken("there are no rows or no tokens");
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
    expect("", name, *tensor, {{"heads", call.heads}, {"T", call.T}}, 0);
  expect("", "shares", sums, {{"heads", call.heads}, {"R", call.R}}, 0);
  call.query = q.as<float>();
  call.keys = k.as<float>();
  call.values = v.as<float>();
  call.mask = seen.as<uint8_t>();
  call.counts = coded.as<float>();
  call.sinks = logits.given() ? logits.as<float>() : nullptr;
  call.scaling = static_cast<float>(scaling);
  call.softcap = static_cast<float>(softcap);
  call.shares = output<float>(sums);
  const double products =
      static_cast<double>(call.heads * call.R) * static_cast<double>(call.T * (call.D + 2 * call.Dv));
  // Each task has sums of its own, which are added in order.
  const int64_t tasks = call.tasks_of_head();
  std::vector<float> parts(2 * call.heads * tasks * call.T);
  call.of_keys = parts.data();
  call.of_values = parts.data() + call.heads * tasks * call.T;
  run_blocks(encoders().observed_loss, call, call.heads * tasks, 0.03 * products, threads);
  for (const auto& [to, from] :
       {std::pair{output<float>(first), call.of_keys}, std::pair{output<float>(second), call.of_values}})
    for (int64_t i = 0; i < call.heads * call.T; i++) {
      to[i] = 0.0f;
      for (int64_t task = 0; task < tasks; task++) to[i] += from[(i / call.T * tasks + task) * call.T + i % call.T];
    }
}

}  // namespace

void define_fits(nb::module_& m) {
  m.def("weighted_sums", &py_weighted_sums);
  m.def("fitted_basis", &py_fitted_basis);
  m.def("observed_loss", &py_observed_loss, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
}

}  // namespace tersekv
