#include "driver.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace tersekv {
namespace {

constexpr int64_t kRowBlock = 32;            // rows whose scores stay in the second cache
constexpr double kThreadsWorthNs = 50000.0;  // below it waking a thread costs more than it saves
constexpr double kTaskNs = 15000.0;          // tasks no smaller than this

constexpr int64_t kRopedTokens = 512;  // whose cosines and sines stay in the second cache

// Whether cosines and sines of all tokens are read.
bool turns(const View& view) {
  bool any = view.kind == Kind::roped || (view.kind == Kind::turned && view.rope.steps == 0);
  for (int64_t i = 0; i < view.count; i++) any |= turns(view.parts[i]);
  return any;
}

using Kernel = void (*)(const Call&, const Task&);

struct Plan {
  const Call& call;
  Kernel kernel;
  int64_t row_blocks, splits, units;
  float* out;  // [splits] of [B, H, R, Dv]
  float* lse;  // [splits] of [B, H, R]

  void run(int64_t index) const {
    // Heads of the same tokens follow each other: what depends on the token alone is at hand.
    const int64_t heads = call.B * call.H, head = index % heads, rest = index / heads;
    const int64_t block = rest % row_blocks, split = rest / row_blocks;
    Task task;
    task.b = head / call.H;
    task.h = head % call.H;
    task.row = block * kRowBlock;
    task.rows = std::min(kRowBlock, call.R - task.row);
    task.first = units * split / splits;
    task.last = units * (split + 1) / splits;
    const int64_t rows = call.B * call.H * call.R;
    task.out = out + split * rows * call.Dv;
    task.lse = lse + split * rows;
    kernel(call, task);
  }
};

void run(const Call& call, Kernel kernel, int threads) {
  const int64_t rows = call.B * call.H * call.R, units = call.T / call.tokens_per_unit;
  if (rows == 0) return;
  const double products = static_cast<double>(call.B * call.H * call.T) * std::max<int64_t>(call.R, 2) *
                          static_cast<double>(call.D + call.Dv);
  const double ns = products * current().ns_per_product;
  if (ns < kThreadsWorthNs) threads = 1;
  Plan plan{call, kernel, ceil_div(call.R, kRowBlock), 1, units, call.out, call.lse};
  const int64_t heads = call.B * call.H * plan.row_blocks;
  std::unique_ptr<float[]> partial;
  if (threads > 1) {
    const int64_t wanted = ceil_div(4 * threads, heads), worth = static_cast<int64_t>(ns / kTaskNs) / heads;
    plan.splits = std::max<int64_t>(1, std::min({wanted, worth, units}));
  }
  if (turns(*call.keys)) plan.splits = std::min(units, std::max(plan.splits, ceil_div(call.T, kRopedTokens)));
  if (plan.splits > 1) {
    partial.reset(new float[plan.splits * rows * (call.Dv + 1)]);
    plan.out = partial.get();
    plan.lse = partial.get() + plan.splits * rows * call.Dv;
  }
  run_tasks(
      heads * plan.splits, threads,
      [](const void* context, int64_t index) noexcept { static_cast<const Plan*>(context)->run(index); }, &plan);
  if (plan.splits == 1) return;
  std::vector<const float*> outs(plan.splits), lses(plan.splits);
  for (int64_t s = 0; s < plan.splits; s++) {
    outs[s] = plan.out + s * rows * call.Dv;
    lses[s] = plan.lse + s * rows;
  }
  current().merge({plan.splits, rows, call.Dv, outs.data(), lses.data(), call.out, call.lse});
}

}  // namespace

void attend(Call call, int threads) {
  const Kernels& kernels = current();
  static std::atomic<int64_t> calls{0};
  call.id = ++calls;
  call.grid_product = kernels.grid_product;
  call.trellis = kernels.trellis;
  run(call, kernels.attend, threads);
}
void merge_segments(const Merge& call) { current().merge(call); }

}  // namespace tersekv
