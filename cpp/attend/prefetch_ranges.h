// Memory ranges that are prefetched while something else is computed.
#pragma once

#include "node.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

class PrefetchRanges {
 public:
  void add(const void* first, int64_t bytes) {
    if (first && count_ < kMost) ranges_[count_++] = {static_cast<const char*>(first), bytes};
  }

  // Add tokens [token, token + tokens) of a head, if the view, its part before a factor, or the
  // first part of a sum, is a layout of blocks.
  void add(const View& view, int64_t b, int64_t h, int64_t token, int64_t tokens) {
    if (view.kind == Kind::sum || view.kind == Kind::scaled) return add(view.parts[0], b, h, token, tokens);
    if (token % view.t) return;
    for (int64_t n = token / view.t; n < ceil_div(token + tokens, view.t); n++) {
      if (view.kind == Kind::grid) {
        const GridView& v = view.grid;
        const int64_t ranges = (v.lane_scaled ? v.P / v.group * v.L : v.L / v.group * v.P) * 2;
        add(v.codes + b * v.stride_b + h * v.stride_h + n * v.stride_n, ceil_div(v.L, kLanes) * v.words * kLanes * 4);
        add(plane_at(v.scale, b, h, n), ranges);
        add(plane_at(v.offset, b, h, n), ranges);
      } else if (view.kind == Kind::signs) {
        const SignsView& v = view.signs;
        add(v.signs + b * v.stride_b + h * v.stride_h + n * v.stride_n, ceil_div(v.M, 8) * view.t);
        add(plane_at(v.norms, b, h, n), view.t * 2);
      } else if (view.kind == Kind::polar) {
        const PolarView& v = view.polar;
        add(v.angles + b * v.stride_b + h * v.stride_h + n * v.stride_n, v.bytes * view.t);
        add(plane_at(v.radii, b, h, n), (view.D >> v.levels) * view.t * 2);
      }
    }
  }

  // Add the values of tokens whose keys are about to be scored, once for all rows.
  void add_values(const Node& keys, Span span, int64_t token, int64_t tokens) {
    if (span.row == 0) add(*keys.call->values, keys.b, keys.h, token, tokens);
  }

  // Prefetch one of `parts` parts of the ranges into the L2 cache. With more at once the CPU
  // would drop requests.
  [[gnu::always_inline]] inline void fetch(int64_t part, int64_t parts) const {
    for (int i = 0; i < count_; i++)
      for (int64_t at = part * 64; at < ranges_[i].bytes; at += parts * 64)
        __builtin_prefetch(ranges_[i].first + at, 0, 2);
  }

 private:
  struct Range {
    const char* first;
    int64_t bytes;
  };

  static constexpr int kMost = 8;
  Range ranges_[kMost];
  int count_ = 0;
};

}  // namespace
}  // namespace tersekv
