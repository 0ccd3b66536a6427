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
  marks_of(rope.marks, node.b, node.h).each(rope.marks.skip + first, count, [&](int64_t i, int64_t position) {
    places[i] = begin + static_cast<int32_t>(position);
  });
  node.places = places;
}

// Cosines and sines of the next kLanes tokens after a position: [columns][kLanes] each.
struct NearSteps {
  float *cos, *sin;
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

}  // namespace
}  // namespace tersekv
