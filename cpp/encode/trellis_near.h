// Near entries of the search for trellis codes.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "encode_trellis.h"

namespace tersekv {

// Near entries and marks of one set of codebooks; see near_entries in kernels/trellis_search.py. They are made when
// they are needed, and kept.
class NearTables {
 public:
  explicit NearTables(const int16_t* scaled) : scaled_(scaled, scaled + kTrellisRates * kTrellisStates) {}
  bool of(const int16_t* scaled) const { return std::equal(scaled_.begin(), scaled_.end(), scaled); }

  // Return entries and marks of each bin of a component of `bits` bits before one of `next` bits, or null where all
  // entries may be taken. The caller holds `mutex`.
  const int16_t* get(int bits, int next);

  std::mutex mutex;

 private:
  struct alignas(64) Line {
    int16_t lane[32];
  };
  struct Table {
    bool made = false;
    std::vector<Line> lines;
  };
  int entry(int bits, int window) const { return scaled_[bits * kTrellisStates + kReversed[window]]; }
  bool has_equal(int bits, int next) const;
  void fill(int bits, int next, int bin, int group, int16_t* to) const;

  std::vector<int16_t> scaled_;
  Table tables_[kTrellisRates][kTrellisRates];
};

// Return the tables of codebooks scaled to int16, states in reverse. Calls mostly have one or two sets of them.
std::shared_ptr<NearTables> near_tables(const int16_t* scaled);

}  // namespace tersekv
