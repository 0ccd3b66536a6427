// Tables with bfloat16 entries that approximate float32 tables.
#pragma once

namespace tersekv {

constexpr int kRoundedEntries = 16;

// table[i] ≈ unit · entry[i] + middle.
struct Rounded {
  float entry[kRoundedEntries];
  float unit, middle;
};

// Return the nearest table found to `size` entries (at most 16). If the entries, or the entries
// minus the middle of the table, need no rounding, it is exact with unit 1. `centred`: try the
// latter first. Rounding errors are equal for every token and do not average out in a sum, so the
// nearest table is searched, once per table and thread.
const Rounded& rounded_table(const float* table, int size, bool centred);

}  // namespace tersekv
