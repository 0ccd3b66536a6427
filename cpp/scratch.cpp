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
    const int64_t size = floats > kChunkFloats ? floats : kChunkFloats;
    auto* memory = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
    if (!memory) throw std::bad_alloc();
    chunks.push_back({std::unique_ptr<float, Release>(memory), size});
    used = floats;
    return memory;
  }
};

thread_local Arena arena;

}  // namespace

float* scratch(int64_t floats) { return arena.take(round_up(floats > 0 ? floats : 1, kLanes)); }

void reset_scratch() {
  arena.chunk = 0;
  arena.used = 0;
}

}  // namespace tersekv
