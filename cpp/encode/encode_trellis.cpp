#include "encode_trellis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "trellis_near.h"

namespace tersekv {
namespace {

constexpr double kNsPerStep = 5.0;  // rough value, with AVX-512

struct SearchTasks {
  const EncodeTrellis& call;
  decltype(Kernels::encode_trellis) encode;
  int64_t tasks_per_row;

  void run(int64_t index) const {
    const int64_t first = index % tasks_per_row * kTrellisTask;
    encode(call, index / tasks_per_row, first, std::min(call.n, first + kTrellisTask));
  }
};

int shift_of(int bits) { return bits > 4 ? bits - 4 : 0; }

// Scale codebooks to kTrellisLargest, states in reverse. Return the largest absolute value of each.
std::array<float, kTrellisRates> scale_tables(const float* tables, int16_t* scaled) {
  std::array<float, kTrellisRates> most{};
  for (int rate = 0; rate < kTrellisRates; rate++) {
    const float* table = tables + rate * kTrellisStates;
    for (int u = 0; u < kTrellisStates; u++) most[rate] = std::max(most[rate], std::fabs(table[u]));
    most[rate] = std::max(most[rate], 1e-30f);
    const float scale = static_cast<float>(kTrellisLargest) / most[rate];
    for (int u = 0; u < kTrellisStates; u++)
      scaled[rate * kTrellisStates + kReversed[u]] = static_cast<int16_t>(std::nearbyint(table[u] * scale));
  }
  return most;
}

// The codebooks of a call in units of costs.
struct Codebooks {
  alignas(64) int16_t scaled[kTrellisRates * kTrellisStates];
  std::array<float, kTrellisRates> most;
  std::shared_ptr<NearTables> near;

  explicit Codebooks(const float* entries) : most(scale_tables(entries, scaled)), near(near_tables(scaled)) {}
};

// The rows of a call.
class Rows {
 public:
  Rows(const EncodeTrellis& call, const Codebooks& books)
      : columns_(round_up(call.D, kLanes)),
        components_(call.R * call.D),
        floats_(5 * call.R * columns_),
        places_(call.R * columns_),
        newest_(call.R * columns_ / 8) {
    const std::lock_guard<std::mutex> lock(books.near->mutex);
    for (int64_t row = 0; row < call.R; row++) rows_.push_back(made(call, row, books));
  }
  const TrellisRow* data() const { return rows_.data(); }

 private:
  TrellisRow made(const EncodeTrellis& call, int64_t row, const Codebooks& books);

  int64_t columns_;
  std::vector<TrellisRow> rows_;
  std::vector<Component> components_;
  std::vector<float> floats_;
  std::vector<int32_t> places_;
  std::vector<uint64_t> newest_;
};

// Return the expected error of the component that has the typical cost.
float middle_error(const float* weight, const uint8_t* bits, int64_t D) {
  std::vector<float> expected;
  for (int64_t d = 0; d < D; d++) {
    const float error = std::ldexp(weight[d], -2 * bits[d]);
    if (bits[d] && error > 0) expected.push_back(error);
  }
  if (expected.empty()) return 1.0f;
  const auto at = expected.begin() + (static_cast<int64_t>(expected.size()) - 1) / 2;
  std::nth_element(expected.begin(), at, expected.end());
  return *at;
}

// Units are those of cost_units in kernels/trellis_search.py.
TrellisRow Rows::made(const EncodeTrellis& call, int64_t row, const Codebooks& books) {
  const float* weight = call.weight + row * call.D;
  const uint8_t* bits = call.bits + row * call.D;
  Component* components = components_.data() + row * call.D;
  float *unit = floats_.data() + 5 * row * columns_, *limit = unit + columns_, *per_bin = limit + columns_,
        *weights = per_bin + columns_, *reach = weights + columns_;
  int32_t* places = places_.data() + row * columns_;
  uint64_t* newest = newest_.data() + row * columns_ / 8;
  TrellisRow out{components, 0, 0, unit, limit, per_bin, weights, reach, places, newest};
  const float middle = middle_error(weight, bits, call.D), largest = static_cast<float>(kTrellisLargest);
  int brought = 0;
  float expected = 0.0f;
  for (int64_t d = 0; d < call.D; d++) {
    const int own = bits[d];
    if (own == 0) continue;
    const int64_t a = out.count++;
    const float scale = std::ldexp(1.0f, -shift_of(own)), most = books.most[own];
    const float product = 256.0f * std::sqrt(kTrellisTypicalCost * weight[d] / middle) * scale * most;
    const float factor = product < largest ? std::nearbyint(product) : largest;
    const float margin = 256.0f * std::sqrt(kTrellisMargin) * scale;
    unit[a] = factor / most;
    limit[a] = std::min(std::nearbyint(factor + std::min(margin, unit[a])), largest);
    per_bin[a] = static_cast<float>(kTrellisBins) / std::max(factor, 1.0f);
    weights[a] = weight[d];
    places[a] = own * kTrellisStates;
    newest[a / 8] |= static_cast<uint64_t>(0xff << (8 - own) & 0xff) << a % 8 * 8;
    components[a] = {books.scaled + own * kTrellisStates, nullptr, own, 0, brought, static_cast<int>(factor), 0, d};
    brought += own;
    expected += weight[d] / static_cast<float>(1 << 2 * own);
  }
  for (int64_t a = 0; a < out.count; a++) {
    Component& c = components[a];
    c.next = components[a + 1 < out.count ? a + 1 : 0].bits;
    if (c.factor >= kTrellisLeastFactor) c.near = books.near->get(c.bits, c.next);
    c.place = static_cast<int>(out.choices);
    out.choices += std::max(32, kTrellisStates >> c.next);
    const float end = books.most[c.bits], product = weights[a] * end, sum = product * end + expected;
    reach[a] = product / (sum > 1e-30f ? sum : 1e-30f);
  }
  return out;
}

}  // namespace

const float* trellis_gains() {
  static const std::array<float, 256> made = [] {
    std::array<float, 256> gains{};
    for (int code = 1; code < 256; code++)
      gains[code] = static_cast<float>(std::exp2((code - kUnitGain) / static_cast<double>(kGainSteps)));
    return gains;
  }();
  return made.data();
}

const double* trellis_gain_bounds() {
  static const std::array<double, kGainSteps> made = [] {
    std::array<double, kGainSteps> bounds{};
    for (int i = 0; i < kGainSteps; i++) bounds[i] = std::exp2((i + 0.5) / kGainSteps);
    return bounds;
  }();
  return made.data();
}

void encode_trellis(EncodeTrellis call, int threads) {
  if (call.R * call.n * call.D == 0) return;
  const Codebooks books(call.entries);
  const Rows rows(call, books);
  call.gains = trellis_gains();
  call.bounds = trellis_gain_bounds();
  call.rows = rows.data();
  const SearchTasks tasks{call, current().encode_trellis, ceil_div(call.n, kTrellisTask)};
  const double steps = static_cast<double>(call.R * call.n * (1 + call.tries)) *
                       (1.3 * static_cast<double>(call.D));  // a third is searched twice
  const double ns = steps * kNsPerStep;
  const auto run = ns < kLongNs ? run_tasks : run_in_team;
  run(
      call.R * tasks.tasks_per_row, ns < kThreadsWorthNs ? 1 : threads,
      [](const void* context, int64_t index) { static_cast<const SearchTasks*>(context)->run(index); }, &tasks);
}

}  // namespace tersekv
