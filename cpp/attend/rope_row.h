// Cosines and sines of one position: the rotations of its digits, multiplied (angle addition).
#pragma once

#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

struct RopeRow {
  const float *cos, *sin;  // [columns]
};

// room: [2][columns], memory for the row. A negative position rotates backwards.
template <class S>
RopeRow rope_row(const RopeView& rope, int64_t place, float* room) {
  const int64_t C = rope.columns;
  if (rope.digits == 1) {
    const int64_t row = place < 0 ? 0 : place < rope.table_rows ? place : rope.table_rows - 1;
    const float* at = rope.table + row * 2 * C;
    return {at, at + C};
  }
  const bool back = place < 0;
  const uint64_t size = static_cast<uint64_t>(back ? -place : place);
  const float* rows[kMostTableDigits];
  int64_t count = 0;
  for (int64_t digit = rope.digits; digit-- > 0;) {
    const int64_t row = static_cast<int64_t>(size >> (kTableBits * digit)) & (kTableBase - 1);
    // Row 0 of a digit is the identity and is skipped. The last digit's row 0 may carry a factor.
    if (row > 0 || digit == rope.digits - 1) rows[count++] = rope.table + (digit * kTableBase + row) * 2 * C;
  }
  if (count == 1 && !back) return {rows[0], rows[0] + C};
  for (int64_t i = 0; i < C; i += kLanes) {
    auto cos = S::load(rows[0] + i), sin = S::load(rows[0] + C + i);
    for (int64_t k = 1; k < count; k++) {
      const auto x = S::load(rows[k] + i), y = S::load(rows[k] + C + i);
      const auto next = S::negative_fma(sin, y, S::mul(cos, x));
      sin = S::fma(sin, x, S::mul(cos, y));
      cos = next;
    }
    S::store(room + i, cos);
    S::store(room + C + i, back ? S::mul(sin, S::set1(-1.0f)) : sin);
  }
  return {room, room + C};
}

// List the positions of a task's tokens in node.places, if they are marked.
inline void list_places(Node& node) {
  const RopeView& rope = node.view->rope;
  if (!rope.marks.bits) return;
  const int64_t unit = node.call->tokens_per_unit, first = node.task->first * unit,
                count = node.task->last * unit - first;
  auto* places = scratch_of<int32_t>(count);
  const int32_t begin = rope.places[node.b * rope.stride_b + node.h * rope.stride_h];
  const HeadMarks marks = marks_of(rope.marks, node.b, node.h);
  marks.each(marks.skip + first, count,
             [&](int64_t i, int64_t position) { places[i] = begin + static_cast<int32_t>(position); });
  node.places = places;
}

// Cosines and sines of the next kLanes tokens after a position: [columns][kLanes] each.
struct NearSteps {
  float *cos = nullptr, *sin = nullptr;
};

template <class S>
NearSteps near_steps(const RopeView& rope) {
  const int64_t C = rope.columns;
  NearSteps out{scratch(C * kLanes), scratch(C * kLanes)};
  for (int64_t i = 0; i < C; i += kLanes) {
    S::transpose(rope.table + i, 2 * C, out.cos + i * kLanes, kLanes);
    S::transpose(rope.table + C + i, 2 * C, out.sin + i * kLanes, kLanes);
  }
  return out;
}

// Columns of cosines and sines that a task reads, and what it needs to compute them.
struct RopeLanes {
  const int32_t* column = nullptr;  // those of cosines first
  int64_t cos = 0, columns = 0;     // number of columns of cosines, and of all
  NearSteps near;                   // if positions are consecutive
  float* room = nullptr;            // for a RopeRow
  float* tile = nullptr;            // [columns][kLanes], for the angles of sixteen tokens
};

template <class S>
RopeLanes rope_lanes(const RopeView& rope, const int32_t* column, int64_t cos, int64_t columns) {
  const bool steps = rope.consecutive && rope.digits > 1;
  return {column,
          cos,
          columns,
          steps ? near_steps<S>(rope) : NearSteps{},
          scratch(2 * rope.columns),
          scratch(columns * kLanes)};
}

// Compute cosines and sines of `count` (at most kLanes) tokens, whose numbers count from the row's first token:
// out[column][token], columns `stride` floats apart.
template <class S>
void rope_angles(const Node& node, const RopeLanes& of, int64_t token, int64_t count, float* out, int64_t stride) {
  const RopeView& rope = node.view->rope;
  if (!of.near.cos) {
    const int32_t* places =
        node.places ? node.places + (token - node.task->first * node.call->tokens_per_unit) : nullptr;
    for (int64_t t = 0; t < count; t++) {
      const RopeRow row = rope_row<S>(rope, places ? places[t] : place_of(rope, node.b, node.h, token + t), of.room);
      for (int64_t k = 0; k < of.columns; k++) out[k * stride + t] = (k < of.cos ? row.cos : row.sin)[of.column[k]];
    }
    return;
  }
  const RopeRow row = rope_row<S>(rope, place_of(rope, node.b, node.h, token), of.room);
  for (int64_t k = 0; k < of.columns; k++, out += stride) {
    const int64_t c = of.column[k];
    const auto x = S::set1(row.cos[c]), y = S::set1(row.sin[c]);
    const auto near_cos = S::load(of.near.cos + c * kLanes), near_sin = S::load(of.near.sin + c * kLanes);
    const auto value =
        k < of.cos ? S::negative_fma(y, near_sin, S::mul(x, near_cos)) : S::fma(x, near_sin, S::mul(y, near_cos));
    if (count == kLanes) {
      S::store(out, value);
      continue;
    }
    alignas(64) float lanes[kLanes];
    S::store(lanes, value);
    for (int64_t t = 0; t < count; t++) out[t] = lanes[t];
  }
}

}  // namespace
}  // namespace tersekv
