// Ranks that are processes and may die: forked from the test without the launcher, which would end the survivors.
//
// Thread-safety: one thread. Ranks are forked when the process's other threads sleep, which are then to hold no locks.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "muster/base/deadline.h"
#include "muster/comm/world.h"
#include "muster/store/store.h"

namespace muster::test {

class ForkedRanks {
 public:
  struct End {
    bool exited = false;  // false: killed by `signal`, or still running when time ran out (signal 0)
    int status = 0;       // 0: the body returned and no check failed
    int signal = 0;
    std::string said;  // what the body returned; or the failed checks or the exception that ended it
  };

  // Runs body(rank) in n processes.
  ForkedRanks(int n, const std::function<std::string(int rank)>& body);
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;
  ~ForkedRanks();  // kills what still runs

  void signal(int rank, int number) const;
  pid_t pid(int rank) const { return children_[static_cast<size_t>(rank)].pid; }
  // Waits for one or all of them to end.
  End wait(int rank, Deadline deadline);
  std::vector<End> wait_all(Deadline deadline);

 private:
  struct Child {
    pid_t pid = -1;
    UniqueFd out;
    bool reaped = false;
    End end;
  };
  std::vector<Child> children_;
};

// A job for forked ranks: the test serves its store.
class ForkedJob {
 public:
  ForkedJob() : server_(serve_store()) {}
  // In a rank. `hosts`: as comm::WorldStarter's.
  World join(int rank, int n, const WorldOptions& options = {}, const std::vector<std::string>& hosts = {}) const;
  std::shared_ptr<Store> store() const { return server_->local(); }
  const std::string& address() const { return server_->address(); }

 private:
  std::unique_ptr<StoreServer> server_;
};

// Numbers that forked ranks share with the test.
class SharedNumbers {
 public:
  explicit SharedNumbers(size_t count);
  SharedNumbers(const SharedNumbers&) = delete;
  SharedNumbers& operator=(const SharedNumbers&) = delete;
  ~SharedNumbers();
  std::atomic<int64_t>& operator[](size_t i) const { return numbers_[i]; }

 private:
  size_t bytes_;
  std::atomic<int64_t>* numbers_;
};

// In a rank, before it has other threads: `more` bytes of private memory may be taken from now on (RLIMIT_DATA).
void limit_private_memory(size_t more);

// While it lives, no thread can be started in this process. For a fork: the limit (RLIMIT_DATA) holds for all threads.
class NoMoreThreads {
 public:
  NoMoreThreads();
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;
  ~NoMoreThreads();

 private:
  rlimit before_{};
  std::atomic<bool> over_{false};
  std::vector<std::thread> parked_;  // on the stacks that ended threads have left, which need no memory
};

inline int64_t now_ns() {
  return Clock::now().time_since_epoch().count();
}  // of the machine: the same in all its processes

// What a test could leave behind: descriptors and children of this process, and files in its temporary folder, which it
// has for itself from the first call on. Abstract sockets and memfds are gone with the processes that have them.
std::vector<std::string> leftovers();

}  // namespace muster::test
