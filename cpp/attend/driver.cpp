#include "driver.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <thread>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "rope_kernel.h"

namespace tersekv {
namespace {

constexpr int64_t kRowBlock = 32;    // rows whose scores fit the L2 cache
constexpr double kTaskNs = 15000.0;  // minimum duration of a task

constexpr int64_t kMeanPositions = 1024;  // fewest positions of a task that computes scores of a mean

constexpr int64_t kRopedTokens = 512;  // tokens whose cosines and sines fit the L2 cache

// True if cosines and sines of all tokens are computed.
bool turns(const Call& call, const View& view) {
  const bool stepped = call.rope && view.rope.int16_offsets && roped_codes(view.parts[0]);
  bool any = (view.kind == Kind::roped && !stepped) || (view.kind == Kind::rotated_mean && !view.rope.offsets);
  for (int64_t i = 0; i < view.count; i++) any |= turns(call, view.parts[i]);
  return any;
}

// The tasks of one call. `first` is the number of its first task; `out` and `lse` belong to its
// first split.
struct Plan {
  const Call* call;
  int64_t first, row_blocks, splits, units;
  double ns;
  float* out;  // [splits] of [B, H, R, Dv]
  float* lse;  // [splits] of [B, H, R]

  int64_t heads() const { return call->B * call->H; }
  int64_t tasks() const { return heads() * row_blocks * splits; }

  // Return a split's first unit. From there on kernels read whole vectors of tokens.
  int64_t begin(int64_t split) const {
    const int64_t grain = call->tokens_per_unit % kLanes ? kLanes : 1;
    return split == splits ? units : units * split / splits / grain * grain;
  }

  // Return the position of a task's last token, relative to the first mark.
  int64_t last_position(int64_t index) const {
    const int64_t head = index % heads(), split = index / heads() / row_blocks;
    const Marks& marks = *call->start_marks;
    const int64_t last = marks.skip + begin(split + 1) * call->tokens_per_unit - 1;
    return marks_of(marks, head / call->H, head % call->H).position(last);
  }

  void run(int64_t index) const {
    // Tasks of different heads over the same tokens are consecutive, so that data per token stays
    // in the cache.
    const int64_t head = index % heads(), rest = index / heads();
    const int64_t block = rest % row_blocks, split = rest / row_blocks;
    Task task;
    task.b = head / call->H;
    task.h = head % call->H;
    task.row = block * kRowBlock;
    task.rows = std::min(kRowBlock, call->R - task.row);
    task.first = begin(split);
    task.last = begin(split + 1);
    const int64_t rows = heads() * call->R;
    task.out = out + split * rows * call->Dv;
    task.lse = lse + split * rows;
    current().attend(*call, task);
  }
};

Plan plan_of(const Call& call) {
  Plan plan{&call, 0, ceil_div(call.R, kRowBlock), 1, call.T / call.tokens_per_unit, 0.0, nullptr, nullptr};
  const double products = static_cast<double>(call.B * call.H * call.T) * std::max<int64_t>(call.R, 2) *
                          static_cast<double>(call.D + call.Dv);
  plan.ns = products * current().ns_per_product;
  return plan;
}

// Split tokens if there are fewer heads than threads need, or if heads share cosines and sines of
// tokens.
void split(Plan& plan, int threads) {
  const int64_t tasks = plan.tasks();
  if (threads > 1) {
    const int64_t wanted = ceil_div(4 * threads, tasks), worth = static_cast<int64_t>(plan.ns / kTaskNs) / tasks;
    plan.splits = std::max<int64_t>(1, std::min({wanted, worth, plan.units}));
  }
  if (turns(*plan.call, *plan.call->keys))
    plan.splits =
        std::max<int64_t>(1, std::min(plan.units, std::max(plan.splits, ceil_div(plan.call->T, kRopedTokens))));
}

// The tasks that compute scores of a rotated mean.
struct MeanPlan {
  const MeanScores* of;
  int64_t first, row_blocks, splits;
  std::unique_ptr<std::atomic<int64_t>[]> left;  // of each split, the tasks that have not ended

  int64_t heads() const { return of->call.B * of->call.H; }
  int64_t tasks() const { return heads() * row_blocks * splits; }
  int64_t begin(int64_t split) const {
    return split == splits ? of->call.T : of->call.T * split / splits / kWordBits * kWordBits;
  }

  // Wait until the scores of positions up to `last` are there.
  void wait(int64_t last) const {
    for (int64_t split = 0; split < splits && begin(split) <= last; split++)
      while (left[split].load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

  void run(int64_t index) const {
    const int64_t head = index % heads(), rest = index / heads(), split = rest / row_blocks;
    struct End {
      std::atomic<int64_t>& left;
      ~End() { left.fetch_sub(1, std::memory_order_release); }
    } end{left[split]};
    Task task;
    task.b = head / of->call.H;
    task.h = head % of->call.H;
    task.row = rest % row_blocks * kRowBlock;
    task.rows = std::min(kRowBlock, of->call.R - task.row);
    task.first = begin(split);
    task.last = begin(split + 1);
    current().mean_scores(*of, task);
  }
};

MeanPlan mean_plan_of(const MeanScores& of, int threads) {
  MeanPlan plan{&of, 0, ceil_div(of.call.R, kRowBlock), 1, nullptr};
  if (threads > 1) {
    const int64_t worth = ceil_div(of.call.T, kMeanPositions);
    plan.splits = std::max<int64_t>(1, std::min(ceil_div(3 * threads, plan.tasks()), worth));
  }
  plan.left.reset(new std::atomic<int64_t>[plan.splits]);
  for (int64_t split = 0; split < plan.splits; split++) plan.left[split] = plan.heads() * plan.row_blocks;
  return plan;
}

struct Job {
  std::vector<MeanPlan> means;
  int64_t mean_tasks = 0;
  std::vector<Plan> plans;

  // Tasks begin in order, so those of means are running or have ended when any other one begins.
  static void run(const void* context, int64_t index) {
    const Job& job = *static_cast<const Job*>(context);
    if (index < job.mean_tasks) {
      const MeanPlan& plan = find(job.means, index);
      return plan.run(index - plan.first);
    }
    const Plan& plan = find(job.plans, index);
    if (plan.call->start) job.means[plan.call->start_mean].wait(plan.last_position(index - plan.first));
    plan.run(index - plan.first);
  }

  template <class P>
  static const P& find(const std::vector<P>& plans, int64_t index) {
    const auto after = std::upper_bound(plans.begin(), plans.end(), index,
                                        [](int64_t task, const P& plan) { return task < plan.first; });
    return *(after - 1);
  }
};

}  // namespace

void decode(const Decode& call, int threads) {
  run_long_tasks(
      call.B * call.H * call.spans(), threads,
      [](const void* context, int64_t task) { current().decode(*static_cast<const Decode*>(context), task); }, &call);
}

void multiply(const BasisProduct& call, int threads, bool team) {
  const double products = static_cast<double>(call.B * call.H * call.R) * static_cast<double>(call.D * call.D);
  if (0.1 * products < (team ? kTeamWorthNs : kThreadsWorthNs)) threads = 1;
  (team ? run_long_tasks : run_tasks)(
      call.tasks(), threads,
      [](const void* context, int64_t task) {
        current().basis_product(*static_cast<const BasisProduct*>(context), task);
      },
      &call);
}

namespace {

// Transform the merged outputs of some calls, [B·H·R, Dv], in place.
void map_outputs(const Call& any, const OutputMap& map, int threads, bool team, float* out) {
  const int64_t rows = any.B * any.H * any.R, Dv = any.Dv;
  if (map.matrix.given()) {
    const std::vector<float> inner(out, out + rows * Dv);
    multiply({any.B, any.H, any.R, Dv, true, map.matrix, inner.data(), Dv, out, Dv}, threads, team);
  }
  if (!map.mean) return;
  const int64_t heads = map.mean_b ? any.B * any.H : any.H;
  std::vector<float> means(heads * Dv);
  for (int64_t head = 0; head < heads; head++)
    for (int64_t d = 0; d < Dv; d++)
      means[head * Dv + d] = float_at(map.type, map.mean, head / any.H * map.mean_b + head % any.H * map.mean_h + d);
  for (int64_t head = 0; head < any.B * any.H; head++) {
    const float* mean = means.data() + head % heads * Dv;
    for (int64_t r = 0; r < any.R; r++)
      for (int64_t d = 0; d < Dv; d++) out[(head * any.R + r) * Dv + d] += mean[d];
  }
}

}  // namespace

void attend(std::vector<Call>& calls, const OutputMap& map, std::vector<SharedMean>& means, int threads, float* out,
            float* lse) {
  static std::atomic<int64_t> numbers{0};
  const Call& any = calls.front();
  const int64_t rows = any.B * any.H * any.R, Dv = any.Dv;
  if (rows == 0) return;
  Job job;
  double ns = 0;
  for (Call& call : calls) {
    call.id = ++numbers;
    call.grid_product = current().grid_product;
    call.rounds = current().rounds;
    call.trellis = current().trellis;
    call.rope = current().rope;
    call.polar = current().polar;
    job.plans.push_back(plan_of(call));
    ns += job.plans.back().ns;
  }
  const int most = threads;
  // Engines call for all requests at once, between torch's operations, whose threads still spin.
  const bool team = std::any_of(calls.begin(), calls.end(), [](const Call& call) { return call.pages.at; });
  if (ns < (team ? kTeamWorthNs : kThreadsWorthNs)) threads = 1;
  int64_t tasks = 0, parts = 0;
  for (SharedMean& mean : means) {
    mean.scores.call.rope = current().rope;
    job.means.push_back(mean_plan_of(mean.scores, threads));
    job.means.back().first = tasks;
    tasks += job.means.back().tasks();
  }
  job.mean_tasks = tasks;
  for (Plan& plan : job.plans) {
    split(plan, threads);
    plan.first = tasks;
    tasks += plan.tasks();
    parts += plan.splits;
  }
  const bool maps = map.given() && map.first < calls.size();
  std::unique_ptr<float[]> partial;
  if (parts > 1 || maps) partial.reset(new float[(parts + 1) * rows * (Dv + 1)]);
  const auto part_at = [&](int64_t part) { return partial.get() + part * rows * (Dv + 1); };
  std::vector<const float*> outs, lses;
  size_t unmapped = 0;  // number of parts of calls before `map.first`
  for (size_t i = 0; i < calls.size(); i++) {
    Plan& plan = job.plans[i];
    if (i == map.first) unmapped = outs.size();
    const bool alone = parts == 1 && !maps;
    float* to = alone ? out : part_at(static_cast<int64_t>(outs.size()));
    plan.out = to;
    plan.lse = alone ? lse : to + plan.splits * rows * Dv;
    for (int64_t s = 0; s < plan.splits; s++) {
      outs.push_back(plan.out + s * rows * Dv);
      lses.push_back(plan.lse + s * rows);
    }
  }
  (team ? run_long_tasks : run_tasks)(tasks, threads, Job::run, &job);
  if (maps) {
    float *mapped = part_at(parts), *mapped_lse = mapped + rows * Dv;
    const auto count = static_cast<int64_t>(outs.size() - unmapped);
    current().merge({count, rows, Dv, outs.data() + unmapped, lses.data() + unmapped, mapped, mapped_lse});
    map_outputs(any, map, most, team, mapped);
    outs.resize(unmapped);
    lses.resize(unmapped);
    outs.push_back(mapped);
    lses.push_back(mapped_lse);
  }
  const auto count = static_cast<int64_t>(outs.size());
  if (maps || parts > 1) current().merge({count, rows, Dv, outs.data(), lses.data(), out, lse});
}

void merge_segments(const Merge& call) { current().merge(call); }

}  // namespace tersekv
