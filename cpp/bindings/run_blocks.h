// Functions that the bindings of encoders share.
#pragma once

#include <utility>

#include "encoders.h"
#include "pool.h"
#include "tensors.h"

namespace tersekv {
namespace {

// Run `encode` for each block on up to `threads` threads. ns: estimated time of all blocks.
template <class Arguments>
void run_blocks(void (*encode)(const Arguments&, int64_t), const Arguments& call, int64_t blocks, double ns,
                int threads) {
  const std::pair context(encode, &call);
  nb::gil_scoped_release release;
  const auto run = ns < kLongNs ? run_tasks : run_in_team;
  run(
      blocks, ns < kThreadsWorthNs ? 1 : threads,
      [](const void* both, int64_t block) {
        const auto& [fn, argument] = *static_cast<const decltype(context)*>(both);
        fn(*argument, block);
      },
      &context);
}

template <class T>
T* output(const Tensor& x) {
  return reinterpret_cast<T*>(x.address);
}

}  // namespace
}  // namespace tersekv
