// The search for trellis codes, compiled once per instruction set, and the operations on 32 costs of
// 16 bits that differ between them:
//
// - scaled(entries, factor): product over 2^15, rounded. difference(a, b): signed, saturating.
// - squared<s>(x): (2^s·x)² over 2^16. plus(a, b): unsigned, saturating. minus(a, b).
// - choose: the smaller of two costs, and the mark that goes with it, plus `bit` if the second is
//   smaller. choose_first: without marks so far. pick: without `bit`.
// - table<K, NEXT>(costs): costs of groups for look_up<K, NEXT>(table, marks), which returns the one of each mark.
// - down<n>(x): lanes from n on, in lane 0 and later. head<n>(x): lanes from n on at their largest.
// - from<K, z>(best): see Origin. least(x): over all lanes. equal(a, b): a bit per lane.
#include "build.h"
#include "trellis_vectors.h"

namespace tersekv {
namespace {

#if TERSEKV_avx512
struct Avx512Costs {
  using W = __m512i;
  static W load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, W x) { _mm512_storeu_si512(p, x); }
  static W set1(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
  static W min(W a, W b) { return _mm512_min_epu16(a, b); }
  static W plus(W a, W b) { return _mm512_adds_epu16(a, b); }
  static W minus(W a, W b) { return _mm512_sub_epi16(a, b); }
  static W scaled(W entries, W factor) { return _mm512_mulhrs_epi16(entries, factor); }
  static W difference(W a, W b) { return _mm512_subs_epi16(a, b); }
  template <int S>
  static W squared(W x) {
    if constexpr (S == 0) return _mm512_mulhi_epi16(x, x);
    x = _mm512_slli_epi16(_mm512_min_epu16(_mm512_abs_epi16(x), set1(0xffff >> S)), S);
    return _mm512_mulhi_epu16(x, x);
  }
  static void choose(W low, W high, W low_from, W high_from, int bit, W& least, W& from) {
    const __mmask32 upper = _mm512_cmplt_epu16_mask(high, low);
    least = min(low, high);
    from = _mm512_mask_add_epi16(low_from, upper, high_from, set1(bit));
  }
  static void choose_first(W low, W high, int bit, W& least, W& from) {
    least = min(low, high);
    from = _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(high, low), set1(bit));
  }
  static void pick(W low, W high, W low_from, W high_from, W& least, W& from) {
    least = min(low, high);
    from = _mm512_mask_mov_epi16(low_from, _mm512_cmplt_epu16_mask(high, low), high_from);
  }
  template <int K, int NEXT>
  static W table(W costs) {
    return costs;
  }
  template <int K, int NEXT>
  static W look_up(W table, W marks) {
    return _mm512_permutexvar_epi16(marks, table);  // reads the lowest 5 bits of a mark
  }
  template <int N>
  static W down(W x) {
    if constexpr (N == 1) return _mm512_srli_epi32(x, 16);  // only the first lane is used
    return _mm512_alignr_epi32(x, x, N / 2);
  }
  template <int N>
  static W head(W x) {
    constexpr auto kHead = static_cast<__mmask32>((uint64_t{1} << (N < kCosts ? N : kCosts)) - 1);
    return _mm512_mask_blend_epi16(kHead, set1(-1), x);
  }
  template <int K, int Z>
  static W from(W best) {
    static constexpr Origin<K, Z> origin;
    return _mm512_permutexvar_epi16(_mm512_load_si512(origin.lane), best);
  }
  static int least(W x) {
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return _mm_extract_epi16(_mm_minpos_epu16(quarter), 0);
  }
  static uint32_t equal(W a, W b) { return _mm512_cmpeq_epu16_mask(a, b); }
};
using Costs = Avx512Costs;
#elif TERSEKV_avx2
struct Avx2Costs {
  struct W {
    __m256i lo, hi;
  };
  static W load(const void* p) {
    const auto* at = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
  }
  static void store(void* p, W x) {
    auto* at = static_cast<__m256i*>(p);
    _mm256_storeu_si256(at, x.lo);
    _mm256_storeu_si256(at + 1, x.hi);
  }
  static W set1(int x) {
    const __m256i all = _mm256_set1_epi16(static_cast<int16_t>(x));
    return {all, all};
  }
  static W min(W a, W b) { return {_mm256_min_epu16(a.lo, b.lo), _mm256_min_epu16(a.hi, b.hi)}; }
  static W plus(W a, W b) { return {_mm256_adds_epu16(a.lo, b.lo), _mm256_adds_epu16(a.hi, b.hi)}; }
  static W minus(W a, W b) { return {_mm256_sub_epi16(a.lo, b.lo), _mm256_sub_epi16(a.hi, b.hi)}; }
  static W scaled(W a, W b) { return {_mm256_mulhrs_epi16(a.lo, b.lo), _mm256_mulhrs_epi16(a.hi, b.hi)}; }
  static W difference(W a, W b) { return {_mm256_subs_epi16(a.lo, b.lo), _mm256_subs_epi16(a.hi, b.hi)}; }
  template <int S>
  static __m256i squared_half(__m256i x) {
    if constexpr (S == 0) return _mm256_mulhi_epi16(x, x);
    const __m256i most = _mm256_set1_epi16(static_cast<int16_t>(0xffff >> S));
    x = _mm256_slli_epi16(_mm256_min_epu16(_mm256_abs_epi16(x), most), S);
    return _mm256_mulhi_epu16(x, x);
  }
  template <int S>
  static W squared(W x) {
    return {squared_half<S>(x.lo), squared_half<S>(x.hi)};
  }
  static void choose_half(__m256i low, __m256i high, __m256i low_from, __m256i high_from, __m256i bit, __m256i& least,
                          __m256i& from) {
    least = _mm256_min_epu16(low, high);
    from = _mm256_blendv_epi8(_mm256_or_si256(high_from, bit), low_from, _mm256_cmpeq_epi16(least, low));
  }
  static void choose(W low, W high, W low_from, W high_from, int bit, W& least, W& from) {
    const W all = set1(bit);
    choose_half(low.lo, high.lo, low_from.lo, high_from.lo, all.lo, least.lo, from.lo);
    choose_half(low.hi, high.hi, low_from.hi, high_from.hi, all.hi, least.hi, from.hi);
  }
  static void choose_first(W low, W high, int bit, W& least, W& from) {
    choose(low, high, set1(0), set1(0), bit, least, from);
  }
  static void pick(W low, W high, W low_from, W high_from, W& least, W& from) {
    choose(low, high, low_from, high_from, 0, least, from);
  }
  // From components of 3 bits to ones of 3, each quarter of the lanes comes from the eight groups whose lowest two bits
  // are its number. Else all lanes read the first eight or sixteen groups, or all.
  struct Costs32 {
    __m256i part[4];
  };
  template <int K, int NEXT>
  static Costs32 table(W costs) {
    if constexpr (K > 3)
      return {_mm256_permute2x128_si256(costs.lo, costs.lo, 0x00), _mm256_permute2x128_si256(costs.lo, costs.lo, 0x11)};
    if constexpr (NEXT > 3)
      return {_mm256_permute2x128_si256(costs.lo, costs.lo, 0x00), _mm256_permute2x128_si256(costs.lo, costs.lo, 0x11),
              _mm256_permute2x128_si256(costs.hi, costs.hi, 0x00), _mm256_permute2x128_si256(costs.hi, costs.hi, 0x11)};
    const __m256i pairs = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i lo = _mm256_shuffle_epi8(costs.lo, pairs), hi = _mm256_shuffle_epi8(costs.hi, pairs);
    return {_mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(lo, hi), order),
            _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi32(lo, hi), order)};
  }
  // The bytes of a group's cost are found from its number in a mark's lower byte.
  template <int K, int NEXT>
  static __m256i look_up_half(const Costs32& t, int first, __m256i marks) {
    constexpr bool kOwn = K == 3 && NEXT == 3;  // numbers are divided by four
    const __m256i lower = _mm256_setr_epi8(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14,  //
                                           0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
    const __m256i group = _mm256_shuffle_epi8(marks, lower);
    const __m256i twice = kOwn ? _mm256_srli_epi16(group, 1) : _mm256_add_epi8(group, group);
    const __m256i bytes =
        _mm256_or_si256(_mm256_and_si256(twice, _mm256_set1_epi16(0x0e0e)), _mm256_set1_epi16(0x0100));
    const auto of = [&](int i) { return _mm256_shuffle_epi8(t.part[i], bytes); };
    if constexpr (kOwn) return of(first);
    if constexpr (K > 4) return of(0);
    // A byte's highest bit chooses between two parts.
    const __m256i odd = _mm256_slli_epi16(twice, 3);
    const __m256i low = _mm256_blendv_epi8(of(0), of(1), odd);
    if constexpr (K == 4) return low;
    return _mm256_blendv_epi8(low, _mm256_blendv_epi8(of(2), of(3), odd), _mm256_slli_epi16(twice, 2));
  }
  template <int K, int NEXT>
  static W look_up(const Costs32& table, W marks) {
    return {look_up_half<K, NEXT>(table, 0, marks.lo), look_up_half<K, NEXT>(table, 1, marks.hi)};
  }
  template <int N>
  static W down(W x) {  // only the first N lanes are used
    if constexpr (N == 16) return {x.hi, x.hi};
    if constexpr (N == 8) return {_mm256_permute2x128_si256(x.lo, x.lo, 0x11), x.hi};
    if constexpr (N < 8) return {_mm256_srli_si256(x.lo, 2 * N), x.hi};
  }
  template <int N>
  static W head(W x) {
    if constexpr (N >= kCosts) return x;
    alignas(64) uint16_t lane[kCosts];
    store(lane, x);
    for (int i = N; i < kCosts; i++) lane[i] = 0xffff;
    return load(lane);
  }
  // Sixteen states come from one half of a register. Bytes of its words, for each of them.
  template <int K, int FIRST>
  struct ShuffleBytes {
    alignas(32) uint8_t byte[32];
    static constexpr int kEighth = (FIRST >> K) % kCosts / 8;
    constexpr ShuffleBytes() : byte() {
      for (int i = 0; i < 32; i++) byte[i] = static_cast<uint8_t>(((FIRST + i / 2) >> K) % 8 * 2 + i % 2);
    }
  };
  template <int K, int FIRST>
  static __m256i from_half(W best) {
    static constexpr ShuffleBytes<K, FIRST> bytes;
    const __m256i& half = bytes.kEighth < 2 ? best.lo : best.hi;
    const __m256i both = _mm256_permute2x128_si256(half, half, bytes.kEighth % 2 ? 0x11 : 0x00);
    return _mm256_shuffle_epi8(both, _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes.byte)));
  }
  template <int K, int Z>
  static W from(W best) {
    return {from_half<K, Z * kCosts>(best), from_half<K, Z * kCosts + kCosts / 2>(best)};
  }
  static int least(W x) {
    const __m256i half = _mm256_min_epu16(x.lo, x.hi);
    const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return _mm_extract_epi16(_mm_minpos_epu16(quarter), 0);
  }
  static uint32_t equal(W a, W b) {
    const __m256i both = _mm256_packs_epi16(_mm256_cmpeq_epi16(a.lo, b.lo), _mm256_cmpeq_epi16(a.hi, b.hi));
    return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(both, 0xd8)));
  }
};
using Costs = Avx2Costs;
#else
struct BaselineCosts {
  typedef uint16_t W __attribute__((vector_size(2 * kCosts), aligned(4)));
  typedef int16_t Signed __attribute__((vector_size(2 * kCosts), aligned(4)));
  typedef int32_t Wide __attribute__((vector_size(4 * kCosts), aligned(4)));
  static W load(const void* p) {
    W x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(void* p, W x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static W set1(int x) { return W{} + static_cast<uint16_t>(x); }
  static W min(W a, W b) { return a < b ? a : b; }
  static W plus(W a, W b) {
    const W sum = a + b;
    return sum | reinterpret_cast<W>(sum < a);
  }
  static W minus(W a, W b) { return a - b; }
  static Wide wide(W x) { return __builtin_convertvector(reinterpret_cast<Signed>(x), Wide); }
  static W narrow(Wide x) { return __builtin_convertvector(x, W); }
  static W scaled(W a, W b) { return narrow((wide(a) * wide(b) + (1 << 14)) >> 15); }
  static W difference(W a, W b) {
    const Wide x = wide(a) - wide(b), low = x < -32768 ? Wide{} - 32768 : x;
    return narrow(low > 32767 ? Wide{} + 32767 : low);
  }
  template <int S>
  static W squared(W x) {
    const Wide plain = wide(x);
    if constexpr (S == 0) return narrow(plain * plain >> 16);
    constexpr int kMost = 0xffff >> S;
    const Wide size = plain < 0 ? -plain : plain, kept = size > kMost ? Wide{} + kMost : size;
    return narrow(kept * kept >> (16 - 2 * S));
  }
  static void choose(W low, W high, W low_from, W high_from, int bit, W& least, W& from) {
    least = min(high, low);
    from = high < low ? high_from | set1(bit) : low_from;
  }
  static void choose_first(W low, W high, int bit, W& least, W& from) {
    choose(low, high, set1(0), set1(0), bit, least, from);
  }
  static void pick(W low, W high, W low_from, W high_from, W& least, W& from) {
    choose(low, high, low_from, high_from, 0, least, from);
  }
  template <int K, int NEXT>
  static W table(W costs) {
    return costs;
  }
  template <int K, int NEXT>
  static W look_up(W table, W marks) {
    W out{};
    for (int i = 0; i < kCosts; i++) out[i] = table[marks[i] % kCosts];
    return out;
  }
  template <int N>
  static W down(W x) {
    W out = x;
    for (int i = 0; i < kCosts; i++) out[i] = x[(i + N) % kCosts];
    return out;
  }
  template <int N>
  static W head(W x) {
    for (int i = N; i < kCosts; i++) x[i] = 0xffff;
    return x;
  }
  template <int K, int Z>
  static W from(W best) {
    constexpr Origin<K, Z> origin;
    W out{};
    for (int i = 0; i < kCosts; i++) out[i] = best[origin.lane[i]];
    return out;
  }
  static int least(W x) {
    int out = x[0];
    for (int i = 1; i < kCosts; i++) out = x[i] < out ? x[i] : out;
    return out;
  }
  static uint32_t equal(W a, W b) {
    uint32_t out = 0;
    for (int i = 0; i < kCosts; i++) out |= static_cast<uint32_t>(a[i] == b[i]) << i;
    return out;
  }
};
using Costs = BaselineCosts;
#endif

}  // namespace

void TERSEKV_BUILD(encode_trellis)(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  encode_vectors<Costs, Lanes>(call, row, first, last);
}

}  // namespace tersekv
