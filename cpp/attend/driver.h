// Splits calls into tasks over heads, rows and tokens, runs them and merges.
#pragma once

#include <vector>

#include "contract.h"

namespace tersekv {

// Calls of one query over disjoint tokens, with the same B, H, R and Dv: out [B, H, R, Dv] and lse [B, H, R] over all.
void attend(std::vector<Call>& calls, int threads, float* out, float* lse);
void merge_segments(const Merge& call);

}  // namespace tersekv
