// A job whose ranks are forks of bench_bounds, and memory that it shares with them. There is no launcher, because it
// would end the survivors of a lost rank.
#pragma once

#include <ATen/Parallel.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bounds.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/store/store.h"

namespace bench {

// Numbers that the ranks write and this program reads.
class Numbers {
 public:
  explicit Numbers(size_t count)
      : bytes_(count * sizeof(std::atomic<int64_t>)),
        numbers_(static_cast<std::atomic<int64_t>*>(
            ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (numbers_ == MAP_FAILED) muster::throw_errno("mmap");
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() { ::munmap(numbers_, bytes_); }
  std::atomic<int64_t>& operator[](size_t i) const { return numbers_[i]; }

 private:
  size_t bytes_;
  std::atomic<int64_t>* numbers_;
};

// A job of n forked ranks. This process serves the store.
class Job {
 public:
  Job(int n, const std::function<void(muster::World&)>& body, const muster::WorldOptions& options = {})
      : server_(muster::serve_store()) {
    for (int rank = 0; rank < n; ++rank) {
      const pid_t pid = ::fork();
      if (pid < 0) muster::throw_errno("fork");
      if (pid == 0) run(rank, n, body, options);
      pids_.push_back(pid);
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) end(static_cast<int>(rank), SIGKILL);
  }

  muster::Store& store() { return *server_->local(); }
  void signal(int rank, int number) const { ::kill(pids_[static_cast<size_t>(rank)], number); }

  // Sends the signal `number`, unless it is 0, and waits for the rank's end.
  void end(int rank, int number) {
    pid_t& pid = pids_[static_cast<size_t>(rank)];
    if (pid == 0) return;
    if (number != 0) ::kill(pid, number);
    int status = 0;
    ::waitpid(pid, &status, 0);
    pid = 0;
    if (number == 0 && status != 0) throw std::runtime_error("rank " + std::to_string(rank) + " failed");
  }
  void wait_all() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) end(static_cast<int>(rank), 0);
  }

 private:
  [[noreturn]] void run(int rank, int n, const std::function<void(muster::World&)>& body,
                        const muster::WorldOptions& options) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    int status = 1;
    try {
      at::set_num_threads(1);
      muster::World world({.rank = rank, .world_size = n, .local_rank = rank, .local_world_size = n},
                          muster::connect_store(server_->address(), patience()), options);
      const muster::World::Scope scope(world);
      body(world);
      status = 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    ::_exit(status);
  }

  std::unique_ptr<muster::StoreServer> server_;
  std::vector<pid_t> pids_;
};

}  // namespace bench
