// The contract of every Store, however it is implemented. A new store's test is a StoreUnderTest and an instantiation:
//
//   INSTANTIATE_TEST_SUITE_P(Mine, StoreContract, testing::Values(StoreKind{"mine", make_mine}), store_kind_name);
//
// in a binary with store_contract.cpp.
// Times here are upper bounds after which a test fails. No test sleeps to enforce an order.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "support/patience.h"

namespace muster {

struct StoreUnderTest {
  virtual ~StoreUnderTest() = default;
  // Another handle to the same table, such as another client has.
  virtual std::shared_ptr<Store> open() = 0;
};

struct StoreKind {
  std::string name;
  std::function<std::unique_ptr<StoreUnderTest>()> make;
};

template <typename T>
std::unique_ptr<StoreUnderTest> make_store() {
  return std::make_unique<T>();
}

inline std::string store_kind_name(const testing::TestParamInfo<StoreKind>& info) { return info.param.name; }
inline void PrintTo(const StoreKind& kind, std::ostream* out) { *out << kind.name; }

inline Deadline soon() { return test::patience(); }
inline Deadline in_ms(int ms) { return Deadline::after(std::chrono::milliseconds(ms)); }

// Runs fn(0) … fn(n - 1) concurrently, each on its own thread. Rethrows what one of them threw.
template <typename Fn>
void at_once(int n, Fn fn) {
  std::latch start(n);
  std::vector<std::future<void>> ends;
  for (int i = 0; i < n; ++i)
    ends.push_back(std::async(std::launch::async, [&, i] {
      start.arrive_and_wait();
      fn(i);
    }));
  for (auto& end : ends) end.wait();
  for (auto& end : ends) end.get();
}

template <typename Fn>
std::string timeout_of(Fn fn) {
  try {
    fn();
  } catch (const TimeoutError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no TimeoutError";
  return {};
}

// Thrown by StoreKind::make() if the store's software is not installed. The test then skips.
struct NotInstalled {
  std::string package;
};

class StoreContract : public testing::TestWithParam<StoreKind> {
 protected:
  void SetUp() override {
    try {
      under_test_ = GetParam().make();
    } catch (const NotInstalled& missing) {
      GTEST_SKIP() << "not installed: apt-get install " << missing.package;
    }
    a_ = under_test_->open();
    b_ = under_test_->open();
  }
  std::unique_ptr<StoreUnderTest> under_test_;
  std::shared_ptr<Store> a_, b_;
};

}  // namespace muster
