// The micro-kernel of packed codes: acc[r][lane] += coef[r][p] * table[code[p][lane]]. A wrapper S with kCodes = 1
// multiplies in float32; with kCodes = 2 a look-up yields the bfloat16 values of codes p and p + 1, which lie in the
// two halves of a lane's word, and a dot product adds both.
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
    auto load = [&](Words(&w)[NG], int64_t at) TERSEKV_INLINE {
      repeat<NG>([&](auto g)
                     TERSEKV_INLINE { w[g] = S::load_words(codes.data + g * codes.group_stride + at * kLanes); });
      later.fetch_for(NG);
    };
    auto add_direct = [&](const Words(&w)[NG]) TERSEKV_INLINE {
      repeat<2 * kDirect / S::kCodes>([&](auto i) TERSEKV_INLINE {
        constexpr int p = i * S::kCodes, kShift = p % 2 * 16 + p / 2 * BITS;
        Words index[NG];
        repeat<NG>([&](auto g) TERSEKV_INLINE { index[g] = S::template shr<kShift>(w[g]); });
        add(Index<i % 2>{}, index, coef + p);
      });
      coef += 2 * kDirect;
    };

    for (; codes.count > 0; codes.count--, codes.data += codes.step) {
      int64_t at = 0;
      if constexpr (BITS == 3) {
        for (; at + 3 <= codes.words; at += 3) {
          Words w[3][NG];
          repeat<3>([&](auto k) TERSEKV_INLINE {
            load(w[k], at + k);
            add_direct(w[k]);
          });
          // The sixteenth code of each parity lies in bit 15 (or 31) of the three words.
          repeat<2 / S::kCodes>([&](auto j) TERSEKV_INLINE {
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
      for (; at < codes.words; at++) {
        Words w[NG];
        load(w, at);
        add_direct(w);
      }
    }
    if constexpr (kParts == 2) {
      repeat<NG>([&](auto g) TERSEKV_INLINE {
        repeat<R>([&](auto r) TERSEKV_INLINE { sum[0][g][r] = S::add(sum[0][g][r], sum[1][g][r]); });
      });
    }
  }
};

}  // namespace
}  // namespace tersekv
