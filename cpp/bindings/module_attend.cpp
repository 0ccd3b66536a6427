// Binding of attention: one call reads all segments of a layer, applies their linear maps and
// merges them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <numeric>

#include "attention.h"
#include "rope_kernel.h"

namespace tersekv {

using namespace nb::literals;

namespace {

// Build a call from keys and values of the same tokens. shared: the values are the first channels of the
// keys, so many, and `values` are the keys; 0: they are not.
Call call_of(const NativeView& keys, const NativeView& values, int64_t& B, int64_t& H, int64_t shared = 0) {
  const bool first = keys.view.kind == Kind::concat && keys.view.parts[0].D == shared;
  if (shared && (!first || keys.has_rope)) throw NotTaken("shared values are not the first part of the keys");
  if (keys.view.kind == Kind::rotated || values.view.kind == Kind::rotated)
    throw NotTaken("a rotation is supported only before RoPE");
  if (keys.side == 2 && !shared) fail("keys: ", "expected a grid of keys, got one of values");
  if (values.side == 1 && !shared) fail("values: ", "expected a grid of values, got one of keys");
  if (values.has_rope) throw NotTaken("values have RoPE, which only keys have");
  if (values.view.T != keys.view.T)
    fail("values: ",
         "expected T = " + std::to_string(keys.view.T) + " tokens like the keys, got " + std::to_string(values.view.T));
  Call call;
  call.tokens_per_unit = in_range("", "least common multiple of the block sizes of keys and values",
                                  std::lcm(keys.view.t, values.view.t), kMostBlockTokens);
  call.T = keys.view.T;
  call.D = keys.view.D;
  call.Dv = shared ? shared : values.view.D;
  call.keys = &keys.view;
  call.values = shared ? keys.view.parts : &values.view;
  call.shared = shared > 0;
  for (const auto* side : {&keys, &values}) {
    if (side->H != 0 && H != 0 && side->H != H)
      fail("", "expected " + std::to_string(H) + " key-value heads, got " + std::to_string(side->H));
    if (side->B != 1 && B != 1 && side->B != B)
      fail("", "expected " + std::to_string(B) + " batch rows, got " + std::to_string(side->B));
    H = std::max(H, side->H);
    B = std::max(B, side->B);
  }
  return call;
}

HeadMatrix matrix_of(Owner& owner, nb::handle rotation, nb::handle basis, nb::handle channels, int64_t B, int64_t H,
                     int64_t D) {
  HeadMatrix out;
  if (const Tensor x = owner.keep_optional("rotation", rotation, kFloat32); x.given()) {
    out.dense = x.as<float>();
    if (x.dims == 2) {
      expect("", "rotation", x, {{"D", D}, {"D", D}}, 0);
    } else {
      expect("", "rotation", x, {{"B", x.dims == 4 && x.shape[0] == 1 ? 1 : B}, {"H", H}, {"D", D}, {"D", D}}, 2);
      out.dense_b = batch_stride(x);
      out.dense_h = x.stride[1];
    }
  }
  if (const Tensor x = owner.keep_optional("basis", basis, kUint8); x.given()) {
    if (D % 4) throw NotTaken("vectors have " + std::to_string(D) + " channels, not a multiple of 4");
    const Tensor scale = owner.keep("channels", channels, kFloats);
    expect("", "basis", x, {{"B", x.dims == 3 && x.shape[0] == 1 ? 1 : B}, {"H", H}, {"bytes", D * D * 3 / 4}}, 2);
    expect("", "channels", scale, {{"B", scale.dims == 3 && scale.shape[0] == 1 ? 1 : B}, {"H", H}, {"D", D}}, 2);
    out.codes = x.as<uint8_t>();
    out.codes_b = batch_stride(x);
    out.codes_h = x.stride[1];
    out.type = scale.float_type();
    out.channels = scale.as<void>();
    out.channels_b = batch_stride(scale);
    out.channels_h = scale.stride[1];
  }
  return out;
}

bool same_positions(const RopeView& a, const RopeView& b, int64_t B) {
  if (a.offsets != b.offsets || a.table != b.table || a.marks.positions != b.marks.positions) return false;
  for (int64_t row = 0; row < B; row++)
    if (a.places[row * a.stride_b] != b.places[row * b.stride_b]) return false;
  return true;
}

// If keys are codes and then a rotated mean at marks, add the mean and the marks to those of the pages,
// unless they are there. Return their numbers, or -1.
std::pair<int, int> take_mean(NativePages& pages, const View& keys) {
  if (keys.kind != Kind::concat || keys.count != 2) return {-1, -1};
  const View& view = keys.parts[1];
  const Marks& marks = view.rope.marks;
  if (view.kind != Kind::rotated_mean || !marks.bits || !view.rope.offsets) return {-1, -1};
  size_t mean = 0, set = 0;
  const auto same_mean = [&](const View& other) {
    return other.dense.data == view.dense.data && other.dense.stride_b == view.dense.stride_b &&
           other.dense.stride_h == view.dense.stride_h && same_positions(other.rope, view.rope, pages.B);
  };
  while (mean < pages.means.size() && !same_mean(pages.means[mean].view)) mean++;
  if (mean == pages.means.size()) {
    MarkedMean& made = pages.means.emplace_back(MarkedMean{view, {}, {}});
    made.view.T = marks.positions;
    made.view.rope.consecutive = true;
  }
  MarkedMean& of = pages.means[mean];
  while (set < of.sets.size() && of.sets[set].bits != marks.bits) set += 2;
  for (const bool value : {false, true}) {
    if (set + value < of.sets.size()) continue;
    const Marks made = {marks.bits, marks.stride_b, marks.stride_h, marks.positions, nullptr, 0, value};
    int64_t most = 0;
    for (int64_t b = 0; b < (marks.stride_b ? pages.B : 1); b++)
      for (int64_t h = 0; h < pages.H; h++) most = std::max(most, marks_of(made, b, h).count(made.positions));
    of.sets.push_back(made);
    of.tokens.push_back(most);
  }
  return {static_cast<int>(mean), static_cast<int>(set)};
}

// Query rows from which packed tokens are decoded in tiles: if codes are multiplied without that, and if they are
// decoded again for every few rows.
constexpr int64_t kLeastCodedRows = 65, kLeastDecodedRows = 5;

// True if codes have no product of their own: grids of more bits than fit a register, also before RoPE.
bool is_decoded(const View& view) {
  if (view.kind == Kind::grid) return view.grid.bits > kLutBits;
  if (view.kind == Kind::roped && !roped_codes(view.parts[0])) return true;
  for (int i = 0; i < view.count; i++)
    if (is_decoded(view.parts[i])) return true;
  return false;
}

NativePages* make_pages(const std::vector<nb::object>& keys, const std::vector<nb::object>& values,
                        const std::vector<int64_t>& first, const std::vector<nb::object>& marks,
                        nb::handle key_rotation, nb::handle key_basis, nb::handle key_channels, bool keeps_query,
                        nb::handle value_rotation, nb::handle value_basis, nb::handle value_channels,
                        nb::handle value_mean, const std::vector<nb::object>& corrections, int64_t shared) {
  auto made = std::make_unique<NativePages>();
  if (keys.empty() || keys.size() != values.size() || keys.size() != first.size() || keys.size() != marks.size() ||
      keys.size() != corrections.size())
    fail("pages: ", "expected equally many keys, values, positions, marks and corrections, at least one of each");
  made->keys = keys;
  made->values = values;
  made->first = first;
  for (size_t i = 0; i < keys.size(); i++) {
    made->calls.push_back(call_of(nb::cast<const NativeView&>(keys[i]), nb::cast<const NativeView&>(values[i]), made->B,
                                  made->H, shared));
    const Call &call = made->calls[i], &any = made->calls[0];
    if (call.D != any.D || call.Dv != any.Dv) fail("pages: ", "expected the same number of channels in all pages");
    if (first[i] < 0 || first[i] > kMostElements) fail("first: ", "expected positions of 0 or more");
  }
  for (size_t i = 0; i < keys.size(); i++) {
    made->marks.push_back(take_marks(made->owner, marks[i], made->B, made->H, made->calls[i].T, &made->calls[i].ends));
    made->shared.push_back(take_mean(*made, *made->calls[i].keys));
  }
  const int64_t D = made->calls[0].D, Dv = made->calls[0].Dv;
  if (keeps_query && D % 2) fail("keys: ", "expected an even number of channels: mapped ones, then unmapped ones");
  made->keeps_query = keeps_query;
  made->mapped = shared ? shared : keeps_query ? D / 2 : D;
  made->query = matrix_of(made->owner, key_rotation, key_basis, key_channels, made->B, made->H, made->mapped);
  made->output.matrix = matrix_of(made->owner, value_rotation, value_basis, value_channels, made->B, made->H, Dv);
  if (const Tensor x = made->owner.keep_optional("mean", value_mean, kFloats); x.given()) {
    expect("", "mean", x, {{"B", x.dims == 3 && x.shape[0] == 1 ? 1 : made->B}, {"H", made->H}, {"Dv", Dv}}, 2);
    made->output.type = x.float_type();
    made->output.mean = x.as<void>();
    made->output.mean_b = batch_stride(x);
    made->output.mean_h = x.stride[1];
  }
  for (const nb::object& correction : corrections) {
    Correction& of = made->corrections.emplace_back();
    const Tensor x = made->owner.keep_optional("correction", correction, kFloat32);
    if (!x.given()) continue;
    const int64_t inner = keeps_query ? D / 2 : D;
    expect("", "correction", x, {{"B", x.dims == 3 && x.shape[0] == 1 ? 1 : made->B}, {"H", made->H}, {"D", inner}}, 2);
    of = {x.as<float>(), batch_stride(x), x.stride[1]};
    made->corrected = true;
  }
  bool tiled = !shared, slow = false;
  for (const Call& call : made->calls) {
    const View& view = *call.keys;
    const bool with_mean = view.kind == Kind::concat && view.count == 2 && view.parts[1].kind == Kind::rotated_mean;
    tiled &= keeps_query ? with_mean && 2 * view.parts[0].D == D : view.kind != Kind::exact || !made->query.given();
    slow |= is_decoded(view) || is_decoded(*call.values);
  }
  if (tiled) made->tile_rows = slow ? kLeastDecodedRows : kLeastCodedRows;
  return made.release();
}

// Read rows `rows` int64 [B] of the first axis, one per batch row.
void take_rows(NativeView& v, const Tensor& rows, int64_t batch) {
  expect("", "rows", rows, {{"B", batch}}, 0);
  for (int64_t b = 0; b < batch; b++)
    if (const int64_t at = rows.as<int64_t>()[b]; at < 0 || at >= v.B)
      fail("rows: ", "expected 0 to " + std::to_string(v.B - 1) + ", got " + std::to_string(at));
  v.view.dense.rows = rows.as<int64_t>();
  v.B = 1;
}

// exact: a tuple of (keys, values, where) or (keys, values, where, rows) with tensors [B, H, T, D],
// which come before the pages. rows: int64, index along the first axis of each batch row.
void py_attend(nb::handle query, nb::handle exact, nb::handle pages, nb::handle where, nb::handle table,
               int64_t page_tokens, nb::handle mask, nb::handle hidden, double scaling, double softcap,
               nb::handle sinks, nb::handle out, nb::handle lse, int threads) {
  Attention attention(query, mask, hidden, scaling, softcap);
  const Py_ssize_t n = PyTuple_Check(exact.ptr()) ? NB_TUPLE_GET_SIZE(exact.ptr()) : 0;
  const NativePages* packed = pages.is_none() ? nullptr : &nb::cast<const NativePages&>(pages);
  int64_t B = 1, H = 0;
  std::vector<NativeView> views;
  views.reserve(2 * n);
  for (Py_ssize_t i = 0; i < n; i++) {
    const nb::handle segment = item(exact, i);
    views.push_back(view_of_tokens("keys", tensor_of("keys", item(segment, 0), kFloats)));
    views.push_back(view_of_tokens("values", tensor_of("values", item(segment, 1), kFloats)));
    if (NB_TUPLE_GET_SIZE(segment.ptr()) < 4) continue;
    const Tensor rows = tensor_of("rows", item(segment, 3), kInt64);
    for (NativeView* view : {&views[2 * i], &views[2 * i + 1]}) take_rows(*view, rows, attention.batch());
  }
  std::vector<Call> calls;
  for (Py_ssize_t i = 0; i < n; i++) calls.push_back(call_of(views[2 * i], views[2 * i + 1], B, H));
  if (packed) {
    packed->check_unmoved();
    if (H != 0 && packed->H != 0 && packed->H != H)
      fail("pages: ", "expected as many key-value heads as the exact tokens have");
    H = std::max(H, packed->H);
    B = std::max(B, packed->B);
  }
  if (!packed && n == 0) fail("segments: ", "expected at least one");
  attention.set_heads(H, threads);
  if (B != 1 && B != attention.batch())
    fail("query: ", "expected B = " + std::to_string(B) + ", got " + std::to_string(attention.batch()));
  for (Py_ssize_t i = 0; i < n; i++) attention.add(calls[i], item(item(exact, i), 2));
  if (packed) attention.add(*packed, where, table, page_tokens, threads);
  attention.run(sinks, out, lse, threads);
}

constexpr int64_t kDecodedAtOnce = 256;  // tokens of a task, whose rows fit the L2 cache

// out: float32 or bfloat16 [B, H, T, D], fresh and contiguous.
void py_decode(const NativeView& view, nb::handle out, int threads) {
  if (view.view.kind == Kind::exact) throw NotTaken("only packed tokens are decoded");
  view.check_unmoved();
  const Tensor to = tensor_of("out", out, kFloats);
  if (to.dims != 4) fail("out: ", "expected [B, H, T, D]");
  const int64_t B = to.shape[0], H = to.shape[1];
  expect("", "out", to, {{"B", view.B == 1 ? B : view.B}, {"H", view.H}, {"T", view.view.T}, {"D", view.view.D}}, 0);
  const Float type = to.float_type();
  if (type == Float::f16) throw NotTaken("tokens are decoded to float32 and bfloat16");
  const int64_t t = view.view.t;
  const Decode call = {
      &view.view, B, H, view.side != 2, type, reinterpret_cast<void*>(to.address), ceil_div(kDecodedAtOnce, t) * t};
  nb::gil_scoped_release release;
  decode(call, threads);
}

}  // namespace

void define_attention(nb::module_& m) {
  nb::class_<NativePages>(m, "Pages", "Packed pages of one layer with their linear maps.")
      .def_prop_ro("head_dim", [](const NativePages& p) { return p.calls[0].Dv; });
  m.def("pages", &make_pages, nb::kw_only(), "keys"_a, "values"_a, "first"_a, "marks"_a, "key_rotation"_a.none(),
        "key_basis"_a.none(), "key_channels"_a.none(), "keeps_query"_a, "value_rotation"_a.none(),
        "value_basis"_a.none(), "value_channels"_a.none(), "value_mean"_a.none(), "corrections"_a, "shared"_a = 0,
        nb::rv_policy::take_ownership);
  m.def("decode", &py_decode, "view"_a, "out"_a, "threads"_a);
  m.def("attend", &py_attend, "query"_a, "exact"_a, "pages"_a.none(), "where"_a.none(), "table"_a.none(),
        "page_tokens"_a, "mask"_a.none(), "hidden"_a.none(), "scaling"_a, "softcap"_a, "sinks"_a.none(), "out"_a,
        "lse"_a.none(), "threads"_a);
}

}  // namespace tersekv
