#include "encode_trellis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace tersekv {
namespace {

constexpr double kNsPerStep = 5.0;  // rough value, with AVX-512
constexpr int kAllBins = 2 * kTrellisBins + 1;

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

struct alignas(64) Line {
  int16_t lane[32];
};

// Near entries and marks of all bins, by rate; see near_entries in kernels/trellis_search.py.
struct NearTables {
  std::vector<int16_t> scaled;  // tables they were made from
  std::vector<Line> rate[kTrellisRates];

  explicit NearTables(const int16_t* tables) : scaled(tables, tables + kTrellisRates * kTrellisStates) {
    for (int bits = kTrellisLeastNear; bits <= kTrellisMostNear; bits++) {
      if (has_equal(bits)) continue;
      rate[bits].resize(kAllBins * 2 * near_count(bits) / 32);
      for (int bin = 0; bin < kAllBins; bin++)
        for (int group = 0; group < kTrellisStates >> bits; group++) fill(bits, bin, group);
    }
  }

  int entry(int bits, int window) const { return scaled[bits * kTrellisStates + kReversed[window]]; }

  // True if three entries of any group are equal.
  bool has_equal(int bits) const {
    const int members = 1 << bits;
    std::array<int, kTrellisStates> sorted;
    for (int group = 0; group < kTrellisStates; group += members) {
      for (int i = 0; i < members; i++) sorted[i] = entry(bits, group | i);
      std::sort(sorted.begin(), sorted.begin() + members);
      for (int i = 2; i < members; i++)
        if (sorted[i] == sorted[i - 2]) return true;
    }
    return false;
  }

  void fill(int bits, int bin, int group) {
    const int members = 1 << bits, groups = kTrellisStates >> bits, middle = (bin - kTrellisBins) * kTrellisLargest;
    std::array<int, kTrellisStates> order;
    std::iota(order.begin(), order.begin() + members, 0);
    const auto nearer = [&](int a, int b) {
      const int of_a = std::abs(entry(bits, group << bits | a) * kTrellisBins - middle);
      const int of_b = std::abs(entry(bits, group << bits | b) * kTrellisBins - middle);
      return of_a != of_b ? of_a < of_b : a < b;
    };
    std::partial_sort(order.begin(), order.begin() + kTrellisNear, order.begin() + members, nearer);
    std::sort(order.begin(), order.begin() + kTrellisNear);
    std::swap(order[1], order[2]);  // the first two are compared with the last two, so that the lowest wins ties
    int16_t* to = rate[bits][bin * 2 * near_count(bits) / 32].lane;
    for (int i = 0; i < kTrellisNear; i++) {
      const int reversed = kReversed[group << bits | order[i]], own = reversed & (groups - 1);
      to[i * groups + own] = static_cast<int16_t>(entry(bits, group << bits | order[i]));
      to[near_count(bits) + i * groups + own] = static_cast<int16_t>((reversed - own) << 8 | reversed >> bits);
    }
  }
};

// Return the near tables of scaled tables. All calls mostly have the same tables.
std::shared_ptr<const NearTables> near_tables(const int16_t* scaled) {
  static std::mutex mutex;
  static std::shared_ptr<const NearTables> last;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!last || !std::equal(last->scaled.begin(), last->scaled.end(), scaled))
    last = std::make_shared<const NearTables>(scaled);
  return last;
}

// Compute the units of a row, as cost_units in kernels/trellis_search.py does.
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
  const auto near = near_tables(scaled);
  for (int rate = 0; rate < kTrellisRates; rate++)
    call.near[rate] = near->rate[rate].empty() ? nullptr : near->rate[rate][0].lane;
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
