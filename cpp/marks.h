// Positions of a page's tokens as bits of a mask. Tokens are in order of position.
#pragma once

#include <cstdint>
#include <cstring>

namespace tersekv {

// The tokens of a head at positions whose bits are the head's value are numbered in order. Token t of the
// page is number skip + t. Bits count from the position of the first one.
struct Marks {
  const uint8_t* bits = nullptr;  // [1 or B, H, positions / 8], last axis contiguous; null: none
  int64_t stride_b = 0, stride_h = 0;
  int64_t positions = 0;
  const int64_t* numbers = nullptr;  // [1 or B, H, 2], value and skip of each head; null: `value` and 0
  int64_t numbers_b = 0;
  bool value = true;
};

constexpr int64_t kWordBits = 64;

namespace {  // internal to each build of the kernels

// The tokens of one head.
struct HeadMarks {
  const uint8_t* bits;
  int64_t positions;
  uint64_t flip;
  int64_t skip;

  // Return word i: bit k is 1 if there is a token at position 64·i + k.
  uint64_t word(int64_t i) const {
    const int64_t first = i * kWordBits, left = positions - first;
    uint64_t out = 0;
    std::memcpy(&out, bits + first / 8, left >= kWordBits ? 8 : left / 8);
    out ^= flip;
    return left >= kWordBits ? out : out & ((uint64_t{1} << left) - 1);
  }

  // Return the number of tokens at positions before `end`, a multiple of 64 or `positions`.
  int64_t count(int64_t end) const {
    int64_t out = 0;
    for (int64_t i = 0; i * kWordBits < end; i++) out += __builtin_popcountll(word(i));
    return out;
  }

  // Return the position of a token.
  int64_t position(int64_t number) const {
    int64_t out = 0;
    each(number, 1, [&](int64_t, int64_t position) { out = position; });
    return out;
  }

  // Call body(i, position) for tokens number first + i, 0 <= i < count, or as many as there are.
  template <class Body>
  void each(int64_t first, int64_t count, Body&& body) const {
    int64_t number = -first;
    for (int64_t i = 0; i * kWordBits < positions && number < count; i++) {
      uint64_t left = word(i);
      if (const int64_t n = __builtin_popcountll(left); number + n <= 0) {
        number += n;
        continue;
      }
      for (; left && number < count; left &= left - 1, number++)
        if (number >= 0) body(number, i * kWordBits + __builtin_ctzll(left));
    }
  }
};

inline HeadMarks marks_of(const Marks& marks, int64_t b, int64_t h) {
  const int64_t* own = marks.numbers ? marks.numbers + b * marks.numbers_b + 2 * h : nullptr;
  const bool value = own ? own[0] != 0 : marks.value;
  return {marks.bits + b * marks.stride_b + h * marks.stride_h, marks.positions, value ? 0 : ~uint64_t{0},
          own ? own[1] : 0};
}

}  // namespace
}  // namespace tersekv
