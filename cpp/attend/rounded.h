// Tables with bfloat16 entries that approximate float32 tables.
#pragma once

namespace tersekv {

constexpr int kRoundedEntries = 16;

// table[i] ≈ unit · entry[i] + middle.
struct Rounded {
  float entry[kRoundedEntries];
  float unit, middle;
};

// Return the nearest table found to `size` entries (at most 16). It is exact, with unit 1, if the
// entries need no rounding: minus the middle of the table (tried first if `centred`), or as they
// are. Rounding errors are equal for every token and do not average out in a sum. The nearest table
// is therefore searched, once per table and thread.
const Rounded& rounded_table(const float* table, int size, bool centred);

}  // namespace tersekv
