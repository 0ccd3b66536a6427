// The search for trellis codes, compiled once per instruction set, and the operations that differ
// between them.
#include "trellis_search.h"

#include "build.h"

namespace tersekv {
namespace {

#if TERSEKV_avx512
struct Search : Avx512 {
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static uint32_t less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  template <int N>
  static F down(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    return _mm512_castsi512_ps(_mm512_alignr_epi32(bits, bits, N));
  }
  template <int K, int Z>
  static F from(F best) {
    static constexpr Origin<K, Z> origin;
    return _mm512_permutexvar_ps(_mm512_load_si512(origin.lane), best);
  }
};
#elif TERSEKV_avx2
struct Search : Avx2 {
  static F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static uint32_t less(F a, F b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
    return static_cast<uint32_t>(low | high << 8);
  }
  template <int N>
  static F down(F x) {
    if constexpr (N == 8) return {x.hi, x.lo};
    if constexpr (N < 4) {
      // only the first N lanes are used
      const __m256i lane = _mm256_setr_epi32(N, N + 1, N + 2, N + 3, N + 4, N + 5, 6, 7);
      return {_mm256_permutevar8x32_ps(x.lo, lane), x.hi};
    }
    return {_mm256_permute2f128_ps(x.lo, x.hi, 0x21), _mm256_permute2f128_ps(x.hi, x.lo, 0x21)};
  }
  template <int K, int Z>
  static F from(F best) {
    static constexpr Origin<K, Z> origin;
    // Eight neighbours come from the same half.
    const __m256 low = origin.lane[0] < 8 ? best.lo : best.hi, high = origin.lane[8] < 8 ? best.lo : best.hi;
    const auto* index = reinterpret_cast<const __m256i*>(origin.lane);
    return {_mm256_permutevar8x32_ps(low, _mm256_load_si256(index)),
            _mm256_permutevar8x32_ps(high, _mm256_load_si256(index + 1))};
  }
};
#else
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
#endif

}  // namespace

void TERSEKV_BUILD(encode_trellis)(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  encode_vectors<Search>(call, row, first, last);
}

}  // namespace tersekv
