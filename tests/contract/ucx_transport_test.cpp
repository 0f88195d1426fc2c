// The ucx transport: the contract, over UCX's TCP transport and over those that UCX chooses; which workers cannot meet;
// and what loading UCX leaves unchanged in the program.

#include <gmock/gmock.h>
#include <signal.h>

#include "contract/transport_contract.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "support/served.h"
#include "transport/ucx/fabric_library.h"
#include "transport/ucx/packet.h"
#include "transport/ucx/ucx_transport.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using transport::Limits;
using transport::Receiver;
using transport::Transport;
using transport::UcxOptions;

UcxOptions options_of(size_t rank, size_t size, const std::string& ways) {
  UcxOptions options;
  options.rank = static_cast<int>(rank);
  options.size = static_cast<int>(size);
  options.prefix = "test/";
  options.heartbeat = std::chrono::seconds(60);  // receivers of the contract block
  options.settings = {{"TLS", ways}};
  return options;
}

std::vector<std::unique_ptr<Transport>> make_ucx_mesh(const std::vector<Receiver*>& receivers, const Limits& limits,
                                                      const std::string& ways) {
  const auto store = make_memory_store();
  std::vector<std::unique_ptr<Transport>> made(receivers.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < made.size(); ++rank)
    threads.emplace_back([&, rank] {
      auto options = options_of(rank, made.size(), ways);
      options.limits = limits;
      made[rank] = transport::make_ucx_transport(options, directory_of(store), *receivers[rank], in_time());
    });
  for (auto& thread : threads) thread.join();
  return made;
}

TransportKind kind_of(const std::string& name, const std::string& ways) {
  TransportKind kind{
      name, [ways](const auto& receivers, const Limits& limits) { return make_ucx_mesh(receivers, limits, ways); }};
  kind.unavailable_reason = transport::ucx::unavailable_reason;
  return kind;
}

INSTANTIATE_TEST_SUITE_P(Ucx, TransportContract, testing::Values(kind_of("tcp", "tcp"), kind_of("all", "all")),
                         transport_kind_name);

class Ucx : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = transport::ucx::unavailable_reason(); !why.empty()) GTEST_SKIP() << why;
  }
};

void crash_handler(int) {}

// UCX installs signal handlers when it is loaded, as its environment says. It is loaded in the child, unless an earlier
// test has loaded it.
TEST(UcxLoading, TheProgramKeepsItsSignalsForkProcess) {
  constexpr int kNotHere = 77;
  const pid_t child = fork_child([] {
    ::setenv("UCX_HANDLE_ERRORS", "bt,freeze", 1);
    ::signal(SIGSEGV, &crash_handler);
    if (!transport::ucx::unavailable_reason().empty()) return kNotHere;
    struct sigaction segv {
    }, bus{};
    ::sigaction(SIGSEGV, nullptr, &segv);
    ::sigaction(SIGBUS, nullptr, &bus);
    return segv.sa_handler == &crash_handler && bus.sa_handler == SIG_DFL ? 0 : 2;
  });
  const int status = exit_status(child);
  if (status == kNotHere) GTEST_SKIP() << transport::ucx::unavailable_reason();
  EXPECT_EQ(status, 0);
}

TEST_F(Ucx, LeavesNoDescriptorsBehind) {
  const auto open_and_end = [] {
    std::vector<Recorder> receivers(3);
    const auto made = make_ucx_mesh({&receivers[0], &receivers[1], &receivers[2]}, {}, "tcp");
    made[0]->send(1, {"x", {}});
    receivers[1].take(1);
    return open_fds();
  };
  open_and_end();  // UCX keeps some descriptors forever
  const size_t before = open_fds();
  EXPECT_GT(open_and_end(), before);
  EXPECT_EQ(open_fds(), before);
}

TEST_F(Ucx, WaysThatThereAreNotAreNamed) {
  Recorder receiver;
  auto options = options_of(0, 1, "tcp");
  options.settings = {{"TLS", "pigeon"}};
  try {
    transport::make_ucx_transport(options, directory_of(make_memory_store()), receiver, in_time());
    ADD_FAILURE() << "it was taken";
  } catch (const Unavailable& error) {
    EXPECT_THAT(error.message(), HasSubstr("UCX cannot serve"));
    EXPECT_THAT(error.advice(), HasSubstr("UCX_TLS"));
  }
}

}  // namespace
}  // namespace muster::test
