// Rotated means in int16: AVX-512 BW and VNNI.
#include "words_vnni.h"

namespace tersekv {
namespace {

template <int R, int NG>
void rotated_mean_tiles(const RotatedMeanProduct& of, const float* step, int64_t token) {
  __m512i sum[R][NG];
  repeat<R>([&](auto r)
                TERSEKV_INLINE { repeat<NG>([&](auto g) TERSEKV_INLINE { sum[r][g] = _mm512_setzero_si512(); }); });
  const int16_t *table = of.table + 2 * token, *words = of.words;
  for (int64_t c = 0; c < of.reads; c += 2, table += 2 * of.stride, words += 2)
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      const __m512i x = _mm512_loadu_si512(table + g * 2 * kLanes);
      repeat<R>([&](auto r) TERSEKV_INLINE { add_products(sum[r][g], x, words + r * of.reads); });
    });
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NG>([&](auto g) TERSEKV_INLINE {
      float* out = of.score + r * of.score_stride + token + g * kLanes;
      const __m512 x =
          _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][g]), _mm512_set1_ps(step[r]), _mm512_set1_ps(of.constant[r]));
      _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), x));
    });
  });
}

}  // namespace

void rotated_mean_vnni(const RotatedMeanProduct& of) {
  float step[4];
  for (int64_t r = 0; r < of.rows; r++)
    step[r] = to_words(of.factor + r * of.reads, of.reads, of.words + r * of.reads) / kMostWord;
  with_rows(of.rows, [&](auto rows) {
    int64_t token = 0;
    for (; token + 4 * kLanes <= of.tokens; token += 4 * kLanes) rotated_mean_tiles<rows, 4>(of, step, token);
    for (; token < of.tokens; token += kLanes) rotated_mean_tiles<rows, 1>(of, step, token);
  });
}

}  // namespace tersekv
