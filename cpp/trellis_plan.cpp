#include "trellis_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tersekv {
namespace {

template <class T>
T* scratch_of(int64_t count) {
  return reinterpret_cast<T*>(scratch(ceil_div(count * static_cast<int64_t>(sizeof(T)), sizeof(float))));
}

// Collects a head's quads.
class Planner {
 public:
  explicit Planner(const TrellisSide& side)
      : D_(side.D),
        ring_(16 * side.view->words),
        bits_(side.view->bits + side.b * side.view->bits_b + side.h * side.view->bits_h),
        scale_(side.view->scale + side.b * side.view->scale_b + side.h * side.view->scale_h),
        view_(*side.view),
        end_(scratch_of<int32_t>(D_)),
        used_(scratch_of<uint8_t>(D_)),
        waiting_(scratch_of<int32_t>(D_ + 4)),
        quads_(scratch_of<TrellisQuad>(D_ / 4 + kTrellisRates + 1)) {
    int32_t end = 0;
    for (int64_t d = 0; d < D_; d++) {
      end_[d] = end += bits_[d];
      used_[d] = bits_[d] == 0;
    }
  }

  int64_t run(TrellisPlan& plan) {
    TrellisQuad* next = quads_;
    plan.sections = 0;
    for (int bits = 1; bits < kTrellisRates; bits++) {
      TrellisSection section = {view_.entries + bits * kTrellisStates, next, next, next};
      int64_t count = neighbours(bits);
      for (int64_t i = 0; i + 4 <= count; i += 4) *next++ = quad(bits, waiting_ + i, true);
      section.singles = next;
      for (int64_t i = count / 4 * 4; i < count; i++) used_[waiting_[i]] = 0;
      count = singles(bits);
      for (int64_t i = 0; i < count; i += 4) *next++ = quad(bits, waiting_ + i, false);
      section.last = next;
      if (section.first < section.last) plan.section[plan.sections++] = section;
    }
    *next = next[-1];  // kernels decode one ahead
    return next - quads_;
  }

 private:
  // Components of a rate, two by two 8 bits apart, into waiting_.
  int64_t neighbours(int bits) {
    int64_t count = 0;
    for (int32_t d = 0; d < D_; d++) {
      if (used_[d] || bits_[d] != bits) continue;
      for (int32_t other = d + 1; other < D_ && end_[other] <= end_[d] + 8; other++)
        if (end_[other] == end_[d] + 8 && bits_[other] == bits) {
          waiting_[count++] = d;
          waiting_[count++] = other;
          used_[d] = used_[other] = 1;
          break;
        }
    }
    return count;
  }

  // What is left of a rate, filled up to whole quads.
  int64_t singles(int bits) {
    int64_t count = 0;
    for (int32_t d = 0; d < D_; d++)
      if (!used_[d] && bits_[d] == bits) {
        waiting_[count++] = d;
        used_[d] = 1;
      }
    while (count % 4) waiting_[count++] = -1;
    return count;
  }

  TrellisQuad quad(int bits, const int32_t* d, bool neighbours) const {
    TrellisQuad out;
    for (int k = 0; k < 4; k++) {
      out.d[k] = d[k];
      out.scale[k] = d[k] < 0 ? 0.0f : scale_[d[k]] * view_.unit[bits];
      const int32_t end = end_[d[k] < 0 ? d[0] : d[k]];
      // The window in the low byte, or (a single's, where k is odd) in the high byte.
      const int64_t begin = (end - (k % 2 && !neighbours ? 16 : 8) + ring_) % ring_, word = begin / 16;
      out.at[k] = {static_cast<int32_t>(word * kTrellisBlock),
                   static_cast<int32_t>((word + 1) % view_.words * kTrellisBlock),
                   static_cast<int32_t>(begin % 16 * 0x10001)};
    }
    return out;
  }

  int64_t D_, ring_;
  const uint8_t* bits_;
  const float* scale_;
  const TrellisView& view_;
  int32_t* end_;
  uint8_t* used_;
  int32_t* waiting_;
  TrellisQuad* quads_;
};

// A row in 16 bits, of which the high byte counts 256 and both are signed.
TrellisQuery quantised(const float* query, int64_t D, const TrellisQuad* quads, int64_t count, int32_t* out,
                       int64_t step) {
  float most = 0.0f, wrong = 0.0f;
  for (int64_t d = 0; d < D; d++) wrong += query[d] * 0.0f;  // infinities and NaN become NaN
  const auto each = [&](auto&& body) {
    for (int64_t i = 0; i < count; i++)
      for (int k = 0; k < 4; k++) body(i, k, quads[i].d[k] < 0 ? 0.0f : query[quads[i].d[k]] * quads[i].scale[k]);
  };
  each([&](int64_t, int, float x) { most = std::max(most, std::fabs(x)); });
  const float inverse = most > 0.0f && wrong == 0.0f ? 32512.0f / most : 0.0f;
  int32_t high_sum = 0, low_sum = 0;
  each([&](int64_t i, int k, float x) {
    const auto q = static_cast<int32_t>(std::lrintf(x * inverse)), high = (q + 128) >> 8, low = q - high * 256;
    auto* bytes = reinterpret_cast<int8_t*>(out + i * step);
    bytes[k] = static_cast<int8_t>(high);
    bytes[4 + k] = static_cast<int8_t>(low);
    high_sum += high;
    low_sum += low;
  });
  return {most / 32512.0f + wrong, -128 * high_sum, -128 * low_sum};
}

}  // namespace

const void* prepare_trellis_plan(const TrellisSide& side) {
  auto* plan = scratch_of<TrellisPlan>(1);
  const TrellisView& view = *side.view;
  plan->view = &view;
  plan->stream = stream_of(view, side.b, side.h);
  plan->gain = view.gain + side.b * view.gain_b + side.h * view.gain_h;
  plan->rows = side.rows;
  const int64_t quads = Planner(side).run(*plan);
  plan->collected = scratch(quads * 16);
  if (!side.query) return plan;
  plan->coefficients = scratch_of<int32_t>(quads * side.rows * 2);
  plan->queries = scratch_of<TrellisQuery>(side.rows);
  for (int64_t r = 0; r < side.rows; r++)
    plan->queries[r] = quantised(side.query + r * side.query_stride, side.D, plan->section[0].first, quads,
                                 plan->coefficients + 2 * r, 2 * side.rows);
  return plan;
}

}  // namespace tersekv
