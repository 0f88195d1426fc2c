// Transports between hosts, TCP and UCX, between processes that are killed, stopped, and forked.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>

#include <atomic>

#include "contract/transport_contract.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "support/served.h"
#include "support/ucx.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace muster::test {
namespace {

using std::chrono::milliseconds;
using testing::AnyOf;
using testing::HasSubstr;
using transport::TcpOptions;
using transport::Transport;
using transport::UcxOptions;

constexpr milliseconds kHeartbeat{3000};

struct FarKind {
  std::string name;
  bool tls = false, ucx = false;
  std::string closed = "its connection was";  // the cause where a process is killed
};

void PrintTo(const FarKind& kind, std::ostream* out) { *out << kind.name; }

// Rank 0 of `size` is the test, the others are processes: each echoes what it gets, until rank 0 is lost.
class TransportProcess : public testing::TestWithParam<FarKind> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().ucx ? why_no_ucx() : ""; !why.empty()) GTEST_SKIP() << why;
  }
  ~TransportProcess() override {
    transport.reset();
    for (const pid_t child : children) {
      ::kill(child, SIGKILL);
      exit_status(child);
    }
  }

  std::unique_ptr<Transport> join(int rank, int size, const std::shared_ptr<Store>& store, transport::Receiver& to) {
    const transport::Directory directory{
        [&](const std::string& key, const std::string& value) { store->set(key, value); },
        [&](const std::string& key, Deadline deadline) { return store->get(key, deadline); }};
    const milliseconds heartbeat = rank == 0 ? own_heartbeat : kHeartbeat;
    if (GetParam().ucx) {
      UcxOptions options;
      options.rank = rank;
      options.size = size;
      options.heartbeat = heartbeat;
      options.settings = {{"TLS", "tcp"}};
      return transport::make_ucx_transport(options, directory, to, in_time());
    }
    TcpOptions options;
    options.rank = rank;
    options.size = size;
    options.secret = secret;
    options.heartbeat = heartbeat;
    return transport::make_tcp_transport(options, directory, to, in_time());
  }

  int echo(int rank, int size) {
    const auto store = connect_store(server->address(), in_time());
    std::atomic<Transport*> own{nullptr};
    Recorder to;
    to.on = [&](int peer, std::string_view body, std::vector<transport::Piece>& pieces) {
      while (!own) ::sched_yield();
      transport::Message answer{std::string(body), {}};
      answer.pieces = std::move(pieces);
      try {
        own.load()->send(peer, std::move(answer));
      } catch (const PeerLost&) {
      }
    };
    const auto mine = join(rank, size, store, to);
    own = mine.get();
    to.cause(0);
    return 0;
  }

  void open(int size) {
    for (int rank = 1; rank < size; ++rank) children.push_back(fork_child([=, this] { return echo(rank, size); }));
    transport = join(0, size, server->local(), receiver);
  }

  void expect_echo(int peer, const std::string& word) {
    transport->send(peer, {word, {}});
    EXPECT_EQ(receiver.take(1).at(0).body, word);
  }

  milliseconds own_heartbeat = kHeartbeat;  // of rank 0
  const std::optional<Secret> secret = GetParam().tls ? std::optional(Secret::generate()) : std::nullopt;
  const std::unique_ptr<StoreServer> server = serve_store();
  Recorder receiver;
  std::unique_ptr<Transport> transport;
  std::vector<pid_t> children;
};

INSTANTIATE_TEST_SUITE_P(Far, TransportProcess,
                         testing::Values(FarKind{"tcp"}, FarKind{.name = "tls", .tls = true},
                                         FarKind{.name = "ucx", .ucx = true, .closed = "the way to it broke"}),
                         [](const auto& info) { return info.param.name; });

TEST_P(TransportProcess, WhoIsKilledIsLostAtOnce) {
  open(3);
  expect_echo(1, "one");
  expect_echo(2, "two");
  const auto begin = Clock::now();
  ::kill(children[0], SIGKILL);
  const std::string cause = receiver.cause(1);
  EXPECT_LT(Clock::now() - begin, kHeartbeat / 2);
  EXPECT_THAT(cause, HasSubstr("worker 1 (pid " + std::to_string(children[0]) + ") is lost: " + GetParam().closed));
  try {
    transport->send(1, {"x", {}});
    ADD_FAILURE() << "sent to a dead process";
  } catch (const PeerLost& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_EQ(error.pid(), children[0]);
    EXPECT_EQ(error.message(), cause);
  }
  expect_echo(2, "still here");
}

TEST_P(TransportProcess, WhoIsKilledWhileMuchIsUnderWayIsLost) {
  open(3);
  std::vector<std::byte> data(8 << 20);
  for (int i = 0; i < 20; ++i) {
    transport::Message message{"much", {}};
    message.pieces.push_back({data.data(), data.size(), nullptr, false});
    transport->send(1, std::move(message));
  }
  ::kill(children[0], SIGKILL);
  receiver.cause(1);
  EXPECT_EQ(transport->backlog(1), 0U);
  EXPECT_THROW(transport->wait_below(1, 0, in_time()), PeerLost);
}

TEST_P(TransportProcess, WhoIsStoppedIsLostAfterTheHeartbeat) {
  open(3);
  expect_echo(1, "one");
  const auto begin = Clock::now();
  ::kill(children[0], SIGSTOP);
  EXPECT_THAT(receiver.cause(1), HasSubstr("nothing was heard of it for"));
  const auto took = Clock::now() - begin;
  EXPECT_GE(took, kHeartbeat * 3 / 4 - milliseconds(50));
  EXPECT_LT(took, kHeartbeat + std::chrono::seconds(5));
  expect_echo(2, "still here");
  // When it goes on, it finds that it was given up, and ends.
  ::kill(children[0], SIGCONT);
  EXPECT_EQ(exit_status(children[0]), 0);
  children.erase(children.begin());
}

TEST_P(TransportProcess, WhoWasStoppedItselfLosesNobody) {
  own_heartbeat = std::chrono::seconds(60);  // rank 0 does not mind silence
  open(2);
  expect_echo(1, "one");
  ::kill(children[0], SIGSTOP);
  int status = 0;
  ASSERT_EQ(::waitpid(children[0], &status, WUNTRACED), children[0]);
  // Longer than its interval: our beats lie unread in its socket. What makes the time pass is the thing under test.
  std::this_thread::sleep_for(kHeartbeat + kHeartbeat / 2);
  ::kill(children[0], SIGCONT);
  expect_echo(1, "two");
  std::this_thread::sleep_for(kHeartbeat / 2);  // beyond its next looks at the clock
  expect_echo(1, "three");
}

TEST_P(TransportProcess, AForkedChildHoldsNoConnectionOpen) {
  open(2);
  expect_echo(1, "one");
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  const pid_t copy = fork_child([&] {  // with copies of all sockets
    out.reset();
    transport.reset();  // says and closes nothing: it is the parent's
    char byte = 0;
    return static_cast<int>(::read(in.get(), &byte, 1));
  });
  expect_echo(1, "two");  // the child's destructor has not ended it, nor does it later
  const auto begin = Clock::now();
  transport.reset();
  EXPECT_EQ(exit_status(children[0]), 0);  // it heard that rank 0 is gone
  EXPECT_LT(Clock::now() - begin, kHeartbeat / 2);
  children.clear();
  out.reset();
  EXPECT_EQ(exit_status(copy), 0);
}

}  // namespace
}  // namespace muster::test
