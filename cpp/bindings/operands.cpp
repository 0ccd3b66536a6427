// Unpacked tokens, grids, and views composed of views.
#include "operands.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <numeric>

#include "half_words.h"

namespace tersekv {

using namespace nb::literals;

Tensor Owner::keep(const std::string& name, nb::handle x, unsigned types) {
  const Tensor tensor = tensor_of(name, x, types);
  tensors_.push_back({nb::borrow(x), tensor.address});
  return tensor;
}

void Owner::check_unmoved() const {
  for (const HeldTensor& held : tensors_)
    if (address_of(held.tensor) != held.address)
      throw Moved("the memory of a tensor has moved since its page was packed");
}

void NativeView::check_unmoved() const {
  owner.check_unmoved();
  for (const nb::object& part : parts) nb::cast<const NativeView&>(part).check_unmoved();
  if (rope.is_valid()) nb::cast<const NativeRope&>(rope).owner.check_unmoved();
}

int64_t take_sizes(NativeView& v, const char* what, const Tensor& plane, int dims) {
  if (plane.dims < dims) fail(what, ": expected [B, H, N, ...]");
  v.B = plane.shape[0];
  v.H = plane.shape[1];
  if (std::max(v.B, v.H) > kMostHeads)
    fail(what, ": expected at most " + std::to_string(kMostHeads) + " batch rows and heads");
  return plane.shape[2];
}

Plane plane_of(const char* what, const Tensor& x, std::initializer_list<Size> sizes) {
  expect("", what, x, sizes, 3);
  return {x.as<uint16_t>(), batch_stride(x), x.stride[1], x.stride[2]};
}

NativeView view_of_tokens(const std::string& name, const Tensor& x) {
  if (x.dims != 4) throw NotTaken(name + " have " + std::to_string(x.dims) + " axes, not 4");
  if (x.last_stride() != 1)
    throw NotTaken(name + " have stride " + std::to_string(x.stride[3]) + " along their last axis, not 1");
  NativeView v;
  v.view.T = x.shape[2];
  v.view.D = in_range(name, ": head_dim", x.shape[3], kMostChannels);
  v.B = x.shape[0];
  v.H = x.shape[1];
  v.view.dense = {x.float_type(), x.as<void>(), batch_stride(x), x.stride[1], x.stride[2]};
  return v;
}

namespace {

NativeView* exact_view(nb::handle x) {
  Owner owner;
  const Tensor tokens = owner.keep("tokens", x, kFloats);
  auto v = std::make_unique<NativeView>(view_of_tokens("tokens", tokens));
  v->owner = std::move(owner);
  return v.release();
}

// Build a view of matrices of P packed codes on L lanes: keys have P = D and L = t, values P = t
// and L = D.
NativeView* grid_view(bool of_keys, int64_t bits, bool per_token, int64_t group, int64_t block_tokens, int64_t head_dim,
                      nb::handle codes, nb::handle scale, nb::handle offset, nb::handle table) {
  auto made = std::make_unique<NativeView>();
  View& view = made->view;
  GridView& v = view.grid;
  view.kind = Kind::grid;
  if (bits < 1 || bits > 8) throw NotTaken("codes have " + std::to_string(bits) + " bits, the kernels support 1 to 8");
  v.bits = static_cast<int>(bits);
  made->side = of_keys ? 1 : 2;
  v.lane_scaled = per_token == of_keys;
  v.group = group;
  view.D = in_range("", "head_dim", head_dim, kMostChannels);
  view.t = in_range("", "block_tokens", block_tokens, kMostBlockTokens);
  v.P = of_keys ? view.D : view.t;
  v.L = of_keys ? view.t : view.D;
  if (view.t % kLanes) throw NotTaken("blocks have " + std::to_string(view.t) + " tokens, not a multiple of 16");
  const int64_t grouped = v.lane_scaled ? v.P : v.L;
  if (v.group < 1 || grouped % v.group != 0)
    fail("group: ", "expected a divisor of " + std::to_string(grouped) + ", got " + std::to_string(v.group));
  if (!v.lane_scaled && v.group % kLanes != 0 && v.group != v.L)
    throw NotTaken("groups have " + std::to_string(v.group) + " lanes, neither a multiple of 16 nor all " +
                   std::to_string(v.L));
  v.words = HalfWords(v.bits).words(v.P);
  Owner& owner = made->owner;
  const Tensor words = owner.keep("codes", codes, kInt32);
  const int64_t N = take_sizes(*made, "codes", words, 3);
  view.T = N * view.t;
  expect("", "codes", words,
         {{"B", made->B}, {"H", made->H}, {"N", N}, {"Lg", ceil_div(v.L, kLanes)}, {"W", v.words}, {"16", kLanes}}, 3);
  v.codes = words.as<int32_t>();
  take_strides(v, words);
  const int64_t groups = grouped / v.group, per_group = v.lane_scaled ? v.L : v.P;
  const auto ranges = [&](const char* what, const Tensor& x) {
    return plane_of(what, x, {{"B", made->B}, {"H", made->H}, {"N", N}, {"groups", groups}, {"per group", per_group}});
  };
  const Tensor scales = owner.keep("scale", scale, kHalves);
  v.half = scales.float_type();
  v.scale = ranges("scale", scales);
  if (const Tensor offsets = owner.keep_optional("offset", offset, one(scales.type)); offsets.given())
    v.offset = ranges("offset", offsets);
  const Tensor entries = owner.keep("table", table, kFloat32);
  if (entries.dims == 2) {
    expect("", "table", entries, {{"B", made->B}, {"2**bits", int64_t{1} << v.bits}}, 1);
    v.table_stride_b = batch_stride(entries);
  } else {
    expect("", "table", entries, {{"2**bits", int64_t{1} << v.bits}}, 0);
  }
  v.table = entries.as<float>();
  return made.release();
}

// Build a view of a grid times a second scale: a factor per token of keys, or per block and channel
// of values.
NativeView* scaled_view(nb::object part, nb::handle factor) {
  auto made = std::make_unique<NativeView>();
  View& v = made->view;
  v.kind = Kind::scaled;
  take_parts(*made, {part});
  const View& of = v.parts[0];
  if (of.kind != Kind::grid) throw NotTaken("a factor is not that of a grid");
  v.D = of.D;
  const Tensor plane = made->owner.keep("factor", factor, kHalves);
  v.factor_type = plane.float_type();
  const int64_t per_block = made->side == 1 ? of.t : of.D;
  v.factor = plane_of("factor", plane, {{"B", made->B}, {"H", made->H}, {"N", of.T / of.t}, {"per block", per_block}});
  return made.release();
}

constexpr int kMaxDepth = 8;

int depth_of(const View& view) {
  int most = 0;
  for (int64_t i = 0; i < view.count; i++) most = std::max(most, depth_of(view.parts[i]));
  return most + 1;
}

NativeView* parts_view(Kind kind, const std::vector<nb::object>& parts) {
  auto made = std::make_unique<NativeView>();
  View& v = made->view;
  v.kind = kind;
  take_parts(*made, parts);
  for (const nb::object& part : parts)
    if (const View& of = nb::cast<const NativeView&>(part).view; of.kind == Kind::roped || of.kind == Kind::rotated)
      throw NotTaken("a part is a view with RoPE, or a rotation");
  if (kind == Kind::concat) {
    for (int64_t i = 0; i < v.count; i++) v.D += v.parts[i].D;
  } else {
    v.D = v.parts[0].D;
    for (int64_t i = 1; i < v.count; i++)
      if (v.parts[i].D != v.D)
        fail("parts: ", "expected D = " + std::to_string(v.D) + ", got " + std::to_string(v.parts[i].D));
  }
  in_range("", "head_dim", v.D, kMostChannels);
  return made.release();
}

}  // namespace

void take_parts(NativeView& made, const std::vector<nb::object>& parts) {
  View& v = made.view;
  if (parts.empty()) fail("parts: ", "expected at least one");
  v.count = static_cast<int64_t>(parts.size());
  View* views = made.owner.memory<View>(v.count);
  int ropes = 0;
  for (int64_t i = 0; i < v.count; i++) {
    const auto& part = nb::cast<const NativeView&>(parts[i]);
    views[i] = part.view;
    if (part.view.T != views[0].T)
      fail("parts: ", "expected T = " + std::to_string(views[0].T) + " tokens, got " + std::to_string(part.view.T));
    v.t = in_range("", "least common multiple of the parts' block sizes", std::lcm(v.t, part.view.t), kMostBlockTokens);
    ropes += part.has_rope;
    if (part.side && made.side && part.side != made.side)
      fail("parts: ", "expected all parts to be of keys or all of values");
    made.side = std::max(made.side, part.side);
    if (part.H == 0) continue;
    if ((made.H != 0 && part.H != made.H) || (made.B != 1 && part.B != 1 && part.B != made.B))
      fail("parts: ", "expected the same batch and heads");
    made.H = part.H;
    made.B = std::max(made.B, part.B);
  }
  if (ropes > 1) throw NotTaken("several parts have RoPE");  // a thread caches the cosines of one only
  made.has_rope = ropes > 0;
  v.T = views[0].T;
  v.parts = views;
  made.parts = parts;
  if (depth_of(v) > kMaxDepth) fail("parts: ", "expected views nested at most " + std::to_string(kMaxDepth) + " deep");
}

void define_views(nb::module_& m) {
  nb::class_<NativeView>(m, "View", "Packed tokens of one page and one side, as the kernels read them.")
      .def_prop_ro("batch", [](const NativeView& v) { return v.B; })
      .def_prop_ro("heads", [](const NativeView& v) { return v.H; })
      .def_prop_ro("tokens", [](const NativeView& v) { return v.view.T; })
      .def_prop_ro("head_dim", [](const NativeView& v) { return v.view.D; });
  const auto own = nb::rv_policy::take_ownership;
  m.def("exact", &exact_view, "x"_a, own, "Unpacked tokens [B, H, T, D] of any float type.");
  m.def("grid", &grid_view, nb::kw_only(), "of_keys"_a, "bits"_a, "per_token"_a, "group"_a, "block_tokens"_a,
        "head_dim"_a, "codes"_a, "scale"_a, "offset"_a.none(), "table"_a, own, "See kernels/attend_grid.py.");
  m.def("scaled", &scaled_view, "part"_a, "factor"_a, own, "A grid times a factor per token or channel.");
  m.def(
      "sum", [](const std::vector<nb::object>& parts) { return parts_view(Kind::sum, parts); }, "parts"_a, own,
      "The sum of views.");
  m.def(
      "concat", [](const std::vector<nb::object>& parts) { return parts_view(Kind::concat, parts); }, "parts"_a, own,
      "Views whose channels are concatenated.");
}

}  // namespace tersekv
