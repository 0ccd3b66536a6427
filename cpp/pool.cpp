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

// Entries of the libraries that torch uses, null where it has none. OpenMP's: a parallel region, in which all threads
// of a team call fn(data), and the calling thread's number of threads. MKL's: the same number for its own routines, 0
// if it follows the process's.
struct Torch {
  void (*run)(void (*fn)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  void (*set_threads)(int) = nullptr;
  int (*set_mkl_threads)(int) = nullptr;
};

#ifdef __linux__
template <typename Entry>
void find(void* library, const char* name, Entry& entry) {
  entry = reinterpret_cast<Entry>(dlsym(library, name));
}

// Fill in the entries if this library is torch's. A name is looked for in it and then in what it is linked with:
// another package's copy of OpenMP has other threads.
int find_torch(dl_phdr_info* info, size_t, void* found) {
  const std::string path = info->dlpi_name ? info->dlpi_name : "";
  if (path.compare(path.rfind('/') + 1, std::string::npos, "libtorch_cpu.so") != 0) return 0;
  if (void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
    Torch& torch = *static_cast<Torch*>(found);
    find(library, "GOMP_parallel", torch.run);
    find(library, "omp_set_num_threads", torch.set_threads);
    find(library, "MKL_Set_Num_Threads_Local", torch.set_mkl_threads);
  }
  return 1;
}
#endif

const pid_t kLoadedBy = getpid();

const Torch& torch_entries() {
  static const Torch found = [] {
    Torch torch;
#ifdef __linux__
    dl_iterate_phdr(find_torch, &torch);
#endif
    return torch;
  }();
  return found;
}

// Return whether kernels may run on torch's threads.
bool has_team() {
  return torch_entries().run && kLoadedBy == getpid();  // a fork has none of its parent's threads
}

}  // namespace

double team_worth_ns() { return has_team() ? 10000.0 : kThreadsWorthNs; }

void run_in_team(int64_t count, int threads, TaskFn fn, const void* context) {
  if (threads < 2 || count < 2 || !has_team()) return run_tasks(count, threads, fn, context);
  Job job{fn, context, count, 0};
  torch_entries().run([](void* data) { static_cast<Job*>(data)->work(); }, &job, static_cast<unsigned>(threads), 0);
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

int mkl_threads() {
  const auto set = torch_entries().set_mkl_threads;
  if (!set) return 0;
  const int now = set(0);
  set(now);
  return now;
}

void set_torch_threads(int team, int mkl) {
  const Torch& torch = torch_entries();
  if (torch.set_threads) torch.set_threads(team);
  if (torch.set_threads && torch.set_mkl_threads) torch.set_mkl_threads(mkl);
}

void shutdown_pool() {
  Pool* found = instance.exchange(nullptr);
  if (found && found->pid == getpid()) delete found;
}

}  // namespace tersekv
