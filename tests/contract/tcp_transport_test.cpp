// The TCP transport: the contract, plain and under TLS; which connections it refuses, and at what cost; peers that die.
// How workers come together is in tcp_meeting_test.cpp.
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <fstream>
#include <future>
#include <utility>

#include "contract/tcp_transport_fixture.h"
#include "muster/base/error.h"
#include "store/address/tcp_address.h"
#include "support/served.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/poller.h"

namespace muster::test::tcp_meshes {
namespace {

using transport::FrameKind;
using transport::Limits;
using transport::Receiver;

std::vector<std::unique_ptr<Transport>> make_mesh(const std::vector<Receiver*>& receivers, const Limits& limits,
                                                  const std::optional<Secret>& secret) {
  const auto store = make_memory_store();
  std::vector<std::unique_ptr<Transport>> made(receivers.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < made.size(); ++rank)
    threads.emplace_back([&, rank] {
      auto options = options_of(rank, made.size(), secret);
      options.limits = limits;
      made[rank] = transport::make_tcp_transport(options, directory_of(store), *receivers[rank], in_time());
    });
  for (auto& thread : threads) thread.join();
  return made;
}

INSTANTIATE_TEST_SUITE_P(Tcp, TransportContract,
                         testing::Values(TransportKind{"tcp",
                                                       [](const auto& receivers, const Limits& limits) {
                                                         return make_mesh(receivers, limits, std::nullopt);
                                                       }},
                                         TransportKind{"tls",
                                                       [](const auto& receivers, const Limits& limits) {
                                                         return make_mesh(receivers, limits, Secret::generate());
                                                       }}),
                         transport_kind_name);

// --- peers that break the protocol ---

size_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  size_t all = 0, resident = 0;
  in >> all >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

// The test plays rank 1 of 2 (or more); rank 0 is a transport. TCP is plain, because the frames do not depend on TLS.
class ByHand : public testing::Test {
 protected:
  ByHand() {
    limits.bytes = size_t{16} << 30;
    limits.body = 1 << 20;
    limits.pieces = 1000;
  }
  ~ByHand() override { socket.reset(); }  // so that rank 0 does not wait for an answer to its goodbye

  // Rank 0 begins to wait for its peers.
  void begin(const std::optional<Secret>& secret = std::nullopt) {
    auto options = options_of(0, ranks, secret);
    options.names = {"alice", "bob"};
    options.limits = limits;
    options.heartbeat = heartbeat;
    made_ = std::async(std::launch::async,
                       [=, this] { return make_tcp_transport(options, directory_of(store), receiver, in_time()); });
    entry = Entry::parse(store->get("test/tcp/0", in_time()));
  }
  void post_own() { store->set("test/tcp/1", Entry{own, 1, {"127.0.0.1"}}.text()); }
  UniqueFd dial() const {
    int error = 0;
    const auto found = store::resolve({"127.0.0.1", entry.port}, in_time());
    return store::dial_tcp(found.addresses.at(0), in_time(), &error);
  }
  Hello hello() const {
    Hello mine;
    mine.rank = 1;
    mine.to = 0;
    mine.size = static_cast<uint32_t>(ranks);
    mine.pid = 4711;
    mine.heartbeat_ms = static_cast<uint32_t>(own_heartbeat.count());
    mine.key = entry.key;
    return mine;
  }
  // Lets the test become rank 1.
  void join() {
    begin();
    post_own();
    join_now();
  }
  void join_now() {
    socket = dial();
    write(hello().bytes());
    ASSERT_EQ(read(transport::kHelloBytes).size(), transport::kHelloBytes);
    transport = made_.get();
  }
  void write(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno != EAGAIN) return;
      if (n > 0) bytes.remove_prefix(static_cast<size_t>(n));
      pollfd one{socket.get(), POLLOUT, 0};
      if (n < 0 && ::poll(&one, 1, 20'000) <= 0) return;
    }
  }
  std::string read(size_t size) const {
    std::string bytes;
    while (bytes.size() < size) {
      pollfd one{socket.get(), POLLIN, 0};
      if (::poll(&one, 1, 20'000) <= 0) break;
      std::array<char, 4096> some{};
      const ssize_t n = ::recv(socket.get(), some.data(), std::min(some.size(), size - bytes.size()), 0);
      if (n <= 0) break;
      bytes.append(some.data(), static_cast<size_t>(n));
    }
    return bytes;
  }
  static std::string header(uint8_t kind, uint32_t pieces, uint64_t body, std::vector<uint64_t> table = {}) {
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(kind);
    std::memcpy(bytes.data() + 4, &pieces, sizeof pieces);
    bytes.append(reinterpret_cast<const char*>(&body), sizeof body);
    bytes.append(reinterpret_cast<const char*>(table.data()), table.size() * sizeof(uint64_t));
    return bytes;
  }
  size_t ranks = 2;
  Limits limits;
  milliseconds heartbeat{60'000}, own_heartbeat{60'000};
  const std::shared_ptr<Store> store = make_memory_store();
  Recorder receiver;
  const transport::HelloKey own = transport::make_hello_key();
  Entry entry;
  UniqueFd socket;
  std::unique_ptr<Transport> transport;
  std::future<std::unique_ptr<Transport>> made_;
};

TEST_F(ByHand, ItsMessagesCome) {
  join();
  write(header(1, 2, 5, {3, 0}) + "helloabc");
  const auto got = receiver.take(1);
  EXPECT_EQ(got.at(0).body, "hello");
  ASSERT_EQ(got.at(0).pieces.size(), 2U);
  EXPECT_EQ(std::memcmp(got.at(0).pieces[0].data, "abc", 3), 0);
  write(header(2, 0, 0) + header(3, 0, 0));
  EXPECT_EQ(receiver.cause(1), "bob (pid 4711) left");
}

TEST_F(ByHand, ABrokenFrameIsItsEnd) {
  struct Case {
    std::string bytes, cause;
  };
  const std::vector<Case> cases = {
      {header(0, 0, 0), "kind 0"},
      {header(9, 0, 0), "kind 9"},
      {"GET / HTTP/1.1\r\n\r\n", "kind 71"},
      {header(2, 1, 0), "with contents"},
      {header(3, 0, 1), "with contents"},
      {header(1, 1001, 0), "1001 pieces; at most 1000"},
      {header(1, 0xffffffff, 0), "pieces; at most 1000"},
      {header(1, 0, (1 << 20) + 1), "body of 1048577 bytes"},
      {header(1, 0, ~uint64_t{0}), "body of 18446744073709551615 bytes"},
      {header(1, 1, 10, {(uint64_t{16} << 30) - 9}), "bytes that are allowed"},
      {header(1, 2, 10, {uint64_t{15} << 30, uint64_t{2} << 30}), "bytes that are allowed"},
      {header(1, 2, 10, {5, ~uint64_t{0}}), "bytes that are allowed"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.cause);
    receiver.forget();
    join();
    write(header(1, 0, 2) + "ok" + one.bytes);
    EXPECT_EQ(receiver.take(1).at(0).body, "ok");
    EXPECT_THAT(receiver.cause(1), HasSubstr("bob (pid 4711) is lost: it broke the protocol"));
    EXPECT_THAT(receiver.cause(1), HasSubstr(one.cause));
    EXPECT_THROW(transport->send(1, {}), PeerLost);
    EXPECT_EQ(read(1), "") << "the connection is open";
    transport.reset();
    store->erase("test/tcp/0");
    store->erase("test/tcp/1");
  }
}

TEST_F(ByHand, ClaimedSizesTakeNoMemory) {
  join();
  const size_t before = resident_bytes();
  write(header(1, 2, 0, {uint64_t{8} << 30, uint64_t{7} << 30}) + std::string(1 << 20, 'x'));
  // Rank 0 has read all bytes when the kernel's queue is empty.
  EXPECT_TRUE(eventually([&] {
    int unread = 1;
    return ::ioctl(socket.get(), TIOCOUTQ, &unread) == 0 && unread == 0;
  }));
  transport->send(1, {"ping", {}});
  EXPECT_EQ(read(transport::kFrameHeader + 4).substr(transport::kFrameHeader), "ping");
  EXPECT_LT(resident_bytes(), before + (size_t{24} << 20));
  socket.reset();
  EXPECT_THAT(receiver.cause(1), HasSubstr("its connection was"));
  EXPECT_EQ(receiver.num_got(), 0U);
}

TEST_F(ByHand, SilenceIsTheEnd) {
  heartbeat = milliseconds(kSanitized ? 1000 : 200);
  const auto begin = Clock::now();
  join();
  EXPECT_THAT(receiver.cause(1), HasSubstr("nothing was heard of it for"));
  EXPECT_GE(Clock::now() - begin, heartbeat);
  EXPECT_LT(Clock::now() - begin, heartbeat + std::chrono::seconds(5));
}

TEST_F(ByHand, ItHearsHeartbeats) {
  heartbeat = milliseconds(kSanitized ? 8000 : 4000);
  join();
  // Rank 1's heartbeats keep it alive for one and a half intervals.
  for (const auto end = Clock::now() + heartbeat * 3 / 2; Clock::now() < end;) {
    EXPECT_EQ(read(transport::kFrameHeader), header(2, 0, 0));
    write(header(2, 0, 0));
  }
  EXPECT_FALSE(receiver.is_lost(1));
}

// Its receiver works on one message for as long as the test wants.
TEST_F(ByHand, ItHearsFromUsAlsoWhileTheReceiverIsBusy) {
  own_heartbeat = milliseconds(400);
  const auto gate = std::make_shared<Gate>();
  receiver.on = [gate](int, std::string_view, std::vector<Piece>&) { gate->pass(); };
  join();
  write(header(1, 0, 0));
  for (int beat = 0; beat < 3; ++beat) EXPECT_EQ(read(transport::kFrameHeader), header(2, 0, 0));
  gate->open();
}

// At every poll, more sockets are readable than one poll reports.
TEST_F(ByHand, BusyPeersHearHeartbeatsTooHoweverManyTheyAre) {
  heartbeat = milliseconds(kSanitized ? 8000 : 2000);
  ranks = transport::Poller::kMostEvents + 3;
  std::vector<UniqueFd> peers(1);  // by rank
  std::vector<int> sockets(1);
  std::atomic<bool> over{false};
  const std::string message = header(1, 0, 0);
  int held = 0;
  // A peer that was heard sends again when the next one is heard. So all peers but one always have something to read.
  receiver.on = [&](int peer, std::string_view, std::vector<Piece>&) {
    if (over) return;
    const auto of = static_cast<size_t>(std::exchange(held, peer));
    if (of > 0) ::send(sockets[of], message.data(), message.size(), MSG_NOSIGNAL);
  };
  begin();
  for (size_t rank = 1; rank < ranks; ++rank)
    store->set("test/tcp/" + std::to_string(rank), Entry{own, 1, {"127.0.0.1"}}.text());
  for (size_t rank = 1; rank < ranks; ++rank) {
    socket = dial();
    Hello mine = hello();
    mine.rank = static_cast<uint32_t>(rank);
    write(mine.bytes());
    ASSERT_EQ(read(transport::kHelloBytes).size(), transport::kHelloBytes);
    sockets.push_back(socket.get());
    peers.push_back(std::move(socket));
  }
  transport = made_.get();
  for (size_t rank = 1; rank < ranks; ++rank) ::send(sockets[rank], message.data(), message.size(), MSG_NOSIGNAL);
  socket = std::move(peers.back());
  EXPECT_EQ(read(transport::kFrameHeader), header(2, 0, 0));
  for (size_t rank = 1; rank < ranks; ++rank) EXPECT_FALSE(receiver.is_lost(static_cast<int>(rank)));
  over = true;
  for (size_t rank = 1; rank < ranks; ++rank) ::shutdown(sockets[rank], SHUT_RDWR);
  transport.reset();  // before the objects that its receiver uses
}

TEST_F(ByHand, AResetIsTheEndAtOnce) {
  join();
  const linger hard{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
  socket.reset();
  EXPECT_THAT(receiver.cause(1), HasSubstr("bob (pid 4711) is lost: its connection was reset"));
}

TEST_F(ByHand, GreetingsAreChecked) {
  testing::internal::CaptureStderr();
  begin();
  post_own();
  std::vector<std::pair<Hello, bool>> wrong;  // and whether rank 0 answers
  for (const int what : {0, 1, 2, 3, 4}) {
    Hello mine = hello();
    if (what == 0) mine.key = own;
    if (what == 1) mine.version = 2;
    if (what == 2) mine.size = 3;
    if (what == 3) mine.rank = 0;
    if (what == 4) mine.to = 1;
    wrong.emplace_back(mine, what != 0);
  }
  for (const auto& [mine, answered] : wrong) {
    socket = dial();
    write(mine.bytes());
    const std::string answer = read(transport::kHelloBytes);
    ASSERT_EQ(answer.size(), answered ? transport::kHelloBytes : 0);
    if (answered) {
      EXPECT_NE(Hello::parse(answer).answer, transport::HelloAnswer::kWelcome);
    }
    EXPECT_EQ(read(1), "") << "the connection is open";
  }
  socket = dial();
  write(std::string(transport::kHelloBytes, 'x'));
  EXPECT_EQ(read(1), "");
  join_now();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("alice refused a connection from 127.0.0.1 (it wants a worker of another job)"));
  EXPECT_EQ(log.find("refused"), log.rfind("refused a")) << log;  // once
}

TEST_F(ByHand, WithoutASecretItListensOnLoopbackOnly) {
  const auto reaches = [&](const std::string& host) {
    int error = 0;
    const auto found = store::resolve({host, entry.port}, in_time());
    return static_cast<bool>(store::dial_tcp(found.addresses.at(0), in_time(), &error));
  };
  testing::internal::CaptureStderr();  // rank 0 logs that it refused a silent connection
  begin();
  EXPECT_EQ(entry.addresses, std::vector<std::string>{"127.0.0.1"});
  EXPECT_TRUE(reaches("127.0.0.1"));
  EXPECT_FALSE(reaches("127.0.0.2"));  // a listener on all addresses would be reachable here
  post_own();
  join_now();
  testing::internal::GetCapturedStderr();
}

TEST_F(ByHand, StrangersTakeLittleAndHoldNobodyUp) {
  for (const bool tls : {false, true}) {
    SCOPED_TRACE(tls ? "tls" : "plain");
    store->erase("test/tcp/0");
    store->erase("test/tcp/1");
    testing::internal::CaptureStderr();
    const Secret secret = Secret::generate();
    begin(tls ? std::optional(secret) : std::nullopt);
    post_own();
    const size_t before = open_fds(), memory = resident_bytes();
    std::vector<UniqueFd> strangers;
    for (int i = 0; i < 150; ++i) {  // they stay silent
      strangers.push_back(dial());
      ASSERT_TRUE(strangers.back());
    }
    for (int i = 0; i < 20; ++i) {
      socket = dial();
      write(std::string(1000, static_cast<char>(i * 13)));
    }
    EXPECT_LE(open_fds(), before + strangers.size() + 1 + transport::kMaxHandshakes);
    EXPECT_LT(resident_bytes(), memory + (size_t{64} << 20));
    strangers.clear();
    socket.reset();
    // The right peer comes, and is accepted.
    const transport::TlsPair keys(secret.derive("muster rpc"));
    auto stream = tls ? transport::make_tls_stream(dial(), keys.client, store::TlsContext::Side::kClient)
                      : transport::make_plain_stream(dial());
    transport::Handshake handshake(std::move(stream), hello(), own);
    EXPECT_TRUE(eventually([&] { return handshake.step(); }));
    transport = made_.get();
    transport->send(1, {"hi", {}});
    stream = handshake.take_stream();
    std::array<std::byte, transport::kFrameHeader + 2> got{};
    EXPECT_TRUE(eventually([&] { return stream->read({}, got, true) == static_cast<ssize_t>(got.size()); }));
    EXPECT_EQ(got.back(), std::byte{'i'});
    EXPECT_TRUE(eventually([&] { return !dial(); })) << "the port is open though all have come";
    stream.reset();
    EXPECT_THAT(receiver.cause(1), HasSubstr("its connection was closed"));
    transport.reset();
    EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("refused a connection from 127.0.0.1"));
    receiver.forget();
    EXPECT_TRUE(eventually([&] { return open_fds() < before; })) << open_fds() << " descriptors, before " << before;
  }
}

}  // namespace
}  // namespace muster::test::tcp_meshes
