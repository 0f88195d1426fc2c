// Runs the body of a test as the ranks of a job: as threads of this process, as processes forked from it, or, where
// mpirun has started this program several times, as those processes.
//
// Checks (EXPECT_…, ASSERT_…) work in all. In a process they are collected and thrown, so that they fail the test in
// the parent, with their text; or in every process of mpirun's job. These run the same tests in the same order, and end
// each together.
//
// Thread-safety: call from the test's own thread.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "support/sanitized.h"

namespace muster::test {

enum class RanksAre { kThreads, kProcesses, kLaunched };

// A backend and how its ranks run. Every contract test of comm runs for all of them.
struct Setup {
  std::string backend;
  RanksAre ranks = RanksAre::kThreads;
};

// Each backend of comm::backends(), as threads and as processes: a new backend joins by itself. Those that need a
// launcher are there only under mpirun.
std::vector<Setup> all_setups();
// For what needs no backend's collectives: calls between ranks of one host, and of faked hosts over TCP.
std::vector<Setup> rpc_setups();
std::string setup_name(const testing::TestParamInfo<Setup>& info);
void PrintTo(const Setup& setup, std::ostream* out);

// Skips where the backend does not work here, and says what is missing.
class CommContract : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override;

  // The body in each of n ranks, each with its World; throws what the first of them threw. Skips where mpirun has
  // started fewer.
  void run(int n, const std::function<void(World&)>& body, WorldOptions options = {}) const;
  void run_threads_only(int n, const std::function<void(World&)>& body, WorldOptions options = {}) const;
  // In the body of run(): another world of the same ranks, with the same backend.
  World world_beside(World& outer) const;
  bool as_threads() const { return GetParam().ranks == RanksAre::kThreads; }
};

#define MUSTER_COMM_CONTRACT(suite) \
  INSTANTIATE_TEST_SUITE_P(Comm, suite, testing::ValuesIn(muster::test::all_setups()), muster::test::setup_name)

#define MUSTER_RPC_CONTRACT(prefix, suite) \
  INSTANTIATE_TEST_SUITE_P(prefix, suite, testing::ValuesIn(muster::test::rpc_setups()), muster::test::setup_name)

bool under_mpirun();

// Runs `body` with this thread's failed checks collected, and throws them as one std::runtime_error; for forked
// processes.
void throwing_failed_checks(const std::function<void()>& body);

// The message of the Kind that fn() throws; a failed check and "" where it throws nothing or something else.
template <typename Kind, typename Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Kind& error) {
    return error.what();
  } catch (const std::exception& error) {
    const auto* const ours = dynamic_cast<const Error*>(&error);
    ADD_FAILURE() << "threw " << (ours ? to_string(ours->code()) : "something else") << ": " << error.what();
  }
  return {};
}

inline bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }
#define EXPECT_CONTAINS(text, part) EXPECT_PRED2(::muster::test::contains, text, part)

}  // namespace muster::test
