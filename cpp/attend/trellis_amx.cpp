// Trellis codes in integers with AMX, see trellis_windows.h: decoded components are stored as rows of a tile, and one
// instruction multiplies it with all query rows, or with the weights of all of them. Tiles 0 and 1 are sums. Up to four
// rows take as long with VNNI's products, which then need no room for what is decoded.
#include "tiles_amx.h"
#include "trellis_windows.h"

namespace tersekv {
namespace {

constexpr int64_t kMostTileRows = 16;

// Coefficients of keys: for each query row a row of high bytes and one of low bytes, of all components.
inline int64_t coefficient_stride(const TrellisPlan& plan) { return round_up(4 * plan.quads, kTileBytes); }

// Call body(entries, neighbours, quad) for quads [from, to) of the plan, see TrellisQuad.
template <class Body>
[[gnu::always_inline]] inline void for_quads(const TrellisPlan& plan, int64_t from, int64_t to, Body&& body) {
  const TrellisQuad *first = plan.section[0].first + from, *last = plan.section[0].first + to;
  const auto run = [&](auto neighbours, const int8_t* entry, const TrellisQuad* quad, const TrellisQuad* end)
                       TERSEKV_INLINE {
                         if (quad < first) quad = first;
                         if (end > last) end = last;
                         if (quad >= end) return;
                         const Codebook entries(entry, false);
                         for (; quad < end; quad++) body(entries, neighbours, *quad);
                       };
  for (int i = 0; i < plan.sections; i++) {
    const TrellisSection& s = plan.section[i];
    run(Index<1>{}, s.entries, s.first, s.singles);
    run(Index<0>{}, s.entries, s.singles, s.last);
  }
}

// A block is decoded before the products of the block before it, whose sums are read one block later, because a thread
// that loads what it has just stored waits.
void trellis_scores_amx(const void* side, TrellisSpan span, float* score, int64_t score_stride,
                        const TrellisSide* values) {
  const auto& plan = *static_cast<const TrellisPlan*>(side);
  if (plan.rows <= kRowTile) return trellis_kernel_vnni().scores(side, span, score, score_stride, values);
  const int64_t stride = coefficient_stride(plan), tiles = stride / kTileBytes, first = span.first / kTrellisBlock,
                blocks = span.last / kTrellisBlock - first;
  const auto* coefs = reinterpret_cast<const uint8_t*>(plan.coefficients) + 2 * span.row * stride;
  const ScratchScope scope;
  auto* bytes = scratch_of<__m512i>(4 * tiles * kTileFours);  // of two blocks, of two halves of their tokens
  alignas(64) __m512i sums[2][2][kMostTileRows];
  const auto rows = [&](int64_t n, int half) { return bytes + (n % 2 * 2 + half) * tiles * kTileFours; };
  const auto multiply = [&](int64_t n) TERSEKV_INLINE {
    clear_tile<0>();
    clear_tile<1>();
    for (int64_t i = 0; i < tiles; i++) {
      load_tile<4>(coefs + i * kTileBytes, stride);
      load_tile<6>(rows(n, 0) + i * kTileFours, kTileBytes);
      multiply_tiles<0, 4, 6>();
      load_tile<7>(rows(n, 1) + i * kTileFours, kTileBytes);
      multiply_tiles<1, 4, 7>();
    }
    store_tile<0>(sums[n % 2][0]);
    store_tile<1>(sums[n % 2][1]);
  };
  const auto finish = [&](int64_t n) TERSEKV_INLINE {
    const uint8_t* codes = plan.gain + (first + n) * plan.view->gain_n;
    const __m512 gain[2] = {gains(plan, codes), gains(plan, codes + kLanes)};
    const auto& of = sums[n % 2];
    for (int64_t r = 0; r < span.rows; r++)
      add_scores(joined(of[0][2 * r], of[0][2 * r + 1]), joined(of[1][2 * r], of[1][2 * r + 1]),
                 plan.queries[span.row + r].step, gain, score + r * score_stride + n * kTrellisBlock);
  };
  for (int64_t n = 0; n < blocks; n++) {
    prefetch_after(plan, span, first + n, values);
    __m512i *early = rows(n, 0), *late = rows(n, 1);
    const uint16_t* block = plan.stream + (first + n) * plan.view->stride_n;
    for_quads(plan, 0, plan.quads,
              [&](const Codebook& entries, auto neighbours, const TrellisQuad& quad) TERSEKV_INLINE {
                const __m512i x = entries.at(windows<neighbours, 0>(block, quad)),
                              y = entries.at(windows<neighbours, 1>(block, quad));
                *early++ = _mm512_unpacklo_epi16(x, y);
                *late++ = _mm512_unpackhi_epi16(x, y);
              });
    if (n > 1) finish(n - 2);
    if (n > 0) multiply(n - 1);
  }
  if (blocks > 1) finish(blocks - 2);
  if (blocks > 0) {
    multiply(blocks - 1);
    finish(blocks - 1);
  }
}

constexpr int64_t kBlocks = 8, kQuads = kMostTileRows / 2;  // blocks and quads whose sums are added at a time
constexpr int kFourRows = kCodeRows / 4;

// Weights of up to kBlocks blocks as tiles, of four rows each: a row has those of two tokens, between zeros, for the
// first of two components next to each other in sixteen-byte lanes 0 (high bytes) and 1 (low bytes), for the second in
// 2 and 3. Four rows are the words of a lane.
struct WeightTiles {
  alignas(64) __m512i rows[kBlocks][kFourRows][kTileFours];
  float step[kCodeRows];

  template <int R>
  void set(const TrellisPlan& plan, int64_t n, int64_t blocks, const float* weight, int64_t weight_stride) {
    alignas(64) static constexpr auto kWords = [] {
      struct {
        uint16_t word[32];
      } out{};
      for (int i = 0; i < 32; i++) out.word[i] = static_cast<uint16_t>(2 * i);
      return out;
    }();
    alignas(64) static constexpr Bytes kParts = bytes_of([](int i) {
      const int lane = i / 16, byte = i % 4, token = byte / 2;
      return byte % 2 != lane / 2 ? 0x80 : i % 16 / 4 * 4 + 2 * token + (lane % 2 == 0);
    });
    const __m512i words = _mm512_load_si512(kWords.word), parts = _mm512_load_si512(kParts.byte);
    alignas(64) __m512i of[kBlocks][R];
    whole_weights<R>(plan, n, blocks, weight, weight_stride, step,
                     [&](int64_t block, auto r, __m512i x, __m512i y)
                         TERSEKV_INLINE { of[block][r] = _mm512_permutex2var_epi16(x, words, y); });
    for (int64_t block = 0; block < blocks; block++)
      repeat<(R + 3) / 4>([&](auto q) TERSEKV_INLINE {
        __m512i x[4];
        repeat<4>([&](auto r) TERSEKV_INLINE {
          if constexpr (4 * q + r < R)
            x[r] = of[block][4 * q + r];
          else
            x[r] = _mm512_setzero_si512();
        });
        const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]),
                      c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        const __m512i four[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d),
                                 _mm512_unpackhi_epi64(c, d)};
        repeat<4>([&](auto lane) TERSEKV_INLINE {
          repeat<4>([&](auto i) TERSEKV_INLINE {
            const __m512i all = _mm512_shuffle_i32x4(four[i], four[i], lane * 0x55);
            rows[block][q][4 * lane + i] = _mm512_shuffle_epi8(all, parts);
          });
        });
      });
  }
};

// Quads are decoded before the products of the quads before them, as blocks of keys are.
template <int R>
void block_sums(const TrellisPlan& plan, int64_t first, int64_t blocks, const float* weight, int64_t weight_stride,
                float* sum, int64_t sum_stride) {
  constexpr int kFours = (R + 3) / 4;
  alignas(64) __m512i bytes[2][kBlocks][kMostTileRows], sums[2][kFours][kMostTileRows];
  WeightTiles weights;
  weights.set<R>(plan, first, blocks, weight, weight_stride);
  const int64_t stride = plan.view->stride_n, groups = ceil_div(plan.quads, kQuads);
  const uint16_t* stream = plan.stream + first * stride;
  const auto multiply = [&](int64_t group) TERSEKV_INLINE {
    repeat<kFours>([&](auto q) TERSEKV_INLINE { clear_tile<q>(); });
    for (int64_t block = 0; block < blocks; block++) {
      load_tile<4>(bytes[group % 2][block], kTileBytes);
      repeat<kFours>([&](auto q) TERSEKV_INLINE {
        load_tile<6 + q>(weights.rows[block][q], kTileBytes);
        multiply_with_unsigned<q, 4, 6 + q>();
      });
    }
    repeat<kFours>([&](auto q) TERSEKV_INLINE { store_tile<q>(sums[group % 2][q]); });
  };
  // [quads][4 components][rows, in fours]
  const auto collect = [&](int64_t group) TERSEKV_INLINE {
    float* out = plan.collected + group * kMostTileRows * 8 * kFours;
    for (int64_t i = 0; i < kMostTileRows; i++)
      repeat<kFours>([&](auto q) TERSEKV_INLINE {
        const __m512 x = _mm512_cvtepi32_ps(sums[group % 2][q][i]), parts = _mm512_shuffle_f32x4(x, x, 0xd8);
        const __m256 both =
            _mm256_fmadd_ps(_mm512_castps512_ps256(parts), _mm256_set1_ps(256.0f), _mm512_extractf32x8_ps(parts, 1));
        _mm_storeu_ps(out + (2 * i * kFours + q) * 4, _mm256_castps256_ps128(both));
        _mm_storeu_ps(out + ((2 * i + 1) * kFours + q) * 4, _mm256_extractf128_ps(both, 1));
      });
  };
  for (int64_t group = 0; group < groups; group++) {
    const int64_t from = group * kQuads, to = from + kQuads < plan.quads ? from + kQuads : plan.quads;
    int64_t row = 0;
    for_quads(plan, from, to, [&](const Codebook& entries, auto neighbours, const TrellisQuad& quad) TERSEKV_INLINE {
      const uint16_t* at = stream;
      for (int64_t block = 0; block < blocks; block++, at += stride) {
        bytes[group % 2][block][row] = entries.at(windows<neighbours, 0>(at, quad));
        bytes[group % 2][block][row + 1] = entries.at(windows<neighbours, 1>(at, quad));
      }
      row += 2;
    });
    if (group > 1) collect(group - 2);
    if (group > 0) multiply(group - 1);
  }
  if (groups > 1) collect(groups - 2);
  multiply(groups - 1);
  collect(groups - 1);
  const float* x = plan.collected;
  for (int64_t i = 0; i < 4 * plan.quads; i++, x += 4 * kFours)
    repeat<R>([&](auto r)
                  TERSEKV_INLINE { sum[r * sum_stride + plan.d[i]] += x[r] * weights.step[r] * plan.scale[i]; });
}

void trellis_sums_amx(const void* side, TrellisSpan span, const float* weight, int64_t weight_stride, float* sum,
                      int64_t sum_stride) {
  const auto& plan = *static_cast<const TrellisPlan*>(side);
  if (plan.rows <= kRowTile) return trellis_kernel_vnni().sums(side, span, weight, weight_stride, sum, sum_stride);
  const int64_t last = span.last / kTrellisBlock;
  if (plan.quads == 0) return;
  with_rows<kCodeRows>(span.rows, [&](auto rows) {
    for (int64_t n = span.first / kTrellisBlock; n < last; n += kBlocks, weight += kBlocks * kTrellisBlock)
      block_sums<rows>(plan, n, last - n < kBlocks ? last - n : kBlocks, weight, weight_stride, sum, sum_stride);
  });
}

const void* trellis_prepare_amx(const TrellisSide& side) {
  if (side.rows <= kRowTile) return trellis_kernel_vnni().prepare(side);
  TrellisPlan* plan = make_trellis_plan(side);
  if (!side.query) {
    plan->collected = scratch(round_up(plan->quads, kQuads) * 16 * kFourRows);
    return plan;
  }
  const int64_t stride = coefficient_stride(*plan);
  // A tile of the last rows has more, whose sums are not read.
  auto* bytes = scratch_of<char>((2 * side.rows + kMostTileRows) * stride);
  __builtin_memset(bytes, 0, 2 * side.rows * stride);
  plan->coefficients = reinterpret_cast<int32_t*>(bytes);
  float* room = scratch(round_up(4 * plan->quads, kLanes));
  for (int64_t r = 0; r < side.rows; r++)
    plan->queries[r] = quantised(*plan, side.query + r * side.query_stride, side.D, room,
                                 [&](int64_t quad, int32_t high, int32_t low) TERSEKV_INLINE {
                                   int32_t* out = plan->coefficients + (2 * r * stride) / 4 + quad;
                                   out[0] = high;
                                   out[stride / 4] = low;
                                 });
  return plan;
}

}  // namespace

const TrellisKernel& trellis_kernel_amx() {
  static constexpr TrellisKernel kernel = {trellis_prepare_amx, trellis_scores_amx, trellis_sums_amx};
  return kernel;
}

}  // namespace tersekv
