#include "support/ranks.h"

#include <ATen/Parallel.h>
#include <gtest/gtest-spi.h>

#include <stdexcept>

#include "comm/backend.h"
#include "muster/launch/spawn.h"

namespace muster::test {
namespace {

// Ranks outnumber the cores already, and a process forked while libtorch's own threads run would wait for them for
// ever.
struct OneThreadARank final : testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
[[maybe_unused]] testing::Environment* const kOneThreadARank =
    testing::AddGlobalTestEnvironment(std::make_unique<OneThreadARank>().release());

}  // namespace

std::vector<Setup> all_setups() {
  std::vector<Setup> setups;
  for (const auto& entry : comm::backends()) {
    if (!entry.needs_peers || entry.needs_launcher || entry.name == "nccl") continue;  // these have tests of their own
    for (const auto ranks : {RanksAre::kThreads, RanksAre::kProcesses})
      setups.push_back({std::string(entry.name), ranks});
  }
  return setups;
}

WorldOptions options_for(const Setup& setup, int n, WorldOptions options) {
  options.backend = setup.backend;
  if (options.timeout == WorldOptions().timeout) options.timeout = std::chrono::seconds(60);
  // All ranks but the last on one host: then sums inside it and between hosts are taken in the order of ranks, and
  // results must have the bits that they have on any backend.
  if (setup.backend == "hierarchical" && options.hosts.empty()) {
    options.hosts.assign(static_cast<size_t>(n), "here");
    if (n > 1) options.hosts.back() = "there";
  }
  return options;
}

std::string setup_name(const testing::TestParamInfo<Setup>& info) {
  return info.param.backend + (info.param.ranks == RanksAre::kThreads ? "_threads" : "_processes");
}

void PrintTo(const Setup& setup, std::ostream* out) {
  *out << setup.backend << (setup.ranks == RanksAre::kThreads ? ", ranks as threads" : ", ranks as processes");
}

void CommContract::SetUp() {
  for (const auto& entry : comm::backends())
    if (entry.name == GetParam().backend)
      if (const auto reason = entry.why_not(); !reason.empty()) GTEST_SKIP() << reason;
}

void CommContract::run(int n, const std::function<void(World&)>& body, WorldOptions options) const {
  if (as_threads()) return run_threads_only(n, body, std::move(options));
  spawn(
      n, [&](World& world) { throwing_failed_checks([&] { body(world); }); },
      options_for(GetParam(), n, std::move(options)));
}

void CommContract::run_threads_only(int n, const std::function<void(World&)>& body, WorldOptions options) const {
  run_threads(n, body, options_for(GetParam(), n, std::move(options)));
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
