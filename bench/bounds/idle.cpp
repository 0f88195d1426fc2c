// The share of a core that a rank takes while it waits; the cost of the black box per operation; a barrier of far more
// ranks than cores.
#include <ATen/ops/ones.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "bounds.h"
#include "job.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/store/store.h"
#include "shm/black_box.h"

namespace bench {
namespace {

using muster::World;

int64_t cpu_ns() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);  // all threads of the process
  const auto ns = [](const timeval& time) { return time.tv_sec * 1'000'000'000 + time.tv_usec * 1000; };
  return ns(usage.ru_utime) + ns(usage.ru_stime);
}

// Rank 0 waits five seconds for an operation that rank 1 does not join: either in a call, or asleep while an operation
// is pending. All jobs wait at the same time.
void waiting() {
  constexpr int kSeconds = 5;
  struct Wait {
    const char* name;
    std::function<muster::Work()> start;  // on rank 0; empty if the call itself waits
    std::function<void()> call, answer;
  };
  const at::Tensor t = at::ones({1000}), large = at::ones({1'000'000});
  const std::vector<Wait> waits = {
      {"barrier", {}, [] { muster::barrier(); }, [] { muster::barrier(); }},
      {"all_reduce", {}, [&] { muster::all_reduce(large); }, [&] { muster::all_reduce(large); }},
      {"recv", {}, [&] { muster::recv(t, 1); }, [&] { muster::send(t, 0); }},
      {"send", {}, [&] { muster::send(large, 1); }, [&] { muster::recv(large, 0); }},
      {"wait of all_reduce_async", {}, [&] { muster::all_reduce_async(t).wait(); }, [&] { muster::all_reduce(t); }},
      {"wait of irecv", {}, [&] { muster::irecv(t, 1).wait(); }, [&] { muster::send(t, 0); }},
      {"pending all_reduce_async", [&] { return muster::all_reduce_async(t); }, {}, [&] { muster::all_reduce(t); }},
      {"pending irecv", [&] { return muster::irecv(t, 1); }, {}, [&] { muster::send(t, 0); }},
      {"pending isend", [&] { return muster::isend(large, 1); }, {}, [&] { muster::recv(large, 0); }},
  };
  const Numbers used(waits.size()), waited(waits.size());
  std::vector<std::unique_ptr<Job>> jobs;
  for (size_t i = 0; i < waits.size(); ++i)
    jobs.push_back(std::make_unique<Job>(2, [&, i](World& world) {
      for (int time = 0; time < 3; ++time) muster::all_reduce(at::ones({200'000}));  // so that the memory is allocated
      muster::barrier();
      if (world.rank() == 1) {
        ::sleep(kSeconds);
        if (waits[i].start) world.store().get("measured", patience());
        waits[i].answer();
        muster::barrier();
        return;
      }
      const int64_t cpu = cpu_ns(), began = now_ns();
      muster::Work work;
      if (waits[i].start) {
        work = waits[i].start();
        ::sleep(kSeconds);
      } else {
        waits[i].call();
      }
      used[i] = cpu_ns() - cpu;
      waited[i] = now_ns() - began;
      if (waits[i].start) {
        world.store().set("measured", "1");
        work.wait();
      }
      muster::barrier();
    }));
  for (size_t i = 0; i < waits.size(); ++i) {
    jobs[i]->wait_all();
    const double percent = 100 * static_cast<double>(used[i]) / static_cast<double>(waited[i]);
    print("idle", std::string("of a core while a rank waits: ") + waits[i].name, 2, percent, percent, 1, "%");
  }
}

void black_box() {
  const muster::UniqueFd memory = muster::shm::create_black_box(0, 1, "bench");
  const auto box = muster::shm::BlackBox::open(memory.get());
  const int group = box->group("world");
  // The best and the median of many batches.
  const auto batches = [](auto&& fn) {
    std::vector<double> ns;
    for (int batch = 0; batch < 200; ++batch) {
      const int64_t began = now_ns();
      for (int i = 0; i < 1000; ++i) fn();
      ns.push_back(static_cast<double>(now_ns() - began) / 1000);
    }
    std::sort(ns.begin(), ns.end());
    return std::pair(ns.front(), ns[ns.size() / 2]);
  };
  const auto clock = batches([] {
    volatile int64_t now = now_ns();
    static_cast<void>(now);
  });
  uint64_t sequence = 0;
  const auto both = batches([&] {
    box->end(box->begin({.group = group, .operation = 1, .bytes = 4096, .sequence = sequence++}),
             muster::shm::BlackBoxState::kDone);
  });
  // Machines differ in the cost of reading the clock; the rest is Muster's cost.
  print("idle", "black box, begin() and end(), without two readings of the clock", 1, both.second - 2 * clock.second,
        std::max(both.first - 2 * clock.first, both.second - 2 * clock.second), 50, "ns");
}

void barrier_of_many() {
  constexpr int kRanks = 64, kTimes = 200;
  const Numbers took(kTimes);
  muster::WorldOptions options;
  options.backend = "shm";
  Job job(
      kRanks,
      [&](World& world) {
        for (int i = 0; i < 10; ++i) muster::barrier();
        for (size_t i = 0; i < kTimes; ++i) {
          const int64_t began = now_ns();
          muster::barrier();
          if (world.rank() == 0) took[i] = now_ns() - began;
        }
      },
      options);
  job.wait_all();
  int64_t sum = 0, longest = 0;
  for (size_t i = 0; i < kTimes; ++i) {
    sum += took[i];
    longest = std::max<int64_t>(longest, took[i]);
  }
  // The mean, because the times of a rank vary: the rank that comes last waits for no other rank, and the next time for
  // all.
  print("idle", "barrier", kRanks, static_cast<double>(sum) / kTimes / 1e6, static_cast<double>(longest) / 1e6, 20,
        "ms");
}

}  // namespace

void idle() {
  waiting();
  black_box();
  barrier_of_many();
}

}  // namespace bench
