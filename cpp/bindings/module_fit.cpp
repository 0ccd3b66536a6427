// Binding of fits on a prompt: kernels/weighted_sums.py, fitted_basis of kernels/basis.py, kernels/observed_loss.py and
// kernels/rotated_mean.py.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "isa.h"
#include "rounding.h"
#include "run_blocks.h"

namespace tersekv {
namespace {

// Floats [B, H, T, D] whose channels are contiguous.
TokenRows token_rows(const char* name, nb::handle tensor) {
  const Tensor x = tensor_of(name, tensor, kFloats);
  if (x.dims != 4) fail(std::string(name) + ": ", "expected [B, H, T, D]");
  const int64_t D = x.shape[3], bytes = x.type == Type::f32 ? 4 : 2;
  if (D % kLanes || x.last_stride() != 1)
    throw NotTaken(std::string(name) + " has channels that are not a multiple of 16, or not contiguous");
  return {x.as<char>(),        x.float_type(),      x.shape[0],         x.shape[1], x.shape[2], D,
          x.stride[0] * bytes, x.stride[1] * bytes, x.stride[2] * bytes};
}

// cos and sin [1 or B, 1 or H, T, D], contiguous.
RotatedTokens rotated_tokens(nb::handle x, nb::handle cos, nb::handle sin) {
  RotatedTokens call;
  call.x = token_rows("x", x);
  const Tensor c = tensor_of("cos", cos, kFloat32), s = tensor_of("sin", sin, kFloat32);
  if (c.dims != 4) fail("cos: ", "expected [1 or B, 1 or H, T, D]");
  const int64_t rows = c.shape[0], heads = c.shape[1], size = call.x.T * call.x.D;
  if ((rows != 1 && rows != call.x.B) || (heads != 1 && heads != call.x.H))
    fail("cos: ", "expected 1 or all batch rows and heads of x");
  for (const auto& [name, tensor] : {std::pair{"cos", &c}, std::pair{"sin", &s}})
    expect("", name, *tensor, {{"B", rows}, {"H", heads}, {"T", call.x.T}, {"D", call.x.D}}, 0);
  call.cos = c.as<float>();
  call.sin = s.as<float>();
  call.angles_b = rows > 1 ? heads * size : 0;
  call.angles_h = heads > 1 ? size : 0;
  return call;
}

// along and across float32 [B, H, D], contiguous.
void py_rotated_sums(nb::handle x, nb::handle cos, nb::handle sin, nb::handle along, nb::handle across, int threads) {
  RotatedTokens call = rotated_tokens(x, cos, sin);
  const Tensor first = tensor_of("along", along, kFloat32), second = tensor_of("across", across, kFloat32);
  for (const auto& [name, tensor] : {std::pair{"along", &first}, std::pair{"across", &second}})
    expect("", name, *tensor, {{"B", call.x.B}, {"H", call.x.H}, {"D", call.x.D}}, 0);
  call.first = output<float>(first);
  call.second = output<float>(second);
  const int64_t heads = call.x.B * call.x.H;
  if (heads * call.x.D > 0)
    run_blocks(encoders().rotated_sums, call, heads * call.x.D / kLanes,
               0.2 * static_cast<double>(heads * call.x.T * call.x.D), threads);
}

// mean and across [1 or B, H, D], out [B, H, T, D], float32 and contiguous.
void py_without_rotated_mean(nb::handle x, nb::handle mean, nb::handle across, nb::handle cos, nb::handle sin,
                             nb::handle out, int threads) {
  RotatedTokens call = rotated_tokens(x, cos, sin);
  const Tensor a = tensor_of("mean", mean, kFloat32), b = tensor_of("across", across, kFloat32),
               to = tensor_of("out", out, kFloat32);
  if (a.dims != 3 || (a.shape[0] != 1 && a.shape[0] != call.x.B)) fail("mean: ", "expected [1 or B, H, D]");
  for (const auto& [name, tensor] : {std::pair{"mean", &a}, std::pair{"across", &b}})
    expect("", name, *tensor, {{"B", a.shape[0]}, {"H", call.x.H}, {"D", call.x.D}}, 0);
  expect("", "out", to, {{"B", call.x.B}, {"H", call.x.H}, {"T", call.x.T}, {"D", call.x.D}}, 0);
  call.mean = a.as<float>();
  call.across = b.as<float>();
  call.mean_b = a.shape[0] > 1 ? call.x.H * call.x.D : 0;
  call.first = output<float>(to);
  const int64_t heads = call.x.B * call.x.H;
  if (heads * call.x.T * call.x.D > 0)
    run_blocks(encoders().without_rotated_mean, call, heads * call.tasks_of_head(),
               0.2 * static_cast<double>(heads * call.x.T * call.x.D), threads);
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

// In double: the factor of tiny weights is beyond float32.
template <class T>
void relative(const T* from, int64_t n, double plain, T* to) {
  double sum = 0;
  for (int64_t t = 0; t < n; t++) sum += static_cast<double>(from[t]);
  const double mean = sum / static_cast<double>(n);
  const bool ordinary = mean > 0 && mean <= std::numeric_limits<double>::max();
  for (int64_t t = 0; t < n; t++)
    to[t] = ordinary ? static_cast<T>(static_cast<double>(from[t]) / mean * (1 - plain) + plain) : T{1};
}

// weights and out [rows, T], float32 or float64, contiguous.
void py_relative_weights(nb::handle weights, double plain, nb::handle out) {
  const Tensor x = tensor_of("weights", weights, kFloat32 | kFloat64), to = tensor_of("out", out, one(x.type));
  if (x.dims != 2) fail("weights: ", "expected [rows, T]");
  const int64_t rows = x.shape[0], T = x.shape[1];
  expect("", "weights", x, {{"rows", rows}, {"T", T}}, 0);
  expect("", "out", to, {{"rows", rows}, {"T", T}}, 0);
  for (int64_t row = 0; row < rows; row++) {
    if (x.type == Type::f32)
      relative(x.as<float>() + row * T, T, plain, output<float>(to) + row * T);
    else
      relative(x.as<double>() + row * T, T, plain, output<double>(to) + row * T);
  }
}

uint16_t half_of(double x) { return Number<Float::f16>::rounded(static_cast<float>(x)); }
float value_of(uint16_t half) { return Number<Float::f16>::value(half); }

// variance and weight [heads, D], falls [8], float64; scales and weights float16 and bits uint8 [heads, D], importance
// float32 [heads]. All are contiguous.
void py_fitted_components(nb::handle variance, nb::handle weight, nb::handle falls, int64_t total, double factor,
                          nb::handle scale, nb::handle importance, nb::handle own, nb::handle bits) {
  const Tensor spread = tensor_of("variance", variance, kFloat64), cost = tensor_of("weight", weight, kFloat64),
               each = tensor_of("falls", falls, kFloat64), scales = tensor_of("scale", scale, one(Type::f16)),
               most = tensor_of("importance", importance, kFloat32), weights = tensor_of("own", own, one(Type::f16)),
               rates = tensor_of("bits", bits, kUint8);
  if (spread.dims != 2) fail("variance: ", "expected [heads, D]");
  const int64_t heads = spread.shape[0], D = spread.shape[1], n = each.dims == 1 ? each.shape[0] : 0;
  for (const auto& [name, x] : {std::pair{"variance", &spread}, std::pair{"weight", &cost}, std::pair{"scale", &scales},
                                std::pair{"own", &weights}, std::pair{"bits", &rates}})
    expect("", name, *x, {{"heads", heads}, {"D", D}}, 0);
  expect("", "falls", each, {{"bits", n}}, 0);
  expect("", "importance", most, {{"heads", heads}}, 0);
  if (total < 0) fail("total: ", "expected at least 0, got " + std::to_string(total));
  const double *fall = each.as<double>(), *end = spread.as<double>() + heads * D;
  const auto odd = [](double x) { return !(x >= 0 && x <= std::numeric_limits<double>::max()); };
  if (std::any_of(spread.as<double>(), end, odd) || std::any_of(cost.as<double>(), cost.as<double>() + heads * D, odd))
    throw NotTaken("variances or weights are negative or not finite");
  std::vector<double> gains(D * n);
  std::vector<int32_t> order(D * n);
  for (int64_t head = 0; head < heads; head++) {
    const double *v = spread.as<double>() + head * D, *w = cost.as<double>() + head * D;
    uint16_t *to = output<uint16_t>(scales) + head * D, *weighed = output<uint16_t>(weights) + head * D;
    uint8_t* rate = output<uint8_t>(rates) + head * D;
    double largest = 0, heaviest = 1e-30;
    for (int64_t d = 0; d < D; d++) {
      largest = std::max(largest, std::sqrt(v[d]));
      heaviest = std::max(heaviest, w[d]);
    }
    float longest = 0;
    for (int64_t d = 0; d < D; d++) {
      const double plain = largest > 0 ? std::max(std::sqrt(v[d]), largest * 1e-3) : 1.0;
      to[d] = half_of(std::clamp(plain, 1e-6, 65504.0));
      longest = std::max(longest, static_cast<float>(factor) * value_of(to[d]));
    }
    if (longest < 65504.0f)
      for (int64_t d = 0; d < D; d++) to[d] = half_of(static_cast<float>(factor) * value_of(to[d]));
    const auto unit = static_cast<float>(heaviest);
    output<float>(most)[head] = unit;
    for (int64_t d = 0; d < D; d++) {
      weighed[d] = half_of(w[d] / static_cast<double>(unit));
      rate[d] = 0;
      for (int64_t b = 0; b < n; b++) gains[d * n + b] = std::max(v[d] * w[d], 1e-300) * fall[b];
    }
    std::iota(order.begin(), order.end(), 0);
    const auto before = [&](int32_t a, int32_t b) { return gains[a] > gains[b] || (gains[a] == gains[b] && a < b); };
    const int64_t taken = std::min<int64_t>(total, D * n);
    if (taken < D * n) std::nth_element(order.begin(), order.begin() + taken, order.end(), before);
    for (int64_t i = 0; i < taken; i++) rate[order[i] / n]++;
  }
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

// query [heads, R, D], keys of any float type [B, H, T, D], mask bool [1 or B, q, T] or None, sinks [H, R] or None. All
// but keys are contiguous, and float32 but for the mask.
ObservedLoss observed_rows(nb::handle query, nb::handle keys, nb::handle mask, nb::handle sinks, double scaling,
                           double softcap) {
  ObservedLoss call;
  call.keys = token_rows("keys", keys);
  const Tensor q = tensor_of("query", query, kFloat32), seen = optional_tensor("mask", mask, kBool),
               logits = optional_tensor("sinks", sinks, kFloat32);
  if (q.dims != 3) fail("query: ", "expected three dimensions");
  if (q.shape[0] * q.shape[1] * call.keys.T == 0) throw NotTaken("there are no rows or no tokens");
  call.heads = q.shape[0];
  call.H = call.keys.H;
  call.R = q.shape[1];
  call.D = q.shape[2];
  call.T = call.keys.T;
  expect("", "query", q, {{"heads", call.keys.B * call.H}, {"R", call.R}, {"D", call.keys.D}}, 0);
  if (seen.given()) {
    if (seen.dims != 3) fail("mask: ", "expected three dimensions");
    call.masks = seen.shape[0];
    call.q = seen.shape[1];
    if (call.masks != 1 && call.masks != call.keys.B)
      fail("mask: ", "expected 1 or " + std::to_string(call.keys.B) + " batch rows");
    if (call.q < 1 || call.R % call.q) fail("mask: ", "expected positions that divide the rows of the query");
    expect("", "mask", seen, {{"masks", call.masks}, {"q", call.q}, {"T", call.T}}, 0);
    call.mask = seen.as<uint8_t>();
  }
  if (logits.given()) {
    expect("", "sinks", logits, {{"H", call.H}, {"R", call.R}}, 0);
    call.sinks = logits.as<float>();
  }
  call.query = q.as<float>();
  call.scaling = static_cast<float>(scaling);
  call.softcap = static_cast<float>(softcap);
  return call;
}

// Set `to` to the sums of a head's tasks, in their order, which are `from` [heads, tasks, T].
void add_tasks(const ObservedLoss& call, const float* from, float* to) {
  const int64_t tasks = call.tasks_of_head();
  for (int64_t i = 0; i < call.heads * call.T; i++) {
    to[i] = 0.0f;
    for (int64_t task = 0; task < tasks; task++) to[i] += from[(i / call.T * tasks + task) * call.T + i % call.T];
  }
}

// values of any float type [B, H, T, Dv], counts [1 or B, T]; of_keys and of_values [heads, T], shares [heads, R].
void py_observed_loss(nb::handle query, nb::handle keys, nb::handle values, nb::handle mask, nb::handle counts,
                      nb::handle sinks, double scaling, double softcap, nb::handle of_keys, nb::handle of_values,
                      nb::handle shares, int threads) {
  ObservedLoss call = observed_rows(query, keys, mask, sinks, scaling, softcap);
  call.values = token_rows("values", values);
  const Tensor coded = tensor_of("counts", counts, kFloat32), first = tensor_of("of_keys", of_keys, kFloat32),
               second = tensor_of("of_values", of_values, kFloat32), sums = tensor_of("shares", shares, kFloat32);
  if (coded.dims != 2) fail("counts: ", "expected [1 or B, T]");
  call.Dv = call.values.D;
  call.of_counts = coded.shape[0];
  const int64_t B = call.keys.B;
  if (call.of_counts != 1 && call.of_counts != B) fail("counts: ", "expected 1 or " + std::to_string(B) + " rows");
  if (call.values.B != B || call.values.H != call.H || call.values.T != call.T)
    fail("values: ", "expected as many batch rows, heads and tokens as of keys");
  expect("", "counts", coded, {{"B", call.of_counts}, {"T", call.T}}, 0);
  for (const auto& [name, tensor] : {std::pair{"of_keys", &first}, std::pair{"of_values", &second}})
    expect("", name, *tensor, {{"heads", call.heads}, {"T", call.T}}, 0);
  expect("", "shares", sums, {{"heads", call.heads}, {"R", call.R}}, 0);
  call.counts = coded.as<float>();
  call.shares = output<float>(sums);
  const double products =
      static_cast<double>(call.heads * call.R) * static_cast<double>(call.T * (call.D + 2 * call.Dv));
  const int64_t tasks = call.heads * call.tasks_of_head();
  std::vector<float> parts(2 * tasks * call.T);
  call.of_keys = parts.data();
  call.of_values = parts.data() + tasks * call.T;
  run_blocks(encoders().observed_loss, call, tasks, 0.03 * products, threads);
  add_tasks(call, call.of_keys, output<float>(first));
  add_tasks(call, call.of_values, output<float>(second));
}

// out [heads, T]. Scores of bfloat16 keys are multiplied in bfloat16 where the CPU does.
void py_squared_weights(nb::handle query, nb::handle keys, nb::handle mask, nb::handle sinks, double scaling,
                        double softcap, nb::handle out, int threads) {
  ObservedLoss call = observed_rows(query, keys, mask, sinks, scaling, softcap);
  const Tensor sums = tensor_of("out", out, kFloat32);
  expect("", "out", sums, {{"heads", call.heads}, {"T", call.T}}, 0);
  if (call.keys.type == Float::bf16) {
    call.product = current().rounded_rows;
    call.registers = current().registers;
  }
  const double products = static_cast<double>(call.heads * call.R) * static_cast<double>(call.T * call.D);
  const int64_t tasks = call.heads * call.tasks_of_head();
  std::vector<float> parts(tasks * call.T);
  call.of_values = parts.data();
  run_blocks(encoders().observed_loss, call, tasks, 0.03 * products, threads);
  add_tasks(call, call.of_values, output<float>(sums));
}

}  // namespace

void define_fits(nb::module_& m) {
  m.def("rotated_sums", &py_rotated_sums);
  m.def("without_rotated_mean", &py_without_rotated_mean);
  m.def("relative_weights", &py_relative_weights);
  m.def("fitted_components", &py_fitted_components);
  m.def("weighted_sums", &py_weighted_sums);
  m.def("fitted_basis", &py_fitted_basis);
  m.def("observed_loss", &py_observed_loss, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
        nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  m.def("squared_weights", &py_squared_weights, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg());
}

}  // namespace tersekv
