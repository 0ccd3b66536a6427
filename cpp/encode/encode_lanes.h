// Encoding of the `grid` layout: ranges, nearest codes, packing. Lanes are tokens or channels; rows
// of L lanes are contiguous.
#pragma once

#include "encoders.h"
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

// Return the P rows of L lanes of a block, copied unless they are in memory with `lanes` lanes. Further lanes are zero.
LaneRows lane_rows(const TokenBlocks& x, int64_t block, bool tokens, int64_t lanes) {
  const int64_t P = tokens ? x.D : x.t, L = tokens ? x.t : x.D;
  const int64_t across = tokens ? x.stride_c : x.stride_t, along = tokens ? x.stride_t : x.stride_c;
  const float* first = x.block(block);
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

// A scale or offset as rows of lanes; `missing` everywhere if there is none.
struct LanePlane {
  float* rows = nullptr;    // `own`: [groups, lanes], one entry per lane; else [P, lane groups]
  float* spread = nullptr;  // not `own`: [lanes], one row repeated over the lanes
  bool own = false;
  int64_t group = 1, L = 0, lanes = 0;

  LanePlane(const EncodeGrid& call, const ScalePlane& plane, int64_t block, float missing)
      : own(plane.data && call.of_keys == call.per_token),
        group(call.group),
        L(call.packed.L),
        lanes(call.packed.lanes()) {
    if (!own) {
      spread = scratch(lanes);
      for (int64_t i = 0; i < lanes; i++) spread[i] = missing;
    }
    if (!plane.data) return;
    const float* first = plane.block(block, call.x);
    const int64_t P = call.packed.P, count = own ? P / group : P, width = own ? L : L / group,
                  room = own ? lanes : width;
    const int64_t across = own ? plane.stride[3] : plane.stride[4], along = own ? plane.stride[4] : plane.stride[3];
    rows = scratch(count * room);
    for (int64_t r = 0; r < count; r++) {
      float* row = rows + r * room;
      const float* from = first + r * across;
      for (int64_t i = 0; i < width; i++) row[i] = from[i * along];
      for (int64_t i = width; i < room; i++) row[i] = missing;
    }
  }

  const float* row(int64_t p) const {
    if (own) return rows + p / group * lanes;
    if (!rows) return spread;
    const int64_t width = L / group;
    for (int64_t g = 0; g < width; g++) {
      const float entry = rows[p * width + g];
      for (int64_t i = 0; i < group; i++) spread[g * group + i] = entry;
    }
    return spread;
  }
};

inline IntVector nearest_integers(FloatVector y, int64_t bits) {
  const FloatVector most = FloatVector{} + static_cast<float>((1 << bits) - 1);
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
  const int64_t lanes = packed.lanes();
  const LaneRows rows = lane_rows(call.x, block, call.of_keys, lanes);
  const LanePlane scale(call, call.scale, block, 1.0f), offset(call, call.offset, block, 0.0f);
  int32_t* codes = scratch_of<int32_t>(packed.P * lanes);
  for (int64_t p = 0; p < packed.P; p++) {
    const float *x = rows.row(p), *from = offset.row(p), *step = scale.row(p);
    int32_t* row = codes + p * lanes;
    for (int64_t i = 0; i < lanes; i += kVectorFloats) {
      FloatVector divisor = load_vector(step + i);
      divisor = divisor == 0.0f ? FloatVector{} + 1.0f : divisor;
      const FloatVector y = (load_vector(x + i) - load_vector(from + i)) / divisor;
      store_vector(row + i,
                   call.middles ? nearest_entries(y, packed.bits, call.middles) : nearest_integers(y, packed.bits));
    }
    for (int64_t i = packed.L; i < lanes; i++) row[i] = 0;
  }
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
