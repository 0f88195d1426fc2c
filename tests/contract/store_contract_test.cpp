// The stores of one host, without libtorch: the contract, and the properties of each.

#include "store_contract.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/random.h"
#include "store/served/protocol.h"
#include "store/table/shared_table.h"
#include "support/served.h"

namespace muster {
namespace {

using test::endless_get;
using test::eventually;
using test::exit_status;
using test::fork_child;
using test::RawClient;

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

// One handle in the server's process, one connected to the server: changes through either must wake the other.
struct MixedUnderTest : ServedUnderTest {
  std::shared_ptr<Store> open() override {
    return opened++ % 2 ? server->local() : connect_store(server->address(), soon());
  }
  int opened = 0;
};

struct OtherProcess : StoreUnderTest {
  std::shared_ptr<Store> open() override { return connect_store(server.address(), soon()); }
  test::ServerProcess server{[] { return serve_store(); }};
};

INSTANTIATE_TEST_SUITE_P(Core, StoreContract,
                         testing::Values(StoreKind{"memory", make_store<MemoryUnderTest>},
                                         StoreKind{"prefix", make_store<PrefixUnderTest>},
                                         StoreKind{"unix", make_store<ServedUnderTest>},
                                         StoreKind{"unix_local", make_store<LocalUnderTest>},
                                         StoreKind{"unix_mixed", make_store<MixedUnderTest>},
                                         StoreKind{"unix_other_process", make_store<OtherProcess>}),
                         store_kind_name);

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
  const auto seen = table.newer("key", first);  // but a watcher still learns that it was erased
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
  table.compare_set("missing", "x", "y");  // changes nothing, so wakes no waiter
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
    for (int i = 0; i < 20; ++i) {
      RawClient raw(server->address());  // does not verify the server
      raw.send_frame(endless_get("key"));
      if (!raw.is_closed()) return 4;
    }
    return 0;
  });
  server->local()->set("key", "secret");
  EXPECT_EQ(exit_status(child), 0);
  const std::string log = testing::internal::GetCapturedStderr(), refused = "refused a connection from process";
  EXPECT_NE(log.find(refused), std::string::npos);
  EXPECT_EQ(log.find(refused), log.rfind(refused)) << "another user can fill the log:\n" << log;
  EXPECT_EQ(connect_store(server->address(), soon())->get("key", soon()), "secret");
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
  EXPECT_THROW(store::decode_request(body + "x"), CorruptError);

  const auto reply = store::decode_reply(encode(store::error_reply(TimeoutError("late", {}, "hurry"))));
  try {
    store::throw_error(reply);
    FAIL();
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.message(), "late");
    EXPECT_EQ(error.advice(), "hurry");
  }
  EXPECT_TRUE(store::deadline_of(store::wait_ms(Deadline::never())).is_never());
  EXPECT_TRUE(store::deadline_of(store::kForever - 1).is_never());
  EXPECT_TRUE(store::deadline_of(store::wait_ms(in_ms(-5))).passed());
}

}  // namespace
}  // namespace muster
