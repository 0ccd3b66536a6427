// Encoding of a task's vectors: components, gains and streams around the search of
// trellis_search.h.
#pragma once

#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include "trellis_search.h"

namespace tersekv {
namespace {  // internal to each build of the search

constexpr int kTogether = 8;  // vectors whose components are computed together

// Nearest code of a gain, see kernels/trellis.py. bounds: gains between two codes, see trellis_gain_bounds.
inline int gain_code(const double* bounds, float gain) {
  const double x = gain > 1e-30f ? gain < 1e30f ? gain : 1e30f : 1e-30f;
  constexpr int kMantissa = 52, kBias = 1023;
  uint64_t word;
  __builtin_memcpy(&word, &x, sizeof(word));
  const int exponent = static_cast<int>(word >> kMantissa) - kBias;
  word = (word & ((uint64_t{1} << kMantissa) - 1)) | static_cast<uint64_t>(kBias) << kMantissa;
  double part;  // between 1 and 2
  __builtin_memcpy(&part, &word, sizeof(part));
  int above = 0;
  for (int i = 0; i < kGainSteps; i++) above += part >= bounds[i];
  const int code = exponent * kGainSteps + above + kUnitGain;
  return code < 0 ? 0 : code > 255 ? 255 : code;
}

// Write the newest bits of each window to a stream of whole words. There are zeros after the windows up to a multiple
// of 8.
inline void write_stream(const TrellisRow& row, const uint8_t* windows, uint16_t* stream) {
  constexpr int kWord = 16, kHeld = 64;
  uint64_t bits = 0;  // that are not written yet
  int held = 0;
  const auto write = [&](uint64_t more, int count) {
    bits |= more << held;
    held += count;
    if (held < kHeld) return;
    __builtin_memcpy(stream, &bits, sizeof(bits));
    stream += kHeld / kWord;
    held -= kHeld;
    bits = held ? more >> (count - held) : 0;
  };
#if defined(__BMI2__)
  for (int64_t a = 0; a < row.count; a += 8) {
    uint64_t eight;
    __builtin_memcpy(&eight, windows + a, sizeof(eight));
    write(_pext_u64(eight, row.newest[a / 8]), __builtin_popcountll(row.newest[a / 8]));
  }
#else
  for (int64_t a = 0; a < row.count; a++) {
    const int own = row.components[a].bits;
    write(static_cast<uint64_t>(windows[a] >> (kStateBits - own)), own);
  }
#endif
  for (; held > 0; held -= kWord, bits >>= kWord) *stream++ = static_cast<uint16_t>(bits);
}

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
  int compare(const TrellisRow& row, const uint8_t* windows, const EncodeTrellis& call, float* found) {
    for (int64_t a = 0; a < row.count; a++) found[a] = call.entries[row.tables[a] + windows[a]];
    typename S::F products = S::zero(), lengths = S::zero();
    for (int64_t a = 0; a < row.count; a += kLanes) {
      const typename S::F x = S::load(found + a), weighted = S::mul(S::load(row.weight + a), x);
      products = S::fma(weighted, S::load(y + a), products);
      lengths = S::fma(weighted, x, lengths);
    }
    const float product = S::hsum(products), length = S::hsum(lengths);
    const int fitting = gain_code(call.bounds, product / (length > 1e-20f ? length : 1e-20f));
    bool better = false;
    for (const int tries : {tried, fitting}) {
      const double gain = call.gains[tries];
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

// Search n vectors with their gains `tried`. after(vector, windows) is called for each.
template <class C, class After>
void search_each(const EncodeTrellis& call, const TrellisRow& row, Searched* room, Gained* const* vectors, int64_t n,
                 After&& after) {
  Searched* all[kTrellisTask];
  for (int64_t v = 0; v < n; v++) {
    all[v] = room + v;
    room[v].y = vectors[v]->y;
    room[v].gain = call.gains[vectors[v]->tried > 1 ? vectors[v]->tried : 1];
  }
  search_vectors<C>(row, all, n);
  for (int64_t v = 0; v < n; v++) after(*vectors[v], room[v].windows);
}

// Find gain and stream of n vectors from number `at` on. C, S: see encode_vectors.
template <class C, class S>
void pack_vectors(const EncodeTrellis& call, int64_t at, int64_t n, const TrellisRow& row, float enough, Searched* room,
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
    own.code = gain_code(call.bounds, length);
    const float gain = call.gains[own.code];
    own.enough = enough * (gain * gain);
    const int larger = own.code < 254 ? own.code + 1 : 255, reaching = gain_code(call.bounds, beyond);
    own.tried = larger > reaching ? larger : reaching;
    own.squares = weighted;
    own.least = __builtin_inff();
    due[v] = &own;
  }
  int64_t left = row.count ? n : 0;
  if (left)
    search_each<C>(call, row, room, due, left,
                   [&](Gained& v, const uint8_t* windows) { v.own = v.compare<S>(row, windows, call, found); });
  for (int64_t t = 0; t < call.tries; t++) {
    int64_t kept = 0;
    for (int64_t v = 0; v < left; v++) {
      if (due[v]->least < due[v]->enough) continue;
      const int64_t code = due[v]->own + call.steps[t];
      due[v]->tried = static_cast<int>(code < 0 ? 0 : code > 255 ? 255 : code);
      due[kept++] = due[v];
    }
    left = kept;
    if (left == 0) break;
    search_each<C>(call, row, room, due, left,
                   [&](Gained& v, const uint8_t* windows) { v.compare<S>(row, windows, call, found); });
  }
  for (int64_t v = 0; v < n; v++) {
    uint16_t* stream = call.stream + (at + v) * call.words;
    for (int64_t w = 0; w < call.words; w++) stream[w] = 0;
    write_stream(row, vectors[v].best, stream);
    call.gain[at + v] = static_cast<uint8_t>(vectors[v].code);
  }
}

// Compute components y [n, call.columns] of vectors [first, first + n) of a row, at most
// kTogether: (x - shift)·inverse. Each vector's sums have the same order in any task.
template <class S>
void components_of(const EncodeTrellis& call, int64_t row, int64_t first, int64_t n, float* x, float* y) {
  const int64_t D = call.D, columns = call.columns;
  const float *shift = call.shift + row * D, *inverse = call.inverse + call.of[row] * D * columns;
  for (int64_t v = 0; v < n; v++) {
    const float* from = call.y + row * call.y_r + (first + v) * call.y_n;
    if (call.y_d == 1)
      for (int64_t d = 0; d < D; d++) x[v * D + d] = from[d] - shift[d];
    else
      for (int64_t d = 0; d < D; d++) x[v * D + d] = from[d * call.y_d] - shift[d];
  }
  for (int64_t v = n; v < kTogether; v++)
    for (int64_t d = 0; d < D; d++) x[v * D + d] = 0.0f;
  for (int64_t column = 0; column < columns; column += kLanes) {
    typename S::F sums[kTogether];
    repeat<kTogether>([&](auto v) TERSEKV_INLINE { sums[v] = S::set1(0.0f); });
    for (int64_t d = 0; d < D; d++) {
      const typename S::F entries = S::load(inverse + d * columns + column);
      repeat<kTogether>([&](auto v) TERSEKV_INLINE { sums[v] = S::fma(S::set1(x[v * D + d]), entries, sums[v]); });
    }
    repeat<kTogether>([&](auto v) TERSEKV_INLINE { S::store(y + v * columns + column, sums[v]); });
  }
}

// Encode vectors [first, last) of a row, at most kTrellisTask. C: operations on costs; S: on floats.
template <class C, class S>
void encode_vectors(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  reset_scratch();
  const int64_t D = call.D, n = last - first;
  const TrellisRow& own = call.rows[row];
  Searched room[kTrellisTask];
  for (int64_t v = 0; v < n; v++)
    room[v] = {nullptr,
               0.0f,
               scratch_of<int16_t>(round_up(D, kLanes)),
               scratch_of<uint8_t>(round_up(D, kLanes)),
               scratch_of<uint8_t>(D),
               scratch_of<uint16_t>(kMostGroups),
               scratch_of<uint16_t>(own.choices),
               0};
  const float* y = call.y + row * call.y_r + first * call.y_n;
  int64_t y_n = call.y_n, y_d = call.y_d;
  if (call.inverse) {
    const int64_t columns = call.columns;
    float *x = scratch(kTogether * D), *made = scratch(round_up(n, kTogether) * columns);
    for (int64_t v = 0; v < n; v += kTogether)
      components_of<S>(call, row, first + v, n - v < kTogether ? n - v : kTogether, x, made + v * columns);
    y = made;
    y_n = columns;
    y_d = 1;
  }
  Gained vectors[kTrellisTask];
  for (int64_t v = 0; v < n; v++) {
    vectors[v].y = zeros(D);
    vectors[v].best = scratch_of<uint8_t>(round_up(D, kLanes));
    __builtin_memset(vectors[v].best, 0, round_up(D, kLanes));
    if (own.count == D && y_d == 1)
      __builtin_memcpy(vectors[v].y, y + v * y_n, D * sizeof(float));
    else
      for (int64_t a = 0; a < own.count; a++) vectors[v].y[a] = y[v * y_n + own.components[a].d * y_d];
  }
  const float enough = call.enough ? call.enough[row] : 0.0f;
  if (!call.windows) return pack_vectors<C, S>(call, row * call.n + first, n, own, enough, room, vectors);
  Gained* all[kTrellisTask];
  for (int64_t v = 0; v < n; v++) {
    vectors[v].tried = kUnitGain;
    all[v] = vectors + v;
  }
  uint8_t* windows = call.windows + (row * call.n + first) * D;
  for (int64_t i = 0; i < n * D; i++) windows[i] = 0;
  if (own.count)
    search_each<C>(call, own, room, all, n, [&](const Gained& v, const uint8_t* found) {
      for (int64_t a = 0; a < own.count; a++) windows[(&v - vectors) * D + own.components[a].d] = found[a];
    });
}

}  // namespace
}  // namespace tersekv
