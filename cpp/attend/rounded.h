// Tables whose entries bfloat16 holds, near to tables that it does not.
#pragma once

namespace tersekv {

constexpr int kRoundedEntries = 16;

// table[i] ≈ unit · entry[i] + middle.
struct Rounded {
  float entry[kRoundedEntries];
  float unit, middle;
};

// The nearest found to `size` entries (at most 16); exact, with unit 1, where entries less the middle of the table (of
// a table that is `centred`), or entries as they are, need no rounding. Rounding errs the same way for every token,
// which no sum averages out: that is why the nearest is looked for, once per table and thread.
const Rounded& rounded_table(const float* table, int size, bool centred);

}  // namespace tersekv
