// Memory of a call. Not for files that are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace tersekv {

struct FreeSlab {
  void operator()(float* p) const { std::free(p); }
};

struct Slab {
  std::unique_ptr<float, FreeSlab> memory;
  int64_t floats = 0;
};

// Memory of one call. Up to 16 MiB of it stay with its thread for the next calls: a page that is new to the process
// takes longer than a pass over it.
class CallMemory {
 public:
  CallMemory() = default;
  ~CallMemory();
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // Return room for so many floats, 64-byte aligned. They are not initialised.
  float* take(int64_t floats);

 private:
  std::vector<Slab> slabs_;
};

}  // namespace tersekv
