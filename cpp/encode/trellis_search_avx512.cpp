#include "simd_avx512.h"
#include "trellis_search.h"

namespace tersekv {
namespace {

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

}  // namespace

void encode_trellis_avx512(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  encode_vectors<Search>(call, row, first, last);
}

}  // namespace tersekv
