// A small pool of sleeping threads. They do not spin, so they cost other processes nothing. Torch's
// threads do: they wait some milliseconds for further work, and take that time from the pool's.
#pragma once

#include <cstdint>

namespace tersekv {

constexpr double kThreadsWorthNs = 50000.0;  // for less work, waking a thread costs more than it saves

constexpr double kLongNs = 1e5;  // work from here on is for run_in_team

using TaskFn = void (*)(const void* context, int64_t index);

// Run fn(context, i) for 0 <= i < count on up to `threads` threads, including the caller. The
// first exception of fn is rethrown here, after all tasks have ended; results are then incomplete.
// If another thread's call is using the pool, or after shutdown, the caller runs all tasks itself.
void run_tasks(int64_t count, int threads, TaskFn fn, const void* context);

// Do the same on torch's OpenMP threads where these can be found, else as run_tasks. For work between torch's
// operations: torch's threads spin while they wait for more, so that the pool's would have to take a core from them.
void run_in_team(int64_t count, int threads, TaskFn fn, const void* context);

// Work of run_in_team, in nanoseconds, for which further threads save more than they cost.
double team_worth_ns();

// Set how many threads torch's operations take in the calling thread alone: OpenMP's, and MKL's routines (0: as many as
// in the process). Nothing changes where torch has no such threads or they cannot be found.
void set_torch_threads(int team, int mkl);

// Return the number of threads of MKL's routines in the calling thread: 0 if it is that of the process, or without MKL.
int mkl_threads();

// Join the threads; a later call starts new ones.
void shutdown_pool();

}  // namespace tersekv
