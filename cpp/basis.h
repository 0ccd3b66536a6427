// Products with a basis of 6-bit entries; the contract is that of ops/basis.py.
#pragma once

#include <cstdint>

namespace tersekv {

// All contiguous.
struct BasisProduct {
  int64_t B, H, R, D;
  bool combine;           // sums of rows in place of products with each
  bool shared;            // codes and channels of one batch row serve all
  const float* x;         // [B, H, R, D]
  const uint8_t* codes;   // [1 or B, H, 3·D²/4]
  const float* channels;  // [1 or B, H, D]
  float* out;             // [B, H, R, D]
};

// D must be a multiple of 16.
void basis_product(const BasisProduct& call);

}  // namespace tersekv
