// Scores of a rotated mean for tokens with gaps between them. They are computed at all positions in
// order, because consecutive positions are cheap. Each set of tokens takes those of its positions.
#pragma once

#include "rotated_mean.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

constexpr int64_t kMeanChunk = 512;  // positions whose scores are computed at a time

// Distribute the scores of positions [first, first + count) of one row. numbers: of the next token of
// each set.
template <class S>
void distribute(const MeanScores& of, const Task& task, int64_t row, int64_t first, int64_t count, const float* score,
                const int64_t* numbers) {
  for (int64_t i = 0; i < of.count; i++) {
    const MarkedScores& set = of.sets[i];
    const HeadMarks marks = marks_of(set.marks, task.b, task.h);
    float* out = set.score + ((task.b * of.call.H + task.h) * of.call.R + row) * set.stride + numbers[i];
    for (int64_t at = 0; at < count; at += kWordBits) {
      uint64_t word = marks.word((first + at) / kWordBits);
      for (int64_t lane = 0; lane < kWordBits && word; lane += kLanes, word >>= kLanes) {
        const auto bits = static_cast<unsigned>(word & 0xffff);
        S::store_marked(out, S::load(score + at + lane), bits);
        out += __builtin_popcount(bits);
      }
    }
  }
}

// task.first is a multiple of 64 positions.
template <class S>
void mean_scores(const MeanScores& of, const Task& task) {
  reset_scratch();
  const Call& call = of.call;
  const int64_t width = round_up(call.D, kLanes), stride = kMeanChunk + kLanes, no_shift = 0;
  float *query = scratch(task.rows * width), *score = scratch(kRowTile * stride);
  const float* in = call.query + ((task.b * call.H + task.h) * call.R + task.row) * of.query_stride;
  for (int64_t r = 0; r < task.rows; r++)
    for (int64_t d = 0; d < width; d++)
      query[r * width + d] = d < call.D ? in[r * of.query_stride + d] * call.scores.scaling : 0.0f;
  Node node;
  node.call = &call;
  node.task = &task;
  node.view = call.keys;
  node.shift = &no_shift;
  node.b = task.b;
  node.h = task.h;
  node.rows = task.rows;
  node.query = query;
  node.query_stride = width;
  rotated_mean_prepare<S>(node);
  auto* numbers = scratch_of<int64_t>(of.count);
  for (int64_t i = 0; i < of.count; i++) numbers[i] = marks_of(of.sets[i].marks, task.b, task.h).count(task.first);
  for (int64_t first = task.first; first < task.last; first += kMeanChunk) {
    const int64_t last = task.last - first < kMeanChunk ? task.last : first + kMeanChunk;
    for (int64_t row = 0; row < task.rows; row += kRowTile) {
      const int64_t rows = task.rows - row < kRowTile ? task.rows - row : kRowTile;
      for (int64_t r = 0; r < rows; r++) clear(score + r * stride, round_up(last - first, kLanes));
      rotated_mean_scores<S>(node, {row, rows, first, last}, score, stride);
      for (int64_t r = 0; r < rows; r++)
        distribute<S>(of, task, task.row + row + r, first, last - first, score + r * stride, numbers);
    }
    for (int64_t i = 0; i < of.count; i++) {
      const HeadMarks marks = marks_of(of.sets[i].marks, task.b, task.h);
      for (int64_t at = first; at < last; at += kWordBits)
        numbers[i] += __builtin_popcountll(marks.word(at / kWordBits));
    }
  }
}

}  // namespace
}  // namespace tersekv
