// Splits a call into tasks over heads, rows and tokens, runs them and merges.
#pragma once

#include "contract.h"

namespace tersekv {

void attend(Call call, int threads);
void merge_segments(const Merge& call);

}  // namespace tersekv
