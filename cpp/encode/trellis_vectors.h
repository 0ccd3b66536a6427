// Encoding of a task's vectors: components, gains and streams around the search of
// trellis_search.h.
#pragma once

#include "trellis_search.h"

namespace tersekv {
namespace {  // internal to each build of the search

// Nearest code of a gain, see kernels/trellis.py.
inline int gain_code(double gain) {
  const double code = __builtin_nearbyint(__builtin_log2(gain > 1e-30 ? gain : 1e-30) * kGainSteps) + kUnitGain;
  return code < 0 ? 0 : code > 255 ? 255 : static_cast<int>(code);
}

// Write the newest bits of each window to a stream. A word is stored again until it is full.
inline void write_stream(const Component* components, int64_t count, const uint8_t* windows, uint16_t* stream) {
  uint32_t word = 0;
  int filled = 0;
  for (int64_t a = 0; a < count; a++) {
    const int bits = components[a].bits;
    word |= static_cast<uint32_t>(windows[a] >> (kStateBits - bits)) << filled;
    filled += bits;
    *stream = static_cast<uint16_t>(word);
    const int full = filled / 16;  // 0 or 1
    stream += full;
    word >>= 16 * full;
    filled -= 16 * full;
  }
}

// The components of a row that have bits.
struct Row {
  Component* components;
  int64_t count;
  float *unit, *limit;
  float* reach;  // see first_gains in kernels/trellis.py
  float enough;  // error at a gain of 1 below which no other gain is tried
};

// A vector while its gain is searched.
struct Gained {
  float* y;       // components with bits
  uint8_t* best;  // the windows with the least error so far
  float squares;  // weighted
  float least;    // least error so far
  float enough;   // error below which no other gain is tried
  int code, own,
      tried;  // codes of gains: the best one, that of least squares of the first search, and the one in search

  // Keep the windows found last if they are better with the gain tried or with that of least squares.
  // Return the latter.
  int compare(const Row& row, const uint8_t* windows, const float* gains) {
    constexpr int kSums = 4;  // sums that are independent of each other
    float products[kSums] = {}, lengths[kSums] = {};
    for (int64_t a = 0; a < row.count; a++) {
      const Component& c = row.components[a];
      const float x = c.table[windows[a]], weighted = c.weight * x;
      products[a % kSums] += weighted * y[a];
      lengths[a % kSums] += weighted * x;
    }
    const float product = products[0] + products[1] + (products[2] + products[3]),
                length = lengths[0] + lengths[1] + (lengths[2] + lengths[3]);
    const int fitting = gain_code(product / (length > 1e-20f ? length : 1e-20f));
    bool better = false;
    for (const int tries : {tried, fitting}) {
      const double gain = gains[tries];
      const auto error = static_cast<float>(squares + gain * (gain * length - 2.0 * product));
      if (!(error < least)) continue;
      better = true;
      least = error;
      code = tries;
    }
    if (better)
      for (int64_t a = 0; a < row.count; a++) best[a] = windows[a];
    return fitting;
  }
};

// Search n vectors with their gains `tried`, two at a time. after(vector, windows) is called for each.
template <class S, class After>
void search_each(const EncodeTrellis& call, const Row& row, const Lane* lanes, Gained* const* vectors, int64_t n,
                 After&& after) {
  for (int64_t i = 0; i < n; i += kTogether) {
    const int64_t together = n - i < kTogether ? n - i : kTogether;
    Lane own[kTogether];
    float gain[kTogether];
    for (int64_t v = 0; v < together; v++) {
      const Gained& vector = *vectors[i + v];
      own[v] = lanes[v];
      own[v].y = vector.y;
      gain[v] = call.gains[vector.tried > 1 ? vector.tried : 1];
    }
    search_vectors<S>(row.components, row.count, row.unit, row.limit, own, gain, together);
    for (int64_t v = 0; v < together; v++) after(*vectors[i + v], own[v].windows);
  }
}

// Find gain and stream of n vectors from number `at` on.
template <class S>
void pack_vectors(const EncodeTrellis& call, int64_t at, int64_t n, const Row& row, const Lane* lanes,
                  Gained* vectors) {
  Gained* due[kTrellisTask];
  for (int64_t v = 0; v < n; v++) {
    Gained& own = vectors[v];
    float squares = 0.0f, weighted = 0.0f;
    for (int64_t a = 0; a < row.count; a++) {
      squares += own.y[a] * own.y[a];
      weighted += row.components[a].weight * (own.y[a] * own.y[a]);
    }
    const float length = __builtin_sqrtf(squares / static_cast<float>(row.count > 1 ? row.count : 1));
    if (call.length) call.length[at + v] = length;
    own.code = gain_code(length);
    const float gain = call.gains[own.code];
    own.enough = row.enough * (gain * gain);
    float beyond = 0.0f;
    for (int64_t a = 0; a < row.count; a++) {
      const float reached = __builtin_fabsf(own.y[a]) * row.reach[a];
      beyond = reached > beyond ? reached : beyond;
    }
    const int larger = own.code < 254 ? own.code + 1 : 255, reaching = gain_code(beyond);
    own.tried = larger > reaching ? larger : reaching;
    own.squares = weighted;
    own.least = __builtin_inff();
    due[v] = &own;
  }
  int64_t left = row.count ? n : 0;
  search_each<S>(call, row, lanes, due, left,
                 [&](Gained& v, const uint8_t* windows) { v.own = v.compare(row, windows, call.gains); });
  for (int64_t t = 0; t < call.tries; t++) {
    int64_t kept = 0;
    for (int64_t v = 0; v < left; v++) {
      if (due[v]->least < due[v]->enough) continue;
      const int64_t code = due[v]->own + call.steps[t];
      due[v]->tried = static_cast<int>(code < 0 ? 0 : code > 255 ? 255 : code);
      due[kept++] = due[v];
    }
    left = kept;
    search_each<S>(call, row, lanes, due, left,
                   [&](Gained& v, const uint8_t* windows) { v.compare(row, windows, call.gains); });
  }
  for (int64_t v = 0; v < n; v++) {
    uint16_t* stream = call.stream + (at + v) * call.words;
    for (int64_t w = 0; w < call.words; w++) stream[w] = 0;
    write_stream(row.components, row.count, vectors[v].best, stream);
    call.gain[at + v] = static_cast<uint8_t>(vectors[v].code);
  }
}

// Compute components y [n, call.columns] of vectors [first, first + n) of a row, at most
// kTrellisTask: (x - shift)·inverse. Each vector's sums have the same order in any task.
template <class S>
void components_of(const EncodeTrellis& call, int64_t row, int64_t first, int64_t n, float* x, float* y) {
  const int64_t D = call.D, columns = call.columns;
  const float *shift = call.shift + row * D, *inverse = call.inverse + row * D * columns;
  for (int64_t v = 0; v < n; v++) {
    const float* from = call.y + row * call.y_r + (first + v) * call.y_n;
    for (int64_t d = 0; d < D; d++) x[v * D + d] = from[d * call.y_d] - shift[d];
  }
  for (int64_t v = n; v < kTrellisTask; v++)
    for (int64_t d = 0; d < D; d++) x[v * D + d] = 0.0f;
  for (int64_t column = 0; column < columns; column += kLanes) {
    typename S::F sums[kTrellisTask];
    repeat<kTrellisTask>([&](auto v) TERSEKV_INLINE { sums[v] = S::set1(0.0f); });
    for (int64_t d = 0; d < D; d++) {
      const typename S::F entries = S::load(inverse + d * columns + column);
      repeat<kTrellisTask>([&](auto v) TERSEKV_INLINE { sums[v] = S::fma(S::set1(x[v * D + d]), entries, sums[v]); });
    }
    repeat<kTrellisTask>([&](auto v) TERSEKV_INLINE { S::store(y + v * columns + column, sums[v]); });
  }
}

// Encode vectors [first, last) of a row, at most kTrellisTask. C: operations on costs; S: on floats.
template <class C, class S>
void encode_vectors(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  reset_scratch();
  const int64_t D = call.D, n = last - first;
  Row own{scratch_of<Component>(D), 0, scratch(D), scratch(D), scratch(D), call.enough ? call.enough[row] : 0.0f};
  int place = 0, brought = 0;
  for (int64_t d = 0; d < D; d++) {
    const int bits = call.bits[row * D + d];
    if (bits == 0) continue;
    const TrellisUnit& unit = call.units[row * D + d];
    own.unit[own.count] = unit.unit;
    own.limit[own.count] = unit.limit;
    own.components[own.count++] = {call.scaled + bits * kTrellisStates,
                                   call.entries + bits * kTrellisStates,
                                   call.weight[row * D + d],
                                   bits,
                                   brought,
                                   unit.factor,
                                   place,
                                   d};
    brought += bits;
    place += kTrellisStates >> bits < kCosts ? kCosts : kTrellisStates >> bits;
  }
  float expected = 0.0f;
  for (int64_t a = 0; a < own.count; a++)
    expected += __builtin_ldexpf(own.components[a].weight, -2 * own.components[a].bits);
  for (int64_t a = 0; a < own.count; a++) {
    const Component& c = own.components[a];
    const float end = call.ends[c.bits], product = c.weight * end, sum = product * end + expected;
    own.reach[a] = product / (sum > 1e-30f ? sum : 1e-30f);
  }
  Lane lanes[kTogether];
  for (Lane& lane : lanes)
    lane = {nullptr, scratch_of<int16_t>(D), scratch_of<uint16_t>(place), scratch_of<uint8_t>(D)};
  const float* y = call.y + row * call.y_r + first * call.y_n;
  int64_t y_n = call.y_n, y_d = call.y_d;
  if (call.inverse) {
    float* made = scratch(kTrellisTask * call.columns);
    components_of<S>(call, row, first, n, scratch(kTrellisTask * D), made);
    y = made;
    y_n = call.columns;
    y_d = 1;
  }
  Gained vectors[kTrellisTask];
  for (int64_t v = 0; v < n; v++) {
    vectors[v].y = scratch(D);
    vectors[v].best = scratch_of<uint8_t>(D);
    for (int64_t a = 0; a < own.count; a++) {
      vectors[v].y[a] = y[v * y_n + own.components[a].d * y_d];
      vectors[v].best[a] = 0;
    }
  }
  if (!call.windows) return pack_vectors<C>(call, row * call.n + first, n, own, lanes, vectors);
  Gained* all[kTrellisTask];
  for (int64_t v = 0; v < n; v++) {
    vectors[v].tried = kUnitGain;
    all[v] = vectors + v;
  }
  uint8_t* windows = call.windows + (row * call.n + first) * D;
  for (int64_t i = 0; i < n * D; i++) windows[i] = 0;
  search_each<C>(call, own, lanes, all, own.count ? n : 0, [&](const Gained& v, const uint8_t* found) {
    for (int64_t a = 0; a < own.count; a++) windows[(&v - vectors) * D + own.components[a].d] = found[a];
  });
}

}  // namespace
}  // namespace tersekv
