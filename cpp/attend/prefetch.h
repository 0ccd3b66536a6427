// Prefetch blocks of a grid that are read later, line by line while other blocks are read. The
// requests are evenly spaced, because hundreds of lines at once would be dropped.
#pragma once

#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

class Prefetch {
 public:
  Prefetch() = default;

  // Prefetch `later_blocks` blocks of `v` from `later` on while the codes of `blocks` blocks of
  // `view` are read.
  Prefetch(const GridView& view, int64_t blocks, const GridView& v, const Block& later, int64_t later_blocks) {
    const int64_t reads = blocks * code_lines(view);
    if (!reads) return;
    by_read_ = 1.0f / static_cast<float>(reads);
    const int64_t lines = code_lines(v), ranges = range_lines(v);
    codes_ = {later.codes, lines, v.stride_n * 4, later_blocks * lines};
    scale_ = {later.scale, ranges, v.scale.stride_n * 2, later_blocks * ranges};
    offset_ = {later.offset, ranges, v.offset.stride_n * 2, later.offset ? later_blocks * ranges : 0};
  }

  // Prefetch the blocks that a product names.
  Prefetch(const GridView& view, const Product& in) {
    if (in.later_view) *this = Prefetch(view, in.blocks, *in.later_view, in.later, in.later_blocks);
  }

  // Call this when `lines` cache lines of the codes have been read.
  [[gnu::always_inline]] inline void fetch_for(int64_t lines) {
    const auto share = static_cast<float>(lines) * by_read_;
    codes_.fetch(share);
    scale_.fetch(share);
    offset_.fetch(share);
  }

 private:
  static int64_t code_lines(const GridView& v) { return ceil_div(v.L, kLanes) * v.words; }
  static int64_t range_lines(const GridView& v) {
    return ceil_div((v.lane_scaled ? v.P / v.group * v.L : v.L / v.group * v.P) * 2, 64);
  }

  // Blocks of `lines` cache lines.
  struct Run {
    const char* at = nullptr;
    int64_t lines = 0, left = 0, skip = 0;
    float total = 0.0f, due = 0.0f;

    Run() = default;
    Run(const void* first, int64_t lines, int64_t stride, int64_t total)
        : at(static_cast<const char*>(first)),
          lines(lines),
          left(lines),
          skip(stride - lines * 64),
          total(static_cast<float>(total)) {}

    // Prefetch a share of all lines. Locals, because a prefetch could be a write for all that the compiler knows.
    [[gnu::always_inline]] inline void fetch(float share) {
      due += share * total;
      auto count = static_cast<int64_t>(due);
      due -= static_cast<float>(count);
      const char* next = at;
      int64_t own = left;
      for (; count > 0; count--) {
        __builtin_prefetch(next, 0, 2);
        next += 64;
        if (--own) continue;
        next += skip;
        own = lines;
      }
      at = next;
      left = own;
    }
  };

  float by_read_ = 0.0f;
  Run codes_, scale_, offset_;
};

}  // namespace
}  // namespace tersekv
