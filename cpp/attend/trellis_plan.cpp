#include "trellis_plan.h"

namespace tersekv {
namespace {

// Components of one rate: pairs whose windows are 8 bits apart, and the others.
struct Rate {
  int32_t *neighbours, *singles;
  int64_t neighbour_count = 0, single_count = 0;
};

class Planner {
 public:
  Planner(const TrellisSide& side, TrellisPlan& plan)
      : D_(side.D),
        ring_(static_cast<int32_t>(16 * side.view->words)),
        bits_(side.view->bits + side.b * side.view->bits_b + side.h * side.view->bits_h),
        scale_(side.scale),
        view_(*side.view),
        plan_(plan),
        end_(scratch_of<int32_t>(D_)) {}

  void run() {
    sort();
    const int64_t most = D_ / 4 + kTrellisRates;
    auto* next = scratch_of<TrellisQuad>(most + 1);
    plan_.d = scratch_of<int32_t>(4 * most);
    plan_.scale = scratch(4 * most);
    plan_.quads = plan_.sections = 0;
    for (int bits = 1; bits < kTrellisRates; bits++) {
      Rate& rate = rates_[bits];
      TrellisSection section = {view_.entries + bits * kTrellisStates, next, next, next};
      int64_t i = 0;
      for (; i + 4 <= rate.neighbour_count; i += 4) *next++ = quad(bits, rate.neighbours + i, 4, true);
      for (; i < rate.neighbour_count; i++) rate.singles[rate.single_count++] = rate.neighbours[i];
      section.singles = next;
      for (i = 0; i < rate.single_count; i += 4) *next++ = quad(bits, rate.singles + i, rate.single_count - i, false);
      section.last = next;
      if (section.first < section.last) plan_.section[plan_.sections++] = section;
    }
    *next = next[-1];  // kernels decode one quad ahead
  }

 private:
  void sort() {
    auto* used = scratch_of<uint8_t>(D_);
    auto* lists = scratch_of<int32_t>(2 * kTrellisRates * D_);
    for (Rate& rate : rates_) {
      rate.neighbours = lists;
      rate.singles = lists + D_;
      lists += 2 * D_;
    }
    int32_t end = 0;
    for (int64_t d = 0; d < D_; d++) {
      end_[d] = end += bits_[d];
      used[d] = bits_[d] == 0;
    }
    for (int32_t d = 0; d < D_; d++) {
      if (used[d]) continue;
      Rate& rate = rates_[bits_[d]];
      int64_t other = d + 1;
      while (other < D_ && end_[other] < end_[d] + 8) other++;
      while (other < D_ && bits_[other] == 0) other++;  // skip components without bits, which have the same end
      if (other < D_ && end_[other] == end_[d] + 8 && bits_[other] == bits_[d] && !used[other]) {
        rate.neighbours[rate.neighbour_count++] = d;
        rate.neighbours[rate.neighbour_count++] = static_cast<int32_t>(other);
        used[other] = 1;
      } else {
        rate.singles[rate.single_count++] = d;
      }
    }
  }

  TrellisQuad quad(int bits, const int32_t* components, int64_t count, bool neighbours) {
    TrellisQuad out;
    const int64_t slot = 4 * plan_.quads++;
    for (int k = 0; k < 4; k++) {
      const int32_t d = k < count ? components[k] : components[0];
      plan_.d[slot + k] = d;
      plan_.scale[slot + k] = k < count ? scale_[d] * view_.unit[bits] : 0.0f;
      // The window goes to the low byte; that of a single with odd k goes to the high byte.
      int32_t begin = end_[d] - (k % 2 && !neighbours ? 16 : 8);
      if (begin < 0) begin += ring_;
      const int32_t word = begin / 16, next = word + 1 < view_.words ? word + 1 : 0;
      out.at[k] = {word * static_cast<int32_t>(kTrellisBlock), next * static_cast<int32_t>(kTrellisBlock),
                   begin % 16 * 0x10001};
    }
    return out;
  }

  int64_t D_;
  int32_t ring_;
  const uint8_t* bits_;
  const float* scale_;
  const TrellisView& view_;
  TrellisPlan& plan_;
  int32_t* end_;
  Rate rates_[kTrellisRates];
};

}  // namespace

TrellisPlan* make_trellis_plan(const TrellisSide& side) {
  auto* plan = scratch_of<TrellisPlan>();
  const TrellisView& view = *side.view;
  plan->view = &view;
  plan->stream = stream_of(view, side.b, side.h);
  plan->gain = view.gain + side.b * view.gain_b + side.h * view.gain_h;
  plan->rows = side.rows;
  Planner(side, *plan).run();
  if (side.query) {
    plan->coefficients = scratch_of<int32_t>(plan->quads * side.rows * 2);
    plan->queries = scratch_of<TrellisQuery>(side.rows);
  } else {
    plan->collected = scratch(plan->quads * 16);
  }
  return plan;
}

}  // namespace tersekv
