// Unpacked tokens, grids, and views made of views.
#include "operands.h"

#include <numeric>

#include "half_words.h"

namespace tersekv {
namespace {

constexpr int kMaxDepth = 8;

}  // namespace

Plane Operands::plane(const std::string& name, const char* what, const Tensor& x, std::initializer_list<Size> sizes) {
  expect(name, what, x, sizes, 3);
  return {x.as<uint16_t>(), x.stride[0], x.stride[1], x.stride[2]};
}

// (0, type, x 3x)
void Operands::parse_exact(View& v, const std::string& name, nb::handle packed) {
  const int64_t type = as_int(item(packed, 1));
  if (type < 0 || type > 2) fail(name, "expected float32, float16 or bfloat16");
  const Tensor x = tensor_at(packed, 2);
  if (x.dims != 4) fail(name, "expected [B, H, T, D]");
  v.T = x.shape[2];
  v.D = x.shape[3];
  expect(name, "x", x, {{"B", B_}, {"H", H_}, {"T", v.T}, {"D", v.D}}, 3);
  v.dense = {static_cast<Float>(type), x.as<void>(), x.stride[0], x.stride[1], x.stride[2]};
}

// (1, bits, lanes are tokens, lane_scaled, half, group, P, L, codes 3x, scale 3x, offset 3x, table 3x); an offset at
// address 0 is none.
void Operands::parse_grid(View& view, const std::string& name, nb::handle packed) {
  const auto fail = [&](const std::string& text) { tersekv::fail(name, text); };
  GridView& v = view.grid;
  v.bits = static_cast<int>(in_range(name, "bits", as_int(item(packed, 1)), 8));
  const bool tokens_on_lanes = as_int(item(packed, 2)) != 0;
  v.lane_scaled = as_int(item(packed, 3)) != 0;
  v.group = as_int(item(packed, 5));
  v.P = in_range(name, tokens_on_lanes ? "head_dim" : "block_tokens", as_int(item(packed, 6)), kMostBlockTokens);
  v.L = in_range(name, tokens_on_lanes ? "block_tokens" : "head_dim", as_int(item(packed, 7)), kMostBlockTokens);
  view.D = tokens_on_lanes ? v.P : v.L;
  view.t = tokens_on_lanes ? v.L : v.P;
  if (view.t % kLanes) fail("block_tokens: expected a multiple of 16, got " + std::to_string(view.t));
  v.half = half_type(name, as_int(item(packed, 4)));
  const int64_t grouped = v.lane_scaled ? v.P : v.L;
  if (v.group < 1 || grouped % v.group != 0)
    fail("group: expected a divisor of " + std::to_string(grouped) + ", got " + std::to_string(v.group));
  if (!v.lane_scaled && v.group % kLanes != 0 && v.group != v.L)
    fail("group: expected a multiple of 16 or " + std::to_string(v.L) + ", got " + std::to_string(v.group));
  v.words = HalfWords(v.bits).words(v.P);
  const Tensor codes = tensor_at(packed, 8), scale = tensor_at(packed, 11), offset = tensor_at(packed, 14);
  const int64_t N = codes.dims > 2 ? codes.shape[2] : 0;
  view.T = N * view.t;
  expect(name, "codes", codes,
         {{"B", B_}, {"H", H_}, {"N", N}, {"Lg", ceil_div(v.L, kLanes)}, {"W", v.words}, {"16", kLanes}}, 3);
  v.codes = codes.as<int32_t>();
  v.stride_b = codes.stride[0];
  v.stride_h = codes.stride[1];
  v.stride_n = codes.stride[2];
  const int64_t groups = grouped / v.group, per_group = v.lane_scaled ? v.L : v.P;
  const auto ranges = [&](const char* what, const Tensor& x) {
    return plane(name, what, x, {{"B", B_}, {"H", H_}, {"N", N}, {"groups", groups}, {"per group", per_group}});
  };
  v.scale = ranges("scale", scale);
  if (offset.given()) v.offset = ranges("offset", offset);
  const Tensor table = tensor_at(packed, 17);
  if (table.dims == 2) {
    expect(name, "table", table, {{"B", B_}, {"2**bits", int64_t{1} << v.bits}}, 1);
    v.table_stride_b = table.stride[0];
  } else {
    expect(name, "table", table, {{"2**bits", int64_t{1} << v.bits}}, 0);
  }
  v.table = table.as<float>();
}

// Items from `first` on, each a view.
void Operands::parse_parts(View& v, const std::string& name, nb::handle packed, Py_ssize_t first, int64_t count) {
  v.count = count;
  if (v.count < 1) fail(name, "expected at least one part");
  auto parts = std::make_unique<View[]>(v.count);
  for (int64_t i = 0; i < v.count; i++) {
    parts[i] = parse(name, item(packed, first + i));
    if (parts[i].T != parts[0].T)
      fail(name, "expected parts with T = " + std::to_string(parts[0].T) + ", got " + std::to_string(parts[i].T));
    v.t = in_range(name, "tokens that blocks of all parts divide", std::lcm(v.t, parts[i].t), kMostBlockTokens);
  }
  v.T = parts[0].T;
  v.parts = parts.get();
  views_.push_back(std::move(parts));
}

View Operands::parse(const std::string& name, nb::handle packed) {
  View v;
  if (++depth_ > kMaxDepth) fail(name, "views are nested too deep");
  const int64_t kind = as_int(item(packed, 0));
  if (kind < 0 || kind > static_cast<int64_t>(Kind::turned)) fail(name, "a view of an unknown kind");
  v.kind = static_cast<Kind>(kind);
  switch (v.kind) {
    case Kind::exact:
      parse_exact(v, name, packed);
      break;
    case Kind::grid:
      parse_grid(v, name, packed);
      break;
    case Kind::signs:
      parse_signs(v, name, packed);
      break;
    case Kind::polar:
      parse_polar(v, name, packed);
      break;
    case Kind::sparse:
      parse_sparse(v, name, packed);
      break;
    case Kind::trellis:
      parse_trellis(v, name, packed);
      break;
    case Kind::roped:
      parse_roped(v, name, packed);
      break;
    case Kind::rotated:
      parse_rotated(v, name, packed);
      break;
    case Kind::turned:
      parse_turned(v, name, packed);
      break;
    case Kind::added:
      parse_parts(v, name, packed, 1, PyTuple_GET_SIZE(packed.ptr()) - 1);
      v.D = v.parts[0].D;
      for (int64_t i = 1; i < v.count; i++)
        if (v.parts[i].D != v.D)
          fail(name, "expected parts with D = " + std::to_string(v.D) + ", got " + std::to_string(v.parts[i].D));
      break;
    case Kind::joined:
      parse_parts(v, name, packed, 1, PyTuple_GET_SIZE(packed.ptr()) - 1);
      for (int64_t i = 0; i < v.count; i++) v.D += v.parts[i].D;
      break;
  }
  in_range(name, "head_dim", v.D, kMostChannels);
  depth_--;
  return v;
}

const View* Operands::read(const char* name, nb::handle packed, int64_t D) {
  auto view = std::make_unique<View[]>(1);
  ropes_ = 0;
  view[0] = parse(std::string(name) + ".", packed);
  if (D >= 0 && view[0].D != D)
    fail(name, ": expected head_dim " + std::to_string(D) + " of the query, got " + std::to_string(view[0].D));
  views_.push_back(std::move(view));
  return views_.back().get();
}

}  // namespace tersekv
