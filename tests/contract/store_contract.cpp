// The contract of store_contract.h.

#include "contract/store_contract.h"

namespace muster {

TEST_P(StoreContract, SetThenGetAndTryGet) {
  EXPECT_EQ(a_->try_get("color"), std::nullopt);
  a_->set("color", "red");
  EXPECT_EQ(a_->get("color", soon()), "red");
  EXPECT_EQ(b_->try_get("color"), "red");
  b_->set("color", "green");
  EXPECT_EQ(a_->get("color", soon()), "green");
}

TEST_P(StoreContract, AnEmptyValueIsAValue) {
  a_->set("empty", "");
  EXPECT_EQ(b_->try_get("empty"), "");
  EXPECT_EQ(b_->get("empty", soon()), "");
  b_->wait({"empty"}, soon());
}

TEST_P(StoreContract, KeysAndValuesAreAnyBytes) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  const std::string with_zero("a\0b", 3), prefix_of_it("a");
  a_->set(bytes, bytes);
  a_->set(with_zero, "zero");
  a_->set(prefix_of_it, "one");
  EXPECT_EQ(b_->get(bytes, soon()), bytes);
  EXPECT_EQ(b_->get(with_zero, soon()), "zero");
  EXPECT_EQ(b_->get(prefix_of_it, soon()), "one");
}

TEST_P(StoreContract, LargeValues) {
  std::string large(8 << 20, '\0');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 31 >> 3);
  a_->set("large", large);
  EXPECT_TRUE(b_->get("large", soon()) == large);
  EXPECT_TRUE(b_->watch("large", 0, soon()).value == large);
}

TEST_P(StoreContract, GetWaitsForAnotherClient) {
  auto value = std::async(std::launch::async, [&] { return b_->get("late", soon()); });
  a_->set("other", "1");
  a_->set("late", "here");
  EXPECT_EQ(value.get(), "here");
}

TEST_P(StoreContract, GetEndsAtItsDeadlineAndNamesTheKey) {
  EXPECT_NE(timeout_of([&] { a_->get("never-set", in_ms(50)); }).find("never-set"), std::string::npos);
  a_->set("after", "1");
  EXPECT_EQ(a_->get("after", in_ms(-1)), "1");  // a key that exists needs no time
  timeout_of([&] { a_->get("never-set", in_ms(-1)); });
}

TEST_P(StoreContract, WaitNamesTheMissingKeysOnly) {
  a_->set("present-1", "");
  a_->set("present-2", "");
  const std::string message = timeout_of([&] {
    a_->wait({"present-1", "missing-1", "present-2", "missing-2"}, in_ms(50));
  });
  EXPECT_NE(message.find("missing-1"), std::string::npos) << message;
  EXPECT_NE(message.find("missing-2"), std::string::npos) << message;
  EXPECT_EQ(message.find("present"), std::string::npos) << message;
}

TEST_P(StoreContract, WaitReturnsOnceAllAreThere) {
  a_->wait({}, in_ms(0));
  std::vector<std::string> keys;
  for (int i = 0; i < 20; ++i) keys.push_back("rank" + std::to_string(i));
  std::atomic<int> set{0};
  auto waiting = std::async(std::launch::async, [&] {
    b_->wait(keys, soon());
    return set.load();
  });
  for (int i = 0; i < 20; ++i) {  // in another order than the waiter's
    set.store(i + 1);
    a_->set(keys[static_cast<size_t>(i * 7 % 20)], "here");
  }
  EXPECT_EQ(waiting.get(), 20);
}

TEST_P(StoreContract, AddCountsFromZero) {
  EXPECT_EQ(a_->add("count", 5), 5);
  EXPECT_EQ(b_->add("count", -7), -2);
  EXPECT_EQ(a_->get("count", soon()), "-2");
  a_->set("count", "40");
  EXPECT_EQ(b_->add("count", 2), 42);
  EXPECT_EQ(b_->add("count", 0), 42);
}

TEST_P(StoreContract, AddToWhatIsNoNumberIsInvalidAndHarmless) {
  a_->set("name", "Ada");
  EXPECT_THROW(a_->add("name", 1), InvalidArgument);
  EXPECT_EQ(b_->get("name", soon()), "Ada");
  EXPECT_EQ(a_->add("count", 1), 1);  // the handle still works
}

TEST_P(StoreContract, AddFromManyThreadsLosesNothing) {
  const int each = GetParam().name == "etcd" ? 100 : 1000;  // etcd: three round trips and a disk write
  at_once(8, [&](int i) {
    for (int k = 0; k < each; ++k) (i % 2 ? a_ : b_)->add("count", 1);
  });
  EXPECT_EQ(a_->add("count", 0), 8 * each);
}

TEST_P(StoreContract, CompareSet) {
  auto result = a_->compare_set("cell", "something", "x");
  EXPECT_FALSE(result.stored);
  EXPECT_EQ(result.value, std::nullopt);
  EXPECT_EQ(a_->try_get("cell"), std::nullopt);

  result = a_->compare_set("cell", std::nullopt, "one");
  EXPECT_TRUE(result.stored);
  EXPECT_EQ(result.value, "one");

  result = b_->compare_set("cell", std::nullopt, "two");
  EXPECT_FALSE(result.stored);
  EXPECT_EQ(result.value, "one");

  result = b_->compare_set("cell", "one", "two");
  EXPECT_TRUE(result.stored);
  EXPECT_EQ(a_->get("cell", soon()), "two");

  result = a_->compare_set("cell", "one", "three");
  EXPECT_FALSE(result.stored);
  EXPECT_EQ(result.value, "two");

  result = a_->compare_set("cell", "two", "two");  // stores the value that is already there
  EXPECT_TRUE(result.stored);
  result = a_->compare_set("cell", "one", "two");  // the desired value is there already, but this call did not store it
  EXPECT_FALSE(result.stored);
  result = a_->compare_set("gone", "same", "same");
  EXPECT_FALSE(result.stored);
  EXPECT_EQ(result.value, std::nullopt);
}

TEST_P(StoreContract, CompareSetIsWonByOne) {
  for (int round = 0; round < 20; ++round) {
    const std::string key = "lock" + std::to_string(round);
    std::atomic<int> winners{0};
    at_once(8, [&](int i) {  // all with the same value
      if ((i % 2 ? a_ : b_)->compare_set(key, std::nullopt, "locked").stored) ++winners;
    });
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(a_->get(key, soon()), "locked");
  }
}

TEST_P(StoreContract, CompareSetCountsWithoutLoss) {
  a_->set("cell", "0");
  at_once(4, [&](int i) {
    auto& store = i % 2 ? a_ : b_;
    for (int k = 0; k < 50; ++k) {
      std::string seen = store->get("cell", soon());
      for (;;) {
        const auto result = store->compare_set("cell", seen, std::to_string(std::stoi(seen) + 1));
        if (result.stored) break;
        seen = result.value.value();
      }
    }
  });
  EXPECT_EQ(a_->get("cell", soon()), "200");
}

TEST_P(StoreContract, WatchFollowsAKeyThroughItsLife) {
  timeout_of([&] { a_->watch("key", 0, in_ms(20)); });
  auto first = std::async(std::launch::async, [&] { return a_->watch("key", 0, soon()); });
  b_->set("key", "one");
  auto seen = first.get();
  EXPECT_EQ(seen.value, "one");
  EXPECT_GT(seen.version, 0u);
  EXPECT_NE(timeout_of([&] { a_->watch("key", seen.version, in_ms(20)); }).find("key"), std::string::npos);

  auto second = std::async(std::launch::async, [&] { return a_->watch("key", seen.version, soon()); });
  b_->set("key", "two");
  auto next = second.get();
  EXPECT_EQ(next.value, "two");
  EXPECT_GT(next.version, seen.version);

  b_->erase("key");
  seen = a_->watch("key", next.version, soon());
  EXPECT_EQ(seen.value, std::nullopt);
  EXPECT_GT(seen.version, next.version);

  b_->set("key", "three");
  next = a_->watch("key", seen.version, soon());
  EXPECT_EQ(next.value, "three");
  EXPECT_GT(next.version, seen.version);
}

TEST_P(StoreContract, WatchersSeeEveryFinalState) {
  constexpr int kKeys = 4, kChanges = 50;
  at_once(2 * kKeys, [&](int i) {
    const std::string key = "key" + std::to_string(i / 2);
    if (i % 2) {
      for (int k = 0; k <= kChanges; ++k) k % 7 == 3 ? void(a_->erase(key)) : a_->set(key, std::to_string(k));
      return;
    }
    Store::Versioned seen;
    while (seen.value != std::to_string(kChanges)) {
      const auto next = b_->watch(key, seen.version, soon());
      ASSERT_GT(next.version, seen.version);
      seen = next;
    }
  });
}

TEST_P(StoreContract, EraseAndNumKeys) {
  const int64_t before = a_->num_keys();
  a_->set("one", "1");
  a_->set("two", "2");
  a_->set("two", "3");
  EXPECT_EQ(b_->num_keys(), before + 2);
  EXPECT_TRUE(b_->erase("one"));
  EXPECT_FALSE(b_->erase("one"));
  EXPECT_FALSE(a_->erase("never"));
  EXPECT_EQ(a_->try_get("one"), std::nullopt);
  EXPECT_EQ(a_->num_keys(), before + 1);
  timeout_of([&] { a_->get("one", in_ms(10)); });
  EXPECT_TRUE(a_->compare_set("one", std::nullopt, "back").stored);
}

TEST_P(StoreContract, AWaitingThreadBlocksNobody) {
  std::vector<std::future<std::string>> waiting;
  for (int i = 0; i < 12; ++i)  // all through the same handle
    waiting.push_back(std::async(std::launch::async, [&, i] { return a_->get("late" + std::to_string(i), soon()); }));
  for (int i = 11; i >= 0; --i) {
    a_->set("busy", std::to_string(i));
    EXPECT_EQ(a_->get("busy", soon()), std::to_string(i));
    a_->set("late" + std::to_string(i), "here");
    EXPECT_EQ(waiting[static_cast<size_t>(i)].get(), "here");
  }
}

TEST_P(StoreContract, ClientsWakeEachOther) {
  at_once(2, [&](int i) {
    auto& store = i ? a_ : b_;
    for (int round = 0; round < 50; ++round) {
      const std::string mine = (i ? "ping" : "pong") + std::to_string(round);
      const std::string theirs = (i ? "pong" : "ping") + std::to_string(round);
      store->set(mine, "");
      store->get(theirs, soon());
    }
  });
}

}  // namespace muster
