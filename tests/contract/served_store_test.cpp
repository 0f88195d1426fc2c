// What every served store must do beyond the contract: survive the ends of servers and clients, forks, descriptors, and
// clients that break the protocol. The tests run for each way to serve a store.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <set>

#include "contract/store_contract.h"
#include "store/kit/outage.h"
#include "store/served/addresses.h"
#include "store/served/protocol.h"
#include "store/table/shared_table.h"
#include "support/served.h"

namespace muster {
namespace {

using test::endless_get;
using test::eventually;
using test::exit_status;
using test::fork_child;
using test::open_fds;
using test::RawClient;
using test::ServerProcess;

// A name as for serve_store().
struct ServedKind {
  std::string name, address;
};
void PrintTo(const ServedKind& kind, std::ostream* out) { *out << kind.name; }

class ServedStore : public testing::TestWithParam<ServedKind> {
 protected:
  std::unique_ptr<StoreServer> serve() const { return serve_store(GetParam().address, secret_); }
  std::unique_ptr<StoreServer> serve_table(std::shared_ptr<store::SharedTable> table) const {
    return store::serve_table(GetParam().address, std::move(table), secret_);
  }
  std::shared_ptr<Store> connect(const std::string& address) const { return connect_store(address, soon(), secret_); }
  RawClient raw(const StoreServer& server) const { return RawClient(server.address(), secret_); }

 private:
  const Secret secret_ = Secret::generate();
};

INSTANTIATE_TEST_SUITE_P(Core, ServedStore,
                         testing::Values(ServedKind{"unix", ""}, ServedKind{"tls", "tls://127.0.0.1:0"}),
                         [](const auto& info) { return info.param.name; });

TEST_P(ServedStore, LocalOutlivesTheServer) {
  auto server = serve();
  const auto local = server->local();
  connect(server->address())->set("key", "value");
  auto waiting = std::async(std::launch::async, [&] { return local->get("late", soon()); });
  server.reset();
  local->set("late", "here");
  EXPECT_EQ(waiting.get(), "here");
  EXPECT_EQ(local->try_get("key"), "value");
}

TEST_P(ServedStore, ItsEndFailsAllWaits) {
  auto server = serve();
  const auto client = connect(server->address());
  const auto local = server->local();
  std::vector<std::future<void>> waiting;
  for (int i = 0; i < 8; ++i)
    waiting.push_back(std::async(std::launch::async, [&, i] {
      local->add("started", 1);
      if (i % 2) client->get("never", Deadline::never());
      client->watch("never", 0, soon());
    }));
  while (local->get("started", soon()) != "8") std::this_thread::yield();
  server.reset();
  for (auto& wait : waiting) EXPECT_THROW(wait.get(), Unavailable);
  EXPECT_THROW(client->set("key", std::string(1'000'000, 'x')), Unavailable);  // and no SIGPIPE
  EXPECT_THROW(client->try_get("key"), Unavailable);
}

// The second write to a connection that the server has closed raises SIGPIPE, unless that is prevented.
TEST_P(ServedStore, AClientSurvivesToFindItsServerGone) {
  auto server = serve();
  const auto client = connect(server->address());
  client->set("key", "value");  // leaves an idle connection
  server.reset();
  EXPECT_THROW(client->set("key", std::string(20'000'000, 'x')), Unavailable);
}

TEST_P(ServedStore, MayEndWhileItsTableChanges) {
  for (int round = 0; round < 30; ++round) {
    auto server = serve();
    const auto client = connect(server->address());
    std::atomic<bool> over{false};
    auto changing = std::async(std::launch::async, [&, local = server->local()] {
      while (!over) local->add("count", 1);
    });
    auto watching = std::async(std::launch::async, [&] {
      for (uint64_t seen = 0;;) seen = client->watch("count", seen, soon()).version;
    });
    client->watch("count", 100, soon());
    server.reset();
    EXPECT_THROW(watching.get(), Unavailable);
    over = true;
    changing.get();
  }
}

// The same in a fixed order: one change wakes two waiters, and the first one ends the server of the second.
TEST_P(ServedStore, MayEndBetweenAChangeAndItsWakes) {
  const auto table = std::make_shared<store::SharedTable>();
  auto server = serve_table(table);
  struct EndsTheServer final : store::Waiter {
    explicit EndsTheServer(std::unique_ptr<StoreServer>& server) : server(server) {}
    void wake() override { server.reset(); }
    std::unique_ptr<StoreServer>& server;
  };
  EXPECT_FALSE(table->find({{"key"}, std::nullopt}, std::make_shared<EndsTheServer>(server)));
  auto waiting = std::async(std::launch::async, [client = connect(server->address())] { client->get("key", soon()); });
  ASSERT_TRUE(eventually([&] { return table->num_waiting() == 2; }));
  table->set("key", "value");
  EXPECT_EQ(server, nullptr);
  EXPECT_THROW(waiting.get(), Unavailable);
}

// A worker that the launcher starts must not inherit another's connection, or no worker learns of the launcher's death.
TEST_P(ServedStore, NothingIsInheritedThroughExec) {
  const auto descriptors = [] {
    std::set<int> fds;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      fds.insert(std::stoi(entry.path().filename().string()));
    return fds;
  };
  const auto before = descriptors();
  const auto server = serve();
  const auto client = connect(server->address());
  client->set("key", "value");
  int ours = 0;
  for (const int fd : descriptors()) {
    const int flags = ::fcntl(fd, F_GETFD);
    if (before.count(fd) || flags < 0) continue;  // or it was the listing's own
    EXPECT_TRUE(flags & FD_CLOEXEC) << std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd));
    ++ours;
  }
  EXPECT_GE(ours, 4);  // the listening socket, both ends of the connection, epoll
}

TEST_P(ServedStore, AKilledServerIsUnavailable) {
  ServerProcess server([this] { return serve(); });
  const auto client = connect(server.address());
  std::vector<std::future<void>> waiting;
  for (int i = 0; i < 4; ++i)
    waiting.push_back(std::async(std::launch::async, [&] {
      client->add("started", 1);
      client->get("never", Deadline::never());
    }));
  while (client->get("started", soon()) != "4") std::this_thread::yield();
  server.kill_it();
  for (auto& wait : waiting) EXPECT_THROW(wait.get(), Unavailable);
  EXPECT_THROW(client->set("key", "value"), Unavailable);
}

TEST_P(ServedStore, AStoppedServerIsATimeoutAndNoAnswerComesLate) {
  ServerProcess server([this] { return serve(); });
  const auto client = connect(server.address());
  client->set("one", "1");
  client->set("two", "2");
  ::kill(server.pid(), SIGSTOP);
  ASSERT_EQ(::waitpid(server.pid(), nullptr, WUNTRACED), server.pid());  // all of its threads have stopped
  EXPECT_NE(timeout_of([&] { client->get("one", in_ms(50)); }).find("one"), std::string::npos);
  ::kill(server.pid(), SIGCONT);
  EXPECT_EQ(client->get("two", soon()), "2");
}

// A server that is stopped for longer than a host may be cut off is not lost, as long as its host answers.
TEST_P(ServedStore, OneConnectionMoreWaitsForAStoppedServer) {
  ServerProcess server([this] { return serve(); });
  const auto client = connect(server.address()), other = connect(server.address());
  auto waiting = std::async(std::launch::async, [&] {
    client->add("started", 1);
    return client->get("end", soon());  // has the only connection
  });
  EXPECT_EQ(other->get("started", soon()), "1");
  ::kill(server.pid(), SIGSTOP);
  ASSERT_EQ(::waitpid(server.pid(), nullptr, WUNTRACED), server.pid());
  auto late = std::async(std::launch::async, [&] { client->set("end", "value"); });
  EXPECT_EQ(late.wait_for(std::chrono::seconds(7)), std::future_status::timeout);
  ::kill(server.pid(), SIGCONT);
  EXPECT_NO_THROW(late.get());
  EXPECT_EQ(waiting.get(), "value");
}

// As for a launcher's heartbeats: a call that takes no deadline ends when the time is over that its user has set.
TEST_P(ServedStore, AStoppedServerIsNoticedByWhoeverCallsInTheTimeThatItGives) {
  ServerProcess server([this] { return serve(); });
  const auto client = connect(server.address());
  client->set("one", "1");
  const auto part = make_prefix_store(client, "part");
  store::set_call_timeout(*part, std::chrono::milliseconds(300));
  EXPECT_FALSE(store::comes_again(*part));
  ::kill(server.pid(), SIGSTOP);
  ASSERT_EQ(::waitpid(server.pid(), nullptr, WUNTRACED), server.pid());
  EXPECT_THROW(part->add("two", 2), TimeoutError);
  ::kill(server.pid(), SIGCONT);
}

TEST_P(ServedStore, RefusesWhatIsTooLong) {
  const auto server = serve();
  const auto client = connect(server->address());
  const std::string too_long(store::kMaxBody, 'x');
  EXPECT_THROW(client->set("key", too_long), InvalidArgument);
  server->local()->set("key", too_long);
  EXPECT_THROW(client->get("key", soon()), Unavailable);
  client->set("key", "short");
  EXPECT_EQ(client->get("key", soon()), "short");
}

TEST_P(ServedStore, AForkedChildHasItsOwnConnections) {
  ServerProcess server([this] { return serve(); });
  const auto store = connect(server.address());
  store->set("key", "value");  // leaves an idle connection, which the child must not use
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i)
    children.push_back(fork_child([&, i] {
      const std::string key = "child" + std::to_string(i);
      for (int k = 0; k < 200; ++k) {
        store->set(key, std::to_string(k));
        if (store->get(key, soon()) != std::to_string(k)) return 1;
      }
      return 0;
    }));
  for (int k = 0; k < 500; ++k) {
    store->set("parent", std::to_string(k));
    ASSERT_EQ(store->get("parent", soon()), std::to_string(k));
  }
  for (const pid_t child : children) EXPECT_EQ(exit_status(child), 0);
}

TEST_P(ServedStore, SixtyFourClientsMeetAtABarrier) {
  const auto server = serve();
  at_once(64, [&](int) {
    const auto client = connect(server->address());
    for (int round = 0; round < 3; ++round) {
      const std::string name = "barrier" + std::to_string(round);
      if (client->add(name, 1) == 64) client->set(name + "/done", "");
      client->wait({name + "/done"}, soon());
      EXPECT_EQ(client->get(name, soon()), "64");
    }
  });
}

TEST_P(ServedStore, LeaksNoDescriptor) {
  const size_t before = open_fds();
  for (int round = 0; round < 20; ++round) {
    const auto server = serve();
    const auto client = connect(server->address());
    at_once(12, [&](int i) {
      client->set("key" + std::to_string(i), "value");
      timeout_of([&] { client->get("never", in_ms(1)); });
    });
    RawClient(server->address()).send("garbage");
  }
  EXPECT_EQ(open_fds(), before);
}

TEST_P(ServedStore, AClientThatLeavesWhileItWaitsLeavesNothing) {
  const auto table = std::make_shared<store::SharedTable>();
  const auto server = serve_table(table);
  const auto client = connect(server->address());
  client->set("key", "value");
  const size_t before = open_fds();
  {
    std::vector<RawClient> leaving;
    for (int i = 0; i < 50; ++i) leaving.emplace_back(raw(*server)).send_frame(endless_get("never"));
    EXPECT_TRUE(eventually([&] { return table->num_waiting() == 50; })) << table->num_waiting();
  }
  EXPECT_TRUE(eventually([&] { return table->num_waiting() == 0; })) << table->num_waiting();
  EXPECT_TRUE(eventually([&] { return open_fds() == before; })) << open_fds() << " descriptors, before " << before;
  client->set("never", "now");  // wakes no waiter, and does no harm
  EXPECT_EQ(client->get("never", soon()), "now");
}

TEST_P(ServedStore, ClosesWhatBreaksTheProtocolAndServesOthers) {
  const auto server = serve();
  const auto client = connect(server->address());
  auto waiting = std::async(std::launch::async, [&] { return client->get("end", soon()); });
  testing::internal::CaptureStderr();  // there is a warning for each
  const std::string good = endless_get("never");

  RawClient huge = raw(*server);
  huge.send("\xff\xff\xff\xff");
  EXPECT_TRUE(huge.is_closed());

  RawClient just_over = raw(*server);
  const uint32_t size = store::kMaxBody + 1;
  just_over.send({reinterpret_cast<const char*>(&size), sizeof size});
  EXPECT_TRUE(just_over.is_closed());

  RawClient empty = raw(*server);
  empty.send_frame("");
  EXPECT_TRUE(empty.is_closed());

  RawClient twice = raw(*server);
  twice.send_frame(good);
  twice.send_frame(good);
  EXPECT_TRUE(twice.is_closed());

  for (size_t cut = 0; cut < good.size(); ++cut) {  // each a whole frame with half a request
    RawClient truncated = raw(*server);
    truncated.send_frame(std::string_view(good).substr(0, cut));
    EXPECT_TRUE(truncated.is_closed()) << cut;
  }
  for (size_t cut = 0; cut < good.size(); cut += 7) {  // half a frame
    RawClient truncated = raw(*server);
    const auto whole = static_cast<uint32_t>(good.size());
    truncated.send({reinterpret_cast<const char*>(&whole), sizeof whole});
    truncated.send(std::string_view(good).substr(0, cut));
    truncated.no_more();
    EXPECT_TRUE(truncated.is_closed()) << cut;
  }
  RawClient long_key = raw(*server);  // a length inside that points beyond the end
  std::string body = good;
  const size_t length = body.find("never") - sizeof(uint32_t);
  body[length] = '\xff';
  body[length + 3] = '\x7f';
  long_key.send_frame(body);
  EXPECT_TRUE(long_key.is_closed());

  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("4294967295 bytes"), std::string::npos) << log;
  EXPECT_NE(log.find("a request while another waits"), std::string::npos) << log;
  EXPECT_EQ(static_cast<size_t>(std::count(log.begin(), log.end(), '\n')), good.size() + 5) << log;

  client->set("end", "reached");
  EXPECT_EQ(waiting.get(), "reached");
}

TEST_P(ServedStore, SurvivesRandomBytes) {
  const auto server = serve();
  const auto client = connect(server->address());
  testing::internal::CaptureStderr();
  std::mt19937 random(20'250'101);  // NOLINT: the same bytes each time
  for (int round = 0; round < 300; ++round) {
    RawClient raw = this->raw(*server);
    std::string bytes = endless_get("never");
    if (round % 2) {  // a good request with some bytes changed
      for (int k = 0; k < 3; ++k) bytes[random() % bytes.size()] = static_cast<char>(random());
    } else {
      bytes.resize(random() % 200);
      for (auto& byte : bytes) byte = static_cast<char>(random());
    }
    round % 3 ? raw.send_frame(bytes) : raw.send(bytes);
    client->set("round", std::to_string(round));
    ASSERT_EQ(client->get("round", soon()), std::to_string(round));
  }
  testing::internal::GetCapturedStderr();
}

TEST_P(ServedStore, AForkedChildMayDestroyItsCopy) {
  auto server = serve();
  const auto client = connect(server->address());
  client->set("key", "value");
  const pid_t child = fork_child([&] {
    server.reset();
    return 0;
  });
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(client->get("key", soon()), "value");
  EXPECT_EQ(connect(server->address())->get("key", soon()), "value");
}

}  // namespace
}  // namespace muster
