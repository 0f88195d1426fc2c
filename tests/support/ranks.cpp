#include "support/ranks.h"

#include <ATen/Parallel.h>
#include <gtest/gtest-spi.h>

#include <stdexcept>

#include "base/env.h"
#include "base/text.h"
#include "comm/backends/registry.h"
#include "comm/core/backend.h"
#include "comm/world/job_environment.h"
#include "comm/world/world_starter.h"
#include "support/patience.h"

namespace muster::test {
namespace {

// Ranks outnumber the cores already, and a process forked while libtorch's own threads run would wait for them for
// ever.
struct OneThreadARank final : testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
[[maybe_unused]] testing::Environment* const kOneThreadARank =
    testing::AddGlobalTestEnvironment(std::make_unique<OneThreadARank>().release());

// The first n processes of mpirun's job run the body, in a world that has a part of the job's store for itself. Nobody
// goes on before all of them have said how it went.
void run_launched(int n, const std::function<void(World&)>& body, const WorldOptions& options) {
  const auto patience = [] { return Deadline::after(std::chrono::minutes(4)); };
  static const comm::JoinedJob job = [&] {
    comm::JoinedJob mine = comm::join_job(patience());
    // MPI begins in all processes of a job at the same time, and tests have worlds of some.
    const World everybody(mine.placement, mine.store, options);
    return mine;
  }();
  static int number = 0;
  const auto& [rank, processes, local_rank, local_processes, node] = job.placement;
  if (n > processes) GTEST_SKIP() << "needs " << n << " ranks, and mpirun has started " << processes;
  const auto store = make_prefix_store(job.store, text("test/", ++number));
  if (rank < n) {
    std::string failure;
    try {
      World world({.rank = rank, .world_size = n, .local_rank = rank, .local_world_size = n}, store, options);
      const World::Scope scope(world);
      throwing_failed_checks([&] { body(world); });
    } catch (const std::exception& error) {
      failure = text("rank ", rank, ": ", error.what());
    }
    store->set(text("ended/", rank), failure);
  }
  std::string failures;
  for (int r = 0; r < n; ++r) failures += store->get(text("ended/", r), patience());
  if (!failures.empty()) throw std::runtime_error(failures);
}

}  // namespace

bool under_mpirun() { return env_string("OMPI_COMM_WORLD_RANK") || env_string("PMI_RANK"); }

std::vector<Setup> all_setups() {
  std::vector<Setup> setups;
  for (const auto& entry : comm::backends()) {
    if (!entry.needs_peers || entry.name == "nccl") continue;  // these have tests of their own
    if (entry.needs_launcher) {
      if (under_mpirun()) setups.push_back({std::string(entry.name), RanksAre::kLaunched});
      continue;
    }
    for (const auto ranks : {RanksAre::kThreads, RanksAre::kProcesses})
      setups.push_back({std::string(entry.name), ranks});
  }
  return setups;
}

std::vector<Setup> rpc_setups() {
  std::vector<Setup> setups;
  for (const char* backend : {"shm", "hierarchical"})
    for (const auto ranks : {RanksAre::kThreads, RanksAre::kProcesses}) setups.push_back({backend, ranks});
  return setups;
}

namespace {

// With the backend, and a timeout for tests.
WorldOptions options_for(const Setup& setup, WorldOptions options = {}) {
  options.backend = setup.backend;
  if (options.timeout == WorldOptions().timeout) options.timeout = kPatience;
  return options;
}

// For the hierarchical backend, all ranks but the last are on one host: then sums inside it and between hosts are taken
// in the order of ranks, and results must have the bits that they have on any backend.
comm::WorldStarter starter_for(const Setup& setup, int n) {
  std::vector<std::string> hosts;
  if (setup.backend == "hierarchical") {
    hosts.assign(static_cast<size_t>(n), "here");
    if (n > 1) hosts.back() = "there";
  }
  return comm::WorldStarter(std::move(hosts));
}

const char* name_of(RanksAre ranks) {
  switch (ranks) {
    case RanksAre::kThreads:
      return "threads";
    case RanksAre::kProcesses:
      return "processes";
    case RanksAre::kLaunched:
      break;
  }
  return "launched";
}

}  // namespace

std::string setup_name(const testing::TestParamInfo<Setup>& info) {
  return info.param.backend + "_" + name_of(info.param.ranks);
}

void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.backend << ", ranks: " << name_of(setup.ranks); }

void CommContract::SetUp() {
  for (const auto& entry : comm::backends())
    if (entry.name == GetParam().backend)
      if (const auto reason = entry.unavailable_reason(); !reason.empty()) GTEST_SKIP() << reason;
}

void CommContract::run(int n, const std::function<void(World&)>& body, WorldOptions options) const {
  if (as_threads()) return run_threads_only(n, body, std::move(options));
  if (GetParam().ranks == RanksAre::kLaunched)
    return run_launched(n, body, options_for(GetParam(), std::move(options)));
  starter_for(GetParam(), n)
      .spawn(
          n, [&](World& world) { throwing_failed_checks([&] { body(world); }); },
          options_for(GetParam(), std::move(options)));
}

void CommContract::run_threads_only(int n, const std::function<void(World&)>& body, WorldOptions options) const {
  if (GetParam().ranks == RanksAre::kLaunched) GTEST_SKIP() << "needs ranks that are threads";
  starter_for(GetParam(), n).run_threads(n, body, options_for(GetParam(), std::move(options)));
}

World CommContract::world_beside(World& outer) const {
  const int rank = outer.rank(), n = outer.world_size();
  return starter_for(GetParam(), n)
      .join({.rank = rank, .world_size = n, .local_rank = rank, .local_world_size = n}, outer.shared_store(),
            options_for(GetParam()));
}

void throwing_failed_checks(const std::function<void()>& body) {
  constexpr int kEnough = 5;
  testing::TestPartResultArray results;
  std::string failures;
  std::exception_ptr thrown;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &results);
    try {
      body();
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  int failed = 0;
  for (int i = 0; i < results.size(); ++i) {
    const auto& result = results.GetTestPartResult(i);
    if (!result.failed() || ++failed > kEnough) continue;
    failures += std::string(result.file_name() ? result.file_name() : "?") + ":" +
                std::to_string(result.line_number()) + ": " + result.message() + "\n";
  }
  if (failed == 0 && thrown) std::rethrow_exception(thrown);
  if (failed == 0) return;
  if (failed > kEnough) failures += "… and " + std::to_string(failed - kEnough) + " more\n";
  if (thrown) try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& error) {
      failures += std::string("and then an exception: ") + error.what();
    }
  throw std::runtime_error(failures);
}

}  // namespace muster::test
