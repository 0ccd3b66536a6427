// Keys before RoPE, and a vector that RoPE turns.
#include <algorithm>

#include "operands.h"
#include "rope_kernel.h"

namespace tersekv {

// (7, part, turns or None, table 3x, places 3x, channels 3x): turns where positions are consecutive, see
// RopeView::turns
void Operands::parse_roped(View& v, const std::string& name, nb::handle packed) {
  if (name != "keys." || depth_ != 1) fail(name, "expected RoPE around keys, outermost");
  tiled_ = true;
  parse_parts(v, name, packed, 1, 1);
  tiled_ = false;
  v.D = v.parts[0].D;
  parse_rope(v, name, packed, 3);
  const nb::handle turns = item(packed, 2);
  if (!turns.is_none()) parse_turns(v, name, tensor_at(turns, 0));
}

// table 3x, places 3x, channels 3x, for the view's D channels and T tokens. Any place is safe: digits are cut to the
// table's rows, and rows of a table of one digit are held within it.
void Operands::parse_rope(View& v, const std::string& name, nb::handle packed, Py_ssize_t first) {
  if (ropes_++) fail(name, "expected one RoPE");  // a thread keeps the tables of one
  RopeView& rope = v.rope;
  const Tensor table = tensor_at(packed, first), places = tensor_at(packed, first + 3),
               channels = tensor_at(packed, first + 6);
  if (table.dims != 4 || table.shape[0] < 1 || table.shape[0] > kMostTableDigits || table.shape[1] < 1 ||
      (table.shape[0] > 1 && table.shape[1] != kTableBase) || table.shape[3] < kLanes || table.shape[3] % kLanes)
    fail(name, "table of angles: expected [digits, 64, 2, columns] or [1, rows, 2, columns], whole vectors of columns");
  rope.digits = table.shape[0];
  rope.table_rows = table.shape[1];
  rope.columns = in_range(name, "columns of the table of angles", table.shape[3], kMostChannels);
  expect(name, "table of angles", table,
         {{"digits", rope.digits}, {"rows", rope.table_rows}, {"2", 2}, {"columns", rope.columns}}, 0);
  rope.table = table.as<float>();
  if (places.dims != 3) fail(name, "places: expected [1 or B, 1 or H, T or 1]");
  const int64_t B = places.shape[0] == 1 ? 1 : B_, H = places.shape[1] == 1 ? 1 : H_,
                tokens = places.shape[2] == 1 ? 1 : v.T;
  expect(name, "places", places, {{"B", B}, {"H", H}, {"T", tokens}}, 2);
  rope.places = places.as<int32_t>();
  rope.stride_b = B == 1 ? 0 : places.stride[0];
  rope.stride_h = H == 1 ? 0 : places.stride[1];
  rope.consecutive = tokens == 1;
  rope.stride_t = rope.consecutive ? 0 : 1;
  expect(name, "rope channels", channels, {{"D", v.D}, {"4", 4}}, 0);
  rope.channels = channels.as<RopeChannel>();
  for (int64_t d = 0; d < v.D; d++) {
    const RopeChannel& channel = rope.channels[d];
    if (channel.partner < 0) continue;
    const bool inside = channel.partner < v.D && channel.cos_column >= 0 && channel.cos_column < rope.columns &&
                        channel.sin_column >= 0 && channel.sin_column < rope.columns &&
                        (channel.sign == 1 || channel.sign == -1);
    if (!inside || rope.channels[channel.partner].partner != d || rope.channels[channel.partner].sign != -channel.sign)
      fail(name, "rope channels: expected pairs of channels, and columns of cos and sin");
  }
}

// int16 [D/4, 2, kTurnTokens, 2]
void Operands::parse_turns(View& v, const std::string& name, const Tensor& turns) {
  const int64_t half = v.D / 2;
  bool halves = v.D % 4 == 0;
  for (int64_t d = 0; halves && d < half; d++) {
    const RopeChannel &a = v.rope.channels[d], &b = v.rope.channels[d + half];
    halves = a.partner == d + half && a.sign == -1;
    for (const int32_t column : {a.sin_column, b.cos_column, b.sin_column}) halves &= column == a.cos_column;
  }
  if (!halves) fail(name, "turns of RoPE: expected channels d and d + D/2 as pairs of one column");
  expect(name, "turns of RoPE", turns, {{"D/4", half / 2}, {"2", 2}, {"steps", kTurnTokens}, {"2", 2}}, 0);
  v.rope.turns = turns.as<int16_t>();
}

// (10, tokens, steps or None, vector 3x, table 3x, places 3x, channels 3x): float32 [1 or B, H, D], next to or added to
// other views; steps where positions are consecutive and channels take cosines and sines of the same columns
void Operands::parse_turned(View& v, const std::string& name, nb::handle packed) {
  if (name != "keys." || tiled_) fail(name, "expected a turned vector in keys, not under RoPE or a rotation");
  const nb::handle steps = item(packed, 2);
  const Tensor vector = tensor_at(packed, 3);
  if (vector.dims != 3) fail(name, "mean: expected [1 or B, H, D]");
  v.T = as_int(item(packed, 1));
  v.D = vector.shape[2];
  const int64_t B = vector.shape[0] == 1 ? 1 : B_;
  expect(name, "mean", vector, {{"B", B}, {"H", H_}, {"D", v.D}}, 2);
  v.dense = {Float::f32, vector.as<void>(), B == 1 ? 0 : vector.stride[0], vector.stride[1], 0};
  parse_rope(v, name, packed, 6);
  turned_columns(v.rope, v.D);
  RopeView& rope = v.rope;
  bool same =
      rope.reads == 2 * rope.reads_cos && std::equal(rope.read, rope.read + rope.reads_cos, rope.read + rope.reads_cos);
  for (int64_t d = 0; d < v.D; d++)
    same &= rope.turned[d].cos < 0 || rope.turned[d].sin == rope.turned[d].cos + rope.reads_cos;
  if (steps.is_none()) return;
  if (!rope.consecutive || rope.digits == 1) fail(name, "rope steps: expected consecutive positions");
  if (!same) fail(name, "rope steps: expected cosines and sines of the same columns");
  parse_steps(rope, name, steps);
}

// (table 3x, matrix 3x, place 3x, words 3x): place int32 [columns], a fast column's number, or -1 less a slow one's
void Operands::parse_steps(RopeView& rope, const std::string& name, nb::handle packed) {
  const Tensor table = tensor_at(packed, 0), matrix = tensor_at(packed, 3), place = tensor_at(packed, 6);
  if (table.dims != 2 || matrix.dims != 2 || table.shape[1] < kLanes || table.shape[1] % kLanes ||
      table.shape[0] > 2 * rope.columns + kLanes || matrix.shape[0] > 2 * rope.columns)
    fail(name, "rope steps: expected a table [rows, M] and a matrix [2·slow, 16], M a multiple of 16");
  RopeSteps steps{table.shape[1], table.shape[0]};
  steps.slow = matrix.shape[0] / 2;
  const int64_t terms = steps.slow ? kLanes : 0;
  steps.fast = (steps.rows - terms) / 2;
  steps.table = table.as<float>();
  steps.matrix = matrix.as<float>();
  expect(name, "rope steps", table, {{"rows", 2 * steps.fast + terms}, {"M", steps.M}}, 0);
  expect(name, "rope steps' matrix", matrix, {{"rows", 2 * steps.slow}, {"16", kLanes}}, 0);
  const Tensor words = tensor_at(packed, 9);
  expect(name, "rope steps' words", words, {{"rows / 2", steps.rows / 2}, {"M", steps.M}, {"2", 2}}, 0);
  steps.words = words.as<int16_t>();
  const int64_t columns = place.dims == 1 ? place.shape[0] : 0;
  if (columns < 1 || columns > rope.columns) fail(name, "rope steps' places: expected one per column of the table");
  expect(name, "rope steps' places", place, {{"columns", columns}}, 0);
  auto memory = std::make_unique<float[]>(ceil_div(sizeof(RopeSteps), sizeof(float)) + rope.columns + steps.pairs());
  auto* pair = reinterpret_cast<int32_t*>(memory.get() + ceil_div(sizeof(RopeSteps), sizeof(float)));
  int32_t* column = pair + rope.columns;
  std::fill(pair, column + steps.pairs(), 0);
  for (int64_t c = columns; c-- > 0;) {
    const int32_t at = place.as<int32_t>()[c];
    if (at >= steps.fast || at < -steps.slow) fail(name, "rope steps' places: expected one per column");
    pair[c] = static_cast<int32_t>(at >= 0 ? at : steps.fast - 1 - at);
    column[pair[c]] = static_cast<int32_t>(c);
  }
  steps.pair = pair;
  steps.column = column;
  steps.in_order = round_up(steps.pairs(), kLanes) <= rope.columns;
  for (int64_t i = 0; i < steps.pairs(); i++) steps.in_order &= column[i] == i;
  rope.steps = new (memory.get()) RopeSteps(steps);
  tables_.push_back(std::move(memory));
}

// Each column of cos and of sin that a channel takes once, in the order of channels.
void Operands::turned_columns(RopeView& rope, int64_t D) {
  auto memory = std::make_unique<float[]>(4 * D + rope.columns);
  auto* turned = reinterpret_cast<TurnedChannel*>(memory.get());
  auto* columns = reinterpret_cast<int32_t*>(turned + D);
  int32_t* row = columns + 2 * D;
  const auto add = [&](int32_t column) {
    if (row[column] < 0) {
      row[column] = static_cast<int32_t>(rope.reads);
      columns[rope.reads++] = column;
    }
    return row[column];
  };
  std::fill(row, row + rope.columns, -1);
  for (int64_t d = 0; d < D; d++) turned[d].cos = rope.channels[d].partner < 0 ? -1 : add(rope.channels[d].cos_column);
  rope.reads_cos = rope.reads;
  std::fill(row, row + rope.columns, -1);
  for (int64_t d = 0; d < D; d++) turned[d].sin = rope.channels[d].partner < 0 ? -1 : add(rope.channels[d].sin_column);
  rope.read = columns;
  rope.turned = turned;
  tables_.push_back(std::move(memory));
}

// (8, part, rotation 3x): [D, D], or [1 or B, H, D, D]
void Operands::parse_rotated(View& v, const std::string& name, nb::handle packed) {
  if (!tiled_) fail(name, "expected a rotation under RoPE");
  parse_parts(v, name, packed, 1, 1);
  v.D = v.parts[0].D;
  const Tensor rotation = tensor_at(packed, 2);
  if (rotation.dims == 4) {
    const int64_t B = rotation.shape[0] == 1 ? 1 : B_;
    expect(name, "rotation", rotation, {{"B", B}, {"H", H_}, {"D", v.D}, {"D", v.D}}, 2);
    v.rotation_stride_b = B == 1 ? 0 : rotation.stride[0];
    v.rotation_stride_h = rotation.stride[1];
  } else {
    expect(name, "rotation", rotation, {{"D", v.D}, {"D", v.D}}, 0);
  }
  v.rotation = rotation.as<float>();
}

}  // namespace tersekv
