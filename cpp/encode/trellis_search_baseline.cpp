#include "simd_baseline.h"
#include "trellis_search.h"

namespace tersekv {
namespace {

struct Search : Baseline {
  static F min(F a, F b) { return a < b ? a : b; }
  static uint32_t less(F a, F b) {
    const I smaller = a < b;
    uint32_t out = 0;
    for (int i = 0; i < kLanes; i++) out |= (static_cast<uint32_t>(smaller[i]) & 1u) << i;
    return out;
  }
  template <int N>
  static F down(F x) {
    F out = x;
    for (int i = 0; i < kLanes; i++) out[i] = x[(i + N) % kLanes];
    return out;
  }
  template <int K, int Z>
  static F from(F best) {
    constexpr Origin<K, Z> origin;
    F out;
    for (int i = 0; i < kLanes; i++) out[i] = best[origin.lane[i]];
    return out;
  }
};

}  // namespace

void encode_trellis_baseline(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  encode_vectors<Search>(call, row, first, last);
}

}  // namespace tersekv
