#include "driver.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "call_memory.h"
#include "isa.h"
#include "pool.h"
#include "rope_kernel.h"

namespace tersekv {
namespace {

constexpr int64_t kRowBlock = 32;         // rows whose scores fit the L2 cache
constexpr int64_t kTileFloats = 1 << 18;  // queries and sums that do; tiles are decoded once for so many
constexpr int64_t kLeastBlock = 256;      // rows of a task that packs floats into panels
constexpr int64_t kTilesLeastRows = 32;   // rows from which it pays to pack floats into panels
constexpr int64_t kMergedRows = 256;      // rows of a task that merges partial results
constexpr double kTaskNs = 15000.0;       // minimum duration of a task

constexpr int64_t kFewRows = 8;  // up to so many, decoding packed tokens takes longer than products with the rows

constexpr int64_t kMeanPositions = 1024;  // fewest positions of a task that computes scores of a mean

constexpr int64_t kRopedTokens = 512;  // tokens whose cosines and sines fit the L2 cache

// True if cosines and sines of all tokens are computed.
bool reads_all_angles(const Call& call, const View& view) {
  const bool stepped = call.rope && view.rope.int16_offsets && roped_codes(view.parts[0]);
  bool any = (view.kind == Kind::roped && !stepped) || (view.kind == Kind::rotated_mean && !view.rope.offsets);
  for (int64_t i = 0; i < view.count; i++) any |= reads_all_angles(call, view.parts[i]);
  return any;
}

// Tasks over the heads, blocks of rows and splits of tokens of a call. `first`: number of the first.
struct HeadTasks {
  const Call* call;
  int64_t first = 0, block = 0, row_blocks = 0, splits = 1;

  explicit HeadTasks(const Call& of) : call(&of) {
    set_block(of.tiles ? std::max(kTileFloats / (of.D + of.Dv), kRowBlock) : kRowBlock);
  }
  void set_block(int64_t most) {
    block = round_up(ceil_div(call->R, ceil_div(call->R, most)), kRowBlock);
    row_blocks = ceil_div(call->R, block);
  }
  int64_t heads() const { return call->B * call->H; }
  int64_t tasks() const { return heads() * row_blocks * splits; }
  int64_t split_of(int64_t index) const { return index / heads() / row_blocks; }

  // Return the head and the rows of a task. Tasks of different heads over the same tokens are
  // consecutive, so that data per token stays in the cache.
  Task task(int64_t index) const {
    const int64_t head = index % heads();
    Task task;
    task.b = head / call->H;
    task.h = head % call->H;
    task.row = index / heads() % row_blocks * block;
    task.rows = std::min(block, call->R - task.row);
    return task;
  }
};

// The tasks of one call, or of consecutive calls with tiles, which a task reads one after the other. `out` and `lse`
// belong to the first split.
struct CallTasks : HeadTasks {
  int64_t count = 0;     // of calls, from `call` on
  bool unpacked = true;  // true if no call reads packed tokens
  int64_t longest = 0;   // most units of a head in a call
  double ns = 0;
  float* out = nullptr;  // [splits] of [B, H, R, Dv]
  float* lse = nullptr;  // [splits] of [B, H, R]

  explicit CallTasks(const Call& of) : HeadTasks(of) {}

  // True if tasks can read the next call too.
  bool takes(const Call& of) const { return call->tiles && of.tiles && rounds_tiles(*call) == rounds_tiles(of); }

  void add(const Call& of) {
    count++;
    unpacked &= of.keys->kind == Kind::exact && of.values->kind == Kind::exact;
    const int64_t rows = std::max<int64_t>(of.R, of.keys->kind == Kind::exact ? 2 : kFewRows);
    for (int64_t head = 0; head < heads(); head++) longest = std::max(longest, end(of, head) - start(of, head));
    const auto tokens = static_cast<double>(of.ends ? of.T : heads() * of.T);
    ns += tokens * static_cast<double>(rows * (of.D + of.Dv)) * current().ns_per_product;
  }

  // Return the number of tokens of the longest head, relative to the mean.
  double longest_share() const {
    int64_t most = 0, all = 0;
    for (int64_t head = 0; head < heads(); head++) {
      int64_t own = 0;
      for (const Call* of = call; of < call + count; of++)
        own += (end(*of, head) - start(*of, head)) * of->tokens_per_unit;
      most = std::max(most, own);
      all += own;
    }
    return static_cast<double>(most * heads()) / static_cast<double>(all);
  }

  // Return a head's first unit, and the one after its last.
  static int64_t start(const Call& of, int64_t head) { return of.ends && head ? end(of, head - 1) : 0; }
  static int64_t end(const Call& of, int64_t head) { return (of.ends ? of.ends[head] : of.T) / of.tokens_per_unit; }

  // Return the first unit of a head's split. From there on kernels read whole vectors of tokens.
  int64_t begin(const Call& of, int64_t head, int64_t split) const {
    const int64_t grain = of.tokens_per_unit % kLanes ? kLanes : 1, from = start(of, head), own = end(of, head) - from;
    return from + (split == splits ? own : own * split / splits / grain * grain);
  }

  // Return the position of a task's last token, relative to the first mark.
  int64_t last_position(int64_t index) const {
    const int64_t head = index % heads();
    const HeadMarks marks = marks_of(*call->start_marks, head / call->H, head % call->H);
    return marks.position(marks.skip + begin(*call, head, split_of(index) + 1) * call->tokens_per_unit - 1);
  }

  void run(int64_t index) const {
    const int64_t split = split_of(index), rows = heads() * call->R, head = index % heads();
    Task one = task(index);
    one.out = out + split * rows * call->Dv;
    one.lse = lse + split * rows;
    const auto part = [&](const Call& of) {
      one.first = begin(of, head, split);
      one.last = begin(of, head, split + 1);
      return Part{&of, one};
    };
    if (count == 1) {
      const Part only = part(*call);
      return current().attend(&only, 1);
    }
    std::vector<Part> parts;
    for (const Call* of = call; of < call + count; of++) parts.push_back(part(*of));
    current().attend(parts.data(), count);
  }
};

// Split tokens if there are fewer heads than threads need, or if heads share cosines and sines of
// tokens. Rows are split instead where no tokens must be decoded again for it, because their results need no merge.
void split(CallTasks& of, int threads) {
  if (threads > 1 && of.call->tiles && of.unpacked)
    of.set_block(std::max(kLeastBlock, std::min(of.block, ceil_div(of.call->R * of.heads(), 4 * threads))));
  const int64_t tasks = of.tasks();
  if (threads > 1 && of.longest) {
    const double share = of.longest_share();
    const int64_t wanted = static_cast<int64_t>(std::ceil(4 * threads * share / static_cast<double>(tasks))),
                  worth = static_cast<int64_t>(of.ns * share / kTaskNs) / tasks;
    of.splits = std::max<int64_t>(1, std::min({wanted, worth, of.longest}));
  }
  if (!of.call->tiles && reads_all_angles(*of.call, *of.call->keys))  // tiles compute angles as they need them
    of.splits = std::max<int64_t>(
        1, std::min(of.longest, std::max(of.splits, ceil_div(of.longest * of.call->tokens_per_unit, kRopedTokens))));
}

// The tasks that compute scores of a rotated mean.
struct MeanTasks : HeadTasks {
  const MeanScores* of;
  std::unique_ptr<std::atomic<int64_t>[]> left;  // of each split, the tasks that have not ended

  MeanTasks(const MeanScores& scores, int threads) : HeadTasks(scores.call), of(&scores) {
    if (threads > 1) {
      const int64_t worth = ceil_div(call->T, kMeanPositions);
      splits = std::max<int64_t>(1, std::min(ceil_div(3 * threads, tasks()), worth));
    }
    left.reset(new std::atomic<int64_t>[splits]);
    for (int64_t split = 0; split < splits; split++) left[split] = heads() * row_blocks;
  }

  int64_t begin(int64_t split) const {
    return split == splits ? call->T : call->T * split / splits / kWordBits * kWordBits;
  }

  // Wait until the scores of positions up to `last` are there.
  void wait(int64_t last) const {
    for (int64_t split = 0; split < splits && begin(split) <= last; split++)
      while (left[split].load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

  void run(int64_t index) const {
    const int64_t split = split_of(index);
    struct End {
      std::atomic<int64_t>& left;
      ~End() { left.fetch_sub(1, std::memory_order_release); }
    } end{left[split]};
    Task one = task(index);
    one.first = begin(split);
    one.last = begin(split + 1);
    current().mean_scores(*of, one);
  }
};

struct AttentionTasks {
  std::vector<MeanTasks> means;
  int64_t mean_tasks = 0;
  std::vector<CallTasks> calls;

  // Tasks begin in order, so those of means are running or have ended when any other one begins.
  static void run(const void* context, int64_t index) {
    const AttentionTasks& all = *static_cast<const AttentionTasks*>(context);
    if (index < all.mean_tasks) {
      const MeanTasks& of = find(all.means, index);
      return of.run(index - of.first);
    }
    const CallTasks& of = find(all.calls, index);
    if (of.call->start) all.means[of.call->start_mean].wait(of.last_position(index - of.first));
    of.run(index - of.first);
  }

  template <class Tasks>
  static const Tasks& find(const std::vector<Tasks>& all, int64_t index) {
    const auto after =
        std::upper_bound(all.begin(), all.end(), index, [](int64_t task, const Tasks& of) { return task < of.first; });
    return *(after - 1);
  }
};

}  // namespace

void decode(const Decode& call, int threads) {
  run_in_team(
      call.B * call.H * call.spans(), threads,
      [](const void* context, int64_t task) { current().decode(*static_cast<const Decode*>(context), task); }, &call);
}

void multiply(BasisProduct call, int threads) {
  const double products = static_cast<double>(call.B * call.H * call.R) * static_cast<double>(call.D * call.D);
  if (0.1 * products < team_worth_ns()) threads = 1;
  call.threads = threads;
  run_in_team(
      call.tasks(), threads,
      [](const void* context, int64_t task) {
        current().basis_product(*static_cast<const BasisProduct*>(context), task);
      },
      &call);
}

namespace {

// Transform the merged outputs of some calls, [B·H·R, Dv], in place.
void map_outputs(const Call& any, const OutputMap& map, int threads, float* out) {
  const int64_t Dv = any.Dv;
  if (map.matrix.given()) multiply({any.B, any.H, any.R, Dv, true, map.matrix, out, Dv, out, Dv}, threads);
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
  AttentionTasks all;
  for (Call& call : calls) {
    call.id = ++numbers;
    call.grid_product = current().grid_product;
    call.code_rows = current().code_rows;
    call.rounds = current().rounds;
    call.rounded_rows = current().rounded_rows;
    call.registers = current().registers;
    call.trellis = current().trellis;
    call.rope = current().rope;
    call.polar = current().polar;
    call.tiles |= call.shared ||
                  (call.R >= kTilesLeastRows && call.keys->kind == Kind::exact && call.values->kind == Kind::exact);
  }
  for (size_t i = 0; i < calls.size(); i++) {
    const bool mapped = map.given() && i == map.first;  // sums of these are transformed
    if (i == 0 || mapped || !all.calls.back().takes(calls[i])) all.calls.emplace_back(calls[i]);
    all.calls.back().add(calls[i]);
  }
  double ns = 0;
  for (const CallTasks& of : all.calls) ns += of.ns;
  const int most = threads;
  if (ns < team_worth_ns()) threads = 1;
  int64_t tasks = 0, parts = 0;
  for (SharedMean& mean : means) {
    mean.scores.call.rope = current().rope;
    all.means.emplace_back(mean.scores, threads);
    all.means.back().first = tasks;
    tasks += all.means.back().tasks();
  }
  all.mean_tasks = tasks;
  for (CallTasks& of : all.calls) {
    split(of, threads);
    of.first = tasks;
    tasks += of.tasks();
    parts += of.splits;
  }
  const bool maps = map.given() && map.first < calls.size();
  CallMemory memory;
  float* partial = parts > 1 || maps ? memory.take((parts + 1) * rows * (Dv + 1)) : nullptr;
  const auto part_at = [&](int64_t part) { return partial + part * rows * (Dv + 1); };
  std::vector<const float*> outs, lses;
  size_t unmapped = 0;  // number of parts of calls before `map.first`
  for (CallTasks& of : all.calls) {
    if (maps && of.call == &calls[map.first]) unmapped = outs.size();
    const bool alone = parts == 1 && !maps;
    float* to = alone ? out : part_at(static_cast<int64_t>(outs.size()));
    of.out = to;
    of.lse = alone ? lse : to + of.splits * rows * Dv;
    for (int64_t s = 0; s < of.splits; s++) {
      outs.push_back(of.out + s * rows * Dv);
      lses.push_back(of.lse + s * rows);
    }
  }
  run_in_team(tasks, threads, AttentionTasks::run, &all);
  if (maps) {
    float *mapped = part_at(parts), *mapped_lse = mapped + rows * Dv;
    const auto count = static_cast<int64_t>(outs.size() - unmapped);
    merge_segments({count, rows, Dv, outs.data() + unmapped, lses.data() + unmapped, mapped, mapped_lse}, most);
    map_outputs(any, map, most, mapped);
    outs.resize(unmapped);
    lses.resize(unmapped);
    outs.push_back(mapped);
    lses.push_back(mapped_lse);
  }
  const auto count = static_cast<int64_t>(outs.size());
  if (maps || parts > 1) merge_segments({count, rows, Dv, outs.data(), lses.data(), out, lse}, most);
}

void merge_segments(const Merge& call, int threads) {
  const auto floats = static_cast<double>(call.segments * call.rows * call.D);
  if (threads == 1 || floats < 4 * team_worth_ns()) return current().merge(call, 0, call.rows);
  run_in_team(
      ceil_div(call.rows, kMergedRows), threads,
      [](const void* context, int64_t task) {
        const Merge& of = *static_cast<const Merge*>(context);
        current().merge(of, task * kMergedRows, std::min((task + 1) * kMergedRows, of.rows));
      },
      &call);
}

}  // namespace tersekv
