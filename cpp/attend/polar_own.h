// Data of a task for polar coordinates: tables by code, also of the query.
#pragma once

#include "polar_kernel.h"
#include "tile.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kPolarTokens = 32;

struct PolarOwn {
  const float *cos[kMaxLevels], *sin[kMaxLevels];  // tables, repeated up to 16 entries
  int64_t offset[kMaxLevels];                      // bit offset of each level's codes
  bool usual;                                      // levels have 4, 2, 2 and 2 bits
  const float* upper;  // if usual: table by codes of levels 3 and 4: cos·cos, cos·sin, sin·cos, sin·sin
  int64_t pairs;       // number of pairs per radius
  float* query;        // keys: [rows, D/2, 16], null if level 1 has more than 4 bits
  float* tile;
  const void* fast;  // data of the call's PolarKernel, or null
};

inline const float* repeated_table(const float* table, int bits) {
  if (bits > 4) return table;
  float* out = scratch(16);
  for (int i = 0; i < 16; i++) out[i] = table[i & ((1 << bits) - 1)];
  return out;
}

template <class S>
void polar_query_tables(const Node& node, PolarOwn& own) {
  const int64_t pairs = node.view->D / 2;
  own.query = scratch(node.rows * pairs * kLanes);
  const typename S::F cos = S::load(own.cos[0]), sin = S::load(own.sin[0]);
  for (int64_t r = 0; r < node.rows; r++)
    for (int64_t j = 0; j < pairs; j++) {
      const float* q = node.query_row(r) + 2 * j;
      S::store(own.query + (r * pairs + j) * kLanes, S::fma(S::set1(q[0]), cos, S::mul(S::set1(q[1]), sin)));
    }
}

template <class S>
void polar_prepare(Node& node) {
  const PolarView& v = node.view->polar;
  auto* own = scratch_of<PolarOwn>();
  node.own = own;
  int64_t offset = 0;
  for (int level = 0; level < v.levels; level++) {
    own->cos[level] = repeated_table(v.cos[level] + node.b * v.table_stride_b, v.bits[level]);
    own->sin[level] = repeated_table(v.sin[level] + node.b * v.table_stride_b, v.bits[level]);
    own->offset[level] = offset;
    offset += (node.view->D >> (level + 1)) * v.bits[level];
  }
  own->pairs = int64_t{1} << (v.levels - 1);
  own->usual = v.levels == 4 && v.bits[0] == 4 && v.bits[1] == 2 && v.bits[2] == 2 && v.bits[3] == 2;
  // A tile, or the weights of eight pairs for the tokens of a span.
  const int64_t span = 8 * (node.call->tokens_per_unit > kChunkTokens ? node.call->tokens_per_unit : kChunkTokens);
  const int64_t tile = (node.view->D + kTileSlack) * kLanes;
  own->tile = scratch(span > tile ? span : tile);
  if (node.sum && !own->usual) node.lanes = scratch(kRowTile * node.view->D * kLanes);
  if (own->usual) {
    // Entry i: level 3 in the low two bits of i, level 4 in the next two.
    float* table = scratch(64);
    for (int i = 0; i < 64; i++)
      table[i] = (i < 32 ? own->cos : own->sin)[3][i >> 2 & 3] * (i & 16 ? own->sin : own->cos)[2][i & 3];
    own->upper = table;
  }
  const PolarSide side = {&v, node.view->D, node.b, node.h, node.rows, node.query, node.query_stride};
  own->fast = node.call->polar ? node.call->polar->prepare(side) : nullptr;
  own->query = nullptr;
  if (node.query && !own->fast && v.bits[0] <= 4) polar_query_tables<S>(node, *own);
}

}  // namespace
}  // namespace tersekv
