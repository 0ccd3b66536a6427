// Products with a basis of 6-bit entries; the contract is that of kernels/basis.py.
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

// Head `head` of B·H; D is a multiple of 16.
void basis_product_baseline(const BasisProduct& call, int64_t head);
void basis_product_avx2(const BasisProduct& call, int64_t head);
void basis_product_avx512(const BasisProduct& call, int64_t head);

}  // namespace tersekv
