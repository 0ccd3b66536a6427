// Working memory of a thread, allocated in large slabs that are reused by its next task, or by its next call.
#include <cstdlib>
#include <new>
#include <utility>

#include "call_memory.h"
#include "contract.h"

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tersekv {
namespace {

constexpr int64_t kSlabFloats = 1 << 16;
constexpr int64_t kSpareFloats = 1 << 22;  // of calls that have ended, which a thread keeps

// AddressSanitizer sees a slab as one allocation, so it is told where each piece ends. `kGuard`
// floats after a piece stay poisoned.
#ifdef __SANITIZE_ADDRESS__
constexpr int64_t kGuard = kLanes;
void close(float* p, int64_t floats) { __asan_poison_memory_region(p, floats * sizeof(float)); }
void open(float* p, int64_t floats) { __asan_unpoison_memory_region(p, floats * sizeof(float)); }
#else
constexpr int64_t kGuard = 0;
void close(float*, int64_t) {}
void open(float*, int64_t) {}
#endif

Slab make_slab(int64_t floats) {
  auto* memory = static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float)));
  if (!memory) throw std::bad_alloc();
  close(memory, floats);
  return {std::unique_ptr<float, FreeSlab>(memory), floats};
}

struct Arena {
  std::vector<Slab> slabs;
  size_t slab = 0;
  int64_t used = 0;

  float* take(int64_t floats) {
    const int64_t room = round_up(floats > 0 ? floats : 1, kLanes) + kGuard;
    if (slab < slabs.size() && used > 0 && used + room > slabs[slab].floats) {
      slab++;
      used = 0;
    }
    if (slab == slabs.size()) slabs.push_back({nullptr, 0});
    if (used + room > slabs[slab].floats) {  // nothing of it is in use: it makes place for a larger one
      slabs[slab] = {nullptr, 0};
      slabs[slab] = make_slab(room > kSlabFloats ? room : kSlabFloats);
    }
    float* piece = slabs[slab].memory.get() + used;
    used += room;
    open(piece, floats);
    return piece;
  }

  // Return the pieces after the first `floats` of slab number `from`.
  void reset(size_t from, int64_t floats) {
    for (size_t i = from; i <= slab && i < slabs.size(); i++) {
      const int64_t kept = i == from ? floats : 0;
      close(slabs[i].memory.get() + kept, slabs[i].floats - kept);
    }
    slab = from;
    used = floats;
  }
};

struct ThreadBuffer {
  KeptKey key = {0, 0, 0, 0};
  Slab slab = {nullptr, 0};
};

thread_local Arena arena;
thread_local ThreadBuffer kept;
thread_local std::vector<Slab> spare;  // the latest last

}  // namespace

float* scratch(int64_t floats) { return arena.take(floats); }

void reset_scratch() { arena.reset(0, 0); }

ScratchScope::ScratchScope() : slab_(arena.slab), used_(arena.used) {}
ScratchScope::~ScratchScope() { arena.reset(slab_, used_); }

float* kept_scratch(const KeptKey& key, int64_t floats, bool& filled) {
  const KeptKey& last = kept.key;
  filled = key.call == last.call && key.b == last.b && key.h == last.h && key.first == last.first;
  floats = round_up(floats + kLanes, kLanes);  // the last column is read in whole vectors
  if (floats > kept.slab.floats) {
    kept.key.call = 0;
    kept.slab = {nullptr, 0};
    kept.slab = make_slab(floats);
    filled = false;
  }
  kept.key = key;
  close(kept.slab.memory.get(), kept.slab.floats);
  open(kept.slab.memory.get(), floats);
  return kept.slab.memory.get();
}

float* CallMemory::take(int64_t floats) {
  const int64_t room = round_up(floats > 0 ? floats : 1, kLanes);
  auto found = spare.end();
  for (auto it = spare.begin(); it != spare.end(); ++it)
    if (it->floats >= room && (found == spare.end() || it->floats < found->floats)) found = it;
  if (found == spare.end()) {
    slabs_.push_back(make_slab(room));
  } else {
    slabs_.push_back(std::move(*found));
    spare.erase(found);
  }
  open(slabs_.back().memory.get(), floats);
  return slabs_.back().memory.get();
}

CallMemory::~CallMemory() {
  int64_t all = 0;
  try {
    for (Slab& slab : slabs_) {
      close(slab.memory.get(), slab.floats);
      if (slab.floats <= kSpareFloats) spare.push_back(std::move(slab));
    }
  } catch (const std::bad_alloc&) {  // the rest is freed
  }
  for (const Slab& slab : spare) all += slab.floats;
  while (all > kSpareFloats) {
    all -= spare.front().floats;
    spare.erase(spare.begin());
  }
}

}  // namespace tersekv
