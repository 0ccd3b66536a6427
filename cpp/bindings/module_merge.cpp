// Binding of merge_chunk in kernels/attend.py: merge the segments of many queries into the layer's output.
#include <nanobind/nanobind.h>

#include <cmath>
#include <limits>
#include <vector>

#include "rounding.h"
#include "run_blocks.h"

namespace tersekv {
namespace {

constexpr int64_t kRows = 64;  // rows of a task

struct MergeChunk {
  struct Segment {
    const float *out, *lse;
    int64_t out_stride[3], lse_stride[3];  // along B, H, R
  };
  int64_t B, H, G, q, D;
  const Segment* segments = nullptr;
  int64_t count = 0;
  const float* sinks = nullptr;  // [H·G]
  void* out = nullptr;           // [B, q, H·G, D]
};

// Write the merged row r of one head, see `merge_chunk`.
template <Float type>
void merge_row(const MergeChunk& call, int64_t b, int64_t h, int64_t r, float* sum, float* weights) {
  using To = Number<type>;
  const int64_t head = h * call.G + r / call.q, i = r % call.q;
  float most = -std::numeric_limits<float>::infinity(), total = 0;
  for (int64_t s = 0; s < call.count; s++) {
    const auto& of = call.segments[s];
    weights[s] = of.lse[b * of.lse_stride[0] + h * of.lse_stride[1] + r * of.lse_stride[2]];
    most = weights[s] > most || weights[s] != weights[s] ? weights[s] : most;  // NaN stays
  }
  for (int64_t d = 0; d < call.D; d++) sum[d] = 0;
  auto* out = static_cast<typename To::Bits*>(call.out) + ((b * call.q + i) * call.H * call.G + head) * call.D;
  if (most != -std::numeric_limits<float>::infinity()) {
    for (int64_t s = 0; s < call.count; s++) total += weights[s] = std::exp(weights[s] - most);
    if (call.sinks) total += std::exp(call.sinks[head] - most);
    for (int64_t s = 0; s < call.count; s++) {
      const auto& of = call.segments[s];
      const float* x = of.out + b * of.out_stride[0] + h * of.out_stride[1] + r * of.out_stride[2];
      const float share = weights[s] / total;
      if (share != 0)
        for (int64_t d = 0; d < call.D; d++) sum[d] += share * x[d];
    }
  }
  for (int64_t d = 0; d < call.D; d++) out[d] = To::rounded(sum[d]);
}

template <Float type>
void merge_rows(const MergeChunk& call, int64_t task) {
  const int64_t R = call.G * call.q, tasks = ceil_div(R, kRows), head = task / tasks, first = task % tasks * kRows;
  std::vector<float> sum(call.D), weights(call.count);
  for (int64_t r = first; r < first + kRows && r < R; r++)
    merge_row<type>(call, head / call.H, head % call.H, r, sum.data(), weights.data());
}

void strides_of(const Tensor& x, int64_t* stride) {
  for (int k = 0; k < 3; k++) stride[k] = x.stride[k];
}

// outs [B, H, G·q, D], contiguous along D, and lses [B, H, G·q], both float32; sinks float32 [H·G] or None; out [B, q,
// H·G, D], fresh and contiguous.
void py_merge_chunk(nb::list outs, nb::list lses, nb::handle sinks, nb::handle out, int threads) {
  const Tensor to = tensor_of("out", out, kFloats), logits = optional_tensor("sinks", sinks, kFloat32);
  if (to.dims != 4) fail("out: ", "expected [B, q, Hq, D]");
  if (!nb::len(outs) || nb::len(outs) != nb::len(lses)) fail("outs, lses: ", "expected equally many of both");
  const Tensor first = tensor_of("a segment", outs[0], kFloat32);
  if (first.dims != 4 || !first.shape[1] || to.shape[2] % first.shape[1])
    fail("outs: ", "expected [B, H, R, D] with a divisor H of the query heads");
  MergeChunk call{to.shape[0], first.shape[1], to.shape[2] / first.shape[1], to.shape[1], to.shape[3]};
  expect("", "out", to, {{"B", call.B}, {"q", call.q}, {"Hq", call.H * call.G}, {"D", call.D}}, 0);
  if (logits.given()) expect("", "sinks", logits, {{"Hq", call.H * call.G}}, 0);
  std::vector<MergeChunk::Segment> segments;
  for (size_t s = 0; s < nb::len(outs); s++) {
    const Tensor x = tensor_of("a segment", outs[s], kFloat32), y = tensor_of("a segment", lses[s], kFloat32);
    expect("", "outs", x, {{"B", call.B}, {"H", call.H}, {"R", call.G * call.q}, {"D", call.D}}, 3);
    expect("", "lses", y, {{"B", call.B}, {"H", call.H}, {"R", call.G * call.q}}, 3);
    auto& segment = segments.emplace_back();
    segment.out = x.as<float>();
    segment.lse = y.as<float>();
    strides_of(x, segment.out_stride);
    strides_of(y, segment.lse_stride);
  }
  call.segments = segments.data();
  call.count = static_cast<int64_t>(segments.size());
  call.sinks = logits.given() ? logits.as<float>() : nullptr;
  call.out = reinterpret_cast<void*>(to.address);
  const int64_t rows = call.G * call.q, tasks = call.B * call.H * ceil_div(rows, kRows);
  const double elements = static_cast<double>(call.B * call.H * rows) * static_cast<double>(call.D * (call.count + 1));
  if (tasks > 0)
    run_blocks(to.type == Type::f32   ? &merge_rows<Float::f32>
               : to.type == Type::f16 ? &merge_rows<Float::f16>
                                      : &merge_rows<Float::bf16>,
               call, tasks, 0.3 * elements, threads);
}

}  // namespace

void define_merge(nb::module_& m) {
  m.def("merge_chunk", &py_merge_chunk, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
}

}  // namespace tersekv
