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

// Write the newest bits of each window to a stream.
inline void write_stream(const Component* components, int64_t count, const uint8_t* windows, uint16_t* stream) {
  constexpr int kWord = 16;
  uint64_t bits = 0;  // that are not written yet
  int end = 0, begin = 0;
  for (int64_t a = 0; a < count; a++) {
    const Component& c = components[a];
    bits |= static_cast<uint64_t>(windows[a] >> (kStateBits - c.bits)) << (c.brought - begin);
    end = c.brought + c.bits;
    if (end - begin < 2 * kWord) continue;
    *stream++ = static_cast<uint16_t>(bits);
    *stream++ = static_cast<uint16_t>(bits >> kWord);
    bits >>= 2 * kWord;
    begin += 2 * kWord;
  }
  for (; begin < end; begin += kWord, bits >>= kWord) *stream++ = static_cast<uint16_t>(bits);
}

// The components of a row that have bits, and of each one what vectors of floats are computed with. There are zeros
// after them up to a multiple of 16.
struct Row {
  Component* components;
  int64_t count;
  float *unit, *limit, *weight;
  float* per_bin;  // bins per unit of a scaled component
  float* reach;    // see first_gains in kernels/trellis.py
  float enough;    // error at a gain of 1 below which no other gain is tried
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
  // Return the latter. found: room for their table entries.
  template <class S>
  int compare(const Row& row, const uint8_t* windows, const float* gains, float* found) {
    for (int64_t a = 0; a < row.count; a++) found[a] = row.components[a].table[windows[a]];
    typename S::F products = S::zero(), lengths = S::zero();
    for (int64_t a = 0; a < row.count; a += kLanes) {
      const typename S::F x = S::load(found + a), weighted = S::mul(S::load(row.weight + a), x);
      products = S::fma(weighted, S::load(y + a), products);
      lengths = S::fma(weighted, x, lengths);
    }
    const float product = S::hsum(products), length = S::hsum(lengths);
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
    if (better) __builtin_memcpy(best, windows, row.count);
    return fitting;
  }
};

// Zeros up to a multiple of 16.
inline float* zeros(int64_t floats) {
  float* made = scratch(round_up(floats, kLanes));
  for (int64_t i = 0; i < round_up(floats, kLanes); i++) made[i] = 0.0f;
  return made;
}

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
    search_vectors<S>(row.components, row.count, row.unit, row.limit, row.per_bin, own, gain, together);
    for (int64_t v = 0; v < together; v++) after(*vectors[i + v], own[v].windows);
  }
}

// Find gain and stream of n vectors from number `at` on. C, S: see encode_vectors.
template <class C, class S>
void pack_vectors(const EncodeTrellis& call, int64_t at, int64_t n, const Row& row, const Lane* lanes,
                  Gained* vectors) {
  Gained* due[kTrellisTask];
  float* found = zeros(row.count);
  for (int64_t v = 0; v < n; v++) {
    Gained& own = vectors[v];
    typename S::F all = S::zero(), counted = S::zero(), far = S::zero();
    for (int64_t a = 0; a < row.count; a += kLanes) {
      const typename S::F y = S::load(own.y + a), square = S::mul(y, y);
      all = S::add(all, square);
      counted = S::fma(S::load(row.weight + a), square, counted);
      far = S::max(far, S::mul(S::abs(y), S::load(row.reach + a)));
    }
    const float squares = S::hsum(all), weighted = S::hsum(counted), beyond = S::hmax(far);
    const float length = __builtin_sqrtf(squares / static_cast<float>(row.count > 1 ? row.count : 1));
    if (call.length) call.length[at + v] = length;
    own.code = gain_code(length);
    const float gain = call.gains[own.code];
    own.enough = row.enough * (gain * gain);
    const int larger = own.code < 254 ? own.code + 1 : 255, reaching = gain_code(beyond);
    own.tried = larger > reaching ? larger : reaching;
    own.squares = weighted;
    own.least = __builtin_inff();
    due[v] = &own;
  }
  int64_t left = row.count ? n : 0;
  search_each<C>(call, row, lanes, due, left,
                 [&](Gained& v, const uint8_t* windows) { v.own = v.compare<S>(row, windows, call.gains, found); });
  for (int64_t t = 0; t < call.tries; t++) {
    int64_t kept = 0;
    for (int64_t v = 0; v < left; v++) {
      if (due[v]->least < due[v]->enough) continue;
      const int64_t code = due[v]->own + call.steps[t];
      due[v]->tried = static_cast<int>(code < 0 ? 0 : code > 255 ? 255 : code);
      due[kept++] = due[v];
    }
    left = kept;
    search_each<C>(call, row, lanes, due, left,
                   [&](Gained& v, const uint8_t* windows) { v.compare<S>(row, windows, call.gains, found); });
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
  const float *shift = call.shift + row * D, *inverse = call.inverse + call.of[row] * D * columns;
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
  Row own{scratch_of<Component>(D),
          0,
          scratch(D),
          scratch(D),
          zeros(D),
          scratch(D),
          zeros(D),
          call.enough ? call.enough[row] : 0.0f};
  int place = 0, brought = 0;
  for (int64_t d = 0; d < D; d++) {
    const int bits = call.bits[row * D + d];
    if (bits == 0) continue;
    const TrellisUnit& unit = call.units[row * D + d];
    own.unit[own.count] = unit.unit;
    own.limit[own.count] = unit.limit;
    own.per_bin[own.count] = static_cast<float>(kTrellisBins) / static_cast<float>(unit.factor > 1 ? unit.factor : 1);
    own.weight[own.count] = call.weight[row * D + d];
    own.components[own.count++] = {call.scaled + bits * kTrellisStates,
                                   call.entries + bits * kTrellisStates,
                                   bits,
                                   brought,
                                   unit.factor,
                                   place,
                                   d,
                                   unit.factor < kTrellisLeastFactor ? nullptr : call.near[bits]};
    brought += bits;
    place += kTrellisStates >> bits < kCosts ? kCosts : kTrellisStates >> bits;
  }
  float expected = 0.0f;
  for (int64_t a = 0; a < own.count; a++)
    expected += own.weight[a] / static_cast<float>(1 << 2 * own.components[a].bits);
  for (int64_t a = 0; a < own.count; a++) {
    const Component& c = own.components[a];
    const float end = call.ends[c.bits], product = own.weight[a] * end, sum = product * end + expected;
    own.reach[a] = product / (sum > 1e-30f ? sum : 1e-30f);
  }
  Lane lanes[kTogether];
  for (Lane& lane : lanes)
    lane = {nullptr, scratch_of<int16_t>(D), scratch_of<uint8_t>(D), scratch_of<uint16_t>(place),
            scratch_of<uint8_t>(D)};
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
    vectors[v].y = zeros(D);
    vectors[v].best = scratch_of<uint8_t>(D);
    __builtin_memset(vectors[v].best, 0, D);
    if (own.count == D && y_d == 1)
      __builtin_memcpy(vectors[v].y, y + v * y_n, D * sizeof(float));
    else
      for (int64_t a = 0; a < own.count; a++) vectors[v].y[a] = y[v * y_n + own.components[a].d * y_d];
  }
  if (!call.windows) return pack_vectors<C, S>(call, row * call.n + first, n, own, lanes, vectors);
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
