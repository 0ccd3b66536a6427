#include "simd_avx2.h"
#include "trellis_search.h"

namespace tersekv {
namespace {

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
      const __m256i lane = _mm256_setr_epi32(N, N + 1, N + 2, N + 3, N + 4, N + 5, 6, 7);  // the first eight N are read
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

}  // namespace

void encode_trellis_avx2(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  encode_vectors<Search>(call, row, first, last);
}

}  // namespace tersekv
