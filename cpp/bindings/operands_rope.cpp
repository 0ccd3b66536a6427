// RoPE of a model, keys before RoPE, and the rotated mean.
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "operands.h"
#include "rope_kernel.h"

namespace tersekv {

using namespace nb::literals;

namespace {

// Positions per token up to which rotated means are computed for all positions in order. More cost
// more than the angles of each token.
constexpr int64_t kSparsest = 16, kLeastRun = 64;

// channels: int32 [D, 4], partner, columns of cos and sin, sign.
void take_channels(NativeRope& made, const Tensor& channels) {
  RopeView& rope = made.rope;
  made.D = channels.dims == 2 ? channels.shape[0] : 0;
  in_range("", "rope channels", made.D, kMostChannels);
  expect("", "rope channels", channels, {{"D", made.D}, {"4", 4}}, 0);
  rope.channels = channels.as<RopeChannel>();
  for (int64_t d = 0; d < made.D; d++) {
    const RopeChannel& channel = rope.channels[d];
    if (channel.partner < 0) continue;
    const bool inside = channel.partner < made.D && channel.cos_column >= 0 && channel.cos_column < rope.columns &&
                        channel.sin_column >= 0 && channel.sin_column < rope.columns &&
                        (channel.sign == 1 || channel.sign == -1);
    if (!inside || rope.channels[channel.partner].partner != d || rope.channels[channel.partner].sign != -channel.sign)
      fail("rope channels: ", "expected channels in pairs, with valid columns of cos and sin");
  }
}

// List each column of cos and of sin that a channel uses once, in the order of channels. Return
// true if channels use the same columns of cos and sin.
bool take_columns(NativeRope& made) {
  RopeView& rope = made.rope;
  auto* rotated = made.owner.memory<RotatedChannel>(made.D);
  auto* columns = made.owner.memory<int32_t>(2 * made.D);
  std::vector<int32_t> row(rope.columns, -1);
  const auto add = [&](int32_t column) {
    if (row[column] < 0) {
      row[column] = static_cast<int32_t>(rope.reads);
      columns[rope.reads++] = column;
    }
    return row[column];
  };
  for (int64_t d = 0; d < made.D; d++)
    rotated[d].cos = rope.channels[d].partner < 0 ? -1 : add(rope.channels[d].cos_column);
  rope.reads_cos = rope.reads;
  std::fill(row.begin(), row.end(), -1);
  for (int64_t d = 0; d < made.D; d++)
    rotated[d].sin = rope.channels[d].partner < 0 ? -1 : add(rope.channels[d].sin_column);
  rope.read = columns;
  rope.rotated = rotated;
  bool same =
      rope.reads == 2 * rope.reads_cos && std::equal(columns, columns + rope.reads_cos, columns + rope.reads_cos);
  for (int64_t d = 0; d < made.D; d++) same &= rotated[d].cos < 0 || rotated[d].sin == rotated[d].cos + rope.reads_cos;
  return same;
}

// int16_offsets: int16 [D/4, 2, kInt16Offsets, 2].
void take_int16_offsets(NativeRope& made, const Tensor& int16_offsets) {
  const int64_t half = made.D / 2;
  bool halves = made.D % 4 == 0;
  for (int64_t d = 0; halves && d < half; d++) {
    const RopeChannel &a = made.rope.channels[d], &b = made.rope.channels[d + half];
    halves = a.partner == d + half && a.sign == -1;
    for (const int32_t column : {a.sin_column, b.cos_column, b.sin_column}) halves &= column == a.cos_column;
  }
  if (!halves) fail("int16_offsets: ", "expected channels d and d + D/2 to be a pair with one column");
  expect("", "int16_offsets", int16_offsets, {{"D/4", half / 2}, {"2", 2}, {"offsets", kInt16Offsets}, {"2", 2}}, 0);
  made.rope.int16_offsets = int16_offsets.as<int16_t>();
}

// parts: (table, matrix, place, words). place is int32 [columns]: the number of a fast column, or
// -1 minus the number of a slow one.
void take_offsets(NativeRope& made, const std::vector<nb::object>& parts) {
  RopeView& rope = made.rope;
  if (parts.size() != 4) fail("offsets: ", "expected a table, a matrix, places and words");
  const Tensor table = made.owner.keep("offsets", parts[0], kFloat32),
               matrix = made.owner.keep("offsets", parts[1], kFloat32),
               place = made.owner.keep("offsets", parts[2], kInt32),
               words = made.owner.keep("offsets", parts[3], kInt16);
  if (table.dims != 2 || matrix.dims != 2 || table.shape[1] < kLanes || table.shape[1] % kLanes ||
      table.shape[0] > 2 * rope.columns + kLanes || matrix.shape[0] > 2 * rope.columns)
    fail("offsets: ", "expected a table [rows, M] and a matrix [2·slow, 16], M a multiple of 16");
  RopeOffsets offsets{table.shape[1], table.shape[0]};
  offsets.slow = matrix.shape[0] / 2;
  const int64_t terms = offsets.slow ? kLanes : 0;
  offsets.fast = (offsets.rows - terms) / 2;
  offsets.table = table.as<float>();
  offsets.matrix = matrix.as<float>();
  expect("", "offsets' table", table, {{"rows", 2 * offsets.fast + terms}, {"M", offsets.M}}, 0);
  expect("", "offsets' matrix", matrix, {{"rows", 2 * offsets.slow}, {"16", kLanes}}, 0);
  expect("", "offsets' words", words, {{"rows / 2", offsets.rows / 2}, {"M", offsets.M}, {"2", 2}}, 0);
  offsets.words = words.as<int16_t>();
  const int64_t columns = place.dims == 1 ? place.shape[0] : 0;
  if (columns < 1 || columns > rope.columns) fail("offsets' places: ", "expected one per column of the table");
  expect("", "offsets' places", place, {{"columns", columns}}, 0);
  auto* pair = made.owner.memory<int32_t>(rope.columns);
  auto* column = made.owner.memory<int32_t>(offsets.pairs());
  std::fill(pair, pair + rope.columns, 0);
  std::fill(column, column + offsets.pairs(), 0);
  for (int64_t c = columns; c-- > 0;) {
    const int32_t at = place.as<int32_t>()[c];
    if (at >= offsets.fast || at < -offsets.slow) fail("offsets' places: ", "expected numbers of fast or slow columns");
    pair[c] = static_cast<int32_t>(at >= 0 ? at : offsets.fast - 1 - at);
    column[pair[c]] = static_cast<int32_t>(c);
  }
  offsets.pair = pair;
  offsets.column = column;
  offsets.in_order = round_up(offsets.pairs(), kLanes) <= rope.columns;
  for (int64_t i = 0; i < offsets.pairs(); i++) offsets.in_order &= column[i] == i;
  rope.offsets = new (made.owner.memory<RopeOffsets>(1)) RopeOffsets(offsets);
}

// Build a model's RoPE. Any position is safe to read: digits are truncated to the table's rows,
// and row numbers of a table of one digit are clamped.
NativeRope* make_rope(nb::handle table, nb::handle channels, const std::vector<nb::object>& offsets,
                      nb::handle int16_offsets) {
  auto made = std::make_unique<NativeRope>();
  RopeView& rope = made->rope;
  const Tensor angles = made->owner.keep("table of angles", table, kFloat32);
  if (angles.dims != 4 || angles.shape[0] < 1 || angles.shape[0] > kMostTableDigits || angles.shape[1] < 1 ||
      (angles.shape[0] > 1 && angles.shape[1] != kTableBase) || angles.shape[3] < kLanes || angles.shape[3] % kLanes)
    fail("table of angles: ", "expected [digits, 64, 2, columns] or [1, rows, 2, columns], whole vectors of columns");
  rope.digits = angles.shape[0];
  rope.table_rows = angles.shape[1];
  rope.columns = in_range("", "columns of the table of angles", angles.shape[3], kMostChannels);
  expect("", "table of angles", angles,
         {{"digits", rope.digits}, {"rows", rope.table_rows}, {"2", 2}, {"columns", rope.columns}}, 0);
  rope.table = angles.as<float>();
  take_channels(*made, made->owner.keep("rope channels", channels, kInt32));
  const bool same = take_columns(*made);
  if (!offsets.empty()) {
    if (rope.digits == 1) fail("offsets: ", "expected a table of positions, not one row per token");
    if (!same) fail("offsets: ", "expected cosines and sines of the same columns");
    take_offsets(*made, offsets);
  }
  if (!int16_offsets.is_none()) take_int16_offsets(*made, made->owner.keep("int16_offsets", int16_offsets, kInt16));
  return made.release();
}

// True if tokens are in runs that ascend, which span at most kSparsest positions per token. A run costs as much as
// kLeastRun positions.
bool are_dense_runs(const Tensor& places) {
  const int64_t T = places.shape[2];
  for (int64_t b = 0; b < places.shape[0]; b++)
    for (int64_t h = 0; h < places.shape[1]; h++) {
      const int32_t* at = places.as<int32_t>() + b * places.stride[0] + h * places.stride[1];
      if (T < 1 || at[0] < 0) return false;
      int64_t span = 0;
      for (int64_t t = 1; t < T; t++) {
        if (at[t] < 0) return false;
        span += at[t] < at[t - 1] ? kLeastRun : at[t] - at[t - 1];
      }
      if (span >= kSparsest * T) return false;
    }
  return true;
}

// places int32 [1 or B, 1 or H, T or 1]: of each token, or only of the first one if positions are
// consecutive, or of the first mark.
void take_rope(NativeView& made, const nb::object& rope, nb::handle places, nb::handle marks) {
  View& v = made.view;
  const auto& of = nb::cast<const NativeRope&>(rope);
  made.rope = rope;
  v.rope = of.rope;
  if (of.D != v.D) fail("rope: ", "expected " + std::to_string(v.D) + " channels, got " + std::to_string(of.D));
  const Tensor at = made.owner.keep("places", places, kInt32);
  if (at.dims != 3) fail("places: ", "expected [1 or B, 1 or H, T or 1]");
  if (at.shape[0] != 1 && made.B == 1) made.B = at.shape[0];
  const int64_t B = at.shape[0] == 1 ? 1 : made.B, H = at.shape[1] == 1 ? 1 : made.H,
                tokens = at.shape[2] == 1 ? 1 : v.T;
  expect("", "places", at, {{"B", B}, {"H", H}, {"T", tokens}}, 2);
  RopeView& rope_view = v.rope;
  rope_view.places = at.as<int32_t>();
  rope_view.stride_b = batch_stride(at);
  rope_view.stride_h = H == 1 ? 0 : at.stride[1];
  rope_view.consecutive = tokens == 1;
  rope_view.stride_t = rope_view.consecutive ? 0 : 1;
  if (!marks.is_none()) {
    if (tokens != 1 || at.shape[1] != 1) fail("places: ", "expected one position per batch row next to marks");
    if (PyTuple_Check(marks.ptr()) && made.B == 1) made.B = tensor_of("marks", item(marks, 0), kUint8).shape[0];
    rope_view.marks = take_marks(made.owner, marks, made.B, made.H, v.T);
    rope_view.consecutive = false;
    rope_view.int16_offsets = nullptr;
  } else if (!rope_view.consecutive) {
    if (!are_dense_runs(at)) rope_view.offsets = nullptr;
    rope_view.int16_offsets = nullptr;
  }
  made.has_rope = true;
}

NativeView* roped_view(const nb::object& inner, const nb::object& rope, nb::handle places, nb::handle marks) {
  auto made = std::make_unique<NativeView>();
  View& v = made->view;
  v.kind = Kind::roped;
  take_parts(*made, {inner});
  if (made->has_rope) throw NotTaken("RoPE is applied twice");
  v.D = v.parts[0].D;
  take_rope(*made, rope, places, marks);
  return made.release();
}

NativeView* rotated_mean_view(nb::handle mean, int64_t tokens, const nb::object& rope, nb::handle places,
                              nb::handle marks) {
  auto made = std::make_unique<NativeView>();
  View& v = made->view;
  v.kind = Kind::rotated_mean;
  const Tensor vector = made->owner.keep("mean", mean, kFloats);
  if (vector.dims != 3) fail("mean: ", "expected [1 or B, H, D]");
  if (vector.last_stride() != 1) throw NotTaken("the mean is not contiguous along its last axis");
  if (tokens < 0 || tokens > kMostElements) fail("tokens: ", "expected 0 or more");
  made->B = vector.shape[0];
  made->H = vector.shape[1];
  v.T = tokens;
  v.D = in_range("", "head_dim", vector.shape[2], kMostChannels);
  v.dense = {vector.float_type(), vector.as<void>(), batch_stride(vector), vector.stride[1], 0};
  take_rope(*made, rope, places, marks);
  return made.release();
}

// rotation float32 [D, D], or [1 or B, H, D, D]: x = rotation^T * inner.
NativeView* rotated_view(const nb::object& inner, nb::handle rotation) {
  auto made = std::make_unique<NativeView>();
  View& v = made->view;
  v.kind = Kind::rotated;
  take_parts(*made, {inner});
  if (made->has_rope) throw NotTaken("a rotation is applied after RoPE");
  v.D = v.parts[0].D;
  const Tensor matrix = made->owner.keep("rotation", rotation, kFloat32);
  if (matrix.dims == 4) {
    const int64_t B = matrix.shape[0] == 1 ? 1 : made->B;
    expect("", "rotation", matrix, {{"B", B}, {"H", made->H}, {"D", v.D}, {"D", v.D}}, 2);
    v.rotation_stride_b = batch_stride(matrix);
    v.rotation_stride_h = matrix.stride[1];
  } else {
    expect("", "rotation", matrix, {{"D", v.D}, {"D", v.D}}, 0);
  }
  v.rotation = matrix.as<float>();
  return made.release();
}

}  // namespace

Marks take_marks(Owner& owner, nb::handle marks, int64_t B, int64_t H, int64_t tokens, const int64_t** ends) {
  Marks made;
  if (marks.is_none()) return made;
  if (!PyTuple_Check(marks.ptr()) || NB_TUPLE_GET_SIZE(marks.ptr()) != 3)
    fail("marks: ", "expected (bits, numbers, ends)");
  const Tensor bits = owner.keep("marks", nb::handle(item(marks, 0)), kUint8);
  const int64_t n = bits.dims == 3 ? bits.shape[2] : 0;
  expect("", "marks", bits, {{"B", bits.dims == 3 && bits.shape[0] == 1 ? 1 : B}, {"H", H}, {"n", n}}, 2);
  const Tensor numbers = owner.keep("numbers", nb::handle(item(marks, 1)), kInt64);
  expect("", "numbers", numbers, {{"B", numbers.dims == 3 && numbers.shape[0] == 1 ? 1 : B}, {"H", H}, {"2", 2}}, 0);
  made = {bits.as<uint8_t>(), batch_stride(bits), bits.stride[1], n * 8, numbers.as<int64_t>(), batch_stride(numbers)};
  const Tensor last = owner.keep_optional("ends", nb::handle(item(marks, 2)), kInt64);
  if (last.given()) expect("", "ends", last, {{"B", B}, {"H", H}}, 0);
  if (ends && last.given()) *ends = last.as<int64_t>();
  const int64_t rows = last.given() ? B : std::max(bits.shape[0], numbers.shape[0]);
  for (int64_t head = 0, first = 0; head < rows * H; head++) {
    const int64_t end = last.given() ? last.as<int64_t>()[head] : tokens;
    if (end < first || end > tokens) fail("ends: ", "expected tokens that ascend to " + std::to_string(tokens));
    const HeadMarks own = marks_of(made, head / H, head % H);
    if (own.skip < -first || own.skip > kMostElements) fail("marks: ", "expected to skip 0 tokens or more");
    if (const int64_t held = own.count(made.positions); end > first && held < own.skip + end)
      fail("marks: ", "expected " + std::to_string(own.skip + end) + " tokens, got " + std::to_string(held));
    if (last.given()) first = end;
  }
  return made;
}

void define_rope_views(nb::module_& m) {
  const auto own = nb::rv_policy::take_ownership;
  nb::class_<NativeRope>(m, "Rope", "RoPE of a model's keys, for all pages.")
      .def("check_unmoved", [](const NativeRope& of) { of.owner.check_unmoved(); });
  m.def("rope", &make_rope, nb::kw_only(), "table"_a, "channels"_a, "offsets"_a, "int16_offsets"_a.none(), own,
        "See transforms/rope.py.");
  m.def("roped", &roped_view, "inner"_a, "rope"_a, "places"_a, "marks"_a.none() = nb::none(), own, "Keys before RoPE.");
  m.def("rotated_mean", &rotated_mean_view, nb::kw_only(), "mean"_a, "tokens"_a, "rope"_a, "places"_a,
        "marks"_a.none() = nb::none(), own, "One vector per head, rotated to each token's position.");
  m.def("rotated", &rotated_view, "inner"_a, "rotation"_a, own, "A rotation that is applied before RoPE.");
}

}  // namespace tersekv
