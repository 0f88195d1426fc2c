// The stores without libtorch: the contract, and what only a served store can get wrong.

#include "store_contract.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <random>
#include <set>

#include "base/fd.h"
#include "base/random.h"
#include "store/protocol.h"
#include "store/shared_table.h"
#include "store/unix_address.h"
#include "store/unix_store_server.h"

namespace muster {
namespace {

struct MemoryUnderTest : StoreUnderTest {
  std::shared_ptr<Store> open() override { return store; }
  std::shared_ptr<Store> store = make_memory_store();
};

struct PrefixUnderTest : MemoryUnderTest {
  std::shared_ptr<Store> open() override { return make_prefix_store(make_prefix_store(store, "job"), "group/0"); }
};

struct ServedUnderTest : StoreUnderTest {
  std::shared_ptr<Store> open() override { return connect_store(server->address(), soon()); }
  std::unique_ptr<StoreServer> server = serve_store();
};

struct LocalUnderTest : ServedUnderTest {
  std::shared_ptr<Store> open() override { return server->local(); }
};

// One handle beside the server, one through it: changes made on either side must wake the other.
struct MixedUnderTest : ServedUnderTest {
  std::shared_ptr<Store> open() override {
    return opened++ % 2 ? server->local() : connect_store(server->address(), soon());
  }
  int opened = 0;
};

// Runs `body` in a child process; its result is the exit status.
template <typename Body>
pid_t fork_child(Body body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int status = 99;
  try {
    status = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
  }
  ::_exit(status);
}

int exit_status(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// A server in a process of its own.
class OtherProcess : public StoreUnderTest {
 public:
  OtherProcess() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("pipe2");
    UniqueFd read_end(ends[0]), write_end(ends[1]);
    pid_ = fork_child([&] {
      const auto server = serve_store();
      if (::write(write_end.get(), server->address().data(), server->address().size()) < 0) return 1;
      for (;;) ::pause();
      return 0;
    });
    write_end.reset();
    std::array<char, 128> buffer{};
    const ssize_t n = ::read(read_end.get(), buffer.data(), buffer.size());
    address_.assign(buffer.data(), static_cast<size_t>(std::max<ssize_t>(n, 0)));
  }
  ~OtherProcess() override {
    if (pid_ > 0) kill_it();
  }
  void kill_it() {
    ::kill(pid_, SIGKILL);
    exit_status(pid_);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }
  std::shared_ptr<Store> open() override { return connect_store(address_, soon()); }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

template <typename T>
std::unique_ptr<StoreUnderTest> make() {
  return std::make_unique<T>();
}

INSTANTIATE_TEST_SUITE_P(
    Core, StoreContract,
    testing::Values(StoreKind{"memory", make<MemoryUnderTest>}, StoreKind{"prefix", make<PrefixUnderTest>},
                    StoreKind{"unix", make<ServedUnderTest>}, StoreKind{"unix_local", make<LocalUnderTest>},
                    StoreKind{"unix_mixed", make<MixedUnderTest>}, StoreKind{"unix_other_process", make<OtherProcess>}),
    store_kind_name);

size_t open_fds() {
  const std::filesystem::directory_iterator fds("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(fds), end(fds)));
}

// Whether `condition` comes true in time.
template <typename Condition>
bool eventually(Condition condition) {
  for (const Deadline deadline = soon(); !deadline.passed(); ::poll(nullptr, 0, 1))
    if (condition()) return true;
  return false;
}

// A connection that need not keep to the protocol.
class RawClient {
 public:
  explicit RawClient(const std::string& address) : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const auto where = store::UnixAddress::parse(address);
    if (::connect(fd_.get(), where.get(), where.size()) != 0) throw_errno("connect");
  }
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;  // the server has had enough
      bytes.remove_prefix(static_cast<size_t>(n));
    }
  }
  void send_frame(std::string_view body) {
    const auto size = static_cast<uint32_t>(body.size());
    send(std::string(reinterpret_cast<const char*>(&size), sizeof size) + std::string(body));
  }
  // Whether the server closes the connection without having said anything.
  bool is_closed() {
    pollfd one{fd_.get(), POLLIN, 0};
    if (::poll(&one, 1, 10'000) <= 0) return false;
    char byte = 0;
    return ::recv(fd_.get(), &byte, 1, 0) <= 0;
  }
  void no_more() { ::shutdown(fd_.get(), SHUT_WR); }

 private:
  UniqueFd fd_;
};

std::string endless_get(const std::string& key) {
  store::Request request;
  request.op = store::Op::kGet;
  request.keys = {key};
  request.wait_ms = store::kForever;
  return encode(request);
}

TEST(Table, VersionsGrowOverEraseAndForgetting) {
  store::Table table;
  table.set("key", "1");
  const uint64_t first = table.find("key")->version;
  table.erase("key");
  for (size_t i = 0; i < store::Table::kMaxTombstones + 10; ++i) {
    table.set("other" + std::to_string(i), "");
    table.erase("other" + std::to_string(i));
  }
  EXPECT_EQ(table.find("key"), nullptr);  // its tombstone is forgotten
  EXPECT_EQ(table.num_keys(), 0);
  EXPECT_FALSE(table.newer("key", 0));
  const auto seen = table.newer("key", first);  // and yet a watcher learns that it is gone
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->value, std::nullopt);
  EXPECT_GT(seen->version, first);
  EXPECT_FALSE(table.newer("key", seen->version));
  table.set("key", "2");
  EXPECT_GT(table.find("key")->version, seen->version);
}

TEST(Table, AddRefusesToOverflow) {
  store::Table table;
  table.set("n", "9223372036854775807");
  EXPECT_THROW(table.add("n", 1), InvalidArgument);
  EXPECT_EQ(table.add("n", -1), 9223372036854775806);
}

TEST(SharedTable, ForgetsThoseWhoWaitNoMore) {
  store::SharedTable table;
  const store::Want want{{"here", "missing"}, std::nullopt};
  table.set("here", "");
  timeout_of([&] { table.wait_for(want, in_ms(5)); });
  timeout_of([&] { table.wait_for({{"missing"}, 0}, in_ms(5)); });
  EXPECT_EQ(table.num_waiting(), 0u);
  auto waiting = std::async(std::launch::async, [&] { table.wait_for(want, soon()); });
  EXPECT_TRUE(eventually([&] { return table.num_waiting() == 1; }));
  table.set("other", "");
  table.erase("missing");
  table.compare_set("missing", "x", "y");  // no change, and no wake
  EXPECT_EQ(table.num_waiting(), 1u);
  table.set("missing", "");
  waiting.get();
  EXPECT_EQ(table.num_waiting(), 0u);
}

TEST(PrefixStore, KeepsItsKeysApart) {
  const auto base = make_memory_store();
  const auto one = make_prefix_store(base, "one"), nested = make_prefix_store(one, "deep");
  nested->set("key", "value");
  EXPECT_EQ(base->try_get("one/deep/key"), "value");
  EXPECT_EQ(one->try_get("deep/key"), "value");
  EXPECT_EQ(one->try_get("key"), std::nullopt);
  EXPECT_THROW(make_prefix_store(nullptr, "x"), InvalidArgument);
}

TEST(ConnectStore, SaysThatNobodyServes) {
  try {
    connect_store("unix:@muster-nobody-" + random_hex(8), in_ms(30));
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("nobody serves the store at unix:@muster-nobody-"), std::string::npos);
  }
  EXPECT_THROW(connect_store("unix:/nowhere/at/all", in_ms(0)), Unavailable);
  for (const char* address : {"", "tcp:1.2.3.4", "unix:", "unix:@", "unix:name"})
    EXPECT_THROW(connect_store(address, in_ms(0)), InvalidArgument) << address;
  EXPECT_THROW(connect_store("unix:@" + std::string(108, 'x'), in_ms(0)), InvalidArgument);
}

TEST(ConnectStore, WaitsForTheServerToStart) {
  const std::string name = "@muster-test-" + random_hex(8);
  auto client = std::async(std::launch::async, [&] { return connect_store("unix:" + name, soon()); });
  const auto server = serve_store(name);
  EXPECT_EQ(client.get()->num_keys(), 0);
}

TEST(ServeStore, ATakenNameIsUnavailable) {
  const auto server = serve_store();
  EXPECT_THROW(serve_store(server->address().substr(5)), Unavailable);
  EXPECT_THROW(serve_store("no-scheme"), InvalidArgument);
  EXPECT_THROW(serve_store("/nowhere/at/all"), Unavailable);
}

TEST(ServeStore, APathIsPrivateAndRemovedAtTheEnd) {
  const std::string path = testing::TempDir() + "/muster-" + random_hex(8);
  auto server = serve_store(path);
  EXPECT_EQ(server->address(), "unix:" + path);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  connect_store(server->address(), soon())->set("key", "value");
  EXPECT_THROW(serve_store(path), Unavailable);
  server.reset();
  EXPECT_NE(::stat(path.c_str(), &status), 0);
}

TEST(ServeStore, LocalOutlivesTheServer) {
  auto server = serve_store();
  const auto local = server->local();
  connect_store(server->address(), soon())->set("key", "value");
  auto waiting = std::async(std::launch::async, [&] { return local->get("late", soon()); });
  server.reset();
  local->set("late", "here");
  EXPECT_EQ(waiting.get(), "here");
  EXPECT_EQ(local->try_get("key"), "value");
}

TEST(ServeStore, ItsEndFailsAllWaits) {
  auto server = serve_store();
  const auto client = connect_store(server->address(), soon());
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

TEST(ServeStore, MayEndWhileItsTableChanges) {
  for (int round = 0; round < 30; ++round) {
    auto server = serve_store();
    const auto client = connect_store(server->address(), soon());
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

// The same in slow motion: of two who are woken by one change, the first ends the server of the second.
TEST(ServeStore, MayEndBetweenAChangeAndItsWakes) {
  const auto table = std::make_shared<store::SharedTable>();
  auto server = store::serve_table("", table);
  struct EndsTheServer final : store::Waiter {
    explicit EndsTheServer(std::unique_ptr<StoreServer>& server) : server(server) {}
    void wake() override { server.reset(); }
    std::unique_ptr<StoreServer>& server;
  };
  EXPECT_FALSE(table->find({{"key"}, std::nullopt}, std::make_shared<EndsTheServer>(server)));
  auto waiting = std::async(std::launch::async,
                            [client = connect_store(server->address(), soon())] { client->get("key", soon()); });
  ASSERT_TRUE(eventually([&] { return table->num_waiting() == 2; }));
  table->set("key", "value");
  EXPECT_EQ(server, nullptr);
  EXPECT_THROW(waiting.get(), Unavailable);
}

// A worker that the launcher starts must not inherit another's connection, or nobody learns of the launcher's death.
TEST(ServeStore, NothingIsInheritedThroughExec) {
  const auto descriptors = [] {
    std::set<int> fds;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      fds.insert(std::stoi(entry.path().filename().string()));
    return fds;
  };
  const auto before = descriptors();
  const auto server = serve_store();
  const auto client = connect_store(server->address(), soon());
  client->set("key", "value");
  int ours = 0;
  for (const int fd : descriptors()) {
    const int flags = ::fcntl(fd, F_GETFD);
    if (before.count(fd) || flags < 0) continue;  // or it was the listing's own
    EXPECT_TRUE(flags & FD_CLOEXEC) << std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd));
    ++ours;
  }
  EXPECT_GE(ours, 4);  // listening, both ends of the connection, epoll
}

TEST(ServeStore, AKilledServerIsUnavailable) {
  OtherProcess server;
  const auto client = server.open();
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

TEST(UnixStore, AStoppedServerIsATimeoutAndNoAnswerComesLate) {
  OtherProcess server;
  const auto client = server.open();
  client->set("one", "1");
  client->set("two", "2");
  ::kill(server.pid(), SIGSTOP);
  ASSERT_EQ(::waitpid(server.pid(), nullptr, WUNTRACED), server.pid());  // all of its threads have stopped
  EXPECT_NE(timeout_of([&] { client->get("one", in_ms(50)); }).find("one"), std::string::npos);
  ::kill(server.pid(), SIGCONT);
  EXPECT_EQ(client->get("two", soon()), "2");
}

TEST(UnixStore, RefusesWhatIsTooLong) {
  const auto server = serve_store();
  const auto client = connect_store(server->address(), soon());
  const std::string too_long(store::kMaxBody, 'x');
  EXPECT_THROW(client->set("key", too_long), InvalidArgument);
  server->local()->set("key", too_long);
  EXPECT_THROW(client->get("key", soon()), Unavailable);
  client->set("key", "short");
  EXPECT_EQ(client->get("key", soon()), "short");
}

TEST(UnixStore, AForkedChildHasItsOwnConnections) {
  OtherProcess server;
  const auto store = server.open();
  store->set("key", "value");  // leaves an idle connection that the child must not use
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

TEST(UnixStore, SixtyFourClientsMeetAtABarrier) {
  const auto server = serve_store();
  at_once(64, [&](int) {
    const auto client = connect_store(server->address(), soon());
    for (int round = 0; round < 3; ++round) {
      const std::string name = "barrier" + std::to_string(round);
      if (client->add(name, 1) == 64) client->set(name + "/done", "");
      client->wait({name + "/done"}, soon());
      EXPECT_EQ(client->get(name, soon()), "64");
    }
  });
}

TEST(UnixStore, LeaksNoDescriptor) {
  const size_t before = open_fds();
  for (int round = 0; round < 20; ++round) {
    const auto server = serve_store();
    const auto client = connect_store(server->address(), soon());
    at_once(12, [&](int i) {
      client->set("key" + std::to_string(i), "value");
      timeout_of([&] { client->get("never", in_ms(1)); });
    });
    RawClient(server->address()).send("garbage");
  }
  EXPECT_EQ(open_fds(), before);
}

TEST(StoreServer, AClientThatLeavesWhileItWaitsLeavesNothing) {
  const auto table = std::make_shared<store::SharedTable>();
  const auto server = store::serve_table("", table);
  const auto client = connect_store(server->address(), soon());
  client->set("key", "value");
  const size_t before = open_fds();
  {
    std::vector<RawClient> leaving;
    for (int i = 0; i < 50; ++i) leaving.emplace_back(server->address()).send_frame(endless_get("never"));
    EXPECT_TRUE(eventually([&] { return table->num_waiting() == 50; })) << table->num_waiting();
  }
  EXPECT_TRUE(eventually([&] { return table->num_waiting() == 0; })) << table->num_waiting();
  EXPECT_TRUE(eventually([&] { return open_fds() == before; })) << open_fds() << " descriptors, before " << before;
  client->set("never", "now");  // wakes nobody, and harms nobody
  EXPECT_EQ(client->get("never", soon()), "now");
}

TEST(StoreServer, ClosesWhatBreaksTheProtocolAndServesOthers) {
  const auto server = serve_store();
  const auto client = connect_store(server->address(), soon());
  auto waiting = std::async(std::launch::async, [&] { return client->get("end", soon()); });
  testing::internal::CaptureStderr();  // a warning for each
  const std::string good = endless_get("never");

  RawClient huge(server->address());
  huge.send("\xff\xff\xff\xff");
  EXPECT_TRUE(huge.is_closed());

  RawClient just_over(server->address());
  const uint32_t size = store::kMaxBody + 1;
  just_over.send({reinterpret_cast<const char*>(&size), sizeof size});
  EXPECT_TRUE(just_over.is_closed());

  RawClient empty(server->address());
  empty.send_frame("");
  EXPECT_TRUE(empty.is_closed());

  RawClient twice(server->address());
  twice.send_frame(good);
  twice.send_frame(good);
  EXPECT_TRUE(twice.is_closed());

  for (size_t cut = 0; cut < good.size(); ++cut) {  // each a whole frame with half a request
    RawClient truncated(server->address());
    truncated.send_frame(std::string_view(good).substr(0, cut));
    EXPECT_TRUE(truncated.is_closed()) << cut;
  }
  for (size_t cut = 0; cut < good.size(); cut += 7) {  // half a frame
    RawClient truncated(server->address());
    const auto whole = static_cast<uint32_t>(good.size());
    truncated.send({reinterpret_cast<const char*>(&whole), sizeof whole});
    truncated.send(std::string_view(good).substr(0, cut));
    truncated.no_more();
    EXPECT_TRUE(truncated.is_closed()) << cut;
  }
  RawClient long_key(server->address());  // a length inside that points beyond the end
  std::string body = good;
  body[22] = '\xff';
  body[25] = '\x7f';
  long_key.send_frame(body);
  EXPECT_TRUE(long_key.is_closed());

  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("4294967295 bytes"), std::string::npos) << log;
  EXPECT_NE(log.find("a request while another waits"), std::string::npos) << log;
  EXPECT_EQ(static_cast<size_t>(std::count(log.begin(), log.end(), '\n')), good.size() + 5) << log;

  client->set("end", "reached");
  EXPECT_EQ(waiting.get(), "reached");
}

TEST(StoreServer, SurvivesRandomBytes) {
  const auto server = serve_store();
  const auto client = connect_store(server->address(), soon());
  testing::internal::CaptureStderr();
  std::mt19937 random(20'250'101);  // NOLINT: the same bytes each time
  for (int round = 0; round < 300; ++round) {
    RawClient raw(server->address());
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

TEST(StoreServer, AnotherUserGetsNothing) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  testing::internal::CaptureStderr();
  const auto server = serve_store();
  constexpr uid_t kNobody = 65534;
  const pid_t child = fork_child([&] {
    if (::seteuid(kNobody) != 0) return 2;
    try {
      connect_store(server->address(), soon());
      return 3;
    } catch (const Unauthorized&) {
    }
    RawClient raw(server->address());  // does not look at who serves
    raw.send_frame(endless_get("key"));
    return raw.is_closed() ? 0 : 4;
  });
  server->local()->set("key", "secret");
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("refused a connection from process"), std::string::npos);
  EXPECT_EQ(connect_store(server->address(), soon())->get("key", soon()), "secret");
}

TEST(StoreServer, AForkedChildMayDestroyItsCopy) {
  auto server = serve_store();
  const auto client = connect_store(server->address(), soon());
  client->set("key", "value");
  const pid_t child = fork_child([&] {
    server.reset();
    return 0;
  });
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(client->get("key", soon()), "value");
  EXPECT_EQ(connect_store(server->address(), soon())->get("key", soon()), "value");
}

TEST(StoreProtocol, MessagesSurviveTheTrip) {
  store::Request request;
  request.op = store::Op::kCompareSet;
  request.keys = {"key"};
  request.expected = std::string("\0x", 2);
  request.value = "desired";
  request.number = -5;
  request.wait_ms = 77;
  const std::string body = encode(request);
  const auto decoded = store::decode_request(body);
  EXPECT_EQ(decoded.op, request.op);
  EXPECT_EQ(decoded.keys, request.keys);
  EXPECT_EQ(decoded.expected, request.expected);
  EXPECT_EQ(decoded.value, request.value);
  EXPECT_EQ(decoded.number, request.number);
  EXPECT_EQ(decoded.wait_ms, request.wait_ms);
  EXPECT_THROW(store::decode_request(body + "x"), Corrupt);

  const auto reply = store::decode_reply(encode(store::error_reply(Timeout("late", {}, "hurry"))));
  try {
    store::throw_error(reply);
    FAIL();
  } catch (const Timeout& error) {
    EXPECT_EQ(error.message(), "late");
    EXPECT_EQ(error.advice(), "hurry");
  }
  EXPECT_TRUE(store::deadline_of(store::wait_ms(Deadline::never())).is_never());
  EXPECT_TRUE(store::deadline_of(store::kForever - 1).is_never());
  EXPECT_TRUE(store::deadline_of(store::wait_ms(in_ms(-5))).passed());
}

}  // namespace
}  // namespace muster
