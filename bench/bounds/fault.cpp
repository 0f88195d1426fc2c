// The time from the end of a rank until the other ranks know it.
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

#include "bounds.h"
#include "job.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/rpc/call.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/worker.h"
#include "muster/store/store.h"

namespace bench {
namespace {

using muster::World;

void until_cancelled() {
  World::current().store().set("called", "1");
  while (!muster::rpc::this_call().cancelled()) ::usleep(1000);
}

// SIGKILL at any moment of a loop of all_reduce.
void killed_in_a_collective() {
  constexpr int kRanks = 3, kTimes = 60;
  std::vector<int64_t> delays;
  std::mt19937 random(1);
  for (int time = 0; time < kTimes; ++time) {
    const auto victim = static_cast<int>(random() % kRanks);
    const int64_t count = int64_t{1} << (random() % 21);
    const Numbers done(kRanks), knew(kRanks);
    Job job(kRanks, [&](World& world) {
      const at::Tensor t = at::zeros({count});
      const auto me = static_cast<size_t>(world.rank());
      try {
        for (;; ++done[me]) muster::all_reduce(t);
      } catch (const muster::PeerLost&) {
        knew[me] = now_ns();
      }
    });
    for (size_t rank = 0; rank < kRanks; ++rank)
      while (done[rank] < 3) ::usleep(100);
    ::usleep(static_cast<useconds_t>(random() % 5000));
    const int64_t killed = now_ns();
    job.end(victim, SIGKILL);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      job.end(rank, 0);
      delays.push_back(knew[static_cast<size_t>(rank)] - killed);
    }
  }
  print_ms("fault", "a rank is killed in an all_reduce: the others know", kRanks, delays, 50);
}

void killed_before_its_message() {
  std::vector<int64_t> delays;
  for (int time = 0; time < 20; ++time) {
    const Numbers knew(1);
    Job job(2, [&](World& world) {
      if (world.rank() == 1) {
        world.store().set("here", "1");
        world.store().get("nobody sets this", patience());
      }
      world.store().get("here", patience());
      try {
        muster::recv(at::zeros({10}), 1);
      } catch (const muster::PeerLost&) {
        knew[0] = now_ns();
      }
    });
    job.store().get("here", patience());
    ::usleep(20'000);  // rank 0 has long been waiting
    const int64_t killed = now_ns();
    job.end(1, SIGKILL);
    job.end(0, 0);
    delays.push_back(knew[0] - killed);
  }
  print_ms("fault", "a rank is killed: who waits for its message knows", 2, delays, 50);
}

void killed_with_a_call() {
  std::vector<int64_t> delays;
  for (int time = 0; time < 20; ++time) {
    const Numbers knew(1);
    Job job(2, [&](World& world) {
      muster::rpc::init();
      if (world.rank() == 1) world.store().get("nobody sets this", patience());
      const auto call = muster::rpc::async<&until_cancelled>(1);
      try {
        call.get();
      } catch (const muster::PeerLost&) {
        knew[0] = now_ns();
      }
      muster::rpc::shutdown(muster::rpc::Shutdown::kAbrupt);
    });
    job.store().get("called", patience());
    ::usleep(20'000);  // rank 0 has long been waiting
    const int64_t killed = now_ns();
    job.end(1, SIGKILL);
    job.end(0, 0);
    delays.push_back(knew[0] - killed);
  }
  print_ms("fault", "a worker is killed: who has called it knows", 2, delays, 100);
}

void stopped() {
  constexpr int kRanks = 3;
  muster::WorldOptions options;
  options.timeout = std::chrono::milliseconds(200);
  options.faults.add({.action = muster::FaultAction::kStop, .rank = 1, .operation = 3});
  std::vector<int64_t> delays;
  for (int time = 0; time < 20; ++time) {
    const Numbers waited(kRanks);
    Job job(
        kRanks,
        [&](World& world) {
          const at::Tensor t = at::zeros({1000});
          int64_t began = 0;
          try {
            for (;;) {
              began = now_ns();
              muster::all_reduce(t);
            }
          } catch (const muster::TimeoutError&) {
            waited[static_cast<size_t>(world.rank())] = now_ns() - began;
          }
        },
        options);
    job.end(0, 0);
    job.end(2, 0);
    job.end(1, SIGKILL);
    delays.push_back(std::max<int64_t>(waited[0], waited[2]));
  }
  print_ms("fault", "a rank is stopped: a timeout of 200 ms comes after", kRanks, delays, 300);
}

}  // namespace

void fault() {
  killed_in_a_collective();
  killed_before_its_message();
  killed_with_a_call();
  stopped();
}

}  // namespace bench
