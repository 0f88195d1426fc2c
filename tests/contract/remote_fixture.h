// What the tests of map and reduce over workers have in common: workers, and the functions that are called.
#pragma once

#include "muster/remote/auto_init_rpc.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "muster/remote/parallelize.h"
#include "muster/rpc/this_call.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::mapped_calls {

using namespace std::chrono_literals;
using at::Tensor;

class Remote : public CommContract {
 protected:
  // Runs the body in each of n workers, within auto_init_rpc.
  void serve(int n, const std::function<void(World&)>& body) const {
    run(n, [&](World& world) { auto_init_rpc([&] { body(world); }); });
  }
  // Runs the body in worker 0 while the others serve.
  void lead(int n, const std::function<void(World&)>& body) const {
    serve(n, [&](World& world) {
      if (world.rank() == 0) body(world);
    });
  }
};

using Part = std::pair<int, Tensor>;
inline Part who_and_what(const Tensor& x) { return {get_rank(), x}; }
inline Tensor doubled(const Tensor& x) { return x * 2; }

inline int rank_of(Tensor) { return get_rank(); }
inline int own_rank(int) { return get_rank(); }

inline void note(std::string key, Tensor x) { World::current().store().add(key, x.numel()); }

inline std::string text_of(int64_t part) { return std::to_string(part); }
// Reports that it has begun, and runs until it is cancelled.
inline void until_cancelled(const std::string& key, int64_t part) {
  World::current().store().set(key + "begun" + text_of(part), "");
  while (!rpc::this_call().cancelled()) std::this_thread::yield();
  World::current().store().set(key + "stopped" + text_of(part), "");
  rpc::this_call().check();
}
// Part 2 fails when all parts have begun. The others run until they are cancelled.
inline int fails_in_part_2(std::string key, Tensor x) {
  const auto part = x.item<int64_t>();
  if (part != 2) until_cancelled(key, part);
  for (const int other : {0, 1}) World::current().store().get(key + "begun" + text_of(other), patience());
  throw std::out_of_range("no such row");
}
inline int never_ends(std::string key, Tensor x) {
  until_cancelled(key, x[0].item<int64_t>());
  return 0;
}

}  // namespace muster::test::mapped_calls
