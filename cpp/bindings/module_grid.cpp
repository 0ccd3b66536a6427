// Binding of the encoders of kernels/encode_grid.py and lanes.py. Calls are validated, then blocks
// are distributed over threads.
#include <nanobind/nanobind.h>

#include <vector>

#include "half_words.h"
#include "operands.h"
#include "run_blocks.h"

namespace tersekv {
namespace {

// place: (of keys, bits, per token, group, tokens per block)
struct Place {
  bool of_keys, per_token;
  int64_t bits, group, t;

  explicit Place(nb::handle place)
      : of_keys(as_int(item(place, 0)) != 0),
        per_token(as_int(item(place, 2)) != 0),
        bits(in_range("place: ", "bits", as_int(item(place, 1)), 8)),
        group(in_range("place: ", "group", as_int(item(place, 3)), kMostBlockTokens)),
        t(in_range("place: ", "block_tokens", as_int(item(place, 4)), kMostBlockTokens)) {}

  int64_t rows(int64_t D) const { return (per_token ? D : t) / group; }
  int64_t columns(int64_t D) const { return per_token ? t : D; }

  TokenBlocks blocks(nb::handle tensor) const {
    const Tensor x = tensor_of("x", tensor, kFloats);
    if (x.dims != 4) fail("x: ", "expected [B, H, T, D]");
    if (x.shape[2] % t)
      fail("x: ", "expected T whole blocks of " + std::to_string(t) + " tokens, got T = " + std::to_string(x.shape[2]));
    if ((per_token ? x.shape[3] : t) % group)
      fail("place: ", "expected a group that divides " + std::to_string(per_token ? x.shape[3] : t) + ", got " +
                          std::to_string(group));
    return {x.as<char>(), x.float_type(), x.shape[0],  x.shape[1],  x.shape[2] / t, t,
            x.shape[3],   x.stride[0],    x.stride[1], x.stride[2], x.stride[3]};
  }
};

LaneWords lane_words(int64_t bits, int64_t P, int64_t L) {
  return {bits, P, L, HalfWords(static_cast<int>(bits)).words(P), nullptr};
}

void py_group_ranges(nb::handle x, nb::handle place, nb::handle low, nb::handle high, int threads) {
  const Place at(place);
  GroupRanges call{at.blocks(x), at.per_token, at.group};
  const int64_t D = call.x.D;
  const Tensor least = tensor_of("low", low, kFloat32), most = tensor_of("high", high, kFloat32);
  for (const Tensor* out : {&least, &most})
    expect("", "ranges", *out,
           {{"B", call.x.B}, {"H", call.x.H}, {"N", call.x.N}, {"rows", at.rows(D)}, {"columns", at.columns(D)}}, 0);
  call.low = output<float>(least);
  call.high = output<float>(most);
  if (call.x.elements() > 0)
    run_blocks(encoders().group_ranges, call, call.x.count(), 0.5 * call.x.elements(), threads);
}

ScalePlane scale_plane(const char* name, nb::handle tensor, const Place& at, const TokenBlocks& x) {
  if (tensor.is_none()) return {};
  const Tensor plane = tensor_of(name, tensor, kFloat32);
  expect("", name, plane, {{"B", x.B}, {"H", x.H}, {"N", x.N}, {"rows", at.rows(x.D)}, {"columns", at.columns(x.D)}},
         5);
  ScalePlane out{plane.as<float>()};
  for (int i = 0; i < 5; i++) out.stride[i] = plane.stride[i];
  return out;
}

// scale, offset: float32 of the plane's shape, or None. table: float32, contiguous, or None.
void py_encode_grid(nb::handle x, nb::handle place, nb::handle scale, nb::handle offset, nb::handle table,
                    nb::handle out, int threads) {
  const Place at(place);
  EncodeGrid call;
  call.x = at.blocks(x);
  call.of_keys = at.of_keys;
  call.per_token = at.per_token;
  call.group = at.group;
  call.packed = at.of_keys ? lane_words(at.bits, call.x.D, at.t) : lane_words(at.bits, at.t, call.x.D);
  call.scale = scale_plane("scale", scale, at, call.x);
  call.offset = scale_plane("offset", offset, at, call.x);
  const Tensor words = tensor_of("codes", out, kInt32);
  expect("", "codes", words,
         {{"B", call.x.B},
          {"H", call.x.H},
          {"N", call.x.N},
          {"lane groups", call.packed.lanes() / kLanes},
          {"words", call.packed.words},
          {"16", kLanes}},
         0);
  call.packed.out = output<int32_t>(words);
  std::vector<float> middles;
  if (!table.is_none()) {
    const Tensor entries = tensor_of("table", table, kFloat32);
    expect("", "table", entries, {{"entries", int64_t{1} << at.bits}}, 0);
    const float* entry = entries.as<float>();
    for (int64_t i = 0; i + 1 < int64_t{1} << at.bits; i++) middles.push_back((entry[i + 1] + entry[i]) / 2);
    call.middles = middles.data();
  }
  if (call.x.elements() > 0) run_blocks(encoders().encode_grid, call, call.x.count(), 1.0 * call.x.elements(), threads);
}

// codes [blocks, P, L] of integers.
void py_pack_lanes(nb::handle codes, int64_t bits, nb::handle out, int threads) {
  const Tensor x = tensor_of("codes", codes, kIntegers), words = tensor_of("words", out, kInt32);
  if (x.dims != 3) fail("codes: ", "expected [blocks, P, L]");
  in_range("", "bits", bits, 8);
  PackLanes call;
  call.codes = x.as<void>();
  call.item_bytes = x.type == Type::i64 ? 8 : x.type == Type::i32 ? 4 : x.type == Type::i16 ? 2 : 1;
  call.blocks = x.shape[0];
  for (int i = 0; i < 3; i++) call.stride[i] = x.stride[i];
  call.packed = lane_words(bits, x.shape[1], x.shape[2]);
  expect("", "words", words,
         {{"blocks", call.blocks},
          {"lane groups", call.packed.lanes() / kLanes},
          {"words", call.packed.words},
          {"16", kLanes}},
         0);
  call.packed.out = output<int32_t>(words);
  const int64_t elements = x.shape[0] * x.shape[1] * x.shape[2];
  if (elements > 0) run_blocks(encoders().pack_lanes, call, call.blocks, 0.5 * elements, threads);
}

}  // namespace

void define_grid_encoders(nb::module_& m) {
  m.def("group_ranges", &py_group_ranges);
  m.def("encode_grid", &py_encode_grid, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
        nb::arg(), nb::arg());
  m.def("pack_lanes", &py_pack_lanes);
}

}  // namespace tersekv
