// Polar coordinates of 4, 2, 2 and 2 bits in integers: AVX-512 with VBMI (byte permutations) and
// VNNI (dot products).
//
// Cosines, sines and their products are integers in units of 2^-15. A token's radii are relative to
// its largest radius, which is multiplied in float32, so errors are relative to the token's own
// norm. Queries and weights are int16, in units that keep sums within 32 bits.
#include "polar_weights.h"
#include "prefetch_ranges.h"

namespace tersekv {
namespace {

constexpr int64_t kKeyBlocksAhead = 2;  // number of blocks of keys that are prefetched

// sum += Σ a · b over two int16. Inline assembly, because GCC 12 copies the sums of the intrinsic.
[[gnu::always_inline]] inline void add_products(__m512i& sum, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

struct Bytes {
  uint8_t byte[64];
};

// Order of unpacked int16 of 32 tokens: half h has tokens 4h to 4h + 3 of each eight, of two byte
// rows.
template <int H>
constexpr Bytes unpacked_order() {
  Bytes out{};
  for (int i = 0; i < 64; i++) out.byte[i] = static_cast<uint8_t>(i / 2 % 2 * 32 + i / 16 * 8 + 4 * H + i / 4 % 4);
  return out;
}

alignas(64) constexpr Bytes kOrder[2] = {unpacked_order<0>(), unpacked_order<1>()};

template <int R>
void polar_block_scores(const PolarPlan& plan, int64_t n, int64_t row, float* score, int64_t score_stride,
                        const PrefetchRanges& ahead) {
  const Radii radii = largest_radii(plan, n);
  const Tokens tokens(plan, n, radii);
  const __m512i above = _mm512_set1_epi32(0x01000000), nibbles = _mm512_set1_epi32(0x000f000f),
                second = _mm512_set1_epi32(0x00100000);
  __m512i sum[R][2];
  repeat<R>([&](auto r) TERSEKV_INLINE { sum[r][0] = sum[r][1] = _mm512_setzero_si512(); });
  const Shorts* tables = plan.query + row;
  for (int64_t k = 0; k < plan.D / 16; k++) {
    __m512i w[8];
    tokens.weights(k, w);
    ahead.fetch(k, plan.D / 16);
    repeat<2>([&](auto m) TERSEKV_INLINE {
      // Each integer is a byte of two rows for a token. Look-ups read five bits: 16 and more is the
      // second row's pair.
      const __m512i bytes = _mm512_loadu_si512(tokens.angles + (4 * k + 2 * m) * kPolarBlock);
      __m512i code[2][2];
      repeat<2>([&](auto h) TERSEKV_INLINE {
        const __m512i both =
            _mm512_mask_permutexvar_epi8(above, 0x5555555555555555, _mm512_load_si512(kOrder[h].byte), bytes);
        code[0][h] = _mm512_ternarylogic_epi32(both, nibbles, second, 0xEA);  // (both & nibbles) | second
        code[1][h] = _mm512_srli_epi16(both, 4);
      });
      repeat<2>([&](auto i) TERSEKV_INLINE {
        const __m512i a = w[4 * m + i], b = w[4 * m + 2 + i];
        const __m512i x[2] = {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
        repeat<R>([&](auto r) TERSEKV_INLINE {
          const __m512i table = _mm512_load_si512(tables[r].entry);
          repeat<2>([&](auto h)
                        TERSEKV_INLINE { add_products(sum[r][h], _mm512_permutexvar_epi16(code[i][h], table), x[h]); });
        });
        tables += plan.rows;
      });
    });
  }
  const __m512i order[2] = {_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)};
  repeat<R>([&](auto r) TERSEKV_INLINE {
    const __m512 unit = _mm512_set1_ps(plan.unit[row + r]);
    repeat<2>([&](auto h) TERSEKV_INLINE {
      const __m512 x = _mm512_cvtepi32_ps(_mm512_permutex2var_epi64(sum[r][0], order[h], sum[r][1]));
      float* out = score + r * score_stride + h * kLanes;
      _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_mul_ps(x, unit), radii.largest[h], _mm512_loadu_ps(out)));
    });
  });
}

void polar_scores_vnni(const void* side, PolarSpan span, float* score, int64_t score_stride, const View* values) {
  const auto& plan = *static_cast<const PolarPlan*>(side);
  with_rows(span.rows, [&](auto rows) {
    for (int64_t n = span.first / kPolarBlock; n < span.last / kPolarBlock; n++, score += kPolarBlock) {
      PrefetchRanges ahead;
      ahead.add(plan.angles + (n + kKeyBlocksAhead) * plan.view->stride_n, plan.view->bytes * kPolarBlock);
      ahead.add(plan.radii + (n + kKeyBlocksAhead) * plan.view->radii.stride_n, plan.D / 16 * kPolarBlock * 2);
      if (values) ahead.add(*values, plan.b, plan.h, n * kPolarBlock, kPolarBlock);
      polar_block_scores<rows>(plan, n, span.row, score, score_stride, ahead);
    }
  });
}

// Dither that is added to the weights of 32 tokens before rounding: evenly spread between -1/2 and
// 1/2.
alignas(64) constexpr auto kDither = [] {
  struct {
    float of[kPolarBlock];
  } out{};
  for (int i = 0; i < kPolarBlock; i++)
    out.of[i] = static_cast<float>((i & 1) << 4 | (i & 2) << 2 | (i & 4) | (i & 8) >> 2 | i >> 4) / 32 - 31.0f / 64;
  return out;
}();

// Weights times radii as int16, scaled so that a lane's sum over all blocks is at most 2·32600. The
// dither differs between tokens, so that many small weights do not all round to zero. Return the
// units.
template <int R>
void short_weights(const PolarPlan& plan, const float* weight, int64_t weight_stride, const Radii* radii,
                   int64_t blocks, float (&unit)[R]) {
  repeat<R>([&](auto r) TERSEKV_INLINE {
    const float* p = weight + r * weight_stride;
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t n = 0; n < blocks; n++)
      repeat<2>([&](auto h) TERSEKV_INLINE {
        sum[h] = _mm512_fmadd_ps(_mm512_loadu_ps(p + n * kPolarBlock + h * kLanes), radii[n].largest[h], sum[h]);
      });
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(sum[0], sum[1]));
    const float total = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
    unit[r] = most / 32600.0f + 0.0f * total;  // NaN if something is not finite
    const __m512 inverse = _mm512_set1_ps(most > kPolarLeast ? 32600.0f / most : 0.0f);
    for (int64_t n = 0; n < blocks; n++) {
      __m512 x[2];
      repeat<2>([&](auto h) TERSEKV_INLINE {
        const __m512 by = _mm512_mul_ps(radii[n].largest[h], inverse);
        x[h] = _mm512_fmadd_ps(_mm512_loadu_ps(p + n * kPolarBlock + h * kLanes), by,
                               _mm512_load_ps(kDither.of + h * kLanes));
      });
      _mm512_store_si512(plan.weight + r * kPolarSumTokens + n * kPolarBlock, shorts_of(x[0], x[1]));
    }
    unit[r] *= plan.view->unit / kPolarOne;
  });
}

// Return the sums over the lanes of sixteen vectors.
inline __m512 lane_sums(const __m512i (&sum)[16]) {
  __m512 x[16];
  for (int i = 0; i < 16; i++) x[i] = _mm512_cvtepi32_ps(sum[i]);
  for (int i = 0; i < 8; i++)
    x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
    x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; i++)
    x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
}

// Add `blocks` blocks from `first` on, at most kPolarSumTokens. Sums of four channels for R rows
// stay in registers.
template <int R>
void polar_block_sums(const PolarPlan& plan, int64_t first, int64_t blocks, const float* weight, int64_t weight_stride,
                      float* sum, int64_t sum_stride) {
  Radii radii[kPolarSumTokens / kPolarBlock];
  for (int64_t n = 0; n < blocks; n++) radii[n] = largest_radii(plan, first + n);
  float unit[R];
  short_weights<R>(plan, weight, weight_stride, radii, blocks, unit);
  for (int64_t k = 0; k < plan.D / 16; k++) {
    for (int64_t n = 0; n < blocks; n++) {
      __m512i w[8];
      Tokens(plan, first + n, radii[n]).weights(k, w);
      repeat<8>([&](auto j)
                    TERSEKV_INLINE { _mm512_store_si512(plan.pairs + j * kPolarSumTokens + n * kPolarBlock, w[j]); });
    }
    for (int64_t i = 0; i < 4; i++) {
      const uint8_t* codes = plan.angles + first * plan.view->stride_n + (4 * k + i) * kPolarBlock;
      const int16_t* pair = plan.pairs + 2 * i * kPolarSumTokens;
      const __m512i cos = _mm512_load_si512(plan.cos.entry), sin = _mm512_load_si512(plan.sin.entry);
      __m512i of[16];  // [4 rows][4 channels]
      repeat<16>([&](auto c) TERSEKV_INLINE { of[c] = _mm512_setzero_si512(); });
      for (int64_t at = 0; at < blocks * kPolarBlock; at += kPolarBlock, codes += plan.view->stride_n) {
        const __m512i even = load_bytes(codes), odd = _mm512_srli_epi16(even, 4);
        const __m512i a = _mm512_load_si512(pair + at), b = _mm512_load_si512(pair + kPolarSumTokens + at);
        const __m512i x[4] = {_mm512_mulhrs_epi16(a, _mm512_permutexvar_epi16(even, cos)),
                              _mm512_mulhrs_epi16(a, _mm512_permutexvar_epi16(even, sin)),
                              _mm512_mulhrs_epi16(b, _mm512_permutexvar_epi16(odd, cos)),
                              _mm512_mulhrs_epi16(b, _mm512_permutexvar_epi16(odd, sin))};
        repeat<R>([&](auto r) TERSEKV_INLINE {
          const __m512i p = _mm512_load_si512(plan.weight + r * kPolarSumTokens + at);
          repeat<4>([&](auto c) TERSEKV_INLINE { add_products(of[4 * r + c], p, x[c]); });
        });
      }
      const __m512 total = lane_sums(of);
      repeat<R>([&](auto r) TERSEKV_INLINE {
        float* out = sum + r * sum_stride + 16 * k + 4 * i;
        const __m128 part = _mm512_extractf32x4_ps(total, r);
        _mm_storeu_ps(out, _mm_fmadd_ps(part, _mm_set1_ps(unit[r]), _mm_loadu_ps(out)));
      });
    }
  }
}

void polar_sums_vnni(const void* side, PolarSpan span, const float* weight, int64_t weight_stride, float* sum,
                     int64_t sum_stride) {
  const auto& plan = *static_cast<const PolarPlan*>(side);
  with_rows(span.rows, [&](auto rows) {
    for (int64_t token = span.first; token < span.last; token += kPolarSumTokens) {
      const int64_t tokens = span.last - token < kPolarSumTokens ? span.last - token : kPolarSumTokens;
      polar_block_sums<rows>(plan, token / kPolarBlock, tokens / kPolarBlock, weight + token - span.first,
                             weight_stride, sum, sum_stride);
    }
  });
}

}  // namespace

const PolarKernel& polar_kernel_vnni() {
  static constexpr PolarKernel kernel = {make_polar_plan, polar_scores_vnni, polar_sums_vnni};
  return kernel;
}

}  // namespace tersekv
