// The store in a real etcd: the contract, and the loss of its members.

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "base/random.h"
#include "contract/store_contract.h"
#include "store/address/tcp_address.h"
#include "store/etcd/http.h"
#include "store/kit/outage.h"
#include "support/etcd.h"
#include "support/served.h"

namespace muster {
namespace {

using test::Etcd;

// One etcd of one member for all tests of this process. Each test has its own prefix.
Etcd& shared_etcd() {
  if (!Etcd::is_installed()) throw NotInstalled{"etcd-server"};
  static Etcd etcd(1);
  return etcd;
}

struct EtcdUnderTest : StoreUnderTest {
  std::shared_ptr<Store> open() override { return connect_store(shared_etcd().address(prefix), soon()); }
  std::string prefix = "test/" + random_hex(8);
};

std::unique_ptr<StoreUnderTest> make_etcd() {
  shared_etcd();
  return std::make_unique<EtcdUnderTest>();
}

INSTANTIATE_TEST_SUITE_P(Etcd, StoreContract, testing::Values(StoreKind{"etcd", make_etcd}), store_kind_name);

class EtcdStore : public testing::Test {
 protected:
  void SetUp() override {
    if (!Etcd::is_installed()) GTEST_SKIP() << "not installed: apt-get install etcd-server";
  }
  std::shared_ptr<Store> open(Etcd& etcd, size_t first = 0) {
    return connect_store(etcd.address(prefix_, first), soon());
  }
  std::string post(const std::string& path, const std::string& body) {
    const auto answer = store::Http().post(shared_etcd().url(0, path), body, soon());
    EXPECT_EQ(answer.status, 200) << answer.body << answer.reason;
    return answer.body;
  }

  const std::string prefix_ = random_hex(8);
};

TEST_F(EtcdStore, PrefixesAreApart) {
  const auto one = connect_store(shared_etcd().address(prefix_ + "/one"), soon());
  const auto two = connect_store(shared_etcd().address(prefix_ + "/two/"), soon());
  const auto all = connect_store(shared_etcd().address(prefix_), soon());
  one->set("key", "1");
  two->set("key", "2");
  EXPECT_EQ(one->get("key", soon()), "1");
  EXPECT_EQ(one->num_keys(), 1);
  EXPECT_EQ(all->num_keys(), 2);
  EXPECT_EQ(all->get("two/key", soon()), "2");
  EXPECT_EQ(connect_store(shared_etcd().address(prefix_ + "/on"), soon())->num_keys(), 0);
}

TEST_F(EtcdStore, WrongAddressesAreInvalid) {
  for (const char* wrong : {"etcd://", "etcd://host", "etcd://host:x", "etcd://host:1,", "etcd://,host:1",
                            "etcd://host:0", "etcd:///prefix", "etcd://::1:2379"})
    EXPECT_THROW(connect_store(wrong, in_ms(0)), InvalidArgument) << wrong;
  EXPECT_THROW(serve_store("etcd://127.0.0.1:2379"), InvalidArgument);
}

TEST_F(EtcdStore, NobodyIsUnavailableInTime) {
  uint16_t port = 0;
  {
    const UniqueFd taken = store::listen_tcp({"127.0.0.1", 0});
    port = store::SocketAddress::of(taken.get()).port();
  }
  const auto start = Clock::now();
  try {
    connect_store("etcd://127.0.0.1:" + std::to_string(port), in_ms(100));
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("nobody serves the store at etcd://127.0.0.1:"), std::string::npos)
        << error.what();
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
}

TEST_F(EtcdStore, WhatIsTooLongIsInvalid) {
  const auto store = open(shared_etcd());
  EXPECT_THROW(store->set("key", std::string(25'000'000, 'x')), InvalidArgument);
  store->set("key", "short");
  EXPECT_EQ(store->get("key", soon()), "short");
}

TEST_F(EtcdStore, WhatOthersPutThereIsCorrupt) {
  const auto store = connect_store(shared_etcd().address("p"), soon());
  post("/v3/kv/put", R"({"key": "cC9rZXk=", "value": "c2hvcnQ="})");  // p/key, short
  EXPECT_THROW(store->try_get("key"), CorruptError);
  EXPECT_THROW(store->add("key", 1), CorruptError);
  store->erase("key");
}

// etcd forgets old revisions when it is told to compact. A watch that begins before them sees the last state.
TEST_F(EtcdStore, AWatchFromBeforeACompactionSeesTheLastState) {
  const auto store = open(shared_etcd());
  store->set("stays", "1");
  store->set("goes", "1");
  const auto stays = store->watch("stays", 0, soon()), goes = store->watch("goes", 0, soon());
  store->set("stays", "2");
  store->erase("goes");
  store->set("other", "");
  const auto last = store->watch("other", 0, soon()).version;
  post("/v3/kv/compaction", R"({"revision": ")" + std::to_string(last) + R"("})");
  auto seen = store->watch("stays", stays.version, soon());
  EXPECT_EQ(seen.value, "2");
  seen = store->watch("goes", goes.version, soon());
  EXPECT_EQ(seen.value, std::nullopt);
  EXPECT_GT(seen.version, goes.version);
  timeout_of([&] { store->watch("goes", seen.version, in_ms(20)); });
}

TEST_F(EtcdStore, AForkedChildHasItsOwnConnections) {
  const auto store = open(shared_etcd());
  store->set("key", "value");  // leaves an idle connection, which the child must not use
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i)
    children.push_back(test::fork_child([&, i] {
      const std::string key = "child" + std::to_string(i);
      for (int k = 0; k < 100; ++k) {
        store->set(key, std::to_string(k));
        if (store->get(key, soon()) != std::to_string(k)) return 1;
      }
      return 0;
    }));
  for (int k = 0; k < 100; ++k) {
    store->set("parent", std::to_string(k));
    ASSERT_EQ(store->get("parent", soon()), std::to_string(k));
  }
  for (const pid_t child : children) EXPECT_EQ(test::exit_status(child), 0);
}

// A proxy for a member. Now and then it drops the answer to a change and closes the connection: the change was made,
// but the client does not know that.
class LosesAnswers {
 public:
  explicit LosesAnswers(uint16_t port) : port_(port), thread_([this] { run(); }) {}
  ~LosesAnswers() {
    over_ = true;
    thread_.join();
  }
  uint16_t port() const { return store::SocketAddress::of(listening_.get()).port(); }
  void lose_next(const std::string& path) {
    const std::lock_guard lock(mutex_);
    to_lose_ = path;
  }
  int lost() const { return lost_; }

 private:
  static bool ready(int fd) {
    pollfd one{fd, POLLIN, 0};
    return ::poll(&one, 1, 2) > 0;
  }
  void run() {
    while (!over_) {
      if (!ready(listening_.get())) continue;
      const UniqueFd client(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (client) serve(client.get());
    }
  }
  // One connection; libcurl makes the next when this one has ended.
  void serve(int client) {
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(port_);
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int error = 0;
    const UniqueFd member =
        store::dial_tcp(store::SocketAddress(reinterpret_cast<sockaddr*>(&where), sizeof where), soon(), &error);
    std::vector<char> bytes(1 << 16);
    const auto copy = [&](int from, int to) {
      const ssize_t n = ::recv(from, bytes.data(), bytes.size(), 0);
      if (n <= 0) return false;
      if (from == client) {
        const std::lock_guard lock(mutex_);
        losing_ = !to_lose_.empty() &&
                  std::string_view(bytes.data(), static_cast<size_t>(n)).find(to_lose_) != std::string_view::npos;
        if (losing_) to_lose_.clear();
      } else if (losing_) {
        losing_ = false;
        ++lost_;
        return false;
      }
      return ::send(to, bytes.data(), static_cast<size_t>(n), MSG_NOSIGNAL) == n;
    };
    while (!over_) {
      pollfd both[] = {{client, POLLIN, 0}, {member.get(), POLLIN, 0}};
      ::poll(both, 2, 5);
      if (both[0].revents && !copy(client, member.get())) return;
      if (both[1].revents && !copy(member.get(), client)) return;
    }
  }

  const uint16_t port_;
  const UniqueFd listening_ = store::listen_tcp({"127.0.0.1", 0});
  std::mutex mutex_;
  std::string to_lose_;
  bool losing_ = false;  // only the proxy's thread uses it
  std::atomic<bool> over_{false};
  std::atomic<int> lost_{0};
  std::thread thread_;
};

TEST_F(EtcdStore, AnAnswerThatIsLostCountsOnce) {
  const std::string direct = shared_etcd().url(0, "");
  LosesAnswers proxy(static_cast<uint16_t>(std::stoi(direct.substr(direct.rfind(':') + 1))));
  const std::string address = "etcd://127.0.0.1:" + std::to_string(proxy.port()) + "/" + prefix_;
  const auto store = connect_store(address, soon()), other = open(shared_etcd());
  for (int i = 1; i <= 5; ++i) {
    proxy.lose_next("/v3/kv/txn");
    EXPECT_EQ(store->add("count", 1), i);
    EXPECT_EQ(proxy.lost(), i);
  }
  EXPECT_EQ(other->get("count", soon()), "5");

  proxy.lose_next("/v3/kv/txn");
  const auto exchanged = store->compare_set("lock", std::nullopt, "mine");
  EXPECT_TRUE(exchanged.stored) << "it is ours, and we were told that it is another's";
  EXPECT_EQ(exchanged.value, "mine");
  EXPECT_FALSE(store->compare_set("lock", std::nullopt, "mine").stored);
  proxy.lose_next("/v3/kv/put");
  store->set("key", "value");
  EXPECT_EQ(other->get("key", soon()), "value");
  proxy.lose_next("/v3/kv/range");
  EXPECT_EQ(store->get("key", soon()), "value");
  EXPECT_EQ(proxy.lost(), 8);

  // A watch that is cut off resumes where it was.
  proxy.lose_next("/v3/watch");
  auto waiting = std::async(std::launch::async, [&] { return store->get("late", soon()); });
  EXPECT_TRUE(test::eventually([&] { return proxy.lost() == 9; }));
  other->set("late", "here");
  EXPECT_EQ(waiting.get(), "here");
}

TEST_F(EtcdStore, TheEndOfEtcdEndsWaitsInTime) {
  Etcd etcd(1);
  const auto store = open(etcd);
  auto getting = std::async(std::launch::async, [&] { store->get("never", in_ms(3000)); });
  auto watching = std::async(std::launch::async, [&] { store->watch("never", 0, in_ms(3000)); });
  store->set("key", "value");
  const auto start = Clock::now();
  etcd.kill_member(0);
  EXPECT_THROW(getting.get(), Unavailable);
  EXPECT_THROW(watching.get(), Unavailable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(12));
}

// A call waits for an unreachable etcd for as long as its user allows, and goes on if etcd comes back in time.
TEST_F(EtcdStore, ACallWaitsForAnEtcdAsLongAsItsUserSays) {
  Etcd etcd(1);
  const auto store = make_prefix_store(open(etcd), "part");
  EXPECT_TRUE(store::comes_again(*store));
  EXPECT_FALSE(store::comes_again(*make_prefix_store(make_memory_store(), "part")));
  store->set("count", "1");
  etcd.kill_member(0);
  auto patient = std::async(std::launch::async, [&] { return store->add("count", 1); });
  EXPECT_EQ(patient.wait_for(std::chrono::seconds(3)), std::future_status::timeout);
  store::set_call_timeout(*store, std::chrono::milliseconds(300));
  const auto start = Clock::now();
  EXPECT_THROW(store->add("count", 1), Unavailable);
  EXPECT_THROW(store->try_get("count"), Unavailable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
  etcd.start_member(0);
  EXPECT_EQ(patient.get(), 2);
}

// Members are killed and come back while ranks count: no count is lost or made twice, and ranks that wait are not
// disturbed. With two of three members lost, calls fail, and do so in time.
TEST_F(EtcdStore, SurvivesTheLossOfAnyMember) {
  Etcd etcd(3);
  const auto store = open(etcd);
  std::atomic<bool> over{false};
  std::atomic<int64_t> counted{0};
  std::vector<std::future<void>> ranks;
  for (size_t i = 0; i < 3; ++i)
    ranks.push_back(std::async(std::launch::async, [&, mine = open(etcd, i)] {
      std::set<int64_t> sums;
      while (!over) {
        EXPECT_TRUE(sums.insert(mine->add("count", 1)).second) << "a sum came twice";
        ++counted;
      }
    }));
  auto waiting = std::async(std::launch::async, [mine = open(etcd, 1)] {
    return mine->get("late", Deadline::after(std::chrono::minutes(2)));
  });
  for (size_t member = 0; member < 3; ++member) {
    const int64_t before = counted;
    EXPECT_TRUE(test::eventually([&] { return counted > before + 5; }));
    const auto start = Clock::now();
    etcd.kill_member(member);
    const int64_t at_death = counted + 3;  // that many may be on their way
    EXPECT_TRUE(test::eventually([&] { return counted > at_death + 5; }));
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
    etcd.start_member(member);
    etcd.await_member(member);  // otherwise the next loss would leave one member of three
  }
  over = true;
  for (auto& rank : ranks) rank.get();
  EXPECT_EQ(store->add("count", 0), counted);
  store->set("late", "here");
  EXPECT_EQ(waiting.get(), "here");

  etcd.kill_member(0);
  etcd.kill_member(2);
  const auto start = Clock::now();
  EXPECT_THROW(store->get("late", in_ms(100)), Unavailable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
}

TEST_F(EtcdStore, AStoppedMemberIsLeftForAnother) {
  Etcd etcd(3);
  const auto store = open(etcd);
  store->set("key", "value");
  auto waiting = std::async(std::launch::async, [&] { return store->get("late", soon()); });
  ::kill(etcd.pid(0), SIGSTOP);
  ASSERT_EQ(::waitpid(etcd.pid(0), nullptr, WUNTRACED), etcd.pid(0));
  const auto start = Clock::now();
  store->set("late", "here");
  EXPECT_EQ(waiting.get(), "here");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
  ::kill(etcd.pid(0), SIGCONT);
}

// A launcher's calls have little time. One member that hangs must not use all of it.
TEST_F(EtcdStore, AStoppedMemberDoesNotTakeTheWholeTimeOfACall) {
  Etcd etcd(3);
  const auto store = open(etcd), others = open(etcd, 1);
  ::kill(etcd.pid(0), SIGSTOP);
  ASSERT_EQ(::waitpid(etcd.pid(0), nullptr, WUNTRACED), etcd.pid(0));
  others->set("key", "value");  // they have a leader
  store::set_call_timeout(*store, std::chrono::milliseconds(3000));
  EXPECT_EQ(store->try_get("key"), "value");
  ::kill(etcd.pid(0), SIGCONT);
}

// A client that only wants to leave a note asks whether a silent etcd is back. A try gets the time that it was given.
TEST_F(EtcdStore, ASilentEtcdIsOnlyAskedForANote) {
  Etcd etcd(1);
  const auto store = open(etcd);
  etcd.kill_member(0);
  store::set_call_timeout(*store, std::chrono::milliseconds(10));
  EXPECT_THROW(store->try_get("key"), Unavailable);
  store::set_call_timeout(*store, std::chrono::minutes(1));
  const auto took = [&](store::CallsBy::For what, std::chrono::milliseconds time) {
    const store::CallsBy soon(Deadline::after(time), what);
    const auto start = Clock::now();
    EXPECT_THROW(store->set("key", "value"), Unavailable);
    return Clock::now() - start;
  };
  EXPECT_GE(took(store::CallsBy::For::kTry, std::chrono::milliseconds(1000)), std::chrono::milliseconds(1000));
  EXPECT_LT(took(store::CallsBy::For::kNote, std::chrono::minutes(1)), std::chrono::seconds(20));
}

}  // namespace
}  // namespace muster
