// The search of kernels/trellis.py for two vectors at a time: Viterbi over 256 states with costs of
// 16 bits, 32 of them per vector.
//
// A state here is its window in reverse, newest bits lowest: u' = (u << k | c) & 255. The 2^k
// states that lead to one u' >> k are therefore 256 >> k apart. The best of them is found in k
// rounds, each of which compares the upper half of the remaining states with the lower half. A step
// stores the distance of the best one, so that the trace back is one load per component.
#pragma once

#include "encode_trellis.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the search

constexpr int kCosts = 32;                             // costs per vector
constexpr int kCostVectors = kTrellisStates / kCosts;  // vectors that hold all costs
constexpr int kTogether = 2;                           // vectors searched at once, which hide each other's latency
constexpr int kStateBits = 8;

// The lanes in a vector of best costs from which the states from 32·z on are reached.
template <int K, int Z>
struct Origin {
  alignas(64) int16_t lane[kCosts];
  static constexpr int kVector = ((Z * kCosts) >> K) / kCosts;
  constexpr Origin() : lane() {
    for (int i = 0; i < kCosts; i++) lane[i] = ((Z * kCosts + i) >> K) % kCosts;
  }
};

// A component with at least one bit.
struct Component {
  const int16_t* entries;  // scaled table, states in reverse
  const float* table;      // by window
  int bits;
  int brought;  // bits of the components before it
  int factor;
  int place;  // of its choices
  int64_t d;
};

// Room for the search of one vector.
struct Lane {
  float* y;          // components with bits
  int16_t* scaled;   // those in units of costs
  uint16_t* chosen;  // for each step and best state, the distance of the state before it
  uint8_t* windows;  // found last, by component with bits
};

// Costs of the paths of N vectors.
template <class S, int N>
struct Paths {
  typename S::W cost[N][kCostVectors];
};

// Least costs of 32 states, and the distances of the states before them.
template <class S>
struct Choice {
  typename S::W least, from;
};

// Choose between states and those `bit` after them.
template <class S>
[[gnu::always_inline]] inline Choice<S> choice(const Choice<S>& low, const Choice<S>& high, int bit) {
  Choice<S> out;
  S::choose(low.least, high.least, low.from, high.from, bit, out.least, out.from);
  return out;
}

// Return the least costs of states x·32 to x·32 + 31 after L rounds.
template <class S, int L>
[[gnu::always_inline]] inline Choice<S> survivors(const typename S::W* cost, int x) {
  if constexpr (L == 1) {
    Choice<S> out;
    S::choose_first(cost[x], cost[x + kCostVectors / 2], kTrellisStates / 2, out.least, out.from);
    return out;
  } else {
    return choice<S>(survivors<S, L - 1>(cost, x), survivors<S, L - 1>(cost, x + (kCostVectors >> L)),
                     kTrellisStates >> L);
  }
}

// Do one more round for states in one vector.
template <class S, int LANES>
[[gnu::always_inline]] inline Choice<S> halved(const Choice<S>& low) {
  return choice<S>(low, {S::template down<LANES>(low.least), S::template down<LANES>(low.from)}, LANES);
}

// Search components [first, last), which have K bits each. step: number of steps before them.
template <class S, int K, int N>
void search_run(const Component* components, int64_t first, int64_t last, int64_t step, const Lane* lanes,
                Paths<S, N>& paths) {
  using W = typename S::W;
  constexpr int kBest = K < 3 ? kCostVectors >> K : 1;
  W cost[N][kCostVectors];
  repeat<N>([&](auto v) TERSEKV_INLINE {
    repeat<kCostVectors>([&](auto z) TERSEKV_INLINE { cost[v][z] = paths.cost[v][z]; });
  });
  for (int64_t i = first; i < last; i++, step++) {
    const Component& c = components[i];
    W best[N][kBest], off[N];
    repeat<N>([&](auto v) TERSEKV_INLINE {
      uint16_t* chosen = lanes[v].chosen + c.place;
      repeat<kBest>([&](auto x) TERSEKV_INLINE {
        Choice<S> found = survivors<S, (K < 3 ? K : 3)>(cost[v], x);
        if constexpr (K > 3) found = halved<S, 16>(found);
        if constexpr (K > 4) found = halved<S, 8>(found);
        if constexpr (K > 5) found = halved<S, 4>(found);
        if constexpr (K > 6) found = halved<S, 2>(found);
        if constexpr (K > 7) found = halved<S, 1>(found);
        best[v][x] = found.least;
        S::store(chosen + x * kCosts, found.from);
      });
      off[v] = S::set1(lanes[v].scaled[i]);
    });
    if (step % kTrellisRenormalise == kTrellisRenormalise - 1)
      repeat<N>([&](auto v) TERSEKV_INLINE {
        W least = S::template head<(kTrellisStates >> K)>(best[v][0]);
        for (int x = 1; x < kBest; x++) least = S::min(least, best[v][x]);
        const W all = S::set1(S::least(least));
        for (int x = 0; x < kBest; x++) best[v][x] = S::minus(best[v][x], all);
      });
    const W factor = S::set1(c.factor);
    repeat<kCostVectors>([&](auto z) TERSEKV_INLINE {
      const W entries = S::scaled(S::load(c.entries + z * kCosts), factor);
      repeat<N>([&](auto v) TERSEKV_INLINE {
        const W error = S::template squared<(K > 4 ? K - 4 : 0)>(S::difference(entries, off[v]));
        cost[v][z] = S::plus(S::template from<K, z>(best[v][Origin<K, z>::kVector]), error);
      });
    });
  }
  repeat<N>([&](auto v) TERSEKV_INLINE {
    repeat<kCostVectors>([&](auto z) TERSEKV_INLINE { paths.cost[v][z] = cost[v][z]; });
  });
}

// Search components [first, last) after `step` steps.
template <class S, int N>
void search_steps(const Component* components, int64_t first, int64_t last, int64_t step, const Lane* lanes,
                  Paths<S, N>& paths) {
  using Run = void (*)(const Component*, int64_t, int64_t, int64_t, const Lane*, Paths<S, N>&);
  static constexpr Run runs[kTrellisRates] = {nullptr,
                                              search_run<S, 1, N>,
                                              search_run<S, 2, N>,
                                              search_run<S, 3, N>,
                                              search_run<S, 4, N>,
                                              search_run<S, 5, N>,
                                              search_run<S, 6, N>,
                                              search_run<S, 7, N>,
                                              search_run<S, 8, N>};
  while (first < last) {
    int64_t end = first + 1;
    while (end < last && components[end].bits == components[first].bits) end++;
    runs[components[first].bits](components, first, end, step, lanes, paths);
    step += end - first;
    first = end;
  }
}

// Return the state with the lowest window among those with the least cost.
template <class S>
int best_state(const typename S::W* cost) {
  typename S::W least = cost[0];
  for (int z = 1; z < kCostVectors; z++) least = S::min(least, cost[z]);
  least = S::set1(S::least(least));
  int window = kTrellisStates;
  for (int z = 0; z < kCostVectors; z++)
    for (uint32_t found = S::equal(least, cost[z]); found; found &= found - 1) {
      const int candidate = kReversed[z * kCosts + __builtin_ctz(found)];
      window = candidate < window ? candidate : window;
    }
  return kReversed[window];
}

// Return the state before a component that ended in `state`.
inline int state_before(const Lane& lane, const Component& c, int state) {
  const int best = state >> c.bits;
  return best + lane.chosen[c.place + best];
}

// Search components [first, last) of a ring, where those from `count` on are the first ones again.
template <class S, int N>
void search_around(const Component* components, int64_t count, int64_t first, int64_t last, const Lane* lanes,
                   Paths<S, N>& paths) {
  const int64_t middle = last < count ? last : count;
  search_steps<S, N>(components, first, middle, 0, lanes, paths);
  search_steps<S, N>(components, 0, last - middle, middle - first, lanes, paths);
}

template <class S, int N>
void search_together(const Component* components, int64_t count, const Lane* lanes) {
  Paths<S, N> paths;
  int state[N], ring[N];
  const int total = components[count - 1].brought + components[count - 1].bits;
  int64_t begin = 0;
  while (begin < count && components[begin].brought < kTrellisWarmUpBits) begin++;
  const int warm = begin < count ? components[begin].brought : total;
  const auto before = [&](int64_t i) {
    return i < count ? components[i].brought : components[i - count].brought + total;
  };
  int64_t end = begin;
  while (end < begin + count && before(end) < warm + kTrellisLookAheadBits) end++;
  for (int v = 0; v < N; v++)
    for (auto& cost : paths.cost[v]) cost = S::set1(0);
  search_around<S, N>(components, count, 0, end, lanes, paths);
  for (int v = 0; v < N; v++) state[v] = best_state<S>(paths.cost[v]);
  for (int64_t i = end - 1; i >= begin; i--)
    for (int v = 0; v < N; v++) state[v] = state_before(lanes[v], components[i < count ? i : i - count], state[v]);
  for (int v = 0; v < N; v++) {
    alignas(64) uint16_t cost[kTrellisStates];
    for (uint16_t& x : cost) x = 0xffff;
    cost[ring[v] = state[v]] = 0;
    for (int z = 0; z < kCostVectors; z++) paths.cost[v][z] = S::load(cost + z * kCosts);
  }
  search_around<S, N>(components, count, begin, begin + count, lanes, paths);
  for (int64_t i = begin + count - 1; i >= begin; i--) {
    const int64_t at = i < count ? i : i - count;
    const Component& c = components[at];
    const int brought = before(i) - warm;
    for (int v = 0; v < N; v++) {
      lanes[v].windows[at] = kReversed[state[v]];
      state[v] = state_before(lanes[v], c, state[v]);
      if (brought < kStateBits)  // costs that saturate do not tell the ring's path from others
        state[v] = (state[v] & ((1 << brought) - 1)) | (ring[v] << brought & (kTrellisStates - 1));
    }
  }
}

// Search the windows of n vectors, at most kTogether, with their components divided by gains. unit,
// limit: of each component, see TrellisUnit.
template <class S>
void search_vectors(const Component* components, int64_t count, const float* unit, const float* limit,
                    const Lane* lanes, const float* gain, int64_t n) {
  for (int64_t v = 0; v < n; v++) {
    const float *from = lanes[v].y, own = gain[v];
    int16_t* scaled = lanes[v].scaled;
    for (int64_t i = 0; i < count; i++) {
      float y = __builtin_rintf(from[i] / own * unit[i]);
      y = y < limit[i] ? y : limit[i];
      scaled[i] = static_cast<int16_t>(static_cast<int32_t>(y > -limit[i] ? y : -limit[i]));
    }
  }
  if (n == kTogether) return search_together<S, kTogether>(components, count, lanes);
  for (int64_t v = 0; v < n; v++) search_together<S, 1>(components, count, lanes + v);
}

}  // namespace
}  // namespace tersekv
