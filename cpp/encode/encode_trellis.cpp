#include "encode_trellis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace tersekv {
namespace {

constexpr double kNsPerStep = 9.0;  // rough value, with AVX-512

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

// Scale tables to kTrellisLargest. Return the largest absolute value of each.
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

// Compute the units of a row, as cost_units in kernels/trellis.py does.
void find_units(const EncodeTrellis& call, int64_t row, const std::array<float, kTrellisRates>& most,
                TrellisUnit* units) {
  const float* weight = call.weight + row * call.D;
  const uint8_t* bits = call.bits + row * call.D;
  std::vector<float> expected;
  for (int64_t d = 0; d < call.D; d++) {
    const float error = std::ldexp(weight[d], -2 * bits[d]);
    if (bits[d] && error > 0) expected.push_back(error);
  }
  float middle = 1.0f;
  if (!expected.empty()) {
    const auto at = expected.begin() + (static_cast<int64_t>(expected.size()) - 1) / 2;
    std::nth_element(expected.begin(), at, expected.end());
    middle = *at;
  }
  for (int64_t d = 0; d < call.D; d++) {
    const float scale = std::ldexp(1.0f, -shift_of(bits[d])), largest = static_cast<float>(kTrellisLargest);
    const float unit = 256.0f * std::sqrt(kTrellisTypicalCost * weight[d] / middle) * scale;
    const float product = unit * most[bits[d]];
    const float factor = product < largest ? std::nearbyint(product) : largest;
    const float exact = factor / most[bits[d]], margin = 256.0f * std::sqrt(kTrellisMargin) * scale;
    const float limit = std::nearbyint(factor + std::min(margin, exact));
    units[d] = {exact, std::min(limit, largest), static_cast<int>(factor)};
  }
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

void encode_trellis(EncodeTrellis call, int threads) {
  if (call.R * call.n * call.D == 0) return;
  alignas(64) int16_t scaled[kTrellisRates * kTrellisStates];
  const auto most = scale_tables(call.entries, scaled);
  std::vector<TrellisUnit> units(call.R * call.D);
  for (int64_t row = 0; row < call.R; row++) find_units(call, row, most, units.data() + row * call.D);
  call.gains = trellis_gains();
  call.scaled = scaled;
  call.units = units.data();
  call.ends = most.data();
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
