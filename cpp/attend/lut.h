// The micro-kernel of packed codes: acc[r][lane] += coef[r][p] * table[code[p][lane]]. A wrapper S
// with kCodes = 1 multiplies in float32. With kCodes = 2 each look-up returns the bfloat16 values
// of codes p and p + 1 in the two halves of a lane's word, and a dot product adds both. The one in
// integers, four codes at a time, is in lut_vbmi.h. Both are compiled per bit width, number of query
// rows and number of lane groups only, because their compilation dominates the build time.
#pragma once

#include <new>

#include "prefetch.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Words that are added to the same sums: `count` runs of `words` words, `step` apart. Lane groups
// are `group_stride` apart.
struct Codes {
  const int32_t* data;
  int64_t group_stride, words, count, step;
};

// The coefficients of R rows, as S multiplies with them.
template <class S, int R>
struct Coefs {
  const typename S::Coef* data;
  int64_t stride;

  // `values`: they are weights of tokens.
  Coefs(float* rows, int64_t row_stride, int64_t /*slots*/, bool /*values*/)
      : data(reinterpret_cast<const typename S::Coef*>(rows)),
        stride(row_stride * static_cast<int64_t>(sizeof(float) / sizeof(*data))) {}
};

template <class S, int BITS, int R, int NG>
struct LutSums {
  using F = typename S::F;
  static constexpr int kDirect = direct_codes(BITS);
  static constexpr int kParts = S::split(R * NG) ? 2 : 1;
  // A word's codes are unrolled up to eight at a time (ten for 3 bits), then the word is shifted.
  static constexpr int kUnrolled = 2 * kDirect % 8 ? 2 * kDirect : 8;
  F sum[kParts][NG][R];

  // The coefficients of all runs are consecutive, packed_slots(words) each.
  [[gnu::always_inline]] inline LutSums(const typename S::template Table<BITS>& table, Codes codes,
                                        const Coefs<S, R>& coefs, Prefetch& later) {
    using Words = typename S::Words;
    const auto* coef = coefs.data;
    repeat<kParts>([&](auto part) TERSEKV_INLINE {
      repeat<NG>([&](auto g)
                     TERSEKV_INLINE { repeat<R>([&](auto r) TERSEKV_INLINE { sum[part][g][r] = S::zero(); }); });
    });
    auto add = [&](auto part, const Words(&index)[NG], const auto* c) TERSEKV_INLINE {
      decltype(table.at(index[0])) value[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE { value[g] = table.at(index[g]); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const auto factor = S::factor(c + r * coefs.stride);
        repeat<NG>([&](auto g) TERSEKV_INLINE {
          F& s = sum[part % kParts][g][r];
          s = S::dot(factor, value[g], s);
        });
      });
    };
    // Add the codes of the word at `at`; with 3 bits, bits 15 and 31 of each word are moved into
    // `spare`.
    Words spare[NG];
    auto add_word = [&](int64_t at) TERSEKV_INLINE {
      Words w[NG];
      repeat<NG>([&](auto g)
                     TERSEKV_INLINE { w[g] = S::load_words(codes.data + g * codes.group_stride + at * kLanes); });
      if constexpr (BITS == 3) repeat<NG>([&](auto g) TERSEKV_INLINE { spare[g] = S::spare(spare[g], w[g]); });
      const auto* end = coef + 2 * kDirect;
      while (true) {
        repeat<kUnrolled / S::kCodes>([&](auto i) TERSEKV_INLINE {
          constexpr int p = i * S::kCodes, kShift = p % 2 * 16 + p / 2 * BITS;
          Words index[NG];
          repeat<NG>([&](auto g) TERSEKV_INLINE { index[g] = S::template shr<kShift>(w[g]); });
          add(Index<i % 2>{}, index, coef + p);
        });
        coef += kUnrolled;
        if (kUnrolled == 2 * kDirect || coef == end) break;
        repeat<NG>([&](auto g) TERSEKV_INLINE { w[g] = S::template shr<kUnrolled / 2 * BITS>(w[g]); });
      }
    };

    for (; codes.count > 0; codes.count--, codes.data += codes.step) {
      later.fetch_for(NG * codes.words);
      int64_t at = 0;
      if constexpr (BITS == 3) {
        while (at + 3 <= codes.words) {
          repeat<NG>([&](auto g) TERSEKV_INLINE { spare[g] = S::no_words(); });
          for (const int64_t end = at + 3; at < end; at++) add_word(at);
          // Bits 15 (and 31) of the three words are the sixteenth code of each parity.
          repeat<2 / S::kCodes>([&](auto j) TERSEKV_INLINE {
            Words index[NG];
            repeat<NG>([&](auto g) TERSEKV_INLINE { index[g] = S::template shr<13 + 16 * j>(spare[g]); });
            add(j, index, coef + j);
          });
          coef += 2;
        }
      }
      for (; at < codes.words; at++) add_word(at);
    }
    if constexpr (kParts == 2) {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        repeat<R>([&](auto r) TERSEKV_INLINE { sum[0][g][r] = S::add(sum[0][g][r], sum[1][g][r]); });
      });
    }
  }
};

// Add the sums of R rows, `stride` apart, to y. If scale is null: y += sum + shift[r]. Otherwise
// each lane has a scale and maybe an offset: y += sum * (unit * scale) + total[r] * (middle * scale
// + offset).
template <class S>
struct Finish {
  float* y;
  int64_t y_stride;
  const typename S::F* shift;
  const uint16_t *scale, *offset;
  const float* total;
  int64_t total_stride, lanes;
  Float half;
  float unit, middle;
  // Number of blocks, and the steps from one block to the next; coef_step counts coefficients.
  int64_t blocks = 1, code_step = 0, y_step = 0, coef_step = 0, shift_step = 0, scale_step = 0, offset_step = 0;
};

// Add sums of lane group `group` of block n.
template <class S, int R>
[[gnu::always_inline]] inline void finish_group(const Finish<S>& finish, int64_t n, int64_t group,
                                                const typename S::F (&sum)[R]) {
  using F = typename S::F;
  float* y = finish.y + n * finish.y_step + group * kLanes;
  if (finish.scale) {
    const int64_t lane = group * kLanes, left = finish.lanes - lane;
    const F s = load_half_n<S>(finish.half, finish.scale + n * finish.scale_step + lane, left);
    const F added =
        finish.offset ? load_half_n<S>(finish.half, finish.offset + n * finish.offset_step + lane, left) : S::zero();
    const F o = S::fma(s, S::set1(finish.middle), added), by = S::mul(s, S::set1(finish.unit));
    repeat<R>([&](auto r) TERSEKV_INLINE {
      float* out = y + r * finish.y_stride;
      const F total = S::set1(finish.total[r * finish.total_stride]);
      S::store(out, S::fma(sum[r], by, S::fma(total, o, S::load(out))));
    });
    return;
  }
  const F* shift = finish.shift + n * finish.shift_step;
  repeat<R>([&](auto r) TERSEKV_INLINE {
    float* out = y + r * finish.y_stride;
    S::store(out, S::add(S::load(out), S::add(sum[r], shift[r])));
  });
}

// Compute sums over `codes` for lane groups [from, to), and add them to y as `finish` says. The coefficients may be
// changed.
template <class S, int BITS, int R>
struct LutGroups {
  [[gnu::noinline]] static void add(const void* made, Codes codes, float* coef, int64_t coef_stride, int64_t from,
                                    int64_t to, Prefetch& later, const Finish<S>& finish) {
    const auto table = *static_cast<const typename S::template Table<BITS>*>(made);
    const int64_t runs = codes.count * (finish.coef_step ? finish.blocks : 1);
    Coefs<S, R> coefs(coef, coef_stride, runs * packed_slots(BITS, codes.words), !finish.y_step);
    int64_t n = 0, at = from;
    auto run = [&](auto count) TERSEKV_INLINE {
      constexpr int NG = count;
      Codes here = codes;
      here.data += at * codes.group_stride;
      const LutSums<S, BITS, R, NG> acc(table, here, coefs, later);
      repeat<NG>([&](auto g) TERSEKV_INLINE { finish_group<S, R>(finish, n, at + g, acc.sum[0][g]); });
      at += NG;
    };
    for (; n < finish.blocks; n++) {
      for (at = from; at < to;) {
        if constexpr (S::max_groups(R) >= 4) {
          if (to - at >= 4) {
            run(Index<4>{});
            continue;
          }
        }
        if constexpr (S::max_groups(R) >= 2) {
          if (to - at >= 2) {
            run(Index<2>{});
            continue;
          }
        }
        run(Index<1>{});
      }
      codes.data += finish.code_step;
      coefs.data += finish.coef_step;
    }
  }
};

// LutGroups for one bit width and number of rows, with its table.
template <class S, int R>
class Lut {
 public:
  explicit Lut(const GridView& view) {
    if (view.bits == 1) make<1>(view);
    if (view.bits == 2) make<2>(view);
    if (view.bits == 3) make<3>(view);
    if (view.bits == 4) make<4>(view);
  }

  void operator()(const Codes& codes, float* coef, int64_t coef_stride, int64_t from, int64_t to, Prefetch& later,
                  const Finish<S>& finish) const {
    run_(table_, codes, coef, coef_stride, from, to, later, finish);
  }

 private:
  template <int BITS>
  void make(const GridView& view) {
    using Table = typename S::template Table<BITS>;
    static_assert(sizeof(Table) <= sizeof(table_));
    new (table_) Table(view.entries);
    run_ = LutGroups<S, BITS, R>::add;
  }

  alignas(64) char table_[64];
  decltype(&LutGroups<S, 1, R>::add) run_;
};

}  // namespace
}  // namespace tersekv
