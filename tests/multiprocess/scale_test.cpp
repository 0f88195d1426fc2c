// What must hold whatever the size of a group and however long it waits: results on up to 64 ranks, the time of a
// barrier among them, the memory that a group takes, the core that a waiting rank leaves alone; and life after a peer
// has stopped.

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/text.h"
#include "comm/core/backend.h"
#include "muster/comm/collectives.h"
#include "support/asleep.h"
#include "support/collective_cases.h"
#include "support/fault_calls.h"
#include "support/forked.h"
#include "support/full_run.h"
#include "support/patience.h"
#include "support/patterns.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;

// Everybody's last word, checked.
void expect_all_well(ForkedRanks& ranks, int n) {
  for (int rank = 0; rank < n; ++rank) {
    const auto end = ranks.wait(rank, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << "rank " << rank << ": " << end.said << ", signal " << end.signal;
  }
}

// --- a peer that stops ---

// Rank 1 stops itself (SIGSTOP) at each phase of each collective. The others are told who it was; while it stands still
// they make a new World of two and work on. Then it goes on, and is told as well. Three processes play
// all cases. A rank that the machine keeps waiting for longer than the short timeout is rightly named instead of rank
// 1: then the case is played again, with a timeout that no machine reaches.
TEST(FaultProcess, StopAtEachPhaseAndTheOthersGoOn) {
  constexpr int kRanks = 3;
  struct StopCase {
    const Call* call;
    int64_t count;
    FaultPhase phase;
    std::string name;
  };
  std::vector<StopCase> cases;
  for (const auto& [phase, phase_name] : kPhases)
    for (const int64_t count : {5, 300'000}) {
      for (const auto& call : kCalls)
        cases.push_back({&call, count, phase, text(call.name, ", ", count, " elements, phase ", phase_name)});
      if (count == 5) cases.push_back({&kBarrier, count, phase, text("barrier, phase ", phase_name)});
    }

  const auto before = leftovers();
  {
    const ForkedJob job;
    // By attempt at a case: how many survivors are through; whether rank 1 is; how many ranks were told of another one
    // than rank 1, and how many ranks have said so or not.
    constexpr size_t kThrough = 0, kBack = 1, kOthersNamed = 2, kSaid = 3, kNumbers = 4, kAttempts = 2;
    const SharedNumbers numbers(kNumbers * kAttempts * cases.size());
    const auto all_have_said = [&](size_t attempt, Deadline until) {
      while (numbers[attempt * kNumbers + kSaid] < kRanks && !until.passed()) ::usleep(200);
      return numbers[attempt * kNumbers + kSaid] == kRanks;
    };
    const auto is_played_again = [&](size_t attempt, Deadline until) {
      return attempt % kAttempts == 0 && all_have_said(attempt, until) &&
             numbers[attempt * kNumbers + kOthersNamed] > 0;
    };
    ForkedRanks ranks(kRanks, [&](int rank) {
      const auto store = connect_store(job.address(), patience());
      const auto until = patience();
      for (size_t i = 0; i < kAttempts * cases.size(); ++i) {
        if (i % kAttempts == 1 && !is_played_again(i - 1, until)) continue;
        const bool again = i % kAttempts == 1;
        const auto& [call, count, phase, name] = cases[i / kAttempts];
        SCOPED_TRACE(name);
        const auto own = [&](size_t which) -> std::atomic<int64_t>& { return numbers[i * kNumbers + which]; };
        const auto case_store = make_prefix_store(store, text("case ", i));
        case_store->set(text("here/", rank), "1");
        for (int r = 0; r < kRanks; ++r) case_store->get(text("here/", r), patience());

        WorldOptions options;
        options.timeout = 2 * kPatience;
        options.faults.add({.action = FaultAction::kStop, .rank = kVictim, .operation = 1, .phase = phase});
        std::optional<World> world(
            std::in_place,
            Placement{.rank = rank, .world_size = kRanks, .local_rank = rank, .local_world_size = kRanks}, case_store,
            options);
        {
          const World::Scope scope(*world);
          call->run(*world, count);
          if (rank != kVictim) comm::backend_of(world->group()).setTimeout(milliseconds(again ? 10'000 : 200));
          try {
            // In the last phase rank 1 stops when the others have what they need from it: the next call shows it.
            for (int time = 0; time < 2; ++time) call->run(*world, count);
            ADD_FAILURE() << "no timeout";
          } catch (const TimeoutError& timeout) {
            const bool right = timeout.missing() == std::vector<int>{kVictim};
            if (!right) ++own(kOthersNamed);
            EXPECT_TRUE(right || !again) << timeout.what();
            if (right) {
              EXPECT_CONTAINS(timeout.what(), text("rank 1 (pid "));
            }
          }
          ++own(kSaid);
        }
        if (rank == kVictim) {
          own(kBack) = 1;
          continue;
        }
        if (i % 2 == 0) world.reset();  // whether the old one is still there makes no difference
        const int among = rank == 0 ? 0 : 1;
        World survivors({.rank = among, .world_size = 2, .local_rank = among, .local_world_size = 2},
                        make_prefix_store(case_store, "survivors"));
        const World::Scope scope(survivors);
        const at::Tensor t = at::ones({count}) * (1 + among);
        all_reduce(t);
        EXPECT_TRUE((t == 3).all().item<bool>());
        barrier();
        ++own(kThrough);
      }
      return std::string();
    });
    const auto until = patience();
    for (size_t i = 0; i < kAttempts * cases.size() && !until.passed(); ++i) {
      if (i % kAttempts == 1 && !is_played_again(i - 1, until)) continue;
      const auto& through = numbers[i * kNumbers + kThrough];
      const auto& back = numbers[i * kNumbers + kBack];
      while (through < kRanks - 1 && !until.passed()) ::usleep(200);
      // It has stopped, if it was not told of a timeout before (on a machine that let it wait).
      for (siginfo_t info{}; back == 0 && !until.passed(); ::usleep(200))
        if (::waitid(P_PID, static_cast<id_t>(ranks.pid(kVictim)), &info, WSTOPPED | WNOHANG) == 0 && info.si_pid != 0)
          break;
      ranks.signal(kVictim, SIGCONT);
    }
    expect_all_well(ranks, kRanks);
  }
  EXPECT_EQ(leftovers(), before);
}

// --- many ranks ---

WorldOptions many_ranks() {
  WorldOptions options;
  options.backend = "shm";
  options.timeout = kPatience;
  return options;
}

void run_ranks(int n, const std::function<void(World&)>& body) {
  const ForkedJob job;
  ForkedRanks ranks(n, [&](int rank) {
    World world = job.join(rank, n, many_ranks());
    const World::Scope scope(world);
    body(world);
    return std::string();
  });
  expect_all_well(ranks, n);
}

class ManyProcesses : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Scale, ManyProcesses, testing::Values(8, 16, 33, 64),
                         [](const auto& info) { return std::to_string(info.param) + "_processes"; });

TEST_P(ManyProcesses, EveryCollectiveIsRight) {
  run_ranks(GetParam(), [](World& world) {
    const int n = world.world_size();
    int64_t shift = 0;
    for (const auto& each : collectives()) {
      const bool rooted =
          each.name == "broadcast" || each.name == "reduce" || each.name == "gather" || each.name == "scatter";
      const bool whole = each.name == "broadcast" || each.name == "reduce" || each.name == "all_reduce" ||
                         each.name == "send and recv";  // else a part a rank
      for (const int64_t count : {1, 1000, 100'000})
        for (const int root : rooted ? std::vector<int>{0, n / 2, n - 1} : std::vector<int>{0}) {
          Case c{.world = world, .count = whole || count < 100'000 ? count : count / n, .root = root};
          c.shift = ++shift;
          SCOPED_TRACE(testing::Message() << each.name << ", " << c);
          each.start(c)();
          if (testing::Test::HasFailure()) return;
        }
    }
    barrier();
  });
}

TEST(ScaleProcess, BarrierOf64Ranks) {
  run_ranks(64, [&](World&) {
    for (int i = 0; i < 20; ++i) barrier();
  });
}

// --- what waiting costs ---

// A rank that waits sleeps, in every call that waits; ./dev bench has what it takes of a core.
TEST(ScaleProcess, WaitingLeavesTheCoreAlone) {
  struct Wait {
    const char* name;
    std::function<void()> call, answer;
  };
  const at::Tensor t = at::ones({1000}), large = at::ones({1'000'000});
  const std::vector<Wait> waits = {
      {"barrier", [] { barrier(); }, [] { barrier(); }},
      {"all_reduce", [&] { all_reduce(large); }, [&] { all_reduce(large); }},
      {"recv", [&] { recv(t, 1); }, [&] { send(t, 0); }},
      {"send", [&] { send(large, 1); }, [&] { recv(large, 0); }},
      {"wait of an all_reduce", [&] { all_reduce_async(t).wait(); }, [&] { all_reduce(t); }},
      {"wait of a receive", [&] { irecv(t, 1).wait(); }, [&] { send(t, 0); }},
      {"wait of a send", [&] { isend(large, 1).wait(); }, [&] { recv(large, 0); }},
  };
  run_ranks(2, [&](World& world) {
    for (size_t i = 0; i < waits.size(); ++i) {
      SCOPED_TRACE(waits[i].name);
      const auto asleep = text("asleep in ", i);
      if (world.rank() == 1) {
        world.store().get(asleep, patience());
        waits[i].answer();
        continue;
      }
      const OnceAsleep watch([&] { world.store().set(asleep, "1"); }, Sleeper::kProcess);
      waits[i].call();
    }
  });
}

// --- memory ---

// The bytes of memory that this process's memfds with this name have: pages that are there.
int64_t memory_of(const std::string& name) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    struct stat info {};
    if (target.starts_with("/memfd:" + name) && ::stat(entry.path().c_str(), &info) == 0) bytes += info.st_blocks * 512;
  }
  return bytes;
}

// After every collective, of sizes that go through every tier, and messages to every rank from every other.
void use_everything(World& world) {
  const int n = world.world_size(), me = world.rank();
  const int64_t large = n <= 8 ? 1'000'000 : 300'000;
  int64_t shift = 0;
  for (const auto& each : collectives()) {
    const bool whole =
        each.name == "broadcast" || each.name == "reduce" || each.name == "all_reduce" || each.name == "send and recv";
    for (const int64_t count : {int64_t{10}, int64_t{3000}, large})
      each.start({.world = world, .count = whole ? count : std::max<int64_t>(1, count / n), .shift = ++shift})();
  }
  const at::Tensor out = at::ones({50'000}), in = at::zeros({50'000});
  for (int step = 0; step < n; ++step) {
    Work receive = irecv(in, (me + n - step) % n);
    send(out, (me + step) % n);
    receive.wait();
  }
  barrier();
}

TEST(ScaleProcess, MemoryOfAGroup) {
  for (const auto& [n, limit_mb] : {std::pair{2, 16}, std::pair{64, 64}}) {
    if (n > 2 && !full_run()) continue;
    run_ranks(n, [&, n = n, limit_mb = limit_mb](World& world) {
      use_everything(world);
      const int64_t bytes = memory_of("muster-group");
      EXPECT_GT(bytes, int64_t{n} << 20) << "looked at something else";
      EXPECT_LE(bytes / n, limit_mb * 1'000'000) << n << " ranks";
      barrier();  // all are there while one looks
    });
  }
}

}  // namespace
}  // namespace muster::test
