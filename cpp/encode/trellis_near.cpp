#include "trellis_near.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <utility>

namespace tersekv {
namespace {

constexpr int kAllBins = 2 * kTrellisBins + 1;

// Return the place of the i-th entry of a group: its bits in reverse, because entries half of all places apart are
// compared first, and the lower one wins ties.
int place_of(int i, int count) {
  int place = 0;
  for (int bit = 1; bit < count; bit *= 2, i /= 2) place = place * 2 + i % 2;
  return place;
}

}  // namespace

// Return true if three entries of any group are equal.
bool NearTables::has_equal(int bits, int next) const {
  const int members = 1 << next;
  std::array<int, kTrellisStates> sorted;
  for (int group = 0; group < kTrellisStates; group += members) {
    for (int i = 0; i < members; i++) sorted[i] = entry(bits, group | i);
    std::sort(sorted.begin(), sorted.begin() + members);
    for (int i = 2; i < members; i++)
      if (sorted[i] == sorted[i - 2]) return true;
  }
  return false;
}

void NearTables::fill(int bits, int next, int bin, int group, int16_t* to) const {
  const int members = 1 << next, groups = kTrellisStates >> next, count = near_count(next);
  const int middle = (bin - kTrellisBins) * kTrellisLargest;
  std::array<int, kTrellisStates> order, distance;
  std::iota(order.begin(), order.begin() + members, 0);
  for (int i = 0; i < members; i++) distance[i] = std::abs(entry(bits, group << next | i) * kTrellisBins - middle);
  const auto nearer = [&](int a, int b) { return distance[a] != distance[b] ? distance[a] < distance[b] : a < b; };
  std::partial_sort(order.begin(), order.begin() + count, order.begin() + members, nearer);
  std::sort(order.begin(), order.begin() + count);
  for (int i = 0; i < count; i++) {
    const int window = group << next | order[i], reversed = kReversed[window], own = reversed & (groups - 1);
    int16_t* lane = to + place_of(i, count) * groups + own;
    lane[0] = static_cast<int16_t>(entry(bits, window));
    lane[near_lanes(next)] = static_cast<int16_t>((reversed - own) << 8 | reversed >> bits);
  }
}

const int16_t* NearTables::get(int bits, int next) {
  if (bits < kTrellisLeastNear || next < kTrellisLeastNear) return nullptr;
  Table& own = tables_[bits][next];
  if (!own.made && !has_equal(bits, next)) {
    own.lines.resize(kAllBins * 2 * near_lanes(next) / 32);
    int16_t* to = own.lines[0].lane;
    for (int bin = 0; bin < kAllBins; bin++, to += 2 * near_lanes(next))
      for (int group = 0; group < kTrellisStates >> next; group++) fill(bits, next, bin, group, to);
  }
  own.made = true;
  return own.lines.empty() ? nullptr : own.lines[0].lane;
}

std::shared_ptr<NearTables> near_tables(const int16_t* scaled) {
  static std::mutex mutex;
  static std::shared_ptr<NearTables> kept[2];  // keys and values may have different codebooks
  const std::lock_guard<std::mutex> lock(mutex);
  if (kept[1] && kept[1]->of(scaled)) std::swap(kept[0], kept[1]);
  if (!kept[0] || !kept[0]->of(scaled)) {
    kept[1] = std::move(kept[0]);
    kept[0] = std::make_shared<NearTables>(scaled);
  }
  return kept[0];
}

}  // namespace tersekv
