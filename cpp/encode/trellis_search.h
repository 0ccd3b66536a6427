// The search of kernels/trellis_search.py for two vectors at a time: Viterbi over 256 states with costs of
// 16 bits, 32 of them per vector.
//
// A state here is its window in reverse, newest bits lowest: u' = (u << k | c) & 255. The 2^k
// states that lead to one u' >> k are therefore 256 >> k apart. The best of them is found in k
// rounds, each of which compares the upper half of the remaining states with the lower half. A step
// stores a mark of the best one, whose upper byte is its distance, so that the trace back is one load
// per component.
//
// Where only near entries may be taken, a step goes from the best states to the next best states
// without the costs of all 256. A lane per near entry holds it and a mark. Its lower byte is the lane of
// the best state before it; other steps leave 0 there.
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
  const int16_t* near;  // see EncodeTrellis
};

// Room for the search of one vector.
struct Lane {
  float* y;          // components with bits
  int16_t* scaled;   // those in units of costs
  uint8_t* bins;     // of them
  uint16_t* chosen;  // for each step and best state, the mark of the state before it
  uint8_t* windows;  // found last, by component with bits
};

// Costs of the paths of N vectors.
template <class S, int N>
struct Paths {
  typename S::W cost[N][kCostVectors];
};

// Least costs of 32 states, and the marks of the states before them.
template <class S>
struct Choice {
  typename S::W least, from;
};

// Choose between states and those `bit` after them.
template <class S>
[[gnu::always_inline]] inline Choice<S> choice(const Choice<S>& low, const Choice<S>& high, int bit) {
  Choice<S> out;
  S::choose(low.least, high.least, low.from, high.from, bit << 8, out.least, out.from);
  return out;
}

// Choose between near entries.
template <class S>
[[gnu::always_inline]] inline Choice<S> nearest(const Choice<S>& low, const Choice<S>& high) {
  Choice<S> out;
  S::pick(low.least, high.least, low.from, high.from, out.least, out.from);
  return out;
}

template <class S, int LANES>
[[gnu::always_inline]] inline Choice<S> lower(const Choice<S>& x) {
  return {S::template down<LANES>(x.least), S::template down<LANES>(x.from)};
}

// Return the least costs of states x·32 to x·32 + 31 after L rounds.
template <class S, int L>
[[gnu::always_inline]] inline Choice<S> survivors(const typename S::W* cost, int x) {
  if constexpr (L == 1) {
    Choice<S> out;
    S::choose_first(cost[x], cost[x + kCostVectors / 2], kTrellisStates / 2 << 8, out.least, out.from);
    return out;
  } else {
    return choice<S>(survivors<S, L - 1>(cost, x), survivors<S, L - 1>(cost, x + (kCostVectors >> L)),
                     kTrellisStates >> L);
  }
}

// Do one more round for states in one vector.
template <class S, int LANES>
[[gnu::always_inline]] inline Choice<S> halved(const Choice<S>& low) {
  return choice<S>(low, lower<S, LANES>(low), LANES);
}

// Go on from the best states by the near entries of a component's bin, of K bits. off: the component.
template <class S, int K>
[[gnu::always_inline]] inline Choice<S> near_step(const typename S::W& best, const Component& c, int bin,
                                                  const typename S::W& factor, const typename S::W& off) {
  constexpr int kEntries = near_count(K), kVectors = kEntries / kCosts, kGroups = kTrellisStates >> K;
  const int16_t* entries = c.near + bin * 2 * kEntries;
  const auto table = S::template table<K>(best);
  Choice<S> found[kVectors];
  repeat<kVectors>([&](auto x) TERSEKV_INLINE {
    const auto marks = S::load(entries + kEntries + x * kCosts);
    const auto difference = S::difference(S::scaled(S::load(entries + x * kCosts), factor), off);
    const auto error = S::template squared<(K > 4 ? K - 4 : 0)>(difference);
    found[x] = {S::plus(S::template look_up<K>(table, marks), error), marks};
  });
  if constexpr (kVectors == 4)
    return nearest<S>(nearest<S>(found[0], found[2]), nearest<S>(found[1], found[3]));
  else if constexpr (kVectors == 2) {
    const Choice<S> two = nearest<S>(found[0], found[1]);
    return nearest<S>(two, lower<S, kGroups>(two));
  } else {
    const Choice<S> two = nearest<S>(found[0], lower<S, 2 * kGroups>(found[0]));
    return nearest<S>(two, lower<S, kGroups>(two));
  }
}

// Subtract the least of the best states' costs from all.
template <class S, int K>
[[gnu::always_inline]] inline void renormalise(typename S::W* best, int vectors) {
  auto least = S::template head<(kTrellisStates >> K)>(best[0]);
  for (int x = 1; x < vectors; x++) least = S::min(least, best[x]);
  const auto all = S::set1(S::least(least));
  for (int x = 0; x < vectors; x++) best[x] = S::minus(best[x], all);
}

// How far a path has come: its steps and the bits of its components.
struct Progress {
  int64_t steps;
  int bits;
};

// Search components [first, last), which have K bits each.
template <class S, int K, int N>
void search_run(const Component* components, int64_t first, int64_t last, Progress done, const Lane* lanes,
                Paths<S, N>& paths) {
  using W = typename S::W;
  constexpr int kBest = K < 3 ? kCostVectors >> K : 1;
  W cost[N][kCostVectors];
  repeat<N>([&](auto v) TERSEKV_INLINE {
    repeat<kCostVectors>([&](auto z) TERSEKV_INLINE { cost[v][z] = paths.cost[v][z]; });
  });
  for (int64_t i = first; i < last; i++) {
    W best[N][kBest], off[N];
    const auto due = [&] TERSEKV_INLINE { return done.steps % kTrellisRenormalise == kTrellisRenormalise - 1; };
    repeat<N>([&](auto v) TERSEKV_INLINE {
      uint16_t* chosen = lanes[v].chosen + components[i].place;
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
    });
    if constexpr (has_near(K))
      for (; components[i].near && i + 1 < last && done.bits + K >= kStateBits; i++, done.steps++, done.bits += K) {
        const Component &c = components[i], &after = components[i + 1];
        const W factor = S::set1(c.factor);
        const bool subtract = due();
        repeat<N>([&](auto v) TERSEKV_INLINE {
          if (subtract) renormalise<S, K>(best[v], 1);
          const auto found = near_step<S, K>(best[v][0], c, lanes[v].bins[i], factor, S::set1(lanes[v].scaled[i]));
          best[v][0] = found.least;
          S::store(lanes[v].chosen + after.place, found.from);
        });
      }
    if (due()) repeat<N>([&](auto v) TERSEKV_INLINE { renormalise<S, K>(best[v], kBest); });
    const Component& c = components[i];
    repeat<N>([&](auto v) TERSEKV_INLINE { off[v] = S::set1(lanes[v].scaled[i]); });
    const W factor = S::set1(c.factor);
    repeat<kCostVectors>([&](auto z) TERSEKV_INLINE {
      const W entries = S::scaled(S::load(c.entries + z * kCosts), factor);
      repeat<N>([&](auto v) TERSEKV_INLINE {
        const W error = S::template squared<(K > 4 ? K - 4 : 0)>(S::difference(entries, off[v]));
        cost[v][z] = S::plus(S::template from<K, z>(best[v][Origin<K, z>::kVector]), error);
      });
    });
    done.steps++;
    done.bits += K;
  }
  repeat<N>([&](auto v) TERSEKV_INLINE {
    repeat<kCostVectors>([&](auto z) TERSEKV_INLINE { paths.cost[v][z] = cost[v][z]; });
  });
}

// Search components [first, last). done: before them; it is updated.
template <class S, int N>
void search_steps(const Component* components, int64_t first, int64_t last, Progress& done, const Lane* lanes,
                  Paths<S, N>& paths) {
  using Run = void (*)(const Component*, int64_t, int64_t, Progress, const Lane*, Paths<S, N>&);
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
    const int bits = components[first].bits;
    runs[bits](components, first, end, done, lanes, paths);
    done.steps += end - first;
    done.bits += static_cast<int>(end - first) * bits;
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
  return best + (lane.chosen[c.place + best] >> 8);
}

// Search components [first, last) of a ring, where those from `count` on are the first ones again.
template <class S, int N>
void search_around(const Component* components, int64_t count, int64_t first, int64_t last, const Lane* lanes,
                   Paths<S, N>& paths) {
  const int64_t middle = last < count ? last : count;
  Progress done{0, 0};
  search_steps<S, N>(components, first, middle, done, lanes, paths);
  search_steps<S, N>(components, 0, last - middle, done, lanes, paths);
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
// limit, per_bin: of each component, see Row.
template <class S>
void search_vectors(const Component* components, int64_t count, const float* unit, const float* limit,
                    const float* per_bin, const Lane* lanes, const float* gain, int64_t n) {
  for (int64_t v = 0; v < n; v++) {
    const float *from = lanes[v].y, own = gain[v];
    int16_t* scaled = lanes[v].scaled;
    uint8_t* bins = lanes[v].bins;
    for (int64_t i = 0; i < count; i++) {
      float y = __builtin_rintf(from[i] / own * unit[i]);
      y = y == y ? y : 0.0f;
      y = y < limit[i] ? y : limit[i];
      y = y > -limit[i] ? y : -limit[i];
      scaled[i] = static_cast<int16_t>(static_cast<int32_t>(y));
      constexpr float kMost = kTrellisBins;
      float bin = __builtin_rintf(y * per_bin[i]);
      bin = bin < kMost ? bin : kMost;
      bins[i] = static_cast<uint8_t>(static_cast<int32_t>((bin > -kMost ? bin : -kMost) + kMost));
    }
  }
  if (n == kTogether) return search_together<S, kTogether>(components, count, lanes);
  for (int64_t v = 0; v < n; v++) search_together<S, 1>(components, count, lanes + v);
}

}  // namespace
}  // namespace tersekv
