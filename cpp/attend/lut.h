// The micro-kernel of packed codes: acc[r][lane] += coef[r][p] * table[code[p][lane]]. A wrapper S with kCodes = 1
// multiplies in float32; with kCodes = 2 a look-up yields the bfloat16 values of codes p and p + 1, which lie in the
// two halves of a lane's word, and a dot product adds both. Compiled per bit width, number of query rows and number of
// lane groups, and for nothing else: compiling it takes most of the build.
#pragma once

#include "later.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Words that meet the same sums: `count` runs of `words` words, `step` apart; lane groups lie `group_stride` apart.
struct Codes {
  const int32_t* data;
  int64_t group_stride, words, count, step;
};

template <class S, int BITS, int R, int NG>
struct LutSums {
  using F = typename S::F;
  static constexpr int kDirect = direct_codes(BITS);
  static constexpr int kParts = S::split(R * NG) ? 2 : 1;
  // A word's codes are unrolled up to eight at a time (ten of 3 bits), then the word is shifted.
  static constexpr int kUnrolled = 2 * kDirect % 8 ? 2 * kDirect : 8;
  F sum[kParts][NG][R];

  // Coefficients of all runs lie one after the other, packed_slots(words) each.
  [[gnu::always_inline]] inline LutSums(const typename S::template Table<BITS>& table, Codes codes, const float* coefs,
                                        int64_t coef_stride, Later& later) {
    using Words = typename S::Words;
    const auto* coef = reinterpret_cast<const typename S::Coef*>(coefs);
    coef_stride *= sizeof(float) / sizeof(*coef);
    repeat<kParts>([&](auto part) TERSEKV_INLINE {
      repeat<NG>([&](auto g)
                     TERSEKV_INLINE { repeat<R>([&](auto r) TERSEKV_INLINE { sum[part][g][r] = S::zero(); }); });
    });
    auto add = [&](auto part, const Words(&index)[NG], const auto* c) TERSEKV_INLINE {
      decltype(table.at(index[0])) value[NG];
      repeat<NG>([&](auto g) TERSEKV_INLINE { value[g] = table.at(index[g]); });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const auto factor = S::factor(c + r * coef_stride);
        repeat<NG>([&](auto g) TERSEKV_INLINE {
          F& s = sum[part % kParts][g][r];
          s = S::dot(factor, value[g], s);
        });
      });
    };
    // The codes of the words at `at`; of 3 bits, each word's bits 15 and 31 move into `spare`.
    Words spare[NG];
    auto add_word = [&](int64_t at) TERSEKV_INLINE {
      Words w[NG];
      repeat<NG>([&](auto g)
                     TERSEKV_INLINE { w[g] = S::load_words(codes.data + g * codes.group_stride + at * kLanes); });
      later.fetch_for(NG);
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

// What happens to the sums of R rows, `stride` apart. scale null: y += sum + shift[r]. Otherwise each lane has a scale
// and maybe an offset: y += sum * (unit * scale) + total[r] * (middle * scale + offset).
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
};

// Sums over `codes` for lane groups [from, to), and what `finish` does with them.
template <class S, int BITS, int R>
[[gnu::noinline]] void lut_groups(const float* entries, Codes codes, const float* coef, int64_t coef_stride,
                                  int64_t from, int64_t to, Later& later, const Finish<S>& finish) {
  using F = typename S::F;
  const typename S::template Table<BITS> table(entries);
  codes.data += from * codes.group_stride;
  auto run = [&](auto count) TERSEKV_INLINE {
    constexpr int NG = count;
    LutSums<S, BITS, R, NG> acc(table, codes, coef, coef_stride, later);
    float* y = finish.y + from * kLanes;
    if (finish.scale) {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        const int64_t lane = (from + g) * kLanes, left = finish.lanes - lane;
        const F s = load_half_n<S>(finish.half, finish.scale + lane, left);
        const F offset = finish.offset ? load_half_n<S>(finish.half, finish.offset + lane, left) : S::zero();
        const F o = S::fma(s, S::set1(finish.middle), offset), by = S::mul(s, S::set1(finish.unit));
        repeat<R>([&](auto r) TERSEKV_INLINE {
          float* out = y + r * finish.y_stride + g * kLanes;
          const F total = S::set1(finish.total[r * finish.total_stride]);
          S::store(out, S::fma(acc.sum[0][g][r], by, S::fma(total, o, S::load(out))));
        });
      });
    } else {
      repeat<R>([&](auto r) TERSEKV_INLINE {
        repeat<NG>([&](auto g) TERSEKV_INLINE {
          float* out = y + r * finish.y_stride + g * kLanes;
          S::store(out, S::add(S::load(out), S::add(acc.sum[0][g][r], finish.shift[r])));
        });
      });
    }
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

template <class S>
using LutFn = decltype(&lut_groups<S, 1, 1>);

template <class S, int R>
LutFn<S> lut_of(int bits) {
  constexpr LutFn<S> all[] = {lut_groups<S, 1, R>, lut_groups<S, 2, R>, lut_groups<S, 3, R>, lut_groups<S, 4, R>};
  return all[bits - 1];
}

}  // namespace
}  // namespace tersekv
