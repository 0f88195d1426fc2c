// The bridges to and from c10d::Store: the contract over libtorch's stores, and c10d's own semantics over Muster's.

#include "muster/store/c10d_store.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/random.h"
#include "contract/store_contract.h"
#include "store/kit/outage.h"
#include "support/patience.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;

struct HashUnderTest : StoreUnderTest {
  std::shared_ptr<Store> open() override { return from_c10d(base); }
  c10::intrusive_ptr<c10d::Store> base = c10::make_intrusive<c10d::HashStore>();
};

struct PrefixedUnderTest : HashUnderTest {
  std::shared_ptr<Store> open() override { return from_c10d(c10::make_intrusive<c10d::PrefixStore>("job", base)); }
};

struct FileUnderTest : StoreUnderTest {
  ~FileUnderTest() override { std::remove(path.c_str()); }
  std::shared_ptr<Store> open() override { return from_c10d(c10::make_intrusive<c10d::FileStore>(path, -1)); }
  std::string path = testing::TempDir() + "/muster-file-store-" + random_hex(8);
};

c10::intrusive_ptr<c10d::TCPStore> make_tcp(bool is_server, uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = is_server;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

struct TcpUnderTest : StoreUnderTest {
  std::shared_ptr<Store> open() override { return from_c10d(make_tcp(false, server->getPort())); }
  c10::intrusive_ptr<c10d::TCPStore> server = make_tcp(true, 0);
};

// Both bridges: a Muster store seen as c10d's, and that seen as Muster's.
struct RoundTripUnderTest : StoreUnderTest {
  std::shared_ptr<Store> open() override { return from_c10d(to_c10d(base)); }
  std::shared_ptr<Store> base = make_memory_store();
};

INSTANTIATE_TEST_SUITE_P(C10d, StoreContract,
                         testing::Values(StoreKind{"hash", make_store<HashUnderTest>},
                                         StoreKind{"prefix", make_store<PrefixedUnderTest>},
                                         StoreKind{"file", make_store<FileUnderTest>},
                                         StoreKind{"tcp", make_store<TcpUnderTest>},
                                         StoreKind{"round_trip", make_store<RoundTripUnderTest>}),
                         store_kind_name);

Bytes bytes(std::string_view string) { return {string.begin(), string.end()}; }

TEST(FromC10d, PlainValuesForOthersInTheEnd) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  const auto store = from_c10d(hash);
  store->set("set", "1");
  EXPECT_TRUE(store->compare_set("exchanged", std::nullopt, "2").stored);
  EXPECT_TRUE(store->compare_set("exchanged", "2", "3").stored);
  EXPECT_EQ(hash->get("set"), bytes("1"));
  EXPECT_EQ(hash->get("exchanged"), bytes("3"));
  hash->set("theirs", bytes("4"));
  EXPECT_EQ(store->get("theirs", soon()), "4");
}

TEST(FromC10d, TheEmptyValueIsNotAbsent) {
  const auto store = from_c10d(c10::make_intrusive<c10d::HashStore>());
  EXPECT_FALSE(store->compare_set("key", "", "x").stored);
  EXPECT_EQ(store->try_get("key"), std::nullopt);
  store->set("key", "");
  EXPECT_FALSE(store->compare_set("key", std::nullopt, "x").stored);
  EXPECT_TRUE(store->compare_set("key", "", "x").stored);
  EXPECT_EQ(store->get("key", soon()), "x");
  EXPECT_TRUE(store->compare_set("key", "x", "").stored);
  EXPECT_EQ(store->try_get("key"), "");
}

// TCPStore's set() returns when it has sent. Here the value does not arrive before the client asks for something.
TEST(FromC10d, WhatIsSetIsThereForAll) {
  class SendsOnly final : public c10d::HashStore {
   public:
    explicit SendsOnly(c10::intrusive_ptr<c10d::Store> server) : server_(std::move(server)) {}
    void set(const std::string& key, const Bytes& value) override { under_way_.emplace_back(key, value); }
    bool check(const std::vector<std::string>& keys) override {
      for (const auto& [key, value] : std::exchange(under_way_, {})) server_->set(key, value);
      return server_->check(keys);
    }

   private:
    c10::intrusive_ptr<c10d::Store> server_;
    std::vector<std::pair<std::string, Bytes>> under_way_;
  };
  const auto server = c10::make_intrusive<c10d::HashStore>();
  from_c10d(c10::make_intrusive<SendsOnly>(server))->set("key", "value");
  EXPECT_EQ(from_c10d(server)->try_get("key"), "value");
}

// A process that dies in the middle of compare_set() leaves an envelope behind.
TEST(FromC10d, ReadsThroughAnEnvelopeLeftBehind) {
  class Dies final : public c10d::HashStore {
   public:
    using HashStore::compareSet;
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
      if (desired == bytes("5")) throw std::runtime_error("died");
      return HashStore::compareSet(key, expected, desired);
    }
  };
  const auto base = c10::make_intrusive<Dies>();
  const auto store = from_c10d(base);
  EXPECT_THROW(store->compare_set("key", std::nullopt, "5"), Unavailable);
  EXPECT_NE(base->get("key"), bytes("5"));  // it is in its envelope
  EXPECT_EQ(store->get("key", soon()), "5");
  EXPECT_EQ(store->watch("key", 0, soon()).value, "5");
  EXPECT_FALSE(store->compare_set("key", "4", "6").stored);
  EXPECT_TRUE(store->compare_set("key", "5", "6").stored);
  EXPECT_EQ(base->get("key"), bytes("6"));
}

TEST(FromC10d, AServerThatEndsIsUnavailable) {
  auto server = make_tcp(true, 0);
  const auto store = from_c10d(make_tcp(false, server->getPort()));
  store->set("key", "value");
  auto waiting = std::async(std::launch::async, [&] {
    store->set("started", "");
    store->get("never", soon());
  });
  store->get("started", soon());
  server.reset();
  EXPECT_THROW(waiting.get(), Unavailable);
  EXPECT_THROW(store->set("key", "other"), Unavailable);
}

// A rank that leaves a note when it ends does not wait forever for a server that is stopped.
TEST(FromC10d, ANoteIsLeftInTimeOrNotAtAll) {
  struct Stopped : c10d::HashStore {
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
      go_on.get_future().wait();
      return c10d::HashStore::compareSet(key, expected, desired);
    }
    std::promise<void> go_on;
  };
  const auto stopped = c10::make_intrusive<Stopped>();
  const auto store = from_c10d(stopped);
  {
    const store::CallsBy soon(Deadline::after(milliseconds(20)));
    EXPECT_THROW(store->compare_set("cause", std::nullopt, "none"), TimeoutError);
  }
  {
    const store::CallsBy later(test::patience());
    store->set("left", "1");
  }
  EXPECT_EQ(stopped->get("left"), bytes("1"));
  stopped->go_on.set_value();
}

TEST(FromC10d, NeedsAStore) {
  EXPECT_THROW(from_c10d(nullptr), InvalidArgument);
  EXPECT_THROW(to_c10d(nullptr), InvalidArgument);
}

class ToC10d : public testing::Test {
 protected:
  std::shared_ptr<Store> base_ = make_memory_store();
  c10::intrusive_ptr<c10d::Store> store_ = to_c10d(base_);
};

TEST_F(ToC10d, SetGetAddCheckDelete) {
  store_->set("key", bytes("value"));
  EXPECT_EQ(store_->get("key"), bytes("value"));
  EXPECT_EQ(store_->get_to_str("key"), "value");
  EXPECT_EQ(base_->try_get("key"), "value");
  EXPECT_EQ(store_->add("count", 3), 3);
  EXPECT_EQ(store_->add("count", -1), 2);
  EXPECT_THROW(store_->add("key", 1), c10::ValueError);
  EXPECT_TRUE(store_->check({"key", "count"}));
  EXPECT_FALSE(store_->check({"key", "missing"}));
  EXPECT_EQ(store_->getNumKeys(), 2);
  EXPECT_TRUE(store_->deleteKey("key"));
  EXPECT_FALSE(store_->deleteKey("key"));
  EXPECT_FALSE(store_->check({"key"}));
}

// Gives the same answers as libtorch's HashStore.
TEST_F(ToC10d, ComparesAndSetsAsTheHashStoreDoes) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  c10d::Store& theirs = *hash;
  const std::vector<std::pair<std::string, std::string>> exchanges = {
      {"x", "y"},          {"", "first"}, {"", "second"}, {"first", "third"},
      {"wrong", "fourth"}, {"third", ""}, {"", "fifth"},  {"x", "x"}};
  for (const auto& [expected, desired] : exchanges) {
    EXPECT_EQ(store_->compareSet("key", bytes(expected), bytes(desired)),
              theirs.compareSet("key", bytes(expected), bytes(desired)))
        << expected << " -> " << desired;
    EXPECT_EQ(store_->check({"key"}), theirs.check({"key"}));
    if (store_->check({"key"})) {
      EXPECT_EQ(store_->get("key"), theirs.get("key"));
    }
  }
}

TEST_F(ToC10d, WaitsForItsTimeout) {
  store_->setTimeout(milliseconds(30));
  EXPECT_EQ(store_->getTimeout(), milliseconds(30));
  EXPECT_THROW(store_->get("never"), c10::DistStoreError);
  EXPECT_THROW(store_->wait({"never"}), c10::DistStoreError);
  EXPECT_THROW(store_->wait({"never"}, milliseconds(5)), c10::DistStoreError);
  EXPECT_THROW(store_->clone()->get("never"), c10::DistStoreError);  // a clone keeps the timeout
  store_->setTimeout(c10d::Store::kNoTimeout);
  auto waiting = std::async(std::launch::async, [&] { return store_->get("late"); });
  store_->clone()->set("late", bytes("here"));
  EXPECT_EQ(waiting.get(), bytes("here"));
}

TEST_F(ToC10d, HasTheExtendedApi) {
  EXPECT_TRUE(store_->hasExtendedApi());
  store_->append("log", bytes("a"));
  at_once(4, [&](int) {
    for (int i = 0; i < 100; ++i) store_->append("log", bytes("b"));
  });
  EXPECT_EQ(store_->get_to_str("log"), "a" + std::string(400, 'b'));
  store_->multiSet({"one", "two"}, {bytes("1"), bytes("2")});
  EXPECT_EQ(store_->multiGet({"two", "one"}), (std::vector<Bytes>{bytes("2"), bytes("1")}));
  EXPECT_THROW(store_->multiSet({"one"}, {}), c10::ValueError);
}

TEST_F(ToC10d, HasTheBarrier) {
  at_once(4, [&](int) { store_->barrier("barrier", 4, milliseconds(30'000)); });
  EXPECT_THROW(store_->barrier("alone", 2, milliseconds(20)), c10::DistStoreError);
}

TEST(ToC10dServed, AServerThatEndsIsANetworkError) {
  auto server = serve_store();
  const auto store = to_c10d(connect_store(server->address(), soon()));
  store->set("key", bytes("value"));
  server.reset();
  EXPECT_THROW(store->get("key"), c10::DistNetworkError);
}

}  // namespace
}  // namespace muster
