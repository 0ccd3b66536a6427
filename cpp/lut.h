// The micro-kernel of packed codes, acc[r][lane] += coef[r][p] * table[code[p][lane]], and its use on one block:
// y[r][lane] += sum over p of x[r][p] * x̂[p][lane], with scales and offsets folded into coefficients or sums.
#pragma once

#include "contract.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

template <class S, int BITS, int R, int NG>
struct LutSums {
  using F = typename S::F;
  static constexpr int kDirect = direct_codes(BITS);
  static constexpr int kParts = S::split(R * NG) ? 2 : 1;
  F sum[kParts][NG][R];

  [[gnu::always_inline]] inline LutSums(const typename S::template Table<BITS>& table, const int32_t* codes,
                                        int64_t group_stride, int64_t words, const float* coef, int64_t coef_stride) {
    using Words = typename S::Words;
    repeat<kParts>([&](auto part) TERSEKV_INLINE {
      repeat<NG>([&](auto g)
                     TERSEKV_INLINE { repeat<R>([&](auto r) TERSEKV_INLINE { sum[part][g][r] = S::zero(); }); });
    });
    auto add = [&](auto part, const Words(&index)[NG], const float* c) TERSEKV_INLINE {
      F value[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE { value[g] = table.at(index[g]); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const F factor = S::set1(c[r * coef_stride]);
        repeat<NG>([&](auto g) TERSEKV_INLINE {
          F& s = sum[part % kParts][g][r];
          s = S::fma(factor, value[g], s);
        });
      });
    };
    auto load = [&](Words(&w)[NG], int64_t at) TERSEKV_INLINE {
      repeat<NG>([&](auto g) TERSEKV_INLINE { w[g] = S::load_words(codes + g * group_stride + at * kLanes); });
    };
    auto add_direct = [&](const Words(&w)[NG]) TERSEKV_INLINE {
      repeat<2 * kDirect>([&](auto p) TERSEKV_INLINE {
        constexpr int kShift = p % 2 * 16 + p / 2 * BITS;
        Words index[NG];
        repeat<NG>([&](auto g) TERSEKV_INLINE { index[g] = S::template shr<kShift>(w[g]); });
        add(Index<p % 2>{}, index, coef + p);
      });
      coef += 2 * kDirect;
    };

    int64_t at = 0;
    if constexpr (BITS == 3) {
      for (; at + 3 <= words; at += 3) {
        Words w[3][NG];
        repeat<3>([&](auto k) TERSEKV_INLINE {
          load(w[k], at + k);
          add_direct(w[k]);
        });
        // The sixteenth code of each parity lies in bit 15 (or 31) of the three words.
        repeat<2>([&](auto j) TERSEKV_INLINE {
          Words index[NG];
          repeat<NG>([&](auto g) TERSEKV_INLINE {
            index[g] = S::pick(S::template shr<15 + 16 * j>(w[0][g]), S::template shr<14 + 16 * j>(w[1][g]),
                               S::template shr<13 + 16 * j>(w[2][g]));
          });
          add(j, index, coef + j);
        });
        coef += 2;
      }
    }
    for (; at < words; at++) {
      Words w[NG];
      load(w, at);
      add_direct(w);
    }
    if constexpr (kParts == 2) {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        repeat<R>([&](auto r) TERSEKV_INLINE { sum[0][g][r] = S::add(sum[0][g][r], sum[1][g][r]); });
      });
    }
  }
};

template <class S, int BITS, int R>
struct BlockProduct {
  using F = typename S::F;
  using Table = typename S::template Table<BITS>;
  static constexpr int64_t kUnitWords = BITS == 3 ? 3 : 1;
  static constexpr int64_t kUnitCodes = packed_slots(BITS, kUnitWords);

  // Sums over words [first, last) for lane groups [from, to), each handed to finish(group, sums of R rows).
  template <class Finish>
  [[gnu::always_inline]] static inline void sums(const GridView& view, const Table& table, const int32_t* codes,
                                                 int64_t first, int64_t last, const float* coef, int64_t coef_stride,
                                                 int64_t from, int64_t to, Finish&& finish) {
    const int64_t stride = view.words * kLanes;
    auto run = [&](auto count) TERSEKV_INLINE {
      constexpr int NG = count;
      LutSums<S, BITS, R, NG> acc(table, codes + from * stride + first * kLanes, stride, last - first, coef,
                                  coef_stride);
      repeat<NG>([&](auto g) TERSEKV_INLINE { finish(from + g, acc.sum[0][g]); });
      from += NG;
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

  template <Float HALF>
  static void packed_scaled(const GridView& view, const Block& block, const float* x, int64_t x_stride, float* y,
                            int64_t y_stride, float* coef, int64_t coef_stride) {
    const Table table(view.table);
    const int64_t groups = ceil_div(view.L, view.group), slots = packed_slots(BITS, view.words);
    const int64_t lane_groups = ceil_div(view.L, kLanes), whole = view.P / kLanes * kLanes;
    for (int64_t g = 0; g < groups; g++) {
      const uint16_t* scale = block.scale + g * view.P;
      const uint16_t* offset = block.offset ? block.offset + g * view.P : nullptr;
      F shift[R];
      repeat<R>([&](auto r) TERSEKV_INLINE { shift[r] = S::zero(); });
      for (int64_t p = 0; p < whole; p += kLanes) {
        const F s = S::template load_as<HALF>(scale + p);
        F xs[R];
        repeat<R>([&](auto r) TERSEKV_INLINE {
          xs[r] = S::load(x + r * x_stride + p);
          S::store(coef + r * coef_stride + p, S::mul(xs[r], s));
        });
        if (offset) {
          const F o = S::template load_as<HALF>(offset + p);
          repeat<R>([&](auto r) TERSEKV_INLINE { shift[r] = S::fma(xs[r], o, shift[r]); });
        }
      }
      if (whole < view.P) {
        const int64_t n = view.P - whole;
        const F s = S::template load_as_n<HALF>(scale + whole, n);
        const F o = offset ? S::template load_as_n<HALF>(offset + whole, n) : S::zero();
        repeat<R>([&](auto r) TERSEKV_INLINE {
          const F xs = S::template load_as_n<Float::f32>(x + r * x_stride + whole, n);
          S::store(coef + r * coef_stride + whole, S::mul(xs, s));
          shift[r] = S::fma(xs, o, shift[r]);
        });
      }
      // Slots after the last code hold code 0, which the table need not map to zero.
      for (int64_t p = round_up(view.P, kLanes); p < slots; p += kLanes)
        repeat<R>([&](auto r) TERSEKV_INLINE { S::store(coef + r * coef_stride + p, S::zero()); });
      if (offset) repeat<R>([&](auto r) TERSEKV_INLINE { shift[r] = S::set1(S::hsum(shift[r])); });
      const int64_t from = g * view.group / kLanes;
      const int64_t to = g + 1 == groups ? lane_groups : (g + 1) * view.group / kLanes;
      sums(view, table, block.codes, 0, view.words, coef, coef_stride, from, to,
           [&](int64_t lane_group, const F(&sum)[R]) TERSEKV_INLINE {
             repeat<R>([&](auto r) TERSEKV_INLINE {
               float* out = y + r * y_stride + lane_group * kLanes;
               S::store(out, S::add(S::load(out), S::add(sum[r], shift[r])));
             });
           });
    }
  }

  template <Float HALF>
  static void lane_scaled(const GridView& view, const Block& block, const float* x, int64_t x_stride, float* y,
                          int64_t y_stride, float* coef, int64_t coef_stride) {
    const Table table(view.table);
    const int64_t groups = ceil_div(view.P, view.group), lane_groups = ceil_div(view.L, kLanes);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t p0 = g * view.group, p1 = p0 + view.group < view.P ? p0 + view.group : view.P;
      const int64_t first = p0 / kUnitCodes * kUnitWords;
      const int64_t up = ceil_div(p1, kUnitCodes) * kUnitWords, last = up < view.words ? up : view.words;
      const int64_t start = first / kUnitWords * kUnitCodes;
      const int64_t slots = packed_slots(BITS, last) - start;
      F total[R];
      repeat<R>([&](auto r) TERSEKV_INLINE {
        float* c = coef + r * coef_stride;
        const float* source = x + r * x_stride;
        // Codes of neighbouring groups in the same unit meet zeros.
        for (int64_t p = 0; p < p0 - start; p++) c[p] = 0.0f;
        for (int64_t p = p0; p < p1; p++) c[p - start] = source[p];
        const int64_t end = round_up(slots, kLanes);
        for (int64_t p = p1 - start; p < end; p++) c[p] = 0.0f;
        total[r] = S::zero();
        for (int64_t p = 0; p < end; p += kLanes) total[r] = S::add(total[r], S::load(c + p));
      });
      const uint16_t* scale = block.scale + g * view.L;
      const uint16_t* offset = block.offset ? block.offset + g * view.L : nullptr;
      if (offset) repeat<R>([&](auto r) TERSEKV_INLINE { total[r] = S::set1(S::hsum(total[r])); });
      sums(view, table, block.codes, first, last, coef, coef_stride, 0, lane_groups,
           [&](int64_t lane_group, const F(&sum)[R]) TERSEKV_INLINE {
             const int64_t lane = lane_group * kLanes, n = view.L - lane;
             const F s = load_lanes<HALF>(scale + lane, n);
             const F o = offset ? load_lanes<HALF>(offset + lane, n) : S::zero();
             repeat<R>([&](auto r) TERSEKV_INLINE {
               float* out = y + r * y_stride + lane;
               S::store(out, S::fma(sum[r], s, S::fma(total[r], o, S::load(out))));
             });
           });
    }
  }

  template <Float HALF>
  [[gnu::always_inline]] static inline F load_lanes(const uint16_t* p, int64_t n) {
    return n >= kLanes ? S::template load_as<HALF>(p) : S::template load_as_n<HALF>(p, n);
  }
};

template <class S, int BITS, int R>
BlockFn block_product(bool lane_scaled, Float half) {
  using P = BlockProduct<S, BITS, R>;
  if (half == Float::f16)
    return lane_scaled ? P::template lane_scaled<Float::f16> : P::template packed_scaled<Float::f16>;
  return lane_scaled ? P::template lane_scaled<Float::bf16> : P::template packed_scaled<Float::bf16>;
}

// x [rows, x_stride], y [rows, y_stride] (lanes padded to 16); coef: room for 4 rows of coef_stride.
template <class S>
BlockFn block_product(const GridView& view, int rows) {
  constexpr auto with_rows = []<int BITS>(int rows, bool lane_scaled, Float half) {
    switch (rows) {
      case 1:
        return block_product<S, BITS, 1>(lane_scaled, half);
      case 2:
        return block_product<S, BITS, 2>(lane_scaled, half);
      case 3:
        return block_product<S, BITS, 3>(lane_scaled, half);
      default:
        return block_product<S, BITS, 4>(lane_scaled, half);
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
