// A small pool of sleeping threads: no spinning, so that a busy machine does not suffer.
#pragma once

#include <cstdint>

namespace tersekv {

constexpr double kThreadsWorthNs = 50000.0;  // below it waking a thread costs more than it saves

using TaskFn = void (*)(const void* context, int64_t index);

// Runs fn(context, i) for 0 <= i < count on up to `threads` threads, the caller among them. What
// fn throws first is thrown here, once no task runs any more; the others' results are then incomplete.
// While another thread's call is using the pool, or after shutdown, the caller does all by itself.
void run_tasks(int64_t count, int threads, TaskFn fn, const void* context);

// Joins the threads; a later call starts new ones.
void shutdown_pool();

}  // namespace tersekv
