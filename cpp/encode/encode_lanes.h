// Encoding of the `grid` layout: ranges, nearest codes, packing. Lanes are tokens or channels; rows
// of L lanes are contiguous.
#pragma once

#include "encoders.h"
#include "floats.h"
#include "half_words.h"
#include "native_vectors.h"

namespace tersekv {
namespace {  // internal to each build of the encoders

// 1.5·2^23: adding and subtracting it rounds to the nearest integer, ties to even.
constexpr float kRounder = 12582912.0f;
constexpr int64_t kCountedBits = 4;  // for wider codes the nearest entry is found by bisection

// A block as rows of lanes, `stride` apart. Lanes are tokens and rows channels, or the other way round.
struct LaneRows {
  const float* first;
  int64_t stride;
  const float* row(int64_t p) const { return first + p * stride; }
};

// Return the tokens of a block of 16-bit numbers as float32 [t, D].
const float* floats_of_block(const TokenBlocks& x, int64_t block) {
  float* rows = scratch(x.t * x.D);
  for (int64_t t = 0; t < x.t; t++)
    to_floats(x.type, x.block(block) + t * x.stride_t * bytes_of(x.type), x.stride_c, x.D, rows + t * x.D);
  return rows;
}

// Return the P rows of L lanes of a block, copied unless they are in memory with `lanes` lanes. Further lanes are zero.
LaneRows lane_rows(const TokenBlocks& x, int64_t block, bool tokens, int64_t lanes) {
  const int64_t P = tokens ? x.D : x.t, L = tokens ? x.t : x.D;
  int64_t of_token = x.stride_t, of_channel = x.stride_c;
  const float* first = reinterpret_cast<const float*>(x.block(block));
  if (x.type != Float::f32) {
    first = floats_of_block(x, block);
    of_token = x.D;
    of_channel = 1;
  }
  const int64_t across = tokens ? of_channel : of_token, along = tokens ? of_token : of_channel;
  if (along == 1 && lanes == L) return {first, across};
  float* rows = scratch(P * lanes);
  if (across == 1)
    transpose_vectors(first, along, L, P, lanes, rows);
  else
    for (int64_t p = 0; p < P; p++) {
      for (int64_t i = 0; i < L; i++) rows[p * lanes + i] = first[p * across + i * along];
      for (int64_t i = L; i < lanes; i++) rows[p * lanes + i] = 0.0f;
    }
  return {rows, lanes};
}

// Compute the ranges of a block's groups. Elements that share a range are in one lane.
void find_ranges(const GroupRanges& call, int64_t block) {
  reset_scratch();
  const TokenBlocks& x = call.x;
  const int64_t P = call.per_token ? x.D : x.t, L = call.per_token ? x.t : x.D, groups = P / call.group;
  const int64_t lanes = round_up(L, kLanes);
  const LaneRows rows = lane_rows(x, block, call.per_token, lanes);
  float *low = scratch(lanes), *high = scratch(lanes);
  for (int64_t g = 0; g < groups; g++) {
    for (int64_t i = 0; i < lanes; i += kVectorFloats) {
      FloatVector least = load_vector(rows.row(g * call.group) + i), most = least;
      IntVector unordered = least != least;
      for (int64_t p = 1; p < call.group; p++) {
        const FloatVector y = load_vector(rows.row(g * call.group + p) + i);
        least = y < least ? y : least;
        most = y > most ? y : most;
        unordered |= y != y;
      }
      const FloatVector none = FloatVector{} + __builtin_nanf("");  // NaN stays NaN
      store_vector(low + i, unordered ? none : least);
      store_vector(high + i, unordered ? none : most);
    }
    const int64_t at = (block * groups + g) * L;
    std::memcpy(call.low + at, low, L * sizeof(float));
    std::memcpy(call.high + at, high, L * sizeof(float));
  }
}

constexpr float kLeastDivisor = 0x1p-90f;

// Return x / by, rounded as division rounds, by two corrections of x times 1 / by: a division takes longer. by: from
// kLeastDivisor to its inverse. Quotients of 2^24 and more may differ, which changes no code.
inline FloatVector divided(FloatVector x, FloatVector by, [[maybe_unused]] FloatVector inverse) {
#if defined(__AVX512F__)
  const auto numerator = (__m512)x, divisor = (__m512)by, factor = (__m512)inverse;
  __m512 y = _mm512_mul_ps(numerator, factor);
  const __mmask16 few = _mm512_cmp_ps_mask(_mm512_abs_ps(y), _mm512_set1_ps(0x1p24f), _CMP_LT_OQ);
  y = _mm512_mask3_fmadd_ps(_mm512_fnmadd_ps(y, divisor, numerator), factor, y, few);
  return (FloatVector)_mm512_mask3_fmadd_ps(_mm512_fnmadd_ps(y, divisor, numerator), factor, y, few);
#else
  return x / by;
#endif
}

// A scale or offset of a block, float32; `missing` everywhere if there is none.
struct LanePlane {
  float missing;
  float* rows = nullptr;  // [count, room]: lanes of groups of rows, or groups of lanes of rows
  int64_t count = 0, room = 0, size = 0;

  // own: each lane has its own numbers, one for `group` rows; else each row has, one for `group` lanes.
  LanePlane(const EncodeGrid& call, const ScalePlane& plane, int64_t block, bool own, float missing)
      : missing(missing) {
    if (!plane.data) return;
    const float* first = plane.block(block, call.x);
    const int64_t P = call.packed.P, L = call.packed.L, width = own ? L : L / call.group,
                  across = own ? plane.stride[3] : plane.stride[4], along = own ? plane.stride[4] : plane.stride[3];
    count = own ? P / call.group : P;
    room = own ? call.packed.lanes() : width;
    size = round_up(count * room, kVectorFloats);
    rows = scratch(size);
    for (int64_t i = count * room; i < size; i++) rows[i] = 1.0f;
    for (int64_t r = 0; r < count; r++) {
      float* row = rows + r * room;
      const float* from = first + r * across;
      for (int64_t i = 0; i < width; i++) row[i] = from[i * along];
      for (int64_t i = width; i < room; i++) row[i] = missing;
    }
  }

  // Return the plane of 1 divided by each number. Each zero becomes 1 here. `exact` becomes false if `divided` would
  // need a wider range.
  LanePlane inverted(bool& exact) {
    LanePlane out = *this;
    if (!rows) return out;
    out.rows = scratch(size);
    IntVector inside = IntVector{} - 1;
    for (int64_t i = 0; i < size; i += kVectorFloats) {
      FloatVector by = load_vector(rows + i);
      by = by == 0.0f ? FloatVector{} + 1.0f : by;
      inside &= (by >= kLeastDivisor) & (by <= 1.0f / kLeastDivisor);
      store_vector(rows + i, by);
      store_vector(out.rows + i, 1.0f / by);
    }
    for (int i = 0; i < kVectorFloats; i++) exact = exact && inside[i];
    return out;
  }

  FloatVector lanes(int64_t r, int64_t i) const { return rows ? load_vector(rows + r * room + i) : of_row(r, i); }
  FloatVector of_row(int64_t r, int64_t g) const { return FloatVector{} + (rows ? rows[r * room + g] : missing); }
  // Return the numbers of some lanes of a row, whose groups may be narrower than a vector.
  FloatVector mixed(int64_t r, int64_t i, int64_t group) const {
    FloatVector out = FloatVector{} + missing;
    for (int64_t k = 0; rows && k < kVectorFloats && (i + k) / group < room; k++)
      out[k] = rows[r * room + (i + k) / group];
    return out;
  }
};

// most: the largest integer.
inline IntVector nearest_integers(FloatVector y, FloatVector most) {
  y = y > 0.0f ? y : FloatVector{};
  y = y < most ? y : most;
  return __builtin_convertvector((y + kRounder) - kRounder, IntVector);
}

// Nearest codes: the numbers of midpoints below each element. Ties go to the lower entry.
inline IntVector nearest_entries(FloatVector y, int64_t bits, const float* middles) {
  if (bits > kCountedBits) {
    IntVector codes = {};
    for (int32_t half = 1 << (bits - 1); half > 0; half /= 2)
      for (int i = 0; i < kVectorFloats; i++) codes[i] += y[i] <= middles[codes[i] + half - 1] ? 0 : half;
    return codes;
  }
  const int32_t last = (1 << bits) - 1;
#if defined(__AVX512F__)
  if (bits == kCountedBits) {  // bisection in a register
    const __m512 of = _mm512_maskz_loadu_ps(0x7fff, middles);
    __m512i codes = _mm512_setzero_si512();
    for (int32_t half = 8; half > 0; half /= 2) {
      const __m512 middle = _mm512_permutexvar_ps(_mm512_add_epi32(codes, _mm512_set1_epi32(half - 1)), of);
      codes = _mm512_mask_add_epi32(codes, _mm512_cmp_ps_mask((__m512)y, middle, _CMP_NLE_UQ), codes,
                                    _mm512_set1_epi32(half));
    }
    return (IntVector)codes;
  }
#endif
  IntVector codes = IntVector{} + last;
  for (int32_t m = 0; m < last; m++) codes += y <= middles[m];
  return codes;
}

// Pack codes [P, lanes], zero for lanes that do not exist, into the words of a block.
void pack_rows(const int32_t* codes, const LaneWords& packed, int64_t block) {
  const HalfWords half(static_cast<int>(packed.bits));
  const int64_t lanes = packed.lanes();
  for (int64_t first = 0; first < lanes; first += kLanes) {
    int32_t* out = packed.block(block) + first * packed.words;
    for (int64_t w = 0; w < packed.words; w++, out += kLanes) {
      uint32_t word[kLanes] = {};
      // Insert the `mask` bits of the two codes of pair i, shifted down and up.
      const auto add = [&](int64_t i, int64_t down, uint32_t mask, int64_t up) {
        for (int64_t p = 2 * i; p < 2 * i + 2 && p < packed.P; p++, up += 16) {
          const int32_t* row = codes + p * lanes + first;
          for (int k = 0; k < kLanes; k++) word[k] |= (static_cast<uint32_t>(row[k]) >> down & mask) << up;
        }
      };
      const int64_t unit = w / half.unit_words * half.unit_codes, in_unit = w % half.unit_words;
      for (int64_t s = 0; s < half.direct; s++)
        add(unit + in_unit * half.direct + s, 0, (1u << packed.bits) - 1, packed.bits * s);
      for (int64_t j = 0; j < half.spare_bits; j++) {
        const int64_t at = in_unit * half.spare_bits + j;
        add(unit + half.unit_words * half.direct + at / packed.bits, at % packed.bits, 1,
            packed.bits * half.direct + j);
      }
      for (int k = 0; k < kLanes; k++) out[k] = static_cast<int32_t>(word[k]);
    }
  }
}

void grid_codes(const EncodeGrid& call, int64_t block) {
  reset_scratch();
  const LaneWords& packed = call.packed;
  const int64_t lanes = packed.lanes(), P = packed.P, L = packed.L, group = call.group;
  const bool own = call.of_keys == call.per_token;
  const LaneRows rows = lane_rows(call.x, block, call.of_keys, lanes);
  LanePlane scale(call, call.scale, block, own, 1.0f);
  const LanePlane offset(call, call.offset, block, own, 0.0f);
  bool exact = true;
  const LanePlane inverse = scale.inverted(exact);
  int32_t* codes = scratch_of<int32_t>(P * lanes);
  const FloatVector most = FloatVector{} + static_cast<float>((1 << packed.bits) - 1);
  const auto code = [&](int64_t p, int64_t i, FloatVector from, FloatVector by, FloatVector inverted) TERSEKV_INLINE {
    const FloatVector above = load_vector(rows.row(p) + i) - from,
                      y = exact ? divided(above, by, inverted) : above / by;
    store_vector(codes + p * lanes + i,
                 call.middles ? nearest_entries(y, packed.bits, call.middles) : nearest_integers(y, most));
  };
  if (own) {
    for (int64_t r = 0; r * group < P; r++)
      for (int64_t i = 0; i < lanes; i += kVectorFloats) {
        const FloatVector from = offset.lanes(r, i), by = scale.lanes(r, i), inverted = inverse.lanes(r, i);
        for (int64_t p = r * group; p < (r + 1) * group; p++) code(p, i, from, by, inverted);
      }
  } else if (group % kVectorFloats == 0) {
    for (int64_t p = 0; p < P; p++)
      for (int64_t g = 0; g * group < L; g++) {
        const FloatVector from = offset.of_row(p, g), by = scale.of_row(p, g), inverted = inverse.of_row(p, g);
        for (int64_t i = g * group; i < (g + 1) * group; i += kVectorFloats) code(p, i, from, by, inverted);
      }
  } else {
    for (int64_t p = 0; p < P; p++)
      for (int64_t i = 0; i < lanes; i += kVectorFloats)
        code(p, i, offset.mixed(p, i, group), scale.mixed(p, i, group), inverse.mixed(p, i, group));
  }
  for (int64_t p = 0; p < P; p++)
    for (int64_t i = L; i < lanes; i++) codes[p * lanes + i] = 0;
  pack_rows(codes, packed, block);
}

template <class T>
void pack_integers(const PackLanes& call, int64_t block) {
  reset_scratch();
  const LaneWords& packed = call.packed;
  const int64_t lanes = packed.lanes();
  const T* first = static_cast<const T*>(call.codes) + block * call.stride[0];
  int32_t* codes = scratch_of<int32_t>(packed.P * lanes);
  for (int64_t p = 0; p < packed.P; p++) {
    const T* from = first + p * call.stride[1];
    for (int64_t i = 0; i < packed.L; i++) codes[p * lanes + i] = static_cast<int32_t>(from[i * call.stride[2]]);
    for (int64_t i = packed.L; i < lanes; i++) codes[p * lanes + i] = 0;
  }
  pack_rows(codes, packed, block);
}

void lane_codes(const PackLanes& call, int64_t block) {
  switch (call.item_bytes) {
    case 1:
      return pack_integers<uint8_t>(call, block);
    case 2:
      return pack_integers<int16_t>(call, block);
    case 4:
      return pack_integers<int32_t>(call, block);
    default:
      return pack_integers<int64_t>(call, block);
  }
}

}  // namespace
}  // namespace tersekv
