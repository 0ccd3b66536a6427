// Layout of codes of any width in words; equal to kernels/lanes.py.
#pragma once

#include "contract.h"

namespace tersekv {

namespace {  // internal to each build of the kernels

// Layout of codes in a half-word, see kernels/lanes.py: `direct` codes, then the unit's codes in
// the spare bits.
struct HalfWords {
  int bits, direct, spare_bits, unit_words, unit_codes;

  explicit HalfWords(int bits) : bits(bits), direct(16 / bits), spare_bits(16 - bits * direct) {
    int gcd = bits;
    while (16 % gcd || bits % gcd) gcd--;
    unit_words = spare_bits ? bits / gcd : 1;
    unit_codes = spare_bits ? 16 / gcd : direct;
  }

  // Return the number of 32-bit words per lane for `packed` codes.
  int64_t words(int64_t packed) const {
    const int64_t n = ceil_div(packed, 2), rest = ceil_div(n % unit_codes, direct);
    return n / unit_codes * unit_words + (rest < unit_words ? rest : unit_words);
  }
};

}  // namespace
}  // namespace tersekv
