// Packed pages of a layer as the extension holds them between calls.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "driver.h"
#include "operands.h"

namespace tersekv {

// A rotated mean that pages of marked tokens share.
struct MarkedMean {
  View view;                    // at all positions, in order
  std::vector<Marks> sets;      // for each mask, the tokens whose bits are 0, and those whose bits are 1
  std::vector<int64_t> tokens;  // of each set
};

// Factors [1 or B, H, D], see `score_bias`; null: none.
struct Correction {
  const float* factors = nullptr;
  int64_t stride_b = 0, stride_h = 0;
};

// Pages of one layer that are read together: views of keys and values, and the linear maps of both
// sides.
struct NativePages {
  Owner owner;
  std::vector<nb::object> keys, values;
  std::vector<int64_t> first;  // position of each page's first token, or of its first mark
  std::vector<Marks> marks;    // of each page
  std::vector<MarkedMean> means;
  std::vector<std::pair<int, int>> shared;  // of each page: number of its mean and of its mask's sets; -1: none
  std::vector<Call> calls;                  // with views, tokens and units only
  HeadMatrix query;                         // the first `mapped` channels of queries are multiplied with its rows
  int64_t mapped = 0;
  bool keeps_query = false;  // the query itself is appended to the mapped query
  OutputMap output;
  std::vector<Correction> corrections;  // of each page
  bool corrected = false;               // some page has a correction
  // Query rows from which packed tokens are decoded in tiles; none if keys in tiles cannot be mapped back to the
  // model's channels.
  int64_t tile_rows = std::numeric_limits<int64_t>::max();
  int64_t B = 1, H = 0;

  void check_unmoved() const {
    owner.check_unmoved();
    for (const auto* side : {&keys, &values})
      for (const nb::object& view : *side) nb::cast<const NativeView&>(view).check_unmoved();
  }
};

}  // namespace tersekv
