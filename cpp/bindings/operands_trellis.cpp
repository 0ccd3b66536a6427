// Trellis codes: planes, and what each head's components have of them.
#include <cmath>
#include <cstring>

#include "isa.h"
#include "operands.h"

namespace tersekv {
namespace {

constexpr int kEntries = kTrellisRates * kTrellisStates;

const float* gains() {
  static const auto table = [] {
    auto out = std::make_unique<float[]>(256);
    for (int code = 1; code < 256; code++) out[code] = static_cast<float>(std::exp2((code - 144) / 16.0));
    return out;
  }();
  return table.get();
}

// Tables as whole numbers from -127 to 127 and a unit for each; false where they are no such numbers.
bool whole_entries(const float* tables, int8_t* entries, float* unit) {
  constexpr float kRound = 12582912.0f;  // float32 of this size has no fractions
  for (int b = 0; b < kTrellisRates; b++) {
    const float* table = tables + b * kTrellisStates;
    float most = 0.0f, off = 0.0f;
    for (int i = 0; i < kTrellisStates; i++) most = std::max(most, std::fabs(table[i]));
    unit[b] = most / 127.0f;
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    for (int i = 0; i < kTrellisStates; i++) {
      const float x = table[i] * inverse, whole = (x + kRound) - kRound;
      if (!(std::fabs(whole) <= 127.0f)) return false;  // a table may hold anything
      off = std::max(off, std::fabs(x - whole));
      entries[b * kTrellisStates + i] = static_cast<int8_t>(whole);
    }
    if (!(off < 1e-3f)) return false;
  }
  return true;
}

}  // namespace

// (9, head_dim, stream 3x, gain 3x, bits 3x, scale 3x, tables 3x)
void Operands::parse_trellis(View& view, const std::string& name, nb::handle packed) {
  TrellisView& v = view.trellis;
  view.D = in_range(name, "head_dim", as_int(item(packed, 1)), kMostChannels);
  view.t = kByteBlock;
  const Tensor stream = tensor_at(packed, 2), gain = tensor_at(packed, 5), bits = tensor_at(packed, 8),
               scale = tensor_at(packed, 11), tables = tensor_at(packed, 14);
  if (stream.dims != 5) fail(name, "stream: expected [B, H, N, W, t]");
  const int64_t N = stream.shape[2];
  v.words = stream.shape[3];
  view.T = N * view.t;
  expect(name, "stream", stream, {{"B", B_}, {"H", H_}, {"N", N}, {"W", v.words}, {"t", kByteBlock}}, 3);
  v.stream = stream.as<uint16_t>();
  v.stride_b = stream.stride[0];
  v.stride_h = stream.stride[1];
  v.stride_n = stream.stride[2];
  expect(name, "gain", gain, {{"B", B_}, {"H", H_}, {"N", N}, {"t", kByteBlock}}, 3);
  v.gain = gain.as<uint8_t>();
  v.gain_b = gain.stride[0];
  v.gain_h = gain.stride[1];
  v.gain_n = gain.stride[2];
  const auto shared = [&](const Tensor& x) { return x.dims > 0 && x.shape[0] == 1 ? 1 : B_; };
  expect(name, "bits", bits, {{"B", shared(bits)}, {"H", H_}, {"D", view.D}}, 2);
  v.bits = bits.as<uint8_t>();
  v.bits_b = bits.shape[0] == 1 ? 0 : bits.stride[0];
  v.bits_h = bits.stride[1];
  expect(name, "scale", scale, {{"B", shared(scale)}, {"H", H_}, {"D", view.D}}, 2);
  v.scale = scale.as<float>();
  v.scale_b = scale.shape[0] == 1 ? 0 : scale.stride[0];
  v.scale_h = scale.stride[1];
  expect(name, "tables", tables, {{"9", kTrellisRates}, {"256", kTrellisStates}}, 0);
  v.tables = tables.as<float>();
  v.gains = gains();
  for (int64_t b = 0; b < bits.shape[0]; b++)
    for (int64_t h = 0; h < H_; h++) {
      const uint8_t* of = v.bits + b * v.bits_b + h * v.bits_h;
      int64_t sum = 0;
      for (int64_t d = 0; d < view.D; d++) {
        if (of[d] >= kTrellisRates) fail(name, "bits: expected 0 to 8, got " + std::to_string(of[d]));
        sum += of[d];
      }
      if (sum != 16 * v.words)
        fail(name, "bits: expected a sum of 16 * W = " + std::to_string(16 * v.words) + ", got " + std::to_string(sum));
    }
  if (!current().trellis || v.words == 0) return;
  auto entries = std::make_unique<float[]>(kEntries / sizeof(float));
  if (whole_entries(v.tables, reinterpret_cast<int8_t*>(entries.get()), v.unit))
    v.entries = reinterpret_cast<int8_t*>(entries.get());
  tables_.push_back(std::move(entries));
}

}  // namespace tersekv
