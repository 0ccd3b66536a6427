#include "rounded.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <unordered_map>

namespace tersekv {
namespace {

constexpr int kUnits = 64;          // tried between 1 and 2
constexpr int kMiddles = 33;        // tried around the middle of the table
constexpr double kFarthest = 0.12;  // largest distance from it, in halves of the table's range
constexpr size_t kMostTables = 1024;

struct Key {
  float entry[kRoundedEntries];
  int32_t size, centred;

  bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint32_t words[sizeof(Key) / 4];
    std::memcpy(words, &key, sizeof(Key));
    uint64_t hash = 0;
    for (uint32_t word : words) hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
  }
};

float to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

bool shifted(const float* table, int size, float middle, Rounded& out) {
  out.unit = 1.0f;
  out.middle = middle;
  for (int i = 0; i < size; i++) {
    out.entry[i] = table[i] - middle;
    if (to_bfloat16(out.entry[i]) != out.entry[i] || out.entry[i] + middle != table[i]) return false;
  }
  return true;
}

// Fit unit and middle to given entries by least squares; return the squared error.
double fit(const float* table, int size, Rounded& out) {
  double mean_table = 0, mean_entry = 0, both = 0, square = 0, error = 0;
  for (int i = 0; i < size; i++) {
    mean_table += table[i];
    mean_entry += out.entry[i];
  }
  mean_table /= size;
  mean_entry /= size;
  for (int i = 0; i < size; i++) {
    const double entry = out.entry[i] - mean_entry;
    both += entry * (table[i] - mean_table);
    square += entry * entry;
  }
  const double unit = square > 0 ? both / square : 1.0;
  out.unit = static_cast<float>(unit);
  out.middle = static_cast<float>(mean_table - unit * mean_entry);
  for (int i = 0; i < size; i++) {
    const double off = static_cast<double>(out.unit) * out.entry[i] + out.middle - table[i];
    error += off * off;
  }
  return error;
}

Rounded nearest(const float* table, int size, bool centred) {
  const auto [low, high] = std::minmax_element(table, table + size);
  const float middle = 0.5f * (*low + *high), half = 0.5f * (*high - *low);
  Rounded best = {}, tried = {};
  if (shifted(table, size, centred ? middle : 0.0f, best) || shifted(table, size, centred ? 0.0f : middle, best))
    return best;
  double least = std::numeric_limits<double>::infinity();
  for (int m = 0; m < kMiddles; m++)
    for (int u = 0; u < kUnits; u++) {
      const auto at = static_cast<float>(middle + half * kFarthest * (2.0 * m / (kMiddles - 1) - 1.0));
      const auto factor = static_cast<float>(std::exp2(static_cast<double>(u) / kUnits));
      for (int i = 0; i < size; i++) tried.entry[i] = to_bfloat16((table[i] - at) * factor);
      const double error = fit(table, size, tried);
      if (error < least) {
        least = error;
        best = tried;
      }
    }
  if (least == std::numeric_limits<double>::infinity()) {  // something is not finite, and stays so
    std::copy(table, table + size, best.entry);
    best.unit = 1.0f;
    best.middle = 0.0f;
  }
  return best;
}

}  // namespace

const Rounded& rounded_table(const float* table, int size, bool centred) {
  static thread_local std::unordered_map<Key, Rounded, Hash> found;
  Key key = {};
  std::copy(table, table + size, key.entry);
  key.size = size;
  key.centred = centred;
  const auto at = found.find(key);
  if (at != found.end()) return at->second;
  if (found.size() >= kMostTables) found.clear();
  return found.emplace(key, nearest(table, size, centred)).first->second;
}

}  // namespace tersekv
