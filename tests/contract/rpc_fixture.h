// What the tests of remote calls have in common: workers that serve, and the functions that are called.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::remote_calls {

using namespace std::chrono_literals;
using at::Tensor;
using rpc::Future;
using rpc::RRef;

class Rpc : public CommContract {
 protected:
  // Runs the body in each of n workers, and then shuts RPC down gracefully.
  void serve(int n, const std::function<void(World&)>& body, rpc::Options options = {}) const {
    run(n, [&](World& world) {
      rpc::init(options);
      body(world);
      rpc::shutdown();
    });
  }
};

inline int add(int a, int b) { return a + b; }

inline Tensor twice(const Tensor& x) { return x * 2; }
inline void nothing() {}

inline int fails(int) { throw std::out_of_range("no such key"); }
// Blocks its thread, as users' functions do, until the test says go.
inline int held(int number) {
  World::current().store().get("go" + std::to_string(number), patience());
  return number;
}

// Calls itself on the next worker, `depth` times.
inline int down(int depth) {
  const int next = (rpc::worker_info().id + 1) % static_cast<int>(rpc::all_workers().size());
  return depth == 0 ? 0 : 1 + rpc::sync<&down>(next, depth - 1);
}

struct Counter {
  explicit Counter(int start = 0) : value(start) {
    if (start < 0) throw std::invalid_argument("a counter starts at 0");
  }
  int add(int n) {
    const std::lock_guard lock(mutex);
    return value += n;
  }
  int get() const { return value; }
  std::mutex mutex;
  int value;
};

inline int bump_through(RRef<Counter> counter) { return counter.sync<&Counter::add>(1); }

// Returns whether `condition` becomes true.
template <typename Condition>
bool soon(Condition condition) {
  for (const auto end = patience(); !end.passed();) {
    if (condition()) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace muster::test::remote_calls
