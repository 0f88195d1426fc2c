// The meeting of ranks on one host: everybody gets everybody's descriptors, or all are told why not.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "base/byte_stream.h"
#include "base/random.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/exchange.h"
#include "shm/exchange_messages.h"
#include "shm/mapping.h"
#include "support/asleep.h"
#include "support/forwarding_store.h"
#include "support/patience.h"

namespace muster::shm {
namespace {

using std::chrono::milliseconds;

Deadline soon() { return test::patience(); }

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
  stranger(std::string(100'000, 'x'));  // more than a rank may say
  exchange(*store, "meeting", 1, 2, {}, soon());
  hub.join();
}

}  // namespace
}  // namespace muster::shm
