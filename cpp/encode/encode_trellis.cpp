#include "encode_trellis.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "isa.h"
#include "pool.h"

namespace tersekv {
namespace {

constexpr int64_t kVectorsPerTask = 8;
constexpr double kNsPerStep = 15.0;  // rough value, with AVX-512

struct Plan {
  const EncodeTrellis& call;
  decltype(Kernels::encode_trellis) encode;
  int64_t tasks_per_row;

  void run(int64_t index) const {
    const int64_t first = index % tasks_per_row * kVectorsPerTask;
    encode(call, index / tasks_per_row, first, std::min(call.n, first + kVectorsPerTask));
  }
};

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
  float tables[kTrellisRates * kTrellisStates];
  for (int i = 0; i < kTrellisRates; i++)
    for (int u = 0; u < kTrellisStates; u++)
      tables[i * kTrellisStates + u] = call.tables[i * kTrellisStates + reversed_byte(u)];
  call.entries = call.tables;
  call.gains = trellis_gains();
  call.tables = tables;
  const Plan plan{call, current().encode_trellis, ceil_div(call.n, kVectorsPerTask)};
  const double steps =
      static_cast<double>(call.R * call.n * (1 + call.tries)) * static_cast<double>(2 * call.D + kTrellisWarmUp);
  run_tasks(
      call.R * plan.tasks_per_row, steps * kNsPerStep < kThreadsWorthNs ? 1 : threads,
      [](const void* context, int64_t index) { static_cast<const Plan*>(context)->run(index); }, &plan);
}

}  // namespace tersekv
