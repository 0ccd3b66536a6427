// Trellis codes: tensors, and validation of each head's bits.
#include <cmath>
#include <cstring>
#include <mutex>

#include "encode_trellis.h"
#include "operands.h"

namespace tersekv {

using namespace nb::literals;

namespace {

constexpr int kEntries = kTrellisRates * kTrellisStates;

// Convert tables to integers from -127 to 127 and a unit for each; return false if they are not
// such integers.
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
      if (!(std::fabs(whole) <= 127.0f)) return false;  // a table may contain anything
      off = std::max(off, std::fabs(x - whole));
      entries[b * kTrellisStates + i] = static_cast<int8_t>(whole);
    }
    if (!(off < 1e-3f)) return false;
  }
  return true;
}

// Tables as integers; pages with the same tables share them.
struct WholeTables {
  float tables[kEntries];
  int8_t entries[kEntries];
  float unit[kTrellisRates];
  bool are_whole;
};

std::shared_ptr<const WholeTables> whole_tables(const float* tables) {
  static std::mutex mutex;
  static std::shared_ptr<const WholeTables> last;
  const std::lock_guard lock(mutex);
  if (last && std::memcmp(last->tables, tables, sizeof(last->tables)) == 0) return last;
  auto made = std::make_shared<WholeTables>();
  std::memcpy(made->tables, tables, sizeof(made->tables));
  made->are_whole = whole_entries(tables, made->entries, made->unit);
  return last = made;
}

NativeView* trellis_view(int64_t head_dim, nb::handle stream, nb::handle gain, nb::handle bits, nb::handle scale,
                         nb::handle tables) {
  auto made = std::make_unique<NativeView>();
  Owner& owner = made->owner;
  View& view = made->view;
  TrellisView& v = view.trellis;
  view.kind = Kind::trellis;
  view.D = in_range("", "head_dim", head_dim, kMostChannels);
  view.t = kByteBlock;
  const Tensor words = owner.keep("stream", stream, kInt16), gain_codes = owner.keep("gain", gain, kUint8);
  if (words.dims != 5) fail("stream: ", "expected [B, H, N, W, t]");
  const int64_t N = take_sizes(*made, "stream", words, 5), B = made->B, H = made->H;
  v.words = words.shape[3];
  view.T = N * view.t;
  expect("", "stream", words, {{"B", B}, {"H", H}, {"N", N}, {"W", v.words}, {"t", kByteBlock}}, 3);
  v.stream = words.as<uint16_t>();
  take_strides(v, words);
  expect("", "gain", gain_codes, {{"B", B}, {"H", H}, {"N", N}, {"t", kByteBlock}}, 3);
  v.gain = gain_codes.as<uint8_t>();
  v.gain_b = batch_stride(gain_codes);
  v.gain_h = gain_codes.stride[1];
  v.gain_n = gain_codes.stride[2];
  const auto rows = [&](const Tensor& x) { return x.dims > 0 && x.shape[0] == 1 ? 1 : B; };
  const Tensor rates = owner.keep("bits", bits, kUint8), scales = owner.keep("scale", scale, kFloats);
  expect("", "bits", rates, {{"B", rows(rates)}, {"H", H}, {"D", view.D}}, 2);
  v.bits = rates.as<uint8_t>();
  v.bits_b = batch_stride(rates);
  v.bits_h = rates.stride[1];
  expect("", "scale", scales, {{"B", rows(scales)}, {"H", H}, {"D", view.D}}, 2);
  v.scale_type = scales.float_type();
  v.scale = scales.as<void>();
  v.scale_b = batch_stride(scales);
  v.scale_h = scales.stride[1];
  const Tensor entries = owner.keep("tables", tables, kFloat32);
  expect("", "tables", entries, {{"9", kTrellisRates}, {"256", kTrellisStates}}, 0);
  v.tables = entries.as<float>();
  v.gains = trellis_gains();
  for (int64_t b = 0; b < rates.shape[0]; b++)
    for (int64_t h = 0; h < H; h++) {
      const uint8_t* of = v.bits + b * v.bits_b + h * v.bits_h;
      int64_t sum = 0;
      for (int64_t d = 0; d < view.D; d++) {
        if (of[d] >= kTrellisRates) fail("bits: ", "expected 0 to 8, got " + std::to_string(of[d]));
        sum += of[d];
      }
      if (sum != 16 * v.words)
        fail("bits: ", "expected a sum of 16 * W = " + std::to_string(16 * v.words) + ", got " + std::to_string(sum));
    }
  if (v.words > 0) {
    const auto whole = whole_tables(v.tables);
    if (whole->are_whole) {
      v.entries = whole->entries;
      std::copy(whole->unit, whole->unit + kTrellisRates, v.unit);
      owner.keep_shared(whole);
    }
  }
  return made.release();
}

}  // namespace

void define_trellis_views(nb::module_& m) {
  m.def("trellis", &trellis_view, nb::kw_only(), "head_dim"_a, "stream"_a, "gain"_a, "bits"_a, "scale"_a, "tables"_a,
        nb::rv_policy::take_ownership, "See layouts/trellis.py.");
}

}  // namespace tersekv
