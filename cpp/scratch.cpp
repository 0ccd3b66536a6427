// Working memory of a thread: pieces of large chunks, which are kept for its next task.
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "contract.h"

namespace tersekv {
namespace {

constexpr int64_t kChunkFloats = 1 << 16;

struct Release {
  void operator()(float* p) const { std::free(p); }
};

struct Chunk {
  std::unique_ptr<float, Release> memory;
  int64_t floats;
};

Chunk make_chunk(int64_t floats) {
  auto* memory = static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float)));
  if (!memory) throw std::bad_alloc();
  return {std::unique_ptr<float, Release>(memory), floats};
}

struct Arena {
  std::vector<Chunk> chunks;
  size_t chunk = 0;
  int64_t used = 0;

  float* take(int64_t floats) {
    for (; chunk < chunks.size(); chunk++, used = 0) {
      if (used + floats > chunks[chunk].floats) continue;
      float* piece = chunks[chunk].memory.get() + used;
      used += floats;
      return piece;
    }
    chunks.push_back(make_chunk(floats > kChunkFloats ? floats : kChunkFloats));
    used = floats;
    return chunks.back().memory.get();
  }
};

struct Kept {
  KeptKey key = {0, 0, 0, 0};
  Chunk chunk = {nullptr, 0};
};

thread_local Arena arena;
thread_local Kept kept;

}  // namespace

float* scratch(int64_t floats) { return arena.take(round_up(floats > 0 ? floats : 1, kLanes)); }

void reset_scratch() {
  arena.chunk = 0;
  arena.used = 0;
}

float* kept_scratch(const KeptKey& key, int64_t floats, bool& filled) {
  const KeptKey& last = kept.key;
  filled = key.call == last.call && key.b == last.b && key.h == last.h && key.first == last.first;
  floats = round_up(floats + 1, kLanes);
  if (floats > kept.chunk.floats) {
    kept.key.call = 0;
    kept.chunk = {nullptr, 0};
    kept.chunk = make_chunk(floats);
    filled = false;
  }
  kept.key = key;
  return kept.chunk.memory.get();
}

}  // namespace tersekv
