// The store over TLS where the network falls silent or is cut.
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "contract/tls_store_fixture.h"
#include "store/address/tcp_address.h"
#include "support/middleman.h"

namespace muster::test::tls_stores {
namespace {

// Switches the loopback of this process's network namespace.
bool set_loopback(bool up) {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strncpy(request.ifr_name, "lo", IFNAMSIZ - 1);
  request.ifr_flags = up ? IFF_UP | IFF_LOOPBACK | IFF_RUNNING : IFF_LOOPBACK;
  return ::ioctl(socket.get(), SIOCSIFFLAGS, &request) == 0;
}

// A network fails silently: neither end hears from the other again. The test takes the ten seconds of the limit.
TEST(TlsProcess, AnEndThatFallsSilentIsNoticedOnBothSides) {
  constexpr int kSkipped = 77;
  const pid_t child = test::fork_child([] {
    if (::unshare(CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return kSkipped;
    if (!set_loopback(true)) return kSkipped;
    const auto secret = Secret::generate();
    const auto table = std::make_shared<store::SharedTable>();
    const auto server = store::serve_table(kHere, table, secret);
    const auto client = connect_store(server->address(), soon(), secret);
    auto waiting = std::async(std::launch::async, [&] { client->get("never", Deadline::never()); });
    if (!eventually([&] { return table->num_waiting() == 1; })) return 2;
    const auto start = Clock::now();
    if (!set_loopback(false)) return 3;
    if (!eventually([&] { return table->num_waiting() == 0; })) return 5;
    if (Clock::now() - start > std::chrono::seconds(20)) return 6;
    try {
      waiting.get();
      return 4;
    } catch (const Unavailable&) {
    }
    return Clock::now() - start < std::chrono::seconds(28) ? 0 : 7;  // the network might have healed meanwhile
  });
  const int status = test::exit_status(child);
  if (status == kSkipped) GTEST_SKIP() << "this user may make no network namespaces";
  EXPECT_EQ(status, 0);
}

// A dead host sends nothing at all, so its end shows only by the kernel's own probes.
TEST(TcpSockets, NoticeADeadHostWithinTenSeconds) {
  const UniqueFd listening = store::listen_tcp({"127.0.0.1", 0});
  int error = 0;
  const UniqueFd client = store::dial_tcp(store::SocketAddress::of(listening.get()), soon(), &error);
  ASSERT_TRUE(client);
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t size = sizeof value;
    EXPECT_EQ(::getsockopt(client.get(), level, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_LE(option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPCNT) * option(IPPROTO_TCP, TCP_KEEPINTVL),
            10);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 10'000);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_NODELAY), 1);
}

// --- networks that are cut ---

using test::Middleman;
using State = Middleman::State;

class CutStore : public TlsStore {
 protected:
  std::shared_ptr<Store> through() const {
    return connect_store(text("tls://127.0.0.1:", middleman_.port()), soon(), secret_);
  }
  Middleman middleman_{store::TcpAddress::parse(address().substr(6), address()).port};
  const std::shared_ptr<Store> far_ = through();
};

TEST_F(CutStore, ACallWhoseAnswerIsLostIsSentAgainAndDoneOnce) {
  for (int i = 1; i <= 20; ++i) {
    middleman_.lose_next_answer();
    EXPECT_EQ(far_->add("sum", 1), i);
  }
  EXPECT_EQ(client_->add("sum", 0), 20);
  middleman_.lose_next_answer();
  const auto exchanged = far_->compare_set("mine", std::nullopt, "first");
  EXPECT_TRUE(exchanged.stored) << "and not: somebody else was faster";
  middleman_.lose_next_answer();
  EXPECT_TRUE(far_->erase("mine"));
  middleman_.lose_next_answer();
  far_->set("key", "value");
  middleman_.lose_next_answer();
  EXPECT_EQ(far_->try_get("key"), "value");
  EXPECT_EQ(middleman_.cuts(), 24u);
}

TEST_F(CutStore, ManyThreadsThroughManyCutsCountRight) {
  constexpr int kThreads = 4, kAdds = 200;  // each thread adds at least so often, and until there were enough cuts
  std::atomic<int64_t> added{0};
  std::vector<std::thread> threads;
  std::atomic<int> running = kThreads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < kAdds || middleman_.cuts() <= 5; ++k) {
        EXPECT_GT(far_->add("sum", 1), 0);
        ++added;
      }
      --running;
    });
  size_t last = 0;
  while (running > 0) {
    if (const auto sum = static_cast<size_t>(client_->add("sum", 0)); sum / 20 != last) {
      last = sum / 20;
      last % 2 ? middleman_.cut() : middleman_.lose_next_answer();
    }
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(client_->add("sum", 0), added.load());
  EXPECT_GT(middleman_.cuts(), 5u);
}

TEST_F(CutStore, AWaitGoesOnBehindACut) {
  std::thread waits([&] { EXPECT_EQ(far_->get("late", soon()), "come"); });
  EXPECT_TRUE(eventually([&] { return table_->num_waiting() == 1; }));
  middleman_.set(State::kDown);
  EXPECT_TRUE(eventually([&] { return table_->num_waiting() == 0; })) << "the server waits for nobody";
  middleman_.set(State::kOpen);
  EXPECT_TRUE(eventually([&] { return table_->num_waiting() == 1; }));
  client_->set("late", "come");
  waits.join();
  middleman_.cut();
  EXPECT_THROW(far_->get("never", Deadline::after(std::chrono::milliseconds(300))), TimeoutError);
}

TEST_F(CutStore, AServerThatIsGoneIsNotWaitedFor) {
  server_.reset();
  const auto start = Clock::now();
  EXPECT_THROW(client_->add("sum", 1), Unavailable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(4));
}

TEST_F(CutStore, ACutForGoodIsToldWithinSeconds) {
  middleman_.set(State::kDown);
  const auto start = Clock::now();
  EXPECT_THROW(far_->add("sum", 1), Unavailable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(9));
  EXPECT_GT(Clock::now() - start, std::chrono::seconds(3)) << "it might have healed";
}

TEST_F(CutStore, AnotherServerAtTheSameAddressKnowsNothingOfIt) {
  const std::string where = address();
  far_->set("key", "value");
  middleman_.set(State::kDown);
  server_.reset();
  server_ = serve_store(where, secret_);
  middleman_.set(State::kOpen);
  try {
    far_->add("sum", 1);
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("another serves at its address"), std::string::npos) << error.what();
  }
  EXPECT_THROW(far_->set("key", "another"), Unavailable) << "it has heard of the other server";
  EXPECT_EQ(server_->local()->num_keys(), 0);
}

}  // namespace
}  // namespace muster::test::tls_stores
