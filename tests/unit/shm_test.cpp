// shm/: memory files, the arena, the bell, the meeting of ranks, and the watch over peers.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <map>
#include <random>
#include <thread>

#include "base/byte_stream.h"
#include "base/process.h"
#include "base/random.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/arena.h"
#include "shm/bell.h"
#include "shm/exchange.h"
#include "shm/exchange_messages.h"
#include "shm/mapping.h"
#include "shm/peer_watch.h"
#include "shm/spin.h"
#include "support/asleep.h"
#include "support/forwarding_store.h"
#include "support/patience.h"
#include "support/sanitized.h"

namespace muster::shm {
namespace {

using std::chrono::milliseconds;

Deadline soon() { return test::patience(); }

// --- mapping ---

TEST(ShmMapping, OnePerProcessAndFile) {
  const UniqueFd fd = create_memfd("test", 10'000);
  const auto first = map_memfd(fd.get());
  EXPECT_EQ(first->size() % page_size(), 0u);
  EXPECT_GE(first->size(), 10'000u);
  const UniqueFd copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  EXPECT_EQ(map_memfd(copy.get()), first);
  const UniqueFd other = create_memfd("test", 10'000);
  EXPECT_NE(map_memfd(other.get())->data(), first->data());
}

TEST(ShmMapping, OutlivesItsDescriptor) {
  std::shared_ptr<Mapping> mapping;
  {
    const UniqueFd fd = create_memfd("test", 4096);
    mapping = map_memfd(fd.get());
  }
  std::memset(mapping->data(), 7, mapping->size());
  EXPECT_EQ(mapping->data()[4095], std::byte{7});
}

TEST(ShmMapping, OnlyOfSealedSize) {
  const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), 4096), 0);
  EXPECT_THROW(map_memfd(fd.get()), CorruptError);
  const UniqueFd sealed = create_memfd("test", 4096);
  EXPECT_NE(::ftruncate(sealed.get(), 0), 0);
  EXPECT_NE(::ftruncate(sealed.get(), 1 << 20), 0);
}

TEST(ShmMapping, CommitRefusesWhatIsNotThere) {
  const size_t much = memory_total() * 4;
  const UniqueFd fd = create_memfd("test", much);
  commit(fd.get(), 0, 0);
  commit(fd.get(), 4096, 8192);
  try {
    commit(fd.get(), 0, much);
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(much)), std::string::npos);
  }
}

// --- arena ---

TEST(Arena, AlignsAndCounts) {
  Arena arena(4 << 20);
  EXPECT_EQ(arena.used(), 0u);
  std::vector<void*> blocks;
  for (const size_t size :
       {size_t{1}, size_t{127}, size_t{128}, size_t{129}, size_t{65'535}, size_t{65'536}, size_t{300'001}}) {
    void* const block = arena.allocate(size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % (size >= 65'536 ? page_size() : Arena::kAlignment), 0u);
    EXPECT_TRUE(arena.contains(block));
    EXPECT_EQ(arena.base() + arena.offset_of(block), block);
    std::memset(block, 1, size);
    blocks.push_back(block);
  }
  EXPECT_GE(arena.used(), 1u + 127 + 128 + 129 + 65'535 + 65'536 + 300'001);
  EXPECT_LE(arena.used(), arena.committed());
  EXPECT_LE(arena.committed(), arena.capacity());
  for (void* const block : blocks) arena.free(block);
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_FALSE(arena.contains(arena.base() + arena.capacity()));
}

// Freed neighbours join, so the whole arena can be allocated again, in one block and to the last byte.
TEST(Arena, GivesAllOfItAgain) {
  Arena arena(2 << 20);
  for (int round = 0; round < 3; ++round) {
    std::vector<void*> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(arena.allocate(100'000));
    EXPECT_THROW(arena.allocate(200'000), Unavailable);
    for (size_t i = 0; i < blocks.size(); i += 2) arena.free(blocks[i]);
    for (size_t i = 1; i < blocks.size(); i += 2) arena.free(blocks[i]);
    void* const all = arena.allocate(2 << 20);
    arena.free(all);
    EXPECT_EQ(arena.used(), 0u);
  }
  Arena fresh(2 << 20);
  fresh.free(fresh.allocate(2 << 20));
}

TEST(Arena, FullSaysHowMuch) {
  Arena arena(1 << 20);
  void* const some = arena.allocate(700'000);
  try {
    arena.allocate(500'000);
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("1048576"), std::string::npos) << error.what();
  }
  arena.free(some);
  arena.free(arena.allocate(500'000));
}

TEST(Arena, GivesBackToTheKernel) {
  Arena arena(512 << 20);
  void* const large = arena.allocate(200 << 20);
  EXPECT_GE(arena.committed(), 200u << 20);
  arena.free(large);
  EXPECT_LE(arena.committed(), 2 << 20);
  void* const again = arena.allocate(100 << 20);
  std::memset(again, 1, 100 << 20);
  arena.free(again);
}

TEST(Arena, ARetiredBlockIsNeverGivenAgain) {
  Arena arena(1 << 20);
  auto* const first = static_cast<std::byte*>(arena.allocate(400'000));
  auto* const second = static_cast<std::byte*>(arena.allocate(400'000));
  arena.retire(second + 5000);
  arena.retire(second + 5000);
  arena.retire(first - 1);  // in no block
  arena.free(second);
  arena.retire(arena.base() + arena.capacity() - 1);
  EXPECT_GE(arena.used(), 800'000u);
  EXPECT_THROW(arena.allocate(600'000), Unavailable);
  arena.free(first);
  for (int i = 0; i < 3; ++i) {
    auto* const again = static_cast<std::byte*>(arena.allocate(400'000));
    EXPECT_TRUE(again + 400'000 <= second || again >= second + 400'000);
    arena.free(again);
  }
}

TEST(Arena, RandomUseAgainstAModel) {
  Arena arena(16 << 20);
  std::mt19937 random(1);
  std::map<std::byte*, std::pair<size_t, unsigned char>> live;
  for (int i = 0; i < 20'000; ++i) {
    if (live.size() < 60 && random() % 2) {
      const size_t size = size_t{1} << (random() % 18), exact = size + random() % size;
      const auto mark = static_cast<unsigned char>(random());
      auto* const block = static_cast<std::byte*>(arena.allocate(exact));
      const auto next = live.lower_bound(block);
      if (next != live.end()) {
        ASSERT_LE(block + exact, next->first);
      }
      if (next != live.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second.first, block);
      }
      std::memset(block, mark, exact);
      live[block] = {exact, mark};
    } else if (!live.empty()) {
      const auto victim = std::next(live.begin(), static_cast<long>(random() % live.size()));
      const auto [size, mark] = victim->second;
      ASSERT_EQ(victim->first[0], std::byte{mark});
      ASSERT_EQ(victim->first[size - 1], std::byte{mark});
      arena.free(victim->first);
      live.erase(victim);
    }
  }
  for (const auto& [block, size] : live) arena.free(block);
  EXPECT_EQ(arena.used(), 0u);
}

// --- bell and spin ---

// Two threads pass a number back and forth, always sleeping: a lost wake-up would let one sleep until the test fails.
// sleep() may end early, because the ring of the last round may come when the next sleep has begun. So a wake-up counts
// as lost only if a sleep does not end for as long as a test waits.
template <typename Condition>
bool sleep_until(Bell& bell, Condition condition) {
  for (const auto until = test::patience(); !until.passed();)
    if (bell.sleep(test::kPatience, condition)) return true;
  return false;
}

TEST(Bell, LosesNoWakeUp) {
  constexpr uint64_t kRounds = test::kSanitized ? 5'000 : 100'000;
  Bell bells[2];
  std::atomic<uint64_t> turn{0};
  const auto play = [&](uint64_t me) {
    for (uint64_t i = me; i < kRounds; i += 2) {
      ASSERT_TRUE(sleep_until(bells[me], [&] { return turn.load(std::memory_order_acquire) == i; })) << i;
      turn.store(i + 1, std::memory_order_release);
      bells[1 - me].ring();
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_EQ(turn.load(), kRounds);
  EXPECT_EQ(bells[0].waiters.load(), 0u);
}

TEST(Bell, WakesEverybodyAndKeepsItsLimit) {
  Bell bell;
  std::atomic<bool> go{false};
  std::vector<std::thread> waiters;
  std::latch there(4);
  for (int i = 0; i < 4; ++i)
    waiters.emplace_back([&] {
      there.count_down();
      EXPECT_TRUE(sleep_until(bell, [&] { return go.load(); }));
    });
  there.wait();
  go = true;
  bell.ring();
  for (auto& waiter : waiters) waiter.join();
  EXPECT_FALSE(bell.sleep(milliseconds(30), [] { return false; }));
  EXPECT_FALSE(bell.sleep(std::chrono::nanoseconds(0), [] { return false; }));
}

TEST(Spin, UntilTheConditionOrTheLimit) {
  int asked = 0;
  EXPECT_TRUE(spin_until(test::kPatience, [&] { return ++asked == 1000; }));
  EXPECT_FALSE(spin_until(milliseconds(5), [] { return false; }));
  EXPECT_FALSE(spin_until(milliseconds(0), [] { return false; }));
  EXPECT_EQ(spin_for(2, 2), std::chrono::nanoseconds(kSpin));
  EXPECT_EQ(spin_for(3, 2), std::chrono::nanoseconds(0));
}

// --- exchange ---

template <typename Fn>
void at_once(int n, Fn fn) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(fn, i);
  for (auto& thread : threads) thread.join();
}

TEST(Exchange, HandsEverybodyEverybodysDescriptors) {
  for (const int n : {1, 2, 5, 40}) {
    const auto store = make_memory_store();
    at_once(n, [&](int rank) {
      std::vector<UniqueFd> own;
      std::vector<int> fds;
      for (int i = 0; i <= rank % 5; ++i) {
        own.push_back(create_memfd("test", 4096));
        *reinterpret_cast<int*>(map_memfd(own.back().get())->data()) = 100 * rank + i;
        fds.push_back(own.back().get());
      }
      // The mappings above are destroyed; only the memory files keep the numbers.
      const auto all = exchange(*store, "meeting", rank, n, fds, soon());
      ASSERT_EQ(all.size(), static_cast<size_t>(n));
      for (int r = 0; r < n; ++r) {
        EXPECT_EQ(all[static_cast<size_t>(r)].pid, ::getpid());
        ASSERT_EQ(all[static_cast<size_t>(r)].fds.size(), static_cast<size_t>(r % 5 + 1));
        for (int i = 0; i <= r % 5; ++i) {
          const int fd = all[static_cast<size_t>(r)].fds[static_cast<size_t>(i)].get();
          EXPECT_EQ(*reinterpret_cast<const int*>(map_memfd(fd)->data()), 100 * r + i);
          EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
        }
      }
    });
  }
}

// A store that calls a function after each set().
struct TellingStore final : test::ForwardingStore {
  TellingStore(std::shared_ptr<Store> store, std::function<void()> fn)
      : ForwardingStore(std::move(store)), told(std::move(fn)) {}
  void set(std::string_view key, std::string_view value) override {
    ForwardingStore::set(key, value);
    told();
  }
  const std::function<void()> told;
};

TEST(Exchange, TimeoutNamesWhoDidNotComeOnAllRanks) {
  const auto store = make_memory_store();
  const auto names_two_and_three = [](auto&& fn) {
    try {
      fn();
      ADD_FAILURE();
    } catch (const TimeoutError& timeout) {
      EXPECT_EQ(timeout.missing(), (std::vector<int>{2, 3}));
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  };
  // Rank 1 has plenty of time. It first waits for rank 0's invitation, and after it has connected, for the answer.
  std::promise<pid_t> entered;
  std::thread one([&] {
    entered.set_value(::gettid());
    names_two_and_three([&] { exchange(*store, "meeting", 1, 4, {}, soon()); });
  });
  const pid_t waiting = entered.get_future().get();
  test::await_sleep(waiting);
  TellingStore telling(store, [&] { test::await_sleep(waiting); });
  names_two_and_three([&] { exchange(telling, "meeting", 0, 4, {}, Deadline::after(milliseconds(1))); });
  one.join();
  try {
    exchange(*store, "another meeting", 1, 2, {}, Deadline::after(milliseconds(100)));
    ADD_FAILURE();
  } catch (const TimeoutError& timeout) {
    EXPECT_EQ(timeout.missing(), std::vector<int>{0});
  }
}

// A rank dies when the others know its process id, but before it connects.
TEST(ExchangeProcess, WhoeverDiesMeanwhileIsToldAtOnceOnAllRanks) {
  for (const int victim : {0, 1}) {
    const pid_t other = ::fork();
    if (other == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) ::pause();
    }
    const auto store = make_memory_store();
    std::vector<pid_t> pids(3, ::getpid());
    pids[static_cast<size_t>(victim)] = other;
    std::thread killer([&] {
      store->wait({"one waits"}, soon());
      ::kill(other, SIGKILL);
    });
    at_once(3, [&](int rank) {
      if (rank == victim) return;
      store->set("one waits", "");
      try {
        exchange(*store, "meeting", rank, 3, {}, Deadline::never(), {.pids = pids, .shown = {4, 7, 9}});
        ADD_FAILURE();
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank(), victim == 0 ? 4 : 7) << lost.what();
      }
    });
    killer.join();
    ::waitpid(other, nullptr, 0);
  }
}

// The store of an epoch that is over throws like this one.
TEST(Exchange, WhatTheStoreThrowsEndsTheWait) {
  const auto store = make_memory_store();
  const NoticeBoard board{[&](const auto& key, const auto& value) { store->set(key, value); },
                          [&](const auto& key, Deadline until) { return store->get(key, until); },
                          [](const auto&) { throw Aborted("the epoch is over"); }};
  EXPECT_THROW(exchange(board, "meeting", 0, 2, {}, Deadline::never()), Aborted);
}

TEST(Exchange, WhyRankZeroGivesUpIsToldToThoseWhoHaveCome) {
  const auto store = make_memory_store();
  NoticeBoard board{[&](const auto& key, const auto& value) { store->set(key, value); },
                    [&](const auto& key, Deadline until) { return store->get(key, until); }};
  std::atomic<bool> has_come{false};
  NoticeBoard others = board;
  others.look = [&](const auto&) { has_come = true; };  // called only after it has sent its greeting
  int looks = 0;
  board.look = [&](const auto&) {
    if (has_come && ++looks == 3) throw Aborted("the epoch is over");
  };
  std::thread hub([&] { EXPECT_THROW(exchange(board, "meeting", 0, 3, {}, Deadline::never()), Aborted); });
  std::string told;
  try {
    exchange(others, "meeting", 1, 3, {}, Deadline::after(std::chrono::seconds(60)));  // rank 2 never comes
  } catch (const Error& error) {
    told = error.what();
  }
  hub.join();
  EXPECT_NE(told.find("rank 0 gave up"), std::string::npos) << told;
  EXPECT_NE(told.find("the epoch is over"), std::string::npos) << told;
}

TEST(Exchange, DisagreementIsMismatchOnAllRanks) {
  const auto store = make_memory_store();
  at_once(2, [&](int rank) { EXPECT_THROW(exchange(*store, "size", rank, rank == 0 ? 2 : 3, {}, soon()), Mismatch); });
  at_once(3, [&](int i) { EXPECT_THROW(exchange(*store, "twice", i == 0 ? 0 : 1, 3, {}, soon()), Mismatch); });
  EXPECT_THROW(exchange(*store, "outside", 2, 2, {}, soon()), InvalidArgument);
  EXPECT_THROW(exchange(*store, "outside", 0, 0, {}, soon()), InvalidArgument);
  EXPECT_THROW(exchange(*store, "many", 0, 1, std::vector<int>(17, 0), soon()), InvalidArgument);
}

TEST(Exchange, AnotherHostIsUnavailable) {
  const auto store = make_memory_store();
  store->set("meeting/hub", WireWriter()
                                .put(std::string_view("another boot"))
                                .put(std::string_view("name"))
                                .put(std::string_view("nonce"))
                                .bytes());
  EXPECT_THROW(exchange(*store, "meeting", 1, 2, {}, soon()), Unavailable);
  store->set("gone/hub", WireWriter()
                             .put(std::string_view(boot_id()))
                             .put(std::string_view("muster-nobody"))
                             .put(std::string_view("nonce"))
                             .bytes());
  EXPECT_THROW(exchange(*store, "gone", 1, 2, {}, soon()), Unavailable);
}

// The name of rank 0's socket comes from the store. An address takes 107 bytes of it, and the longest is only a name
// that nobody has.
TEST(Exchange, ASocketNameThatDoesNotFitIsCorrupt) {
  const auto store = make_memory_store();
  const auto meet = [&](size_t length) {
    const std::string key = "meeting of " + std::to_string(length), name(length, 'x');
    store->set(key + "/hub", Invitation{boot_id(), name, "nonce"}.bytes());
    exchange(*store, key, 1, 2, {}, soon());
  };
  for (const size_t length : {0, 108, 109, 200, 4096, 1 << 20}) EXPECT_THROW(meet(length), CorruptError) << length;
  EXPECT_THROW(meet(107), Unavailable);
}

// Rank 0 of another version, or another process in its place, sends an answer of an unknown kind.
TEST(Exchange, AnUnknownAnswerIsNoWelcome) {
  const auto store = make_memory_store();
  const std::string name = "muster-test-" + random_hex(8);
  UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address),
                   static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
            0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  store->set(
      "meeting/hub",
      WireWriter().put(std::string_view(boot_id())).put(std::string_view(name)).put(std::string_view("nonce")).bytes());
  std::thread hub([&] {
    const UniqueFd rank(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::array<char, 4096> hello{};
    EXPECT_GT(::recv(rank.get(), hello.data(), hello.size(), 0), 0);
    const std::string answer =
        WireWriter().put(uint8_t{99}).put(int32_t{1}).put(uint32_t{0}).put(int32_t{::getpid()}).put(uint32_t{0}).take();
    EXPECT_GT(::send(rank.get(), answer.data(), answer.size(), MSG_NOSIGNAL), 0);
  });
  EXPECT_THROW(exchange(*store, "meeting", 1, 2, {}, soon()), CorruptError);
  hub.join();
}

// Another process of the same user finds the hub's socket: whatever it sends, the ranks meet.
TEST(Exchange, StrangersAreDropped) {
  const auto store = make_memory_store();
  std::thread hub([&] { EXPECT_EQ(exchange(*store, "meeting", 0, 2, {}, soon()).size(), 2u); });
  const std::string invitation = store->get("meeting/hub", soon());
  WireReader reader(invitation);
  reader.get_string();
  const std::string name(reader.get_string());
  const auto stranger = [&](const std::string& says) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
              0);
    if (!says.empty()) {
      EXPECT_GT(::send(fd.get(), says.data(), says.size(), MSG_NOSIGNAL), 0);
    }
    return fd;
  };
  stranger("");   // hangs up immediately
  stranger("x");  // is shorter than it says
  stranger(WireWriter().put(std::string_view("a wrong nonce")).put(1).put(2).take());
  stranger(std::string(60'000, '\xff'));
  exchange(*store, "meeting", 1, 2, {}, soon());
  hub.join();
}

// --- peer watch ---

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
