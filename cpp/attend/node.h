// A view as one task reads it.
#pragma once

#include <type_traits>

#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kChunkTokens = 512;  // most tokens of a span, unless one unit has more

// Tokens [first, last) for query rows [row, row + rows) of a task; at most `most_rows` of its view.
struct Span {
  int64_t row, rows, first, last;
  int64_t tokens() const { return last - first; }
};

// One view of a call for one task, with the task's data for it.
struct Node {
  const View* view = nullptr;
  const Call* call = nullptr;
  const Task* task = nullptr;
  const Span* later = nullptr;     // tokens of the next chunk, or none
  const int64_t* shift = nullptr;  // tokens of the present chunk are this many further on than in the row
  int64_t b = 0, h = 0, rows = 0;
  const float* query = nullptr;  // of keys: [rows, query_stride], scaled, this view's channels
  int64_t query_stride = 0;
  float* sum = nullptr;  // of values: [rows, sum_stride], this view's channels
  int64_t sum_stride = 0;
  GridView grid;           // the view's grid, with the table of this batch row
  void* own = nullptr;     // data of the layout, such as GridOwn
  float* lanes = nullptr;  // room for sums per lane, of kRowTile rows
  Node* parts = nullptr;
  const int32_t* places = nullptr;  // positions of the task's tokens, if they are marked

  const float* query_row(int64_t row) const { return query + row * query_stride; }
  float* sum_row(int64_t row) const { return sum + row * sum_stride; }
};

// Return the node of a view without queries and sums. shift, later: see `Node`.
inline Node node_of(const View* view, const Call& call, const Task& task, const int64_t& shift, const Span& later) {
  Node node;
  node.view = view;
  node.call = &call;
  node.task = &task;
  node.shift = &shift;
  node.later = &later;
  node.b = task.b;
  node.h = task.h;
  return node;
}

// A layout's row in the table of layouts.h: its functions in one build of the kernels. A function is
// null where the bindings refuse the views that would need it.
struct Layout {
  Kind kind;
  // Prepare the node of a view of keys (with query) or of values (with sums).
  void (*prepare)(Node& node);
  // score[r][i] += query[r] · x̂[i] for the span's rows and tokens. score has room up to a multiple
  // of 16 tokens.
  void (*add_scores)(const Node& node, Span span, float* score, int64_t score_stride);
  // sum[r] += Σ weight[r][i] · x̂[i] over the span's tokens. Weights are 0 up to a multiple of 16
  // tokens.
  void (*add_sums)(const Node& node, Span span, const float* weight, int64_t weight_stride);
  // Decode x̂ of `count` (at most 16) tokens from `token` on into a tile [D][16], and overwrite it.
  // Layouts of blocks decode 16 tokens, whatever `count` is.
  void (*decode_tile)(const Node& node, int64_t token, int64_t count, float* tile);
};

// Return the row of a node's layout, in layouts.h. Views call their parts through it.
template <class S>
const Layout& layout_of(const Node& node);

inline const uint16_t* plane_at(const Plane& p, int64_t b, int64_t h, int64_t n) {
  return p.data ? p.data + b * p.stride_b + h * p.stride_h + n * p.stride_n : nullptr;
}

}  // namespace
}  // namespace tersekv
