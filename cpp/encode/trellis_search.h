// The search of kernels/trellis.py for one vector at a time: Viterbi over 256 states, sixteen per
// vector register.
//
// A state here is its window in reverse, newest bits lowest: u' = (u << k | c) & 255. The 2^k
// states that lead to one u' >> k are therefore 256 >> k apart. The best of them is found in k
// rounds, each of which compares the upper half of the remaining states with the lower half. This
// needs no operations across lanes. Each round stores one bit per pair, 1 if the upper one was
// better. All rounds of a step take fewer than 256 bits, round l from bit 256 - (256 >> l) on. The
// trace back reads k of them.
#pragma once

#include "encode_trellis.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the search

constexpr int kStateLanes = kTrellisStates / kLanes;

struct Rounds {
  uint16_t upper[16];
  int bit(int round, int state) const {
    const int at = kTrellisStates - (kTrellisStates >> round) + state;
    return upper[at / 16] >> at % 16 & 1;
  }
};

// The lanes in a vector of best costs from which the sixteen states from 16·z on are reached.
template <int K, int Z>
struct Origin {
  alignas(64) int32_t lane[kLanes];
  static constexpr int kVector = ((Z * kLanes) >> K) / kLanes;
  constexpr Origin() : lane() {
    for (int i = 0; i < kLanes; i++) lane[i] = ((Z * kLanes + i) >> K) % kLanes;
  }
};

// Return the least costs of states x·16 to x·16 + 15 after L rounds.
template <class S, int L>
[[gnu::always_inline]] inline typename S::F survivors(const float* cost, int x, Rounds& rounds) {
  if constexpr (L == 0) {
    return S::load(cost + x * kLanes);
  } else {
    const typename S::F low = survivors<S, L - 1>(cost, x, rounds),
                        high = survivors<S, L - 1>(cost, x + (kStateLanes >> L), rounds);
    rounds.upper[kStateLanes - (kStateLanes >> (L - 1)) + x] = static_cast<uint16_t>(S::less(high, low));
    return S::min(high, low);
  }
}

// Search one component of K bits. Replace `cost` by the costs of the paths to each state. The
// component's error is (root·(table - y))².
template <class S, int K>
void search_step(float* cost, const float* table, float root, float minus_y, Rounds& rounds) {
  using F = typename S::F;
  constexpr int kVectors = K < 4 ? kStateLanes >> K : 1;
  F best[kVectors];
  repeat<kVectors>([&](auto x) TERSEKV_INLINE { best[x] = survivors<S, (K < 4 ? K : 4)>(cost, x, rounds); });
  if constexpr (K > 4) {
    const F half = S::template down<8>(best[0]);
    uint32_t upper = S::less(half, best[0]) & 0xff;
    best[0] = S::min(half, best[0]);
    if constexpr (K > 5) {
      const F quarter = S::template down<4>(best[0]);
      upper |= (S::less(quarter, best[0]) & 0xf) << 8;
      best[0] = S::min(quarter, best[0]);
    }
    if constexpr (K > 6) {
      const F eighth = S::template down<2>(best[0]);
      upper |= (S::less(eighth, best[0]) & 0x3) << 12;
      best[0] = S::min(eighth, best[0]);
    }
    if constexpr (K > 7) {
      const F last = S::template down<1>(best[0]);
      upper |= (S::less(last, best[0]) & 0x1) << 14;
      best[0] = S::min(last, best[0]);
    }
    rounds.upper[15] = static_cast<uint16_t>(upper);
  }
  const F scale = S::set1(root), shift = S::set1(root * minus_y);
  repeat<kStateLanes>([&](auto z) TERSEKV_INLINE {
    const F error = S::fma(S::load(table + z * kLanes), scale, shift);
    S::store(cost + z * kLanes, S::fma(error, error, S::template from<K, z>(best[Origin<K, z>::kVector])));
  });
}

using SearchStep = void (*)(float*, const float*, float, float, Rounds&);

// A component with at least one bit.
struct Component {
  SearchStep step;
  const float* table;
  float root;  // square root of its weight
  int bits;
  int64_t d;
};

// Return the state before a step of `bits` bits that ended in `state`.
inline int state_before(const Rounds& rounds, int bits, int state) {
  int x = state >> bits;
  for (int round = bits - 1; round >= 0; round--) x += rounds.bit(round, x) << (7 - round);
  return x;
}

// Return the state with the lowest window among those whose cost is the least up to rounding; see
// kernels/trellis.py.
template <class S>
int best_state(const float* cost) {
  typename S::F least = S::load(cost);
  for (int x = 1; x < kStateLanes; x++) least = S::min(S::load(cost + x * kLanes), least);
  alignas(64) float lane[kLanes];
  S::store(lane, least);
  for (int i = 1; i < kLanes; i++) lane[0] = lane[i] < lane[0] ? lane[i] : lane[0];
  const auto bound = S::set1(lane[0] * kTrellisTie);
  int window = kTrellisStates;
  for (int x = 0; x < kStateLanes; x++)
    for (uint32_t found = ~S::less(bound, S::load(cost + x * kLanes)) & 0xffff; found; found &= found - 1) {
      const int candidate = reversed_byte(x * kLanes + __builtin_ctz(found));
      window = candidate < window ? candidate : window;
    }
  return window < kTrellisStates ? reversed_byte(window) : 0;
}

// Vectors searched at once. A step waits for the costs of the step before, so that a second vector
// fills the gaps.
constexpr int kTogether = 2;

// Room for the search of one vector: components times -1, what each step chose, and the windows found.
struct Lane {
  float* minus_y;
  Rounds* rounds;
  uint8_t* windows;
};

template <class S, int N>
void search_together(const Component* components, int64_t count, const Lane* lanes) {
  alignas(64) float cost[N][kTrellisStates];
  int state[N];
  const auto forward = [&](int64_t first) {
    for (int64_t i = first; i < count; i++) {
      const Component& c = components[i];
      for (int v = 0; v < N; v++) c.step(cost[v], c.table, c.root, lanes[v].minus_y[i], lanes[v].rounds[i]);
    }
  };
  const auto fill = [&](float x) {
    for (int v = 0; v < N; v++)
      for (int i = 0; i < kTrellisStates; i++) cost[v][i] = x;
  };
  fill(0.0f);
  forward(count > kTrellisWarmUp ? count - kTrellisWarmUp : 0);
  forward(0);
  for (int v = 0; v < N; v++) state[v] = best_state<S>(cost[v]);
  for (int64_t i = count - 1; i >= 0; i--)
    for (int v = 0; v < N; v++) state[v] = state_before(lanes[v].rounds[i], components[i].bits, state[v]);
  fill(__builtin_inff());
  for (int v = 0; v < N; v++) cost[v][state[v]] = 0.0f;
  forward(0);
  for (int64_t i = count - 1; i >= 0; i--)
    for (int v = 0; v < N; v++) {
      lanes[v].windows[components[i].d] = static_cast<uint8_t>(reversed_byte(state[v]));
      state[v] = state_before(lanes[v].rounds[i], components[i].bits, state[v]);
    }
}

// Search the windows of `n` vectors, at most kTogether.
template <class S>
void search_vectors(const Component* components, int64_t count, const Lane* lanes, int64_t n) {
  if (n == kTogether) return search_together<S, kTogether>(components, count, lanes);
  for (int64_t v = 0; v < n; v++) search_together<S, 1>(components, count, lanes + v);
}

// Nearest code of a gain, see kernels/trellis.py.
inline int gain_code(float gain) {
  const float code =
      __builtin_nearbyintf(__builtin_log2f(gain > 1e-30f ? gain : 1e-30f) * static_cast<float>(kGainSteps)) +
      static_cast<float>(kUnitGain);
  return code < 0.0f ? 0 : code > 255.0f ? 255 : static_cast<int>(code);
}

// Adds the newest bits of each window to a stream of zeros.
inline void write_stream(const Component* components, int64_t count, const uint8_t* windows, uint16_t* stream) {
  int64_t place = 0;
  for (int64_t a = 0; a < count; a++) {
    const uint32_t bits = static_cast<uint32_t>(windows[components[a].d] >> (8 - components[a].bits)) << place % 16;
    stream[place / 16] |= static_cast<uint16_t>(bits);
    if (bits >> 16) stream[place / 16 + 1] |= static_cast<uint16_t>(bits >> 16);
    place += components[a].bits;
  }
}

// A vector while its gain is searched.
struct Gained {
  const float* y;
  uint8_t* best;  // the windows with the least error so far
  float least;
  int code, middle, tried;  // codes of gains: the best one, that of least squares, and the one in search
};

// Find the gain and the stream of each vector. The first gain is the root mean square of its
// components. Gains around that of least squares are tried next; the one with the least error stays.
template <class S>
void pack_vectors(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last, const Component* components,
                  int64_t count, const Lane* lanes) {
  const int64_t D = call.D;
  const float *weight = call.weight + row * D, *entry = call.entries;
  const uint8_t* bits = call.bits + row * D;
  Gained vectors[kTogether];
  for (Gained& v : vectors) v.best = reinterpret_cast<uint8_t*>(scratch(ceil_div(D, 4)));
  const auto value = [&](const uint8_t* of, int64_t d) { return entry[bits[d] * kTrellisStates + of[d]]; };
  const auto error = [&](const Gained& v, const uint8_t* of) {
    float sum = 0.0f;
    for (int64_t d = 0; d < D; d++) {
      const float off = v.y[d * call.y_d] - call.gains[v.tried] * value(of, d);
      sum += weight[d] * off * off;
    }
    return sum;
  };
  for (int64_t i = first; i < last; i += kTogether) {
    const int64_t n = last - i < kTogether ? last - i : kTogether;
    const auto search = [&] {
      for (int64_t v = 0; v < n; v++) {
        const float gain = call.gains[vectors[v].tried > 1 ? vectors[v].tried : 1];
        for (int64_t a = 0; a < count; a++) lanes[v].minus_y[a] = -(vectors[v].y[components[a].d * call.y_d] / gain);
      }
      if (count) search_vectors<S>(components, count, lanes, n);
    };
    for (int64_t v = 0; v < n; v++) {
      Gained& own = vectors[v];
      own.y = call.y + row * call.y_r + (i + v) * call.y_n;
      float squares = 0.0f;
      for (int64_t a = 0; a < count; a++) {
        const float x = own.y[components[a].d * call.y_d];
        squares += x * x;
      }
      own.code = own.tried = gain_code(__builtin_sqrtf(squares / static_cast<float>(count > 1 ? count : 1)));
    }
    search();
    for (int64_t v = 0; v < n; v++) {
      Gained& own = vectors[v];
      float product = 0.0f, length = 0.0f;
      for (int64_t d = 0; d < D; d++) {
        own.best[d] = lanes[v].windows[d];
        const float x = value(own.best, d);
        product += weight[d] * x * own.y[d * call.y_d];
        length += weight[d] * x * x;
      }
      own.middle = gain_code(product / (length > 1e-20f ? length : 1e-20f));
      own.least = error(own, own.best);
    }
    for (int64_t t = 0; t < call.tries && count; t++) {
      for (int64_t v = 0; v < n; v++) {
        const int64_t step = vectors[v].middle + call.steps[t];
        vectors[v].tried = static_cast<int>(step < 0 ? 0 : step > 255 ? 255 : step);
      }
      search();
      for (int64_t v = 0; v < n; v++) {
        Gained& own = vectors[v];
        const float found = error(own, lanes[v].windows);
        if (!(found < own.least)) continue;
        own.least = found;
        own.code = own.tried;
        for (int64_t d = 0; d < D; d++) own.best[d] = lanes[v].windows[d];
      }
    }
    for (int64_t v = 0; v < n; v++) {
      uint16_t* stream = call.stream + (row * call.n + i + v) * call.words;
      for (int64_t w = 0; w < call.words; w++) stream[w] = 0;
      write_stream(components, count, vectors[v].best, stream);
      call.gain[row * call.n + i + v] = static_cast<uint8_t>(vectors[v].code);
    }
  }
}

template <class S>
void encode_vectors(const EncodeTrellis& call, int64_t row, int64_t first, int64_t last) {
  static constexpr SearchStep steps[kTrellisRates] = {nullptr,           search_step<S, 1>, search_step<S, 2>,
                                                      search_step<S, 3>, search_step<S, 4>, search_step<S, 5>,
                                                      search_step<S, 6>, search_step<S, 7>, search_step<S, 8>};
  reset_scratch();
  const int64_t D = call.D;
  auto* components = reinterpret_cast<Component*>(scratch(D * (sizeof(Component) / sizeof(float))));
  Lane lanes[kTogether];
  for (Lane& lane : lanes) {
    lane.minus_y = scratch(D);
    lane.rounds = reinterpret_cast<Rounds*>(scratch(D * (sizeof(Rounds) / sizeof(float))));
    lane.windows = reinterpret_cast<uint8_t*>(scratch(ceil_div(D, 4)));
    for (int64_t d = 0; d < D; d++) lane.windows[d] = 0;
  }
  int64_t count = 0;
  for (int64_t d = 0; d < D; d++) {
    const int bits = call.bits[row * D + d];
    if (bits == 0) continue;
    const float weight = call.weight[row * D + d];
    components[count++] = {steps[bits], call.tables + bits * kTrellisStates, __builtin_sqrtf(weight > 0 ? weight : 0),
                           bits, d};
  }
  if (!call.windows) return pack_vectors<S>(call, row, first, last, components, count, lanes);
  for (int64_t i = first; i < last; i += kTogether) {
    const int64_t n = last - i < kTogether ? last - i : kTogether;
    for (int64_t v = 0; v < n; v++) {
      const float* y = call.y + row * call.y_r + (i + v) * call.y_n;
      for (int64_t a = 0; a < count; a++) lanes[v].minus_y[a] = -y[components[a].d * call.y_d];
    }
    if (count) search_vectors<S>(components, count, lanes, n);
    for (int64_t v = 0; v < n; v++)
      for (int64_t d = 0; d < D; d++) call.windows[(row * call.n + i + v) * D + d] = lanes[v].windows[d];
  }
}

}  // namespace
}  // namespace tersekv
