// Products with tiles of tokens, compiled once per instruction set.
#include "row_product.h"

#include "build.h"
#include "transposed.h"

namespace tersekv {
namespace {  // internal to each build

using F = Lanes::F;

#if TERSEKV_avx512bf16
constexpr int kPair = 2;
constexpr int kRows = 8, kVectors = 2;  // sums that stay in registers

using Word = __m512i;
inline Word load_word(const float* p) { return _mm512_loadu_si512(p); }
inline Word all_of(const float* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return _mm512_set1_epi32(word);
}
inline F product(Word a, Word b, F sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
// Thirty-two consecutive floats as words.
inline void to_words(const float* x, float* words) {
  _mm512_storeu_si512(words,
                      reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + kLanes), _mm512_loadu_ps(x))));
}
// Sixteen words, each of one number of x and one of y.
inline void pair_words(const float* x, const float* y, float* words) {
  const __m256i low = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(x)));
  const __m256i high = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(y)));
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
  _mm512_storeu_si512(words, _mm512_or_si512(_mm512_cvtepu16_epi32(low), upper));
}
#else
constexpr int kPair = 1;
#if TERSEKV_avx512
constexpr int kRows = 8, kVectors = 2;
#elif TERSEKV_avx2
constexpr int kRows = 6, kVectors = 1;
#else
constexpr int kRows = 2, kVectors = 1;
#endif

using Word = F;
inline Word load_word(const float* p) { return Lanes::load(p); }
inline Word all_of(const float* p) { return Lanes::set1(*p); }
inline F product(Word a, Word b, F sum) { return Lanes::fma(a, b, sum); }
#endif

constexpr int64_t kPanel = kVectors * kLanes;
static_assert(kPanelColumns % kPanel == 0);

// Call body(columns of the panel, its first column) for each panel.
template <class Body>
void panels_of(int64_t columns, Body&& body) {
  for (int64_t n = 0; n < columns; n += kPanel) body(columns - n < kPanel ? columns - n : kPanel, n);
}

void pack_keys(const float* rows, int64_t stride, int64_t columns, int64_t K, float* panels) {
  panels_of(columns, [&](int64_t width, int64_t first) {
    float* panel = panels + first * K / kPair;
    for (int64_t n = 0; n < width; n += kLanes) {
      const float* row = rows + (first + n) * stride;
      int64_t k = 0;
#if TERSEKV_avx512bf16
      alignas(64) float words[kLanes * kLanes];
      for (; k + 2 * kLanes <= K; k += 2 * kLanes) {
        for (int64_t i = 0; i < kLanes; i++) to_words(row + i * stride + k, words + i * kLanes);
        transpose(words, kLanes, panel + k / 2 * width + n, width);
      }
      if (k < K) {
        for (int64_t i = 0; i < kLanes; i++) {
          alignas(64) float last[2 * kLanes] = {};
          for (int64_t j = 0; j < kLanes; j++) last[j] = row[i * stride + k + j];
          to_words(last, words + i * kLanes);
        }
        alignas(64) float turned[kLanes * kLanes];
        transpose(words, kLanes, turned, kLanes);
        for (int64_t j = 0; j < kLanes / 2; j++)
          Lanes::store(panel + (k / 2 + j) * width + n, Lanes::load(turned + j * kLanes));
      }
#else
      for (; k < K; k += kLanes) transpose(row + k, stride, panel + k * width + n, width);
#endif
    }
  });
}

void pack_values(const float* rows, int64_t stride, int64_t columns, int64_t K, float* panels) {
  panels_of(columns, [&](int64_t width, int64_t first) {
    float* to = panels + first * K / kPair;
    for (int64_t k = 0; k < K; k += kPair)
      for (int64_t n = 0; n < width; n += kLanes, to += kLanes) {
        const float* from = rows + k * stride + first + n;
#if TERSEKV_avx512bf16
        pair_words(from, from + stride, to);
#else
        Lanes::store(to, Lanes::load(from));
#endif
      }
  });
}

template <int R, int NV>
void multiply_tile(const float* a, int64_t a_stride, int64_t words, const float* panel, bool add, float* out,
                   int64_t out_stride) {
  F sum[R][NV];
  repeat<R>([&](auto r) TERSEKV_INLINE { repeat<NV>([&](auto v) TERSEKV_INLINE { sum[r][v] = Lanes::zero(); }); });
  for (int64_t k = 0; k < words; k++, panel += NV * kLanes) {
    Word b[NV];
    repeat<NV>([&](auto v) TERSEKV_INLINE { b[v] = load_word(panel + v * kLanes); });
    repeat<R>([&](auto r) TERSEKV_INLINE {
      const Word x = all_of(a + r * a_stride + k);
      repeat<NV>([&](auto v) TERSEKV_INLINE { sum[r][v] = product(x, b[v], sum[r][v]); });
    });
  }
  repeat<R>([&](auto r) TERSEKV_INLINE {
    repeat<NV>([&](auto v) TERSEKV_INLINE {
      float* to = out + r * out_stride + v * kLanes;
      Lanes::store(to, add ? Lanes::add(Lanes::load(to), sum[r][v]) : sum[r][v]);
    });
  });
}

// Call body(Index<rows>) for 1 to N rows.
template <int N, class Body>
void with_tile(int64_t rows, Body&& body) {
  if constexpr (N > 1)
    if (rows < N) return with_tile<N - 1>(rows, body);
  body(Index<N>{});
}

void multiply(const float* a, int64_t a_stride, int64_t rows, int64_t K, const Panels& b, int64_t columns, bool add,
              float* words, float* out, int64_t out_stride) {
  const int64_t count = K / kPair, size = ceil_div(rows, ceil_div(rows, kRows));
#if TERSEKV_avx512bf16
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < K; k += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + r * count + k / 2),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(a + r * a_stride + k))));
  a = words;
  a_stride = count;
#endif
  panels_of(columns, [&](int64_t width, int64_t first) {
    const float* panel = b.data + ((b.column + first) * b.K + b.k * width) / kPair;
    for (int64_t row = 0; row < rows; row += size)
      with_tile<kRows>(rows - row < size ? rows - row : size, [&](auto r) {
        const float* from = a + row * a_stride;
        float* to = out + row * out_stride + first;
        if constexpr (kVectors > 1)
          if (width == kPanel) return multiply_tile<r, kVectors>(from, a_stride, count, panel, add, to, out_stride);
        multiply_tile<r, 1>(from, a_stride, count, panel, add, to, out_stride);
      });
  });
}

}  // namespace

const RowProduct& TERSEKV_BUILD(row_product)() {
  static constexpr RowProduct made{pack_keys, pack_values, multiply};
  return made;
}

}  // namespace tersekv
