// Blocks of a grid times rows: y[r][lane] += sum over p of x[r][p] * x̂[p][lane]. Scales and
// offsets are folded into the coefficients or the sums.
#pragma once

#include "lut.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

inline Block block_after(const GridView& view, const Block& block, int64_t n) {
  return {block.codes + n * view.stride_n, block.scale + n * view.scale.stride_n,
          block.offset ? block.offset + n * view.offset.stride_n : nullptr};
}

// Blocks of keys per call of the micro-kernel, so that their coefficients fit the L1 cache.
constexpr int64_t kBlocksAtOnce = 4;

template <class S, int R>
struct GridProduct {
  using F = typename S::F;

  // Compute the coefficients of `blocks` blocks from `first` on: x times the scale, one per packed
  // position. `shift` becomes the sum of x times the offset. It is over all blocks, or per block if
  // all blocks share x (x_step 0).
  template <Float HALF>
  [[gnu::always_inline]] static inline void scale_rows(const GridView& view, const Block& first, int64_t blocks,
                                                       int64_t g, const float* x, int64_t x_stride, int64_t x_step,
                                                       float* coef, int64_t coef_stride, F* shift) {
    if (first.offset || view.middle != 0.0f)
      return scale_blocks<HALF, true>(view, first, blocks, g, x, x_stride, x_step, coef, coef_stride, shift);
    scale_blocks<HALF, false>(view, first, blocks, g, x, x_stride, x_step, coef, coef_stride, shift);
  }

  // SHIFTED: the table's middle or an offset is added to scale times entry.
  template <Float HALF, bool SHIFTED>
  [[gnu::always_inline]] static inline void scale_blocks(const GridView& view, const Block& first, int64_t blocks,
                                                         int64_t g, const float* x, int64_t x_stride, int64_t x_step,
                                                         float* coef, int64_t coef_stride, F* shift) {
    const F unit = S::set1(view.unit), middle = S::set1(view.middle);
    const int64_t P = view.P, slots = packed_slots(view.bits, view.words);
    const uint16_t* scale = first.scale + g * P;
    const uint16_t* offset = first.offset ? first.offset + g * P : nullptr;
    F sum[R];
    repeat<R>([&](auto r) TERSEKV_INLINE { sum[r] = S::zero(); });
    const auto half = [](const uint16_t* from) TERSEKV_INLINE { return S::template load_as<HALF>(from); };
    const auto shift_by = [&](F s, const F(&xs)[R], int64_t p, auto load) TERSEKV_INLINE {
      if constexpr (SHIFTED) {
        const F o = S::fma(s, middle, offset ? load(offset + p) : S::zero());
        repeat<R>([&](auto r) TERSEKV_INLINE { sum[r] = S::fma(xs[r], o, sum[r]); });
      }
    };
    for (int64_t n = 0, at = 0; n < blocks; n++, at += slots) {
      int64_t p = 0;
      for (; p + 2 * kLanes <= P; p += 2 * kLanes) {
        const F s[2] = {half(scale + p), half(scale + p + kLanes)};
        const F by[2] = {S::mul(s[0], unit), S::mul(s[1], unit)};
        F xs[2][R];
        repeat<R>([&](auto r) TERSEKV_INLINE {
          repeat<2>([&](auto k) TERSEKV_INLINE { xs[k][r] = S::load(x + r * x_stride + p + k * kLanes); });
          S::store_coef_pair(coef + r * coef_stride, at + p, S::mul(xs[0][r], by[0]), S::mul(xs[1][r], by[1]));
        });
        repeat<2>([&](auto k) TERSEKV_INLINE { shift_by(s[k], xs[k], p + k * kLanes, half); });
      }
      for (; p < P; p += kLanes) {
        const int64_t left = P - p < kLanes ? P - p : kLanes;
        const auto some = [&](const uint16_t* from) TERSEKV_INLINE {
          return left == kLanes ? half(from) : S::template load_as_n<HALF>(from, left);
        };
        F xs[R];
        const F s = some(scale + p), by = S::mul(s, unit);
        repeat<R>([&](auto r) TERSEKV_INLINE {
          const float* from = x + r * x_stride + p;
          xs[r] = left == kLanes ? S::load(from) : S::template load_as_n<Float::f32>(from, left);
          S::store_coefs(coef + r * coef_stride, at + p, S::mul(xs[r], by));
        });
        shift_by(s, xs, p, some);
      }
      // Slots after the last code have code 0, whose table entry need not be zero.
      for (; p < slots; p += kLanes)
        repeat<R>([&](auto r) TERSEKV_INLINE { S::store_coefs(coef + r * coef_stride, at + p, S::zero()); });
      scale += view.scale.stride_n;
      if (offset) offset += view.offset.stride_n;
      x += x_step;
      if (x_step && n + 1 < blocks) continue;
      if constexpr (SHIFTED) S::spread(sum);
      repeat<R>([&](auto r) TERSEKV_INLINE {
        shift[r] = sum[r];
        sum[r] = S::zero();
      });
      shift += R;
    }
  }

  template <Float HALF>
  static void packed_scaled(const GridView& view, const Product& in) {
    const Lut<S, R> lut(view);
    const int64_t groups = view.L / view.group, lane_groups = ceil_div(view.L, kLanes);
    // Keys whose blocks share their scales have the same coefficients in every block. Coefficients
    // of other keys are computed for a few blocks at a time, those of values for all blocks.
    const bool fixed = in.y_step && groups == 1 && view.scale.stride_n == 0 && view.offset.stride_n == 0;
    const int64_t joint = in.y_step ? 1 : in.blocks, x_step = in.y_step ? 0 : view.P;
    const int64_t most = fixed || !in.y_step ? in.blocks : kBlocksAtOnce;
    F shift[kBlocksAtOnce * R];
    Prefetch later(view, in);
    Finish<S> finish = {};
    finish.y_stride = in.y_stride;
    finish.code_step = view.stride_n;
    finish.y_step = in.y_step;
    finish.coef_step = fixed ? 0 : packed_slots(view.bits, view.words);
    finish.shift = shift;
    finish.shift_step = fixed ? 0 : R;
    for (int64_t n0 = 0; n0 < in.blocks; n0 += most) {
      const Block first = block_after(view, in.first, n0);
      const Codes codes = {first.codes, view.words * kLanes, view.words, joint, view.stride_n};
      const int64_t blocks = in.blocks - n0 < most ? in.blocks - n0 : most;
      finish.y = in.y + n0 * in.y_step;
      finish.blocks = blocks / joint;
      for (int64_t g = 0; g < groups; g++) {
        scale_rows<HALF>(view, first, fixed ? 1 : blocks, g, in.x, in.x_stride, x_step, in.coef, in.coef_stride, shift);
        const int64_t from = g * view.group / kLanes;
        const int64_t to = g + 1 == groups ? lane_groups : (g + 1) * view.group / kLanes;
        lut(codes, in.coef, in.coef_stride, from, to, later, finish);
      }
    }
  }

  // The words that hold packed positions [g * group, (g + 1) * group), and the packed position at
  // which the first one begins.
  struct GroupWords {
    int64_t first, words, start;
  };
  static GroupWords group_words(const GridView& view, int64_t g) {
    const CodeUnit unit(view.bits);
    const int64_t begin = g * view.group >> unit.shift;
    const int64_t end = ((g + 1) * view.group + (int64_t{1} << unit.shift) - 1) >> unit.shift;
    const int64_t first = begin * unit.words, up = end * unit.words;
    return {first, (up < view.words ? up : view.words) - first, begin << unit.shift};
  }

  // Compute the coefficients of every group: x, with zeros for codes of neighbouring groups. After
  // them comes each group's sum of x.
  static void group_rows(const GridView& view, const float* x, int64_t x_stride, float* coef, int64_t coef_stride) {
    const int64_t groups = view.P / view.group, room = group_slots(view);
    for (int64_t g = 0; g < groups; g++) {
      const GroupWords words = group_words(view, g);
      const int64_t skip = g * view.group - words.start;
      const int64_t end = round_up(packed_slots(view.bits, words.first + words.words) - words.start, kLanes);
      F total[R];
      repeat<R>([&](auto r) TERSEKV_INLINE {
        float* c = coef + r * coef_stride + g * room;
        const float* source = x + r * x_stride + g * view.group;
        for (int64_t p = 0; p < skip; p++) c[p] = 0.0f;
        for (int64_t p = 0; p < view.group; p++) c[skip + p] = source[p];
        for (int64_t p = skip + view.group; p < end; p++) c[p] = 0.0f;
        total[r] = S::zero();
        for (int64_t p = 0; p < end; p += kLanes) {
          const F part = S::load(c + p);
          total[r] = S::add(total[r], part);
          S::store_coefs(c, p, part);  // in place: never beyond the elements that were read
        }
        coef[r * coef_stride + groups * room + g] = S::hsum(total[r]);
      });
    }
  }

  static void lane_scaled(const GridView& view, const Product& in) {
    const Lut<S, R> lut(view);
    const int64_t groups = view.P / view.group, room = group_slots(view), lane_groups = ceil_div(view.L, kLanes);
    Prefetch later(view, in);
    Finish<S> finish = {};
    finish.y_stride = in.y_stride;
    finish.total_stride = in.coef_stride;
    finish.lanes = view.L;
    finish.half = view.half;
    finish.unit = view.unit;
    finish.middle = view.middle;
    finish.y = in.y;
    if (in.y_step) {
      finish.blocks = in.blocks;
      finish.code_step = view.stride_n;
      finish.y_step = in.y_step;
      finish.scale_step = view.scale.stride_n;
      finish.offset_step = view.offset.stride_n;
    }
    for (int64_t n = 0; n < in.blocks; n += finish.blocks) {
      const Block block = block_after(view, in.first, n);
      group_rows(view, in.x + n * view.P, in.x_stride, in.coef, in.coef_stride);
      for (int64_t g = 0; g < groups; g++) {
        const GroupWords words = group_words(view, g);
        finish.scale = block.scale + g * view.L;
        finish.offset = block.offset ? block.offset + g * view.L : nullptr;
        finish.total = in.coef + groups * room + g;
        lut({block.codes + words.first * kLanes, view.words * kLanes, words.words, 1, 0}, in.coef + g * room,
            in.coef_stride, 0, lane_groups, later, finish);
      }
    }
  }
};

// Return the product function for one to MOST rows.
template <class S, int MOST>
GridFn product_of(const GridView& view, int rows) {
  GridFn found = nullptr;
  with_rows<MOST>(rows, [&](auto count) {
    using P = GridProduct<S, count>;
    found = view.lane_scaled          ? P::lane_scaled
            : view.half == Float::f16 ? P::template packed_scaled<Float::f16>
                                      : P::template packed_scaled<Float::bf16>;
  });
  return found;
}

}  // namespace
}  // namespace tersekv
