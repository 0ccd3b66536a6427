// Blocks of one side of a packed segment times rows: y[r][lane] += sum over p of x[r][p] * x̂[p][lane], with scales and
// offsets folded into coefficients or sums.
#pragma once

#include "lut.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

inline Block block_after(const GridView& view, const Block& block, int64_t n) {
  return {block.codes + n * view.stride_n, block.scale + n * view.scale.stride_n,
          block.offset ? block.offset + n * view.offset.stride_n : nullptr};
}

template <class S, int BITS, int R>
struct GridProduct {
  using F = typename S::F;
  using Table = typename S::template Table<BITS>;
  static constexpr int64_t kUnitWords = BITS == 3 ? 3 : 1;
  static constexpr int64_t kUnitCodes = packed_slots(BITS, kUnitWords);

  // Sums over `codes` for lane groups [from, to), each handed to finish(group, sums of R rows).
  template <class Finish>
  [[gnu::always_inline]] static inline void sums(const Table& table, Codes codes, const float* coef,
                                                 int64_t coef_stride, int64_t from, int64_t to, Later& later,
                                                 Finish&& finish) {
    codes.data += from * codes.group_stride;
    auto run = [&](auto count) TERSEKV_INLINE {
      constexpr int NG = count;
      LutSums<S, BITS, R, NG> acc(table, codes, coef, coef_stride, later);
      repeat<NG>([&](auto g) TERSEKV_INLINE { finish(from + g, acc.sum[0][g]); });
      from += NG;
      codes.data += NG * codes.group_stride;
    };
    while (from < to) {
      if constexpr (S::max_groups(R) >= 4) {
        if (to - from >= 4) {
          run(Index<4>{});
          continue;
        }
      }
      if constexpr (S::max_groups(R) >= 2) {
        if (to - from >= 2) {
          run(Index<2>{});
          continue;
        }
      }
      run(Index<1>{});
    }
  }

  // Whether something is added to scale times entry.
  static bool shifts(const GridView& view, const Block& block) { return block.offset || view.middle != 0.0f; }

  // Coefficients of `blocks` blocks from `first` on, one per packed position: x times the scale. Adds x times the
  // offset to `shift`.
  template <Float HALF>
  [[gnu::always_inline]] static inline void scale_rows(const GridView& view, const Block& first, int64_t blocks,
                                                       int64_t g, const float* x, int64_t x_stride, float* coef,
                                                       int64_t coef_stride, F (&shift)[R]) {
    const auto run = [&](auto shifted) TERSEKV_INLINE {
      constexpr int kShifted = shifted;
      scale_blocks<HALF, kShifted>(view, first, blocks, g, x, x_stride, coef, coef_stride, shift);
    };
    if (first.offset) return run(Index<2>{});
    if (view.middle != 0.0f) return run(Index<1>{});
    run(Index<0>{});
  }

  // SHIFTED: 0: nothing is added to scale times entry, 1: the table's middle, 2: an offset, too.
  template <Float HALF, int SHIFTED>
  [[gnu::always_inline]] static inline void scale_blocks(const GridView& view, const Block& first, int64_t blocks,
                                                         int64_t g, const float* x, int64_t x_stride, float* coef,
                                                         int64_t coef_stride, F (&shift)[R]) {
    const F unit = S::set1(view.unit), middle = S::set1(view.middle);
    const int64_t P = view.P, slots = packed_slots(BITS, view.words);
    const uint16_t* scale = first.scale + g * P;
    const uint16_t* offset = SHIFTED == 2 ? first.offset + g * P : nullptr;
    const auto half = [](const uint16_t* from) TERSEKV_INLINE { return S::template load_as<HALF>(from); };
    const auto shift_by = [&](F s, const F(&xs)[R], int64_t p, auto load) TERSEKV_INLINE {
      if constexpr (SHIFTED == 0) return;
      F o;
      if constexpr (SHIFTED == 2)
        o = S::fma(s, middle, load(offset + p));
      else
        o = S::mul(s, middle);
      repeat<R>([&](auto r) TERSEKV_INLINE { shift[r] = S::fma(xs[r], o, shift[r]); });
    };
    const auto some_rows = [&](int64_t at, int64_t p, auto load, auto load_x) TERSEKV_INLINE {
      F xs[R];
      const F s = load(scale + p), by = S::mul(s, unit);
      repeat<R>([&](auto r) TERSEKV_INLINE {
        xs[r] = load_x(x + r * x_stride + p);
        S::store_coefs(coef + r * coef_stride, at + p, S::mul(xs[r], by));
      });
      shift_by(s, xs, p, load);
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
      for (; p + kLanes <= P; p += kLanes)
        some_rows(at, p, half, [](const float* from) TERSEKV_INLINE { return S::load(from); });
      if (p < P) {
        const int64_t left = P - p;
        some_rows(
            at, p, [&](const uint16_t* from) TERSEKV_INLINE { return S::template load_as_n<HALF>(from, left); },
            [&](const float* from) TERSEKV_INLINE { return S::template load_as_n<Float::f32>(from, left); });
        p += kLanes;
      }
      // Slots after the last code hold code 0, which the table need not map to zero.
      for (; p < slots; p += kLanes)
        repeat<R>([&](auto r) TERSEKV_INLINE { S::store_coefs(coef + r * coef_stride, at + p, S::zero()); });
      scale += view.scale.stride_n;
      if constexpr (SHIFTED == 2) offset += view.offset.stride_n;
      x += P;
    }
  }

  template <Float HALF>
  static void packed_scaled(const GridView& view, const Product& in) {
    const Table table(view.entries);
    const int64_t groups = view.L / view.group, lane_groups = ceil_div(view.L, kLanes);
    const int64_t joint = in.y_step ? 1 : in.blocks;
    // Keys whose blocks share their scales meet the same coefficients in every block.
    const bool fixed = in.y_step && groups == 1 && view.scale.stride_n == 0 && view.offset.stride_n == 0;
    F shift[R] = {};
    Later later(view, in);
    for (int64_t n0 = 0; n0 < in.blocks; n0 += joint) {
      const Block first = block_after(view, in.first, n0);
      for (int64_t g = 0; g < groups; g++) {
        if (n0 == 0 || !fixed) {
          repeat<R>([&](auto r) TERSEKV_INLINE { shift[r] = S::zero(); });
          scale_rows<HALF>(view, first, joint, g, in.x, in.x_stride, in.coef, in.coef_stride, shift);
          if (shifts(view, first)) S::spread(shift);
        }
        const int64_t from = g * view.group / kLanes;
        const int64_t to = g + 1 == groups ? lane_groups : (g + 1) * view.group / kLanes;
        sums(table, {first.codes, view.words * kLanes, view.words, joint, view.stride_n}, in.coef, in.coef_stride, from,
             to, later, [&](int64_t lane_group, const F(&sum)[R]) TERSEKV_INLINE {
               repeat<R>([&](auto r) TERSEKV_INLINE {
                 float* out = in.y + n0 * in.y_step + r * in.y_stride + lane_group * kLanes;
                 S::store(out, S::add(S::load(out), S::add(sum[r], shift[r])));
               });
             });
      }
    }
  }

  // The words that hold packed positions [g * group, (g + 1) * group), and the position that the first one starts at.
  struct Span {
    int64_t first, words, start;
  };
  static Span span_of(const GridView& view, int64_t g) {
    const int64_t first = g * view.group / kUnitCodes * kUnitWords;
    const int64_t up = ceil_div((g + 1) * view.group, kUnitCodes) * kUnitWords;
    return {first, (up < view.words ? up : view.words) - first, first / kUnitWords * kUnitCodes};
  }

  // Coefficients of every group, x with zeros for codes of neighbouring groups, and behind them each group's sum of x.
  static void group_rows(const GridView& view, const float* x, int64_t x_stride, float* coef, int64_t coef_stride) {
    const int64_t groups = view.P / view.group, room = group_slots(view);
    for (int64_t g = 0; g < groups; g++) {
      const Span span = span_of(view, g);
      const int64_t skip = g * view.group - span.start;
      const int64_t end = round_up(packed_slots(BITS, span.first + span.words) - span.start, kLanes);
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
          S::store_coefs(c, p, part);  // in place: never beyond what was read
        }
        coef[r * coef_stride + groups * room + g] = S::hsum(total[r]);
      });
    }
  }

  template <Float HALF>
  static void lane_scaled(const GridView& view, const Product& in) {
    const F unit = S::set1(view.unit), middle = S::set1(view.middle);
    const Table table(view.entries);
    const int64_t groups = view.P / view.group, room = group_slots(view), lane_groups = ceil_div(view.L, kLanes);
    Later later(view, in);
    for (int64_t n = 0; n < in.blocks; n++) {
      const Block block = block_after(view, in.first, n);
      if (n == 0 || !in.y_step)
        group_rows(view, in.x + (in.y_step ? 0 : n * view.P), in.x_stride, in.coef, in.coef_stride);
      for (int64_t g = 0; g < groups; g++) {
        const Span span = span_of(view, g);
        const uint16_t* scale = block.scale + g * view.L;
        const uint16_t* offset = block.offset ? block.offset + g * view.L : nullptr;
        const float* total = in.coef + groups * room + g;
        sums(table, {block.codes + span.first * kLanes, view.words * kLanes, span.words, 1, 0}, in.coef + g * room,
             in.coef_stride, 0, lane_groups, later, [&](int64_t lane_group, const F(&sum)[R]) TERSEKV_INLINE {
               const int64_t lane = lane_group * kLanes, left = view.L - lane;
               const F s = load_lanes<HALF>(scale + lane, left);
               const F o = S::fma(s, middle, offset ? load_lanes<HALF>(offset + lane, left) : S::zero());
               const F by = S::mul(s, unit);
               repeat<R>([&](auto r) TERSEKV_INLINE {
                 float* out = in.y + n * in.y_step + r * in.y_stride + lane;
                 S::store(out, S::fma(sum[r], by, S::fma(S::set1(total[r * in.coef_stride]), o, S::load(out))));
               });
             });
      }
    }
  }

  template <Float HALF>
  [[gnu::always_inline]] static inline F load_lanes(const uint16_t* p, int64_t n) {
    return n >= kLanes ? S::template load_as<HALF>(p) : S::template load_as_n<HALF>(p, n);
  }
};

template <class S, int BITS, int R>
GridFn product_of(bool lane_scaled, Float half) {
  using P = GridProduct<S, BITS, R>;
  if (half == Float::f16)
    return lane_scaled ? P::template lane_scaled<Float::f16> : P::template packed_scaled<Float::f16>;
  return lane_scaled ? P::template lane_scaled<Float::bf16> : P::template packed_scaled<Float::bf16>;
}

// For one to four rows.
template <class S>
GridFn product_of(const GridView& view, int rows) {
  constexpr auto with_rows = []<int BITS>(int rows, bool lane_scaled, Float half) {
    switch (rows) {
      case 1:
        return product_of<S, BITS, 1>(lane_scaled, half);
      case 2:
        return product_of<S, BITS, 2>(lane_scaled, half);
      case 3:
        return product_of<S, BITS, 3>(lane_scaled, half);
      default:
        return product_of<S, BITS, 4>(lane_scaled, half);
    }
  };
  switch (view.bits) {
    case 1:
      return with_rows.template operator()<1>(rows, view.lane_scaled, view.half);
    case 2:
      return with_rows.template operator()<2>(rows, view.lane_scaled, view.half);
    case 3:
      return with_rows.template operator()<3>(rows, view.lane_scaled, view.half);
    default:
      return with_rows.template operator()<4>(rows, view.lane_scaled, view.half);
  }
}

}  // namespace
}  // namespace tersekv
