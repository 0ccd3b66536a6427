// Layouts whose blocks are bytes with tokens on lanes, and sparse entries.
#include <nanobind/stl/vector.h>

#include <cmath>

#include "operands.h"

namespace tersekv {

using namespace nb::literals;

namespace {

struct ChannelIndex {
  const int64_t* data = nullptr;
  int64_t b = 0, h = 0, n = 0, count = 0;
};

// Validate int64 [B, H, 1 or N, n], each from 0 to `channels` - 1; n = -1: any number.
ChannelIndex channel_index(const NativeView& v, const Tensor& x, int64_t N, int64_t n, int64_t channels) {
  if (!x.given()) return {};
  const int64_t blocks = x.dims > 2 && x.shape[2] == 1 ? 1 : N;
  expect("", "channels", x, {{"B", v.B}, {"H", v.H}, {"N", blocks}, {"n", n < 0 && x.dims == 4 ? x.shape[3] : n}}, 3);
  const ChannelIndex index = {x.as<int64_t>(), batch_stride(x), x.stride[1], blocks > 1 ? x.stride[2] : 0, x.shape[3]};
  for (int64_t b = 0; b < v.B; b++)
    for (int64_t h = 0; h < v.H; h++)
      for (int64_t block = 0; block < blocks; block++)
        for (int64_t i = 0; i < index.count; i++) {
          const int64_t channel = index.data[b * index.b + h * index.h + block * x.stride[2] + i];
          if (channel < 0 || channel >= channels)
            fail("channels: ", "expected 0 to " + std::to_string(channels - 1) + ", got " + std::to_string(channel));
        }
  return index;
}

NativeView* signs_view(int64_t head_dim, double factor, nb::handle signs, nb::handle norms, nb::handle sketch,
                       nb::handle channels, nb::handle dropped) {
  auto made = std::make_unique<NativeView>();
  Owner& owner = made->owner;
  View& view = made->view;
  SignsView& v = view.signs;
  view.kind = Kind::signs;
  view.D = in_range("", "head_dim", head_dim, kMostChannels);
  view.t = kByteBlock;
  v.factor = static_cast<float>(factor);
  const Tensor rows = owner.keep("sketch", sketch, kFloat32);
  if (rows.dims != 2 || rows.shape[0] < 1 || rows.shape[1] < 1) fail("sketch: ", "expected [M, n]");
  v.M = rows.shape[0];
  v.n = rows.shape[1];
  expect("", "sketch", rows, {{"M", v.M}, {"n", v.n}}, 0);
  v.sketch = rows.as<float>();
  const Tensor bytes = owner.keep("signs", signs, kUint8);
  const int64_t N = take_sizes(*made, "signs", bytes, 3), B = made->B, H = made->H;
  view.T = N * view.t;
  expect("", "signs", bytes, {{"B", B}, {"H", H}, {"N", N}, {"M/8", ceil_div(v.M, 8)}, {"t", kByteBlock}}, 3);
  v.signs = bytes.as<uint8_t>();
  take_strides(v, bytes);
  const Tensor lengths = owner.keep("norms", norms, kHalves);
  v.half = lengths.float_type();
  v.norms = plane_of("norms", lengths, {{"B", B}, {"H", H}, {"N", N}, {"t", kByteBlock}});
  const ChannelIndex kept = channel_index(*made, owner.keep_optional("channels", channels, kInt64), N, v.n, view.D);
  if (!kept.data && v.n != view.D)
    fail("sketch: ", "expected n = " + std::to_string(view.D) + ", got " + std::to_string(v.n));
  const ChannelIndex left = channel_index(*made, owner.keep_optional("dropped", dropped, kInt64), N, -1, v.n);
  if (!channels.is_none() && !dropped.is_none()) fail("channels: ", "expected channels or dropped channels, not both");
  v.channels = kept.data;
  v.channels_b = kept.b;
  v.channels_h = kept.h;
  v.channels_n = kept.n;
  v.dropped = left.data;
  v.dropped_b = left.b;
  v.dropped_h = left.h;
  v.dropped_n = left.n;
  v.drops = left.count;
  return made.release();
}

// Compute cosines and sines of the tables, which are [2^bits] or [B, 2^bits].
void polar_tables(NativeView& made, const std::vector<nb::object>& tables) {
  PolarView& v = made.view.polar;
  Tensor table[kMaxLevels];
  int64_t size = 0, rows = 1;
  for (int level = 0; level < v.levels; level++) {
    table[level] = made.owner.keep("table", tables[level], kFloat32);
    const int64_t entries = int64_t{1} << v.bits[level];
    if (table[level].dims == 2) {
      expect("", "table", table[level], {{"B", made.B}, {"2**bits", entries}}, 1);
      rows = made.B;
    } else {
      expect("", "table", table[level], {{"2**bits", entries}}, 0);
    }
    size += entries;
  }
  v.table_stride_b = rows == 1 ? 0 : 2 * size;
  auto* out = made.owner.memory<float>(rows * 2 * size);
  for (int64_t b = 0; b < rows; b++)
    for (int level = 0; level < v.levels; level++) {
      const int64_t entries = int64_t{1} << v.bits[level];
      const float* angle = table[level].as<float>() + (table[level].dims == 2 ? b * table[level].stride[0] : 0);
      if (b == 0) {
        v.cos[level] = out;
        v.sin[level] = out + entries;
      }
      for (int64_t i = 0; i < entries; i++) {
        out[i] = std::cos(angle[i]);
        out[entries + i] = std::sin(angle[i]);
      }
      out += 2 * entries;
    }
}

NativeView* polar_view(int64_t head_dim, double unit, const std::vector<int64_t>& level_bits, nb::handle angles,
                       nb::handle radii, const std::vector<nb::object>& tables) {
  auto made = std::make_unique<NativeView>();
  Owner& owner = made->owner;
  View& view = made->view;
  PolarView& v = view.polar;
  view.kind = Kind::polar;
  view.D = in_range("", "head_dim", head_dim, kMostChannels);
  view.t = kByteBlock;
  v.unit = static_cast<float>(unit);
  const auto levels = static_cast<int64_t>(level_bits.size());
  if (levels < 1 || levels > kMaxLevels || view.D % (int64_t{1} << levels))
    fail("level_bits: ", "expected 1 to 16 levels, and 2^levels to divide head_dim");
  if (tables.size() != level_bits.size()) fail("tables: ", "expected one per level");
  v.levels = static_cast<int>(levels);
  int64_t stream = 0;
  for (int level = 0; level < v.levels; level++) {
    v.bits[level] = static_cast<int>(in_range("", "bits of an angle", level_bits[level], 8));
    stream += (view.D >> (level + 1)) * v.bits[level];
  }
  v.bytes = ceil_div(stream, 8);
  const Tensor codes = owner.keep("angles", angles, kUint8), lengths = owner.keep("radii", radii, kHalves);
  const int64_t N = take_sizes(*made, "angles", codes, 3), B = made->B, H = made->H;
  view.T = N * view.t;
  expect("", "angles", codes, {{"B", B}, {"H", H}, {"N", N}, {"bytes", v.bytes}, {"t", kByteBlock}}, 3);
  v.angles = codes.as<uint8_t>();
  take_strides(v, codes);
  v.half = lengths.float_type();
  v.radii =
      plane_of("radii", lengths, {{"B", B}, {"H", H}, {"N", N}, {"D/2^L", view.D >> v.levels}, {"t", kByteBlock}});
  polar_tables(*made, tables);
  return made.release();
}

NativeView* sparse_view(int64_t head_dim, nb::handle starts, nb::handle places, nb::handle values) {
  auto made = std::make_unique<NativeView>();
  Owner& owner = made->owner;
  View& view = made->view;
  SparseView& v = view.sparse;
  view.kind = Kind::sparse;
  view.D = in_range("", "head_dim", head_dim, kMostChannels);
  view.t = kByteBlock;
  const Tensor begins = owner.keep("outlier_starts", starts, kInt32);
  const Tensor of = owner.keep("outlier_places", places, kInt16);
  const Tensor entries = owner.keep("outlier_values", values, one(Type::f16));
  v.N = take_sizes(*made, "outlier_starts", begins, 3);
  v.B = made->B;
  v.H = made->H;
  view.T = v.N * view.t;
  expect("", "outlier_starts", begins, {{"B", v.B}, {"H", v.H}, {"N", v.N}}, 3);
  v.starts = begins.as<int32_t>();
  v.stride_b = batch_stride(begins);
  v.stride_h = v.H == 1 ? 0 : begins.stride[1];
  v.stride_n = begins.stride[2];
  v.entries = of.dims == 1 ? of.shape[0] : 0;
  expect("", "outlier_places", of, {{"entries", v.entries}}, 0);
  expect("", "outlier_values", entries, {{"entries", v.entries}}, 0);
  v.places = of.as<uint16_t>();
  v.values = entries.as<uint16_t>();
  if (v.B * v.H * v.N > 0) v.base = v.starts[0];
  return made.release();
}

NativeView* sparse_blocks_view(int64_t head_dim, nb::handle places, nb::handle values) {
  auto made = std::make_unique<NativeView>();
  Owner& owner = made->owner;
  View& view = made->view;
  SparseView& v = view.sparse;
  view.kind = Kind::sparse;
  view.D = in_range("", "head_dim", head_dim, kMostChannels);
  view.t = kByteBlock;
  const Tensor of = owner.keep("outlier_places", places, kInt16);
  const Tensor entries = owner.keep("outlier_values", values, one(Type::f16));
  v.N = take_sizes(*made, "outlier_places", of, 3);
  v.B = made->B;
  v.H = made->H;
  view.T = v.N * view.t;
  v.per_block = of.dims == 4 ? in_range("", "entries per block", of.shape[3], kByteBlock * view.D) : 0;
  const std::initializer_list<Size> shape = {{"B", v.B}, {"H", v.H}, {"N", v.N}, {"n", v.per_block}};
  expect("", "outlier_places", of, shape, 3);
  v.place = {of.as<uint16_t>(), batch_stride(of), of.stride[1], of.stride[2]};
  v.value = plane_of("outlier_values", entries, shape);
  return made.release();
}

}  // namespace

void define_byte_views(nb::module_& m) {
  const auto own = nb::rv_policy::take_ownership;
  m.def("signs", &signs_view, nb::kw_only(), "head_dim"_a, "factor"_a, "signs"_a, "norms"_a, "sketch"_a,
        "channels"_a.none(), "dropped"_a.none(), own, "One sketch, see layouts/signs.py.");
  m.def("polar", &polar_view, nb::kw_only(), "head_dim"_a, "unit"_a, "level_bits"_a, "angles"_a, "radii"_a, "tables"_a,
        own, "See layouts/polar.py.");
  m.def("sparse", &sparse_view, nb::kw_only(), "head_dim"_a, "starts"_a, "places"_a, "values"_a, own,
        "See layouts/sparse.py.");
  m.def("sparse_blocks", &sparse_blocks_view, nb::kw_only(), "head_dim"_a, "places"_a, "values"_a, own,
        "See layouts/sparse.py.");
}

}  // namespace tersekv
