// The search of kernels/trellis_search.py: Viterbi with costs of 16 bits, 32 per vector.
//
// A state here is its window in reverse, newest bits lowest: u' = (u << k | c) & 255 for a component of k bits. The
// states that lead to one u' >> k are a group, and only the best one of a group can go on. A step adds the errors of
// a component's entries to the costs of the groups that they come from, and finds the best state of each group that the
// next component, of n bits, comes from. That group is the lowest 8 - n bits of a state. Entries of one group are 256
// >> n places apart, so that it is found in rounds, each of which compares the upper half of the remaining places with
// the lower half. A step stores a mark for each group, whose upper byte is the rest of the best state, so that the
// trace back is one load per component.
//
// Where only near entries may be taken, there is a mark for each of them, whose lower byte is the group that it comes
// from. Else that is known from its place.
//
// All vectors of a task take a step before the next one: their paths hide each other's latency.
#pragma once

#include "encode_trellis.h"
#include "native_vectors.h"
#include "unroll.h"

namespace tersekv {
namespace {  // internal to each build of the search

constexpr int kCosts = 32;                             // costs per vector
constexpr int kCostVectors = kTrellisStates / kCosts;  // vectors that hold the costs of all states
constexpr int kMostGroups = kTrellisStates / 2;        // with one bit
constexpr int kStateBits = 8;

constexpr int groups_of(int bits) { return kTrellisStates >> bits; }

// The lanes in a vector of the groups from which the states from 32·z on are reached.
template <int K, int Z>
struct Origin {
  alignas(64) int16_t lane[kCosts];
  static constexpr int kVector = ((Z * kCosts) >> K) / kCosts;
  constexpr Origin() : lane() {
    for (int i = 0; i < kCosts; i++) lane[i] = ((Z * kCosts + i) >> K) % kCosts;
  }
};

// A vector in search.
struct Searched {
  const float* y;    // components with bits
  float gain;        // that they are divided by
  int16_t* scaled;   // they, in units of costs, with zeros up to a multiple of 16
  uint8_t* bins;     // of these
  uint8_t* windows;  // found last
  uint16_t* cost;    // of groups, at most kMostGroups
  uint16_t* chosen;  // marks of each step and group
  int group;         // where the path around the ring begins
};

// Least costs of 32 groups, and their marks.
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

// Do more rounds in one vector until GROUPS are left. choose: between lower and upper ones, so many lanes apart.
template <class S, int GROUPS, int LANES = kCosts / 2, class Choose>
[[gnu::always_inline]] inline void halve(Choice<S>& low, Choose&& choose) {
  if constexpr (LANES >= GROUPS) {
    low = choose(low, Choice<S>{S::template down<LANES>(low.least), S::template down<LANES>(low.from)}, LANES);
    if constexpr (LANES > 1) halve<S, GROUPS, LANES / 2>(low, choose);
  }
}

// Subtract the least cost of groups from all if it is time, and store them and their marks.
template <class S, int GROUPS>
[[gnu::always_inline]] inline void finish(const Choice<S>* best, bool renormalise, const Searched& own,
                                          const Component& c) {
  constexpr int kVectors = GROUPS < kCosts ? 1 : GROUPS / kCosts;
  auto zero = S::set1(0);
  if (renormalise) {
    auto least = S::template head<GROUPS>(best[0].least);
    for (int x = 1; x < kVectors; x++) least = S::min(least, best[x].least);
    zero = S::set1(S::least(least));
  }
  for (int x = 0; x < kVectors; x++) {
    S::store(own.cost + x * kCosts, renormalise ? S::minus(best[x].least, zero) : best[x].least);
    S::store(own.chosen + c.place + x * kCosts, best[x].from);
  }
}

// Find the best states before a component of NEXT bits among all, whose costs are given.
template <class S, int NEXT>
[[gnu::always_inline]] inline void choose_states(const typename S::W* cost, const Component& c, bool renormalise,
                                                 const Searched& own) {
  constexpr int kGroups = groups_of(NEXT), kVectors = kGroups < kCosts ? 1 : kGroups / kCosts;
  Choice<S> best[kVectors];
  repeat<kVectors>([&](auto x) TERSEKV_INLINE { best[x] = survivors<S, (NEXT < 3 ? NEXT : 3)>(cost, x); });
  halve<S, kGroups>(best[0], choice<S>);
  finish<S, kGroups>(best, renormalise, own, c);
}

// Do the same with costs in memory.
template <class S, int NEXT>
void choose_among(const uint16_t* cost, const Component& c, bool renormalise, const Searched& own) {
  typename S::W all[kCostVectors];
  repeat<kCostVectors>([&](auto z) TERSEKV_INLINE { all[z] = S::load(cost + z * kCosts); });
  choose_states<S, NEXT>(all, c, renormalise, own);
}

template <class S>
using Step = void (*)(const Component&, int64_t, bool, Searched* const*, int64_t);

// Let n vectors take the step of component i, which has K bits, to any state.
template <class S, int K>
void take_step(const Component& c, int64_t i, bool renormalise, Searched* const* vectors, int64_t n) {
  using W = typename S::W;
  using Choose = void (*)(const uint16_t*, const Component&, bool, const Searched&);
  static constexpr Choose choose[kTrellisRates] = {nullptr,
                                                   choose_among<S, 1>,
                                                   choose_among<S, 2>,
                                                   choose_among<S, 3>,
                                                   choose_among<S, 4>,
                                                   choose_among<S, 5>,
                                                   choose_among<S, 6>,
                                                   choose_among<S, 7>,
                                                   choose_among<S, 8>};
  constexpr int kVectors = groups_of(K) < kCosts ? 1 : groups_of(K) / kCosts;
  const W factor = S::set1(c.factor);
  for (int64_t v = 0; v < n; v++) {
    const Searched& own = *vectors[v];
    const W off = S::set1(own.scaled[i]);
    W before[kVectors], cost[kCostVectors];
    repeat<kVectors>([&](auto x) TERSEKV_INLINE { before[x] = S::load(own.cost + x * kCosts); });
    repeat<kCostVectors>([&](auto z) TERSEKV_INLINE {
      const W difference = S::difference(S::scaled(S::load(c.entries + z * kCosts), factor), off);
      const W error = S::template squared<(K > 4 ? K - 4 : 0)>(difference);
      cost[z] = S::plus(S::template from<K, z>(before[Origin<K, z>::kVector]), error);
    });
    if (c.next == K) {
      choose_states<S, K>(cost, c, renormalise, own);
    } else {
      alignas(64) uint16_t all[kTrellisStates];
      repeat<kCostVectors>([&](auto z) TERSEKV_INLINE { S::store(all + z * kCosts, cost[z]); });
      choose[c.next](all, c, renormalise, own);
    }
  }
}

// Let n vectors take the step of component i, which has K bits, to near entries. NEXT: bits of the next component.
template <class S, int K, int NEXT>
void take_near_step(const Component& c, int64_t i, bool renormalise, Searched* const* vectors, int64_t n) {
  using W = typename S::W;
  constexpr int kGroups = groups_of(NEXT), kEntries = near_lanes(NEXT), kVectors = kEntries / kCosts;
  const W factor = S::set1(c.factor);
  for (int64_t v = 0; v < n; v++) {
    const Searched& own = *vectors[v];
    const int16_t* entries = c.near + own.bins[i] * 2 * kEntries;
    const auto table = S::template table<K, NEXT>(S::load(own.cost));
    const W off = S::set1(own.scaled[i]);
    Choice<S> found[kVectors];
    repeat<kVectors>([&](auto x) TERSEKV_INLINE {
      const W marks = S::load(entries + kEntries + x * kCosts);
      const W difference = S::difference(S::scaled(S::load(entries + x * kCosts), factor), off);
      const W error = S::template squared<(K > 4 ? K - 4 : 0)>(difference);
      found[x] = {S::plus(S::template look_up<K, NEXT>(table, marks), error), marks};
    });
    if constexpr (kVectors == 4) {
      found[0] = nearest<S>(found[0], found[2]);
      found[1] = nearest<S>(found[1], found[3]);
    }
    if constexpr (kVectors > 1) found[0] = nearest<S>(found[0], found[1]);
    halve<S, kGroups>(found[0],
                      [](const auto& low, const auto& high, int) TERSEKV_INLINE { return nearest<S>(low, high); });
    finish<S, kGroups>(found, renormalise, own, c);
  }
}

template <class S, int K>
Step<S> near_step(int next) {
  static constexpr Step<S> steps[] = {take_near_step<S, K, 3>, take_near_step<S, K, 4>, take_near_step<S, K, 5>,
                                      take_near_step<S, K, 6>, take_near_step<S, K, 7>, take_near_step<S, K, 8>};
  return steps[next - kTrellisLeastNear];
}

// Let n vectors take steps [first, last) around a ring of `count` components. fixed: bits of states before them that
// are not free.
template <class S>
void take_steps(const TrellisRow& row, int64_t first, int64_t last, int fixed, Searched* const* vectors, int64_t n) {
  static constexpr Step<S> steps[kTrellisRates] = {nullptr,         take_step<S, 1>, take_step<S, 2>,
                                                   take_step<S, 3>, take_step<S, 4>, take_step<S, 5>,
                                                   take_step<S, 6>, take_step<S, 7>, take_step<S, 8>};
  static constexpr Step<S> (*near[kTrellisRates])(int) = {nullptr,         nullptr,         nullptr,
                                                          near_step<S, 3>, near_step<S, 4>, near_step<S, 5>,
                                                          near_step<S, 6>, near_step<S, 7>, near_step<S, 8>};
  for (int64_t s = first; s < last; s++) {
    const int64_t i = s < row.count ? s : s - row.count;
    const Component& c = row.components[i];
    fixed -= c.bits;
    const Step<S> step = c.near && fixed <= 0 ? near[c.bits](c.next) : steps[c.bits];
    step(c, i, (s - first) % kTrellisRenormalise == kTrellisRenormalise - 1, vectors, n);
  }
}

// Return the group with the least cost; of several, that of the lowest windows.
template <class S>
int best_group(const uint16_t* cost, int bits) {
  alignas(64) uint16_t all[kMostGroups];
  __builtin_memset(all, 0xff, sizeof(all));
  __builtin_memcpy(all, cost, groups_of(bits) * sizeof(uint16_t));
  typename S::W least = S::load(all);
  for (int x = kCosts; x < groups_of(bits); x += kCosts) least = S::min(least, S::load(all + x));
  least = S::set1(S::least(least));
  int window = kTrellisStates;
  for (int x = 0; x < groups_of(bits); x += kCosts)
    for (uint32_t found = S::equal(least, S::load(all + x)); found; found &= found - 1) {
      const int candidate = kReversed[x + __builtin_ctz(found)];
      window = candidate < window ? candidate : window;
    }
  return kReversed[window];
}

// Return y rounded to an integer between -most and most; NaN becomes 0.
[[gnu::always_inline]] inline FloatVector rounded(FloatVector y, FloatVector most) {
  y = y == y ? y : FloatVector{};
  y = y < most ? y : most;
  y = y > -most ? y : -most;
  const FloatVector half = FloatVector{} + 0x1.8p23f;  // adding and subtracting it rounds, ties to even
  return (y + half) - half;
}

// Compute the components of a vector in units of costs, and their bins.
inline void scale_components(const TrellisRow& row, const Searched& own) {
  typedef int16_t Shorts __attribute__((vector_size(2 * kVectorFloats)));
  typedef uint8_t Bytes __attribute__((vector_size(kVectorFloats)));
  const FloatVector gain = FloatVector{} + own.gain, most = FloatVector{} + kTrellisBins;
  for (int64_t i = 0; i < row.count; i += kVectorFloats) {
    const FloatVector y =
        rounded(load_vector(own.y + i) / gain * load_vector(row.unit + i), load_vector(row.limit + i));
    const Shorts scaled = __builtin_convertvector(__builtin_convertvector(y, IntVector), Shorts);
    const FloatVector bin = rounded(y * load_vector(row.per_bin + i), most) + most;
    const Bytes bins = __builtin_convertvector(__builtin_convertvector(bin, IntVector), Bytes);
    __builtin_memcpy(own.scaled + i, &scaled, sizeof(scaled));
    __builtin_memcpy(own.bins + i, &bins, sizeof(bins));
  }
}

// Search the windows of n vectors, with their components divided by gains.
template <class S>
void search_vectors(const TrellisRow& row, Searched* const* vectors, int64_t n) {
  const Component* components = row.components;
  const int64_t count = row.count;
  for (int64_t v = 0; v < n; v++) {
    scale_components(row, *vectors[v]);
    __builtin_memset(vectors[v]->cost, 0, kMostGroups * sizeof(uint16_t));
  }
  const int total = components[count - 1].brought + components[count - 1].bits;
  int64_t begin = 0;
  while (begin < count && components[begin].brought < kTrellisWarmUpBits) begin++;
  const int warm = begin < count ? components[begin].brought : total;
  const auto before = [&](int64_t i) {
    return i < count ? components[i].brought : components[i - count].brought + total;
  };
  const auto at = [&](int64_t i) -> const Component& { return components[i < count ? i : i - count]; };
  int64_t end = begin;
  while (end < begin + count && before(end) < warm + kTrellisLookAheadBits) end++;
  take_steps<S>(row, 0, end, 0, vectors, n);
  for (int64_t v = 0; v < n; v++) vectors[v]->group = best_group<S>(vectors[v]->cost, at(end - 1).next);
  for (int64_t i = end - 1; i >= begin; i--) {
    const Component& c = at(i);
    for (int64_t v = 0; v < n; v++) {
      Searched& own = *vectors[v];
      own.group = (own.group | own.chosen[c.place + own.group] >> 8) >> c.bits;
    }
  }
  for (int64_t v = 0; v < n; v++) {
    const Searched& own = *vectors[v];
    __builtin_memset(own.cost, 0xff, kMostGroups * sizeof(uint16_t));
    own.cost[own.group] = 0;
  }
  take_steps<S>(row, begin, begin + count, kStateBits, vectors, n);
  int group[kTrellisTask];
  for (int64_t v = 0; v < n; v++) group[v] = vectors[v]->group;
  for (int64_t i = begin + count - 1; i >= begin; i--) {
    const Component& c = at(i);
    const int64_t place = i < count ? i : i - count;
    const int brought = before(i) - warm + c.bits;
    for (int64_t v = 0; v < n; v++) {
      const Searched& own = *vectors[v];
      int state = group[v] | own.chosen[c.place + group[v]] >> 8;
      if (brought < kStateBits)  // costs that saturate do not tell the ring's path from others
        state = (state & ((1 << brought) - 1)) | (own.group << brought & (kTrellisStates - 1));
      own.windows[place] = kReversed[state];
      group[v] = state >> c.bits;
    }
  }
}

}  // namespace
}  // namespace tersekv
