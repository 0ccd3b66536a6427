// The micro-kernel of lut.h in integers with AMX, see simd_amx.h. Tiles 0 to 3 are sums, tiles 4 and 5 have the
// coefficients of all rows, tiles 6 and 7 codes or table entries. A product with one row takes as long as with sixteen.
#pragma once

#include "lut_bytes.h"
#include "simd_amx.h"
#include "tiles_amx.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Coefficients as integers of 16 bits in a unit per row and call: a row of high bytes, then one of low bytes, per row.
template <int R>
struct Coefs<Avx512Amx, R> {
  ScratchScope scope;
  int64_t stride;
  const uint8_t* data;
  float unit[R];

  // Sums of products with entries of 16 bits fit 32 bits for 2^17 slots.
  Coefs(float* rows, int64_t row_stride, int64_t slots, bool values) : stride(round_up(slots, kTileBytes)) {
    // Tiles may have more rows than 2 · R, whose sums are not read.
    auto* bytes = reinterpret_cast<uint8_t*>(scratch_of<char>(2 * kCodeRows * stride));
    data = bytes;
    // Of 32 integers the second bytes, then the first.
    alignas(64) static constexpr auto kOrder = [] {
      struct {
        uint8_t byte[64];
      } out{};
      for (int i = 0; i < 64; i++) out.byte[i] = static_cast<uint8_t>(i % 32 * 4 + (i < 32));
      return out;
    }();
    const __m512i order = _mm512_load_si512(kOrder.byte);
    for (int r = 0; r < R; r++) {
      uint8_t* high = bytes + 2 * r * stride;
      unit[r] = whole_coefs(rows + r * row_stride, slots, values, [&](int64_t p, __m512i x, __m512i y) TERSEKV_INLINE {
        const __m512i both = _mm512_permutex2var_epi8(x, order, y);
        _mm256_store_si256(reinterpret_cast<__m256i*>(high + p), _mm512_castsi512_si256(both));
        // The 128 that was added for the high byte is taken from the low one again.
        _mm256_store_si256(reinterpret_cast<__m256i*>(high + stride + p),
                           _mm256_xor_si256(_mm512_extracti64x4_epi64(both, 1), _mm256_set1_epi8(-128)));
      });
    }
  }
};

// The codes of a tile are decoded before the product of the tile before it, and the sums of a lane group are read after
// those of the next one are stored, because a thread that loads what it has just stored waits. A product also waits for
// the one before that adds to the same sums, so every second one has sums of its own.
template <int BITS, int R>
struct LutGroups<Avx512Amx, BITS, R> {
  using Table = Avx512Amx::Table<BITS>;

  [[gnu::noinline]] static void add(const void* made, Codes codes, float* coef, int64_t coef_stride, int64_t from,
                                    int64_t to, Prefetch& later, const Finish<Avx512Amx>& finish) {
    const auto& table = *static_cast<const Table*>(made);
    const int64_t runs = codes.count * (finish.coef_step ? finish.blocks : 1);
    const Coefs<Avx512Amx, R> coefs(coef, coef_stride, runs * packed_slots(BITS, codes.words), !finish.y_step);
    table.are_codes ? add_all<1>(table, codes, coefs, from, to, later, finish)
                    : add_all<2>(table, codes, coefs, from, to, later, finish);
  }

 private:
  // PARTS: the bytes of an entry, high and low, or the code itself.
  template <int PARTS>
  static void add_all(const Table& table, const Codes& codes, const Coefs<Avx512Amx, R>& coefs, int64_t from,
                      int64_t to, Prefetch& later, const Finish<Avx512Amx>& finish) {
    using Unit = UnitCodes<BITS>;
    constexpr int kUnits = kTileFours / Unit::kFours, kTileWords = kUnits * Unit::kWords;
    const int64_t units = codes.count * (codes.words / Unit::kWords), tiles = ceil_div(units, kUnits);
    const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
    const __m512i part[2] = {_mm512_broadcast_i32x4(table.high), _mm512_broadcast_i32x4(table.low)};
    alignas(64) __m512i bytes[2][PARTS][kTileFours], sums[2][2 * PARTS][kTileFours];
    struct {
      int64_t tile = 0, block = 0, number;
    } next;                                     // product, of a lane group of a block
    int64_t stored = 0, block = 0, number = 0;  // lane groups whose sums were stored; the last one
    next.number = from;

    const auto finish_last = [&]() TERSEKV_INLINE {
      const auto& own = sums[stored % 2];
      __m512 sum[R];
      repeat<R>([&](auto r) TERSEKV_INLINE {
        const auto at = [&](int k, int i) TERSEKV_INLINE {
          __m512i x = own[k][2 * r + i];
          if (tiles > 1) x = _mm512_add_epi32(x, own[PARTS + k][2 * r + i]);
          return _mm512_cvtepi32_ps(x);
        };
        const __m512 by = _mm512_set1_ps(256.0f);
        __m512 whole = _mm512_fmadd_ps(at(0, 0), by, at(0, 1));
        if constexpr (PARTS == 2) whole = _mm512_fmadd_ps(whole, by, _mm512_fmadd_ps(at(1, 0), by, at(1, 1)));
        sum[r] = _mm512_mul_ps(whole, _mm512_set1_ps(coefs.unit[r] * table.unit));
      });
      finish_group<Avx512Amx, R>(finish, block, number, sum);
    };
    const auto multiply = [&](int64_t tile) TERSEKV_INLINE {
      __m512i(*from_bytes)[kTileFours] = bytes[tile % 2];
      const uint8_t* coef = coefs.data + next.block * finish.coef_step + next.tile * kTileBytes;
      const auto add_to = [&](auto half) TERSEKV_INLINE {
        if (next.tile < 2) repeat<PARTS>([&](auto k) TERSEKV_INLINE { clear_tile<half * PARTS + k>(); });
        load_tile<4 + half>(coef, coefs.stride);
        repeat<PARTS>([&](auto k) TERSEKV_INLINE {
          load_tile<6 + k>(from_bytes[k], kTileBytes);
          multiply_tiles<half * PARTS + k, 4 + half, 6 + k>();
        });
      };
      next.tile % 2 ? add_to(Index<1>{}) : add_to(Index<0>{});
      if (++next.tile < tiles) return;
      repeat<PARTS>([&](auto k) TERSEKV_INLINE { store_tile<k>(sums[(stored + 1) % 2][k]); });
      if (tiles > 1)
        repeat<PARTS>([&](auto k) TERSEKV_INLINE { store_tile<PARTS + k>(sums[(stored + 1) % 2][PARTS + k]); });
      if (stored) finish_last();
      stored++;
      block = next.block;
      number = next.number;
      next.tile = 0;
      if (++next.number < to) return;
      next.number = from;
      next.block++;
    };
    // Decode a unit into rows of a tile.
    const auto put = [&](const int32_t* words, __m512i(*tile)[kTileFours], int64_t row) TERSEKV_INLINE {
      const Unit unit(words);
      repeat<Unit::kFours>([&](auto i) TERSEKV_INLINE {
        const __m512i code = _mm512_and_si512(unit.template four<i>(), mask);
        repeat<PARTS>(
            [&](auto k) TERSEKV_INLINE { tile[k][row + i] = PARTS == 1 ? code : _mm512_shuffle_epi8(part[k], code); });
      });
    };

    int64_t decoded = 0;
    for (int64_t n = 0; n < finish.blocks; n++)
      for (int64_t group = from; group < to; group++) {
        const int32_t *words = codes.data + n * finish.code_step + group * codes.group_stride,
                      *end = words + codes.words * kLanes;
        for (int64_t left = units; left > 0; left -= kUnits, decoded++) {
          __m512i(*tile)[kTileFours] = bytes[decoded % 2];
          later.fetch_for(left < kUnits ? left * Unit::kWords : kTileWords);
          if (left >= kUnits && end - words >= kTileWords * kLanes) {
            repeat<kUnits>([&](auto u)
                               TERSEKV_INLINE { put(words + u * Unit::kWords * kLanes, tile, u * Unit::kFours); });
            words += kTileWords * kLanes;
          } else {
            int64_t row = 0;
            for (const int64_t rows = (left < kUnits ? left : kUnits) * Unit::kFours; row < rows; row += Unit::kFours) {
              if (words == end) {
                words += codes.step - codes.words * kLanes;
                end = words + codes.words * kLanes;
              }
              put(words, tile, row);
              words += Unit::kWords * kLanes;
            }
            for (; row < kTileFours; row++)
              repeat<PARTS>([&](auto k) TERSEKV_INLINE { tile[k][row] = _mm512_setzero_si512(); });
          }
          if (decoded) multiply(decoded - 1);
        }
      }
    multiply(decoded - 1);
    finish_last();
  }
};

}  // namespace
}  // namespace tersekv
