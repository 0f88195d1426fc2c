// The watch over peers: deaths are reported, once, to all who asked.
#include <gtest/gtest.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "base/process.h"
#include "shm/peer_watch.h"
#include "support/patience.h"

namespace muster::shm {
namespace {

// A child that does nothing until it is killed.
class Child {
 public:
  Child() : Child(::fork()) {}
  // A child with this pid, as if the kernel had assigned it again; pid() is -1 if this user may not choose pids.
  static Child with(pid_t pid) {
    clone_args arguments{};
    arguments.exit_signal = SIGCHLD;
    arguments.set_tid = reinterpret_cast<uintptr_t>(&pid);
    arguments.set_tid_size = 1;
    return Child(static_cast<pid_t>(::syscall(SYS_clone3, &arguments, sizeof arguments)));
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { kill(); }
  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ > 0 && !std::exchange(killed_, true)) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
  }

 private:
  explicit Child(pid_t pid) : pid_(pid) {
    if (pid_ == 0)
      for (;;) ::pause();
  }
  pid_t pid_;
  bool killed_ = false;
};

struct Deaths {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<pid_t> pids;
  PeerWatch::OnDeath note() {
    return [this](pid_t pid) {
      const std::lock_guard lock(mutex);
      pids.push_back(pid);
      changed.notify_all();
    };
  }
  bool reach(size_t count) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, test::kPatience, [&] { return pids.size() >= count; });
  }
};

TEST(PeerWatchFork, ReportsEachDeathOnceToEachSubscriber) {
  Child a, b, c;
  Deaths first, second;
  PeerWatch watch;
  watch.subscribe({a.pid(), b.pid(), ::getpid()}, first.note());
  watch.subscribe({b.pid(), c.pid()}, second.note());
  b.kill();
  EXPECT_TRUE(first.reach(1) && second.reach(1));
  a.kill();
  EXPECT_TRUE(first.reach(2));
  c.kill();
  EXPECT_TRUE(second.reach(2));
  EXPECT_EQ(first.pids, (std::vector{b.pid(), a.pid()}));
  EXPECT_EQ(second.pids, (std::vector{b.pid(), c.pid()}));
}

TEST(PeerWatchFork, KnowsWhoDiedBefore) {
  Child gone;
  gone.kill();
  PeerWatch watch;
  Deaths first, second;
  watch.subscribe({gone.pid()}, first.note());
  EXPECT_TRUE(first.reach(1));
  watch.subscribe({gone.pid()}, second.note());  // known to be dead
  EXPECT_TRUE(second.reach(1));
}

// In a long job the pid of a dead peer may be assigned to another process.
TEST(PeerWatchFork, APidThatIsUsedAgainIsAnotherProcess) {
  for (const bool subscribed : {false, true}) {  // whether the subscription to the old process still exists
    PeerWatch watch;
    Deaths of_old, of_new;
    pid_t pid = 0;
    uint64_t id = 0;
    {
      Child old;
      pid = old.pid();
      id = watch.subscribe({pid}, of_old.note());
      old.kill();
      EXPECT_TRUE(of_old.reach(1));
    }
    if (!subscribed) watch.unsubscribe(id);
    Child next = Child::with(pid);
    if (next.pid() < 0) GTEST_SKIP() << "this user cannot choose a pid (clone3, set_tid)";
    ASSERT_EQ(next.pid(), pid);
    Child other;
    watch.subscribe({pid, other.pid()}, of_new.note());
    other.kill();
    EXPECT_TRUE(of_new.reach(1));
    EXPECT_EQ(of_new.pids, std::vector{other.pid()});  // and not also the one that is running
    next.kill();
    EXPECT_TRUE(of_new.reach(2));
    EXPECT_EQ(of_new.pids, (std::vector{other.pid(), pid}));
    EXPECT_EQ(of_old.pids, std::vector{pid});
  }
}

// The pid belongs to another process than the one that is meant, which has died.
TEST(PeerWatchFork, AProcessThatStartedAtAnotherTimeIsAnotherOne) {
  Child running;
  const uint64_t start = start_time_of(running.pid());
  PeerWatch watch;
  Deaths of_it, of_another;
  watch.subscribe({{running.pid(), start}}, of_it.note());
  watch.subscribe({{running.pid(), start - 1}}, of_another.note());
  EXPECT_TRUE(of_another.reach(1));
  EXPECT_TRUE(of_it.pids.empty());
  running.kill();
  EXPECT_TRUE(of_it.reach(1));
  EXPECT_EQ(of_another.pids.size(), 1u);
}

TEST(PeerWatchFork, UnsubscribedMeansSilent) {
  Child a, b;
  PeerWatch watch;
  Deaths silent, heard;
  const auto id = watch.subscribe({a.pid(), b.pid()}, silent.note());
  watch.subscribe({a.pid(), b.pid()}, heard.note());
  a.kill();
  EXPECT_TRUE(heard.reach(1) && silent.reach(1));
  watch.unsubscribe(id);
  b.kill();
  EXPECT_TRUE(heard.reach(2));
  EXPECT_EQ(silent.pids.size(), 1u);
}

TEST(PeerWatch, NothingToWatchNeedsNoThread) {
  PeerWatch watch;
  Deaths deaths;
  watch.unsubscribe(watch.subscribe({::getpid()}, deaths.note()));
  watch.unsubscribe(12345);
  EXPECT_TRUE(deaths.pids.empty());
}

}  // namespace
}  // namespace muster::shm
