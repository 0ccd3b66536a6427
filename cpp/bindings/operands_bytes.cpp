// Layouts whose blocks are bytes with tokens on lanes, and the overlay.
#include <cmath>

#include "operands.h"

namespace tersekv {

// int64 [B, H, 1 or N, n], each from 0 to `channels` - 1.
Operands::Index Operands::channel_index(const std::string& name, const Tensor& x, int64_t N, int64_t n,
                                        int64_t channels) const {
  if (!x.given()) return {};
  const int64_t blocks = x.dims > 2 && x.shape[2] == 1 ? 1 : N;
  expect(name, "channels", x, {{"B", B_}, {"H", H_}, {"N", blocks}, {"n", n < 0 && x.dims == 4 ? x.shape[3] : n}}, 3);
  Index index = {true, x.as<int64_t>(), x.stride[0], x.stride[1], blocks > 1 ? x.stride[2] : 0, x.shape[3]};
  for (int64_t b = 0; b < B_; b++)
    for (int64_t h = 0; h < H_; h++)
      for (int64_t block = 0; block < blocks; block++)
        for (int64_t i = 0; i < index.count; i++) {
          const int64_t channel = index.data[b * index.b + h * index.h + block * x.stride[2] + i];
          if (channel < 0 || channel >= channels)
            fail(name, "channels: expected 0 to " + std::to_string(channels - 1) + ", got " + std::to_string(channel));
        }
  return index;
}

// (2, head_dim, half, factor, signs 3x, norms 3x, sketch 3x, channels 3x, dropped 3x)
void Operands::parse_signs(View& view, const std::string& name, nb::handle packed) {
  SignsView& v = view.signs;
  view.D = in_range(name, "head_dim", as_int(item(packed, 1)), kMostChannels);
  view.t = kByteBlock;
  v.half = half_type(name, as_int(item(packed, 2)));
  v.factor = static_cast<float>(as_double(item(packed, 3)));
  const Tensor signs = tensor_at(packed, 4), norms = tensor_at(packed, 7), sketch = tensor_at(packed, 10);
  if (sketch.dims != 2 || sketch.shape[0] < 1 || sketch.shape[1] < 1) fail(name, "sketch: expected [M, n]");
  v.M = sketch.shape[0];
  v.n = sketch.shape[1];
  expect(name, "sketch", sketch, {{"M", v.M}, {"n", v.n}}, 0);
  v.sketch = sketch.as<float>();
  const int64_t N = signs.dims > 2 ? signs.shape[2] : 0;
  view.T = N * view.t;
  expect(name, "signs", signs, {{"B", B_}, {"H", H_}, {"N", N}, {"M/8", ceil_div(v.M, 8)}, {"t", kByteBlock}}, 3);
  v.signs = signs.as<uint8_t>();
  v.stride_b = signs.stride[0];
  v.stride_h = signs.stride[1];
  v.stride_n = signs.stride[2];
  v.norms = plane(name, "norms", norms, {{"B", B_}, {"H", H_}, {"N", N}, {"t", kByteBlock}});
  const Index channels = channel_index(name, tensor_at(packed, 13), N, v.n, view.D);
  if (!channels.given && v.n != view.D)
    fail(name, "sketch: expected n = " + std::to_string(view.D) + ", got " + std::to_string(v.n));
  const Index dropped = channel_index(name, tensor_at(packed, 16), N, -1, v.n);
  if (channels.given && dropped.given) fail(name, "expected channels or dropped channels, not both");
  v.channels = channels.data;
  v.channels_b = channels.b;
  v.channels_h = channels.h;
  v.channels_n = channels.n;
  v.dropped = dropped.data;
  v.dropped_b = dropped.b;
  v.dropped_h = dropped.h;
  v.dropped_n = dropped.n;
  v.drops = dropped.count;
}

// (3, head_dim, half, unit, (bits of level 1, ...), angles 3x, radii 3x, table of level 1 3x, ...)
void Operands::parse_polar(View& view, const std::string& name, nb::handle packed) {
  PolarView& v = view.polar;
  view.D = in_range(name, "head_dim", as_int(item(packed, 1)), kMostChannels);
  view.t = kByteBlock;
  v.half = half_type(name, as_int(item(packed, 2)));
  v.unit = static_cast<float>(as_double(item(packed, 3)));
  const nb::handle bits = item(packed, 4);
  const int64_t levels = PyTuple_Check(bits.ptr()) ? PyTuple_GET_SIZE(bits.ptr()) : 0;
  if (levels < 1 || levels > kMaxLevels || view.D % (int64_t{1} << levels))
    fail(name, "expected 1 to 16 levels, and 2^levels to divide head_dim");
  v.levels = static_cast<int>(levels);
  int64_t stream = 0;
  for (int level = 0; level < v.levels; level++) {
    v.bits[level] = static_cast<int>(in_range(name, "bits of an angle", as_int(item(bits, level)), 8));
    stream += (view.D >> (level + 1)) * v.bits[level];
  }
  v.bytes = ceil_div(stream, 8);
  const Tensor angles = tensor_at(packed, 5), radii = tensor_at(packed, 8);
  const int64_t N = angles.dims > 2 ? angles.shape[2] : 0;
  view.T = N * view.t;
  expect(name, "angles", angles, {{"B", B_}, {"H", H_}, {"N", N}, {"bytes", v.bytes}, {"t", kByteBlock}}, 3);
  v.angles = angles.as<uint8_t>();
  v.stride_b = angles.stride[0];
  v.stride_h = angles.stride[1];
  v.stride_n = angles.stride[2];
  v.radii =
      plane(name, "radii", radii, {{"B", B_}, {"H", H_}, {"N", N}, {"D/2^L", view.D >> v.levels}, {"t", kByteBlock}});
  polar_tables(v, name, packed);
}

// Cosines and sines of the tables, which are [2^bits], or all [B, 2^bits].
void Operands::polar_tables(PolarView& v, const std::string& name, nb::handle packed) {
  Tensor table[kMaxLevels];
  int64_t size = 0;
  for (int level = 0; level < v.levels; level++) {
    table[level] = tensor_at(packed, 11 + 3 * level);
    const int64_t entries = int64_t{1} << v.bits[level];
    if (table[level].dims == 2) {
      expect(name, "table", table[level], {{"B", B_}, {"2**bits", entries}}, 1);
    } else {
      expect(name, "table", table[level], {{"2**bits", entries}}, 0);
    }
    size += entries;
  }
  v.table_stride_b = 2 * size;
  auto tables = std::make_unique<float[]>(B_ * v.table_stride_b);
  float* out = tables.get();
  for (int64_t b = 0; b < B_; b++)
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
  tables_.push_back(std::move(tables));
}

// (4, head_dim, starts 3x, places 3x, values 3x)
void Operands::parse_sparse(View& view, const std::string& name, nb::handle packed) {
  SparseView& v = view.sparse;
  view.D = in_range(name, "head_dim", as_int(item(packed, 1)), kMostChannels);
  view.t = kByteBlock;
  const Tensor starts = tensor_at(packed, 2), places = tensor_at(packed, 5), values = tensor_at(packed, 8);
  v.B = B_;
  v.H = H_;
  v.N = starts.dims == 3 ? starts.shape[2] : 0;
  view.T = v.N * view.t;
  expect(name, "outlier_starts", starts, {{"B", B_}, {"H", H_}, {"N", v.N}}, 3);
  v.starts = starts.as<int32_t>();
  v.stride_b = starts.stride[0];
  v.stride_h = starts.stride[1];
  v.stride_n = starts.stride[2];
  v.entries = places.dims == 1 ? places.shape[0] : 0;
  expect(name, "outlier_places", places, {{"entries", v.entries}}, 0);
  expect(name, "outlier_values", values, {{"entries", v.entries}}, 0);
  v.places = places.as<uint16_t>();
  v.values = values.as<uint16_t>();
  if (B_ * H_ * v.N > 0) v.base = v.starts[0];
}

}  // namespace tersekv
