#include "pool.h"

#include <unistd.h>

#ifdef __linux__
#include <dlfcn.h>
#include <link.h>
#endif

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace tersekv {
namespace {

struct Job {
  TaskFn fn;
  const void* context;
  int64_t count;
  int helpers;  // number of further threads that may join
  std::atomic<int64_t> next{0};
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error{};  // the first exception of a task; tasks that have not begun by then are skipped

  void work() {
    try {
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) fn(context, i);
    } catch (...) {
      next = count;
      if (!failed.test_and_set()) error = std::current_exception();
    }
  }
};

class Pool {
 public:
  const pid_t pid = getpid();
  std::mutex callers;  // held by the call that uses the threads

  void run(Job& job) {
    {
      std::lock_guard lock(mutex_);
      try {
        while (static_cast<int>(threads_.size()) < job.helpers) threads_.emplace_back([this] { loop(); });
      } catch (const std::system_error&) {  // the system has no more threads: the existing ones do the work
      } catch (const std::bad_alloc&) {
      }
      job_ = &job;
    }
    if (job.helpers == 1)
      wake_.notify_one();
    else
      wake_.notify_all();
    job.work();
    // Do not wait for threads that have not woken up by now: they will find no job.
    std::unique_lock lock(mutex_);
    job_ = nullptr;
    idle_.wait(lock, [this] { return active_ == 0; });
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || (job_ && job_->helpers > 0 && job_->next < job_->count); });
      if (stop_) return;
      Job& job = *job_;
      job.helpers--;
      active_++;
      lock.unlock();
      job.work();
      lock.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  int active_ = 0;
  bool stop_ = false;
};

std::atomic<Pool*> instance{nullptr};

// Return the pool of this process. After a fork the parent's threads are gone and its locks are in
// an unknown state. The parent's pool is therefore neither used nor destroyed.
Pool* pool() {
  Pool* found = instance.load();
  if (found && found->pid == getpid()) return found;
  Pool* fresh = new Pool;
  if (instance.compare_exchange_strong(found, fresh)) return fresh;
  delete fresh;
  return found;
}

// libgomp's entry for a parallel region: all threads of a team call fn(data).
using RunTeam = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

#ifdef __linux__
int find_gomp(dl_phdr_info* info, size_t, void* found) {
  const std::string path = info->dlpi_name ? info->dlpi_name : "";
  const size_t name = path.rfind('/') + 1;
  // torch/lib or torch.libs; another package's copy has other threads
  if (path.compare(name, 7, "libgomp") || path.find("/torch") == std::string::npos) return 0;
  if (void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD))
    *static_cast<RunTeam*>(found) = reinterpret_cast<RunTeam>(dlsym(library, "GOMP_parallel"));
  return 1;
}
#endif

const pid_t kLoadedBy = getpid();

// Return the entry of the libgomp that torch has loaded, or null.
RunTeam torch_team() {
#ifdef __linux__
  static const RunTeam found = [] {
    RunTeam run = nullptr;
    dl_iterate_phdr(find_gomp, &run);
    return run;
  }();
  return kLoadedBy == getpid() ? found : nullptr;  // a fork has none of its parent's threads
#else
  return nullptr;
#endif
}

}  // namespace

double team_worth_ns() { return torch_team() ? 10000.0 : kThreadsWorthNs; }

void run_in_team(int64_t count, int threads, TaskFn fn, const void* context) {
  const RunTeam team = threads > 1 && count > 1 ? torch_team() : nullptr;
  if (!team) return run_tasks(count, threads, fn, context);
  Job job{fn, context, count, 0};
  team([](void* data) { static_cast<Job*>(data)->work(); }, &job, static_cast<unsigned>(threads), 0);
  if (job.error) std::rethrow_exception(job.error);
}

void run_tasks(int64_t count, int threads, TaskFn fn, const void* context) {
  const auto helpers = static_cast<int>(count < threads ? count - 1 : threads - 1);
  if (helpers > 0) {
    Pool* shared = pool();
    std::unique_lock lock(shared->callers, std::try_to_lock);
    if (lock.owns_lock()) {
      Job job{fn, context, count, helpers};
      shared->run(job);
      if (job.error) std::rethrow_exception(job.error);
      return;
    }
  }
  for (int64_t i = 0; i < count; i++) fn(context, i);
}

void shutdown_pool() {
  Pool* found = instance.exchange(nullptr);
  if (found && found->pid == getpid()) delete found;
}

}  // namespace tersekv
