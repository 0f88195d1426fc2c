// The store over TLS: the contract, which clients are refused and at what cost, and addresses.

#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "contract/store_contract.h"
#include "store/addresses.h"
#include "store/shared_table.h"
#include "store/tcp_address.h"
#include "support/middleman.h"
#include "support/served.h"

namespace muster {
namespace {

using test::endless_get;
using test::eventually;
using test::open_fds;
using test::RawClient;
using test::TlsEnd;
using testing::internal::CaptureStderr;
using testing::internal::GetCapturedStderr;

constexpr const char* kHere = "tls://127.0.0.1:0";

struct TlsUnderTest : StoreUnderTest {
  explicit TlsUnderTest(const char* address = kHere) : server(serve_store(address, secret)) {}
  std::shared_ptr<Store> open() override { return connect_store(server->address(), soon(), secret); }
  Secret secret = Secret::generate();
  std::unique_ptr<StoreServer> server;
};

struct TlsMixedUnderTest : TlsUnderTest {
  std::shared_ptr<Store> open() override { return opened++ % 2 ? server->local() : TlsUnderTest::open(); }
  int opened = 0;
};

struct ByNameUnderTest : TlsUnderTest {
  ByNameUnderTest() : TlsUnderTest("tls://localhost:0") {}
};

struct TlsOtherProcess : StoreUnderTest {
  std::shared_ptr<Store> open() override { return connect_store(server.address(), soon(), secret); }
  Secret secret = Secret::generate();
  test::ServerProcess server{[this] { return serve_store(kHere, secret); }};
};

INSTANTIATE_TEST_SUITE_P(Tls, StoreContract,
                         testing::Values(StoreKind{"tls", make_store<TlsUnderTest>},
                                         StoreKind{"tls_mixed", make_store<TlsMixedUnderTest>},
                                         StoreKind{"tls_by_name", make_store<ByNameUnderTest>},
                                         StoreKind{"tls_other_process", make_store<TlsOtherProcess>}),
                         store_kind_name);

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

// A server, a client of it with the right secret, and everything that is logged.
class TlsStore : public testing::Test {
 protected:
  TlsStore() { CaptureStderr(); }
  ~TlsStore() override {
    if (!log_taken_) GetCapturedStderr();
  }

  std::string log() {
    log_taken_ = true;
    return GetCapturedStderr();
  }
  std::shared_ptr<Store> connect(Deadline deadline = soon()) { return connect_store(address(), deadline, secret_); }
  const std::string& address() const { return server_->address(); }
  void expect_it_serves() {
    client_->set("still", "here");
    EXPECT_EQ(connect()->get("still", soon()), "here");
  }

  const Secret secret_ = Secret::generate();
  const std::shared_ptr<store::SharedTable> table_ = std::make_shared<store::SharedTable>();
  std::unique_ptr<StoreServer> server_ = store::serve_table(kHere, table_, secret_);
  std::shared_ptr<Store> client_ = connect();
  bool log_taken_ = false;
};

TEST_F(TlsStore, AnotherSecretIsRefusedAndLoggedOnce) {
  const size_t before = open_fds();
  const auto wrong = Secret::generate();
  for (int i = 0; i < 20; ++i) {
    try {
      connect_store(address(), soon(), wrong);
      FAIL();
    } catch (const Unauthorized& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find(address()), std::string::npos) << what;
      EXPECT_NE(what.find("do not have the same secret"), std::string::npos) << what;
      EXPECT_EQ(what.find(wrong.hex()), std::string::npos);
    }
  }
  EXPECT_TRUE(eventually([&] { return open_fds() == before; })) << open_fds() << " descriptors, before " << before;
  expect_it_serves();
  const std::string log = this->log();
  EXPECT_EQ(count(log, "refused a connection from 127.0.0.1"), 1u) << log;
  EXPECT_EQ(count(log, "\n"), 1u) << log;
  EXPECT_EQ(log.find(secret_.hex()), std::string::npos);
}

TEST_F(TlsStore, NoSecretIsUnauthorizedAndTheEnvironmentsCounts) {
  ::unsetenv("MUSTER_SECRET");
  EXPECT_THROW(connect_store(address(), soon()), Unauthorized);
  EXPECT_THROW(serve_store(kHere), Unauthorized);
  ::setenv("MUSTER_SECRET", secret_.hex().c_str(), 1);
  client_->set("key", "value");
  EXPECT_EQ(connect_store(address(), soon())->get("key", soon()), "value");
  EXPECT_NE(serve_store(kHere), nullptr);
  ::unsetenv("MUSTER_SECRET");
}

TEST_F(TlsStore, WhatIsNotTlsIsClosedUnread) {
  const size_t before = open_fds();
  const std::vector<std::string> greetings = {
      "GET / HTTP/1.1\r\nHost: store\r\n\r\n",
      std::string(100'000, '\xff'),
      std::string(100'000, '\0'),
      "\x16\x03\x01\xff\xff" + std::string(70'000, 'x'),              // a record longer than allowed
      std::string("\x16\x03\x01\x00\x04\x01\xff\xff\xff", 9),         // a hello of 16 MiB
      std::string("\x17\x03\x03\x00\x05hello", 10),                   // data before any handshake
      std::string("\x80\x2e\x01\x00\x02", 5) + std::string(44, 'x'),  // SSL 2
  };
  for (const auto& greeting : greetings) {
    RawClient client(address());
    client.send(greeting);
    client.no_more();
    const std::string answer = client.read_all();
    EXPECT_LE(answer.size(), 16u);  // an alert of TLS, or nothing
  }
  {
    RawClient client(address());  // a good frame, but without TLS
    client.send_frame(endless_get("key"));
    client.no_more();
    EXPECT_LE(client.read_all().size(), 16u);
  }
  EXPECT_EQ(table_->num_waiting(), 0u);
  EXPECT_TRUE(eventually([&] { return open_fds() == before; }));
  expect_it_serves();
  EXPECT_EQ(count(log(), "refused a connection"), 1u);
}

// Connects with OpenSSL's own settings, for a range of TLS versions.
std::string outcome_of_plain_tls(const std::string& address, int lowest, int highest) {
  RawClient client(address);
  const std::unique_ptr<SSL_CTX, store::TlsFree> context(::SSL_CTX_new(::TLS_client_method()));
  ::SSL_CTX_set_security_level(context.get(), 0);
  ::SSL_CTX_set_min_proto_version(context.get(), lowest);
  ::SSL_CTX_set_max_proto_version(context.get(), highest);
  const store::TlsPtr tls(::SSL_new(context.get()));
  ::SSL_set_bio(tls.get(), ::BIO_new(::BIO_s_mem()), ::BIO_new(::BIO_s_mem()));
  for (;;) {
    ::ERR_clear_error();
    if (::SSL_connect(tls.get()) == 1) return "connected";
    if (const auto error = ::ERR_peek_error()) return ::ERR_reason_error_string(error);
    std::string out(::BIO_ctrl_pending(::SSL_get_wbio(tls.get())), '\0');
    if (!out.empty()) ::BIO_read(::SSL_get_wbio(tls.get()), out.data(), static_cast<int>(out.size()));
    client.send(out);
    const std::string in = client.read_some();
    if (in.empty()) return "closed";
    ::BIO_write(::SSL_get_rbio(tls.get()), in.data(), static_cast<int>(in.size()));
  }
}

TEST_F(TlsStore, OlderVersionsAndClientsWithoutAKeyAreRefused) {
  EXPECT_EQ(outcome_of_plain_tls(address(), TLS1_2_VERSION, TLS1_2_VERSION), "tlsv1 alert protocol version");
  EXPECT_EQ(outcome_of_plain_tls(address(), TLS1_VERSION, TLS1_1_VERSION), "tlsv1 alert protocol version");
  const std::string without_key = outcome_of_plain_tls(address(), TLS1_3_VERSION, TLS1_3_VERSION);
  EXPECT_NE(without_key.find("alert"), std::string::npos) << without_key;
  expect_it_serves();
}

TEST_F(TlsStore, AKeyOfAnotherUseIsRefused) {
  EXPECT_THROW(connect_store(address(), soon(), secret_.derive("store tls psk")), Unauthorized);
  EXPECT_THROW(connect_store(address(), soon(), secret_.derive("another use")), Unauthorized);
}

TEST_F(TlsStore, HalfAHandshakeAndSilenceAreClosedInTimeAndHoldUpNobody) {
  const size_t before = open_fds();
  TlsEnd end(secret_);
  end.shake_hands();
  const std::string hello = end.to_send();
  {
    const auto start = Clock::now();
    RawClient silent(address()), half(address()), a_byte(address()), half_then_gone(address()), unfinished(address());
    half.send(hello.substr(0, hello.size() / 2));
    a_byte.send(hello.substr(0, 1));
    half_then_gone.send(hello.substr(0, hello.size() / 2));
    half_then_gone.no_more();
    unfinished.send(hello);  // takes the server's answer, and gives none
    EXPECT_FALSE(unfinished.read_some().empty());
    EXPECT_TRUE(half_then_gone.is_closed());
    expect_it_serves();
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(4)) << "the others should have been served immediately";
    EXPECT_TRUE(silent.is_closed());
    half.read_all();
    a_byte.read_all();
    unfinished.read_all();
    EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(4900));
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(15));
  }
  EXPECT_TRUE(eventually([&] { return open_fds() == before; })) << open_fds() << " descriptors, before " << before;
  EXPECT_EQ(count(log(), "refused a connection"), 1u);
}

// A flood takes a bounded number of the server's descriptors. A client with the key gets through when the flood's time
// is over.
TEST_F(TlsStore, AFloodOfConnectionsCostsLittle) {
  constexpr size_t kFlood = 200, kAtOnce = 64;
  const size_t before = open_fds();
  std::vector<RawClient> flood;
  for (size_t i = 0; i < kFlood; ++i) flood.emplace_back(address());
  EXPECT_TRUE(eventually([&] { return open_fds() == before + kFlood + kAtOnce; })) << open_fds() - before;
  client_->set("key", "value");  // a connected client is not affected
  const auto start = Clock::now();
  const auto late = connect();
  EXPECT_EQ(late->get("key", soon()), "value");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(25));
  EXPECT_LE(open_fds(), before + kFlood + kAtOnce + 2);
  flood.clear();
  EXPECT_TRUE(eventually([&] { return open_fds() == before + 2; })) << open_fds() - before;
}

// Each record is authenticated: a byte that was changed on the way ends the connection, and changes no value.
TEST_F(TlsStore, ChangedBytesEndTheConnection) {
  store::Request request;
  request.op = store::Op::kSet;
  request.keys = {"changed"};
  request.value = "no";
  const std::string frame = store::frame(request);
  for (size_t at = 0;; at += 3) {
    RawClient client(address(), secret_);
    client.tls().write(frame);
    std::string bytes = client.tls().to_send();
    if (at >= bytes.size()) break;
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    client.send_bytes(bytes);
    client.no_more();
    EXPECT_TRUE(client.is_closed()) << at;
  }
  expect_it_serves();
  EXPECT_EQ(client_->try_get("changed"), std::nullopt);
}

TEST_F(TlsStore, NothingOfItCanBeReadOnTheWay) {
  TlsEnd client(secret_), server(secret_, store::TlsContext::Side::kServer);
  std::string wire;
  for (int i = 0; i < 4; ++i) {
    client.shake_hands();
    const std::string to_server = client.to_send();
    server.feed(to_server);
    server.shake_hands();
    const std::string to_client = server.to_send();
    client.feed(to_client);
    wire += to_server + to_client;
  }
  ASSERT_TRUE(store::TlsContext::is_proved(client.get()));
  ASSERT_TRUE(store::TlsContext::is_proved(server.get()));
  EXPECT_STREQ(::SSL_get_cipher_name(client.get()), "TLS_AES_128_GCM_SHA256");
  client.write("a rather long and readable value");
  wire += client.to_send();
  EXPECT_EQ(wire.find("readable"), std::string::npos);
  EXPECT_EQ(wire.find(std::string(reinterpret_cast<const char*>(secret_.bytes().data()), 8)), std::string::npos);
}

// --- The other side is not a Muster store ---

// Listens, and calls a function for each connection.
class Impostor {
 public:
  explicit Impostor(std::function<void(int socket)> act) : act_(std::move(act)) {
    thread_ = std::thread([this] {
      for (;;) {
        pollfd both[] = {{listening_.get(), POLLIN, 0}, {over_[0], POLLIN, 0}};
        ::poll(both, 2, -1);
        if (both[1].revents) return;
        UniqueFd socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!socket) continue;
        act_(socket.get());
        held_.push_back(std::move(socket));
      }
    });
  }
  ~Impostor() {
    ::close(over_[1]);
    thread_.join();
    ::close(over_[0]);
  }
  std::string address() const {
    return "tls://127.0.0.1:" + std::to_string(store::SocketAddress::of(listening_.get()).port());
  }

 private:
  std::function<void(int)> act_;
  UniqueFd listening_ = store::listen_tcp({"127.0.0.1", 0});
  std::array<int, 2> over_ = [] {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("pipe2");
    return ends;
  }();
  std::vector<UniqueFd> held_;
  std::thread thread_;
};

TEST(TlsClient, AServerThatIsNoStoreIsUnauthorized) {
  const Impostor web([](int socket) {
    const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    static_cast<void>(::send(socket, answer.data(), answer.size(), MSG_NOSIGNAL));
  });
  EXPECT_THROW(connect_store(web.address(), soon(), Secret::generate()), Unauthorized);
}

TEST(TlsClient, AServerThatIsSilentIsATimeout) {
  const Impostor silent([](int) {});
  EXPECT_NE(timeout_of([&] { connect_store(silent.address(), in_ms(100), Secret::generate()); }).find("did not answer"),
            std::string::npos);
}

TEST(TlsClient, AServerThatHangsUpIsUnavailableAtTheDeadline) {
  const Impostor busy([](int socket) { ::shutdown(socket, SHUT_RDWR); });
  EXPECT_THROW(connect_store(busy.address(), in_ms(1000), Secret::generate()), Unavailable);
}

TEST(TlsClient, RepliesThatAreNoneAreCorrupt) {
  const auto secret = Secret::generate();
  const Impostor liar([&](int socket) {
    TlsEnd end(secret, store::TlsContext::Side::kServer);
    std::string bytes(16 * 1024, '\0');
    bool sent = false;
    while (!sent) {
      const ssize_t n = ::recv(socket, bytes.data(), bytes.size(), 0);
      if (n <= 0) return;
      end.feed(std::string_view(bytes).substr(0, static_cast<size_t>(n)));
      if (end.shake_hands() && end.read_any()) {
        end.write(std::string(100, '\x7f'));
        sent = true;
      }
      const std::string answer = end.to_send();
      static_cast<void>(::send(socket, answer.data(), answer.size(), MSG_NOSIGNAL));
    }
  });
  const auto client = connect_store(liar.address(), soon(), secret);
  EXPECT_THROW(client->try_get("key"), CorruptError);
}

TEST(TlsClient, NobodyIsUnavailableAndSaysWhy) {
  uint16_t port = 0;
  {
    const UniqueFd taken = store::listen_tcp({"127.0.0.1", 0});
    port = store::SocketAddress::of(taken.get()).port();
  }
  try {
    connect_store("tls://127.0.0.1:" + std::to_string(port), in_ms(50), Secret::generate());
    FAIL();
  } catch (const Unavailable& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("nobody serves the store at tls://127.0.0.1:"), std::string::npos) << what;
    EXPECT_NE(what.find("Connection refused"), std::string::npos) << what;
  }
}

TEST(TlsClient, WaitsForTheServerToStart) {
  const auto secret = Secret::generate();
  uint16_t port = 0;
  {
    const UniqueFd taken = store::listen_tcp({"127.0.0.1", 0});
    port = store::SocketAddress::of(taken.get()).port();
  }
  const std::string address = "tls://127.0.0.1:" + std::to_string(port);
  auto client = std::async(std::launch::async, [&] { return connect_store(address, soon(), secret); });
  const auto server = serve_store(address, secret);
  EXPECT_EQ(client.get()->num_keys(), 0);
}

TEST(TlsClient, AHostWithoutAnAddressIsUnavailableOrLate) {
  try {
    connect_store("tls://no-such-host.invalid:29400", in_ms(50), Secret::generate());
    FAIL();
  } catch (const Error& error) {  // TimeoutError if a name server does not answer
    EXPECT_TRUE(error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout) << error.what();
    EXPECT_NE(std::string(error.what()).find("no-such-host.invalid"), std::string::npos) << error.what();
  }
}

// --- Addresses ---

TEST(TcpAddress, IsReadAndWritten) {
  const auto parse = [](std::string_view address) { return store::TcpAddress::parse(address, address); };
  EXPECT_EQ(parse("host:1").text(), "host:1");
  EXPECT_EQ(parse("10.1.2.3:65535").text(), "10.1.2.3:65535");
  EXPECT_EQ(parse("[::1]:0").host, "::1");
  EXPECT_EQ(parse("[fe80::1%eth0]:7").text(), "[fe80::1%eth0]:7");
  for (const char* wrong :
       {"", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "host: 1", "host:1 ", "::1:80", "[::1]", "[]:1",
        "[::1:1", "::1]:1", "a b:1", "host/x:1", "user@host:1", "host:1/path"})
    EXPECT_THROW(parse(wrong), InvalidArgument) << wrong;
  EXPECT_THROW(parse(std::string(5000, 'x') + ":1"), InvalidArgument);
}

TEST(ServeTls, GivesAFreePortAndHoldsIt) {
  const auto secret = Secret::generate();
  const auto server = serve_store(kHere, secret);
  EXPECT_TRUE(server->address().starts_with("tls://127.0.0.1:")) << server->address();
  EXPECT_FALSE(server->address().ends_with(":0"));
  try {
    serve_store(server->address(), secret);
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("Another server has that port"), std::string::npos) << error.what();
  }
  EXPECT_THROW(serve_store("tls://203.0.113.1:0", secret), Unavailable);  // no address of this host (RFC 5737)
  for (const char* wrong : {"tls://", "tls://127.0.0.1", "tls://:1", "tls://127.0.0.1:x"})
    EXPECT_THROW(serve_store(wrong, secret), InvalidArgument) << wrong;
  EXPECT_THROW(connect_store("tls://127.0.0.1:0", in_ms(0), secret), InvalidArgument);
}

TEST(ServeTls, AgainAtOnceOnTheSamePort) {
  const auto secret = Secret::generate();
  auto server = serve_store(kHere, secret);
  const std::string address = server->address();
  for (int i = 0; i < 5; ++i) {
    const auto client = connect_store(address, soon(), secret);
    client->set("key", "value");
    server.reset();  // the server closes first, so the port stays in TIME_WAIT
    EXPECT_THROW(client->set("key", "value"), Unavailable);
    server = serve_store(address, secret);
    EXPECT_EQ(server->address(), address);
  }
}

TEST(ServeTls, OnAllAddressesAndOnIpv6) {
  const auto secret = Secret::generate();
  const auto port = [](const StoreServer& server) { return server.address().substr(server.address().rfind(':')); };
  const auto ipv4 = serve_store("tls://0.0.0.0:0", secret);
  connect_store("tls://127.0.0.1" + port(*ipv4), soon(), secret)->set("key", "value");
  EXPECT_EQ(connect_store("tls://localhost" + port(*ipv4), soon(), secret)->get("key", soon()), "value");
  std::unique_ptr<StoreServer> all;
  try {
    all = serve_store("tls://[::]:0", secret);
  } catch (const Unavailable& error) {
    GTEST_SKIP() << "no IPv6 here: " << error.what();
  }
  connect_store("tls://127.0.0.1" + port(*all), soon(), secret)->set("key", "value");
  EXPECT_EQ(connect_store("tls://[::1]" + port(*all), soon(), secret)->get("key", soon()), "value");
  // An IPv4 client of an IPv6 socket is reported and logged with its IPv4 address.
  CaptureStderr();
  EXPECT_THROW(connect_store("tls://127.0.0.1" + port(*all), soon(), Secret::generate()), Unauthorized);
  EXPECT_TRUE(eventually([&] { return connect_store(all->address(), soon(), secret)->try_get("key") == "value"; }));
  const std::string log = GetCapturedStderr();
  EXPECT_NE(log.find("from 127.0.0.1,"), std::string::npos) << log;
}

// Switches the loopback of this process's network namespace.
bool set_loopback(bool up) {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strncpy(request.ifr_name, "lo", IFNAMSIZ - 1);
  request.ifr_flags = up ? IFF_UP | IFF_LOOPBACK | IFF_RUNNING : IFF_LOOPBACK;
  return ::ioctl(socket.get(), SIOCSIFFLAGS, &request) == 0;
}

// A network fails silently: neither end hears from the other again. The test takes the ten seconds of the limit.
TEST(TlsProcess, AnEndThatFallsSilentIsNoticedOnBothSides) {
  constexpr int kSkipped = 77;
  const pid_t child = test::fork_child([] {
    if (::unshare(CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return kSkipped;
    if (!set_loopback(true)) return kSkipped;
    const auto secret = Secret::generate();
    const auto table = std::make_shared<store::SharedTable>();
    const auto server = store::serve_table(kHere, table, secret);
    const auto client = connect_store(server->address(), soon(), secret);
    auto waiting = std::async(std::launch::async, [&] { client->get("never", Deadline::never()); });
    if (!eventually([&] { return table->num_waiting() == 1; })) return 2;
    const auto start = Clock::now();
    if (!set_loopback(false)) return 3;
    if (!eventually([&] { return table->num_waiting() == 0; })) return 5;
    if (Clock::now() - start > std::chrono::seconds(20)) return 6;
    try {
      waiting.get();
      return 4;
    } catch (const Unavailable&) {
    }
    return Clock::now() - start < std::chrono::seconds(28) ? 0 : 7;  // the network might have healed meanwhile
  });
  const int status = test::exit_status(child);
  if (status == kSkipped) GTEST_SKIP() << "this user may make no network namespaces";
  EXPECT_EQ(status, 0);
}

// A dead host sends nothing at all, so its end shows only by the kernel's own probes.
TEST(TcpSockets, NoticeADeadHostWithinTenSeconds) {
  const UniqueFd listening = store::listen_tcp({"127.0.0.1", 0});
  int error = 0;
  const UniqueFd client = store::dial_tcp(store::SocketAddress::of(listening.get()), soon(), &error);
  ASSERT_TRUE(client);
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t size = sizeof value;
    EXPECT_EQ(::getsockopt(client.get(), level, name, &value, &size), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_LE(option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPCNT) * option(IPPROTO_TCP, TCP_KEEPINTVL),
            10);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 10'000);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_NODELAY), 1);
}

// --- networks that are cut ---

using test::Middleman;
using State = Middleman::State;

class CutStore : public TlsStore {
 protected:
  std::shared_ptr<Store> through() const {
    return connect_store(text("tls://127.0.0.1:", middleman_.port()), soon(), secret_);
  }
  Middleman middleman_{store::TcpAddress::parse(address().substr(6), address()).port};
  const std::shared_ptr<Store> far_ = through();
};

TEST_F(CutStore, ACallWhoseAnswerIsLostIsSentAgainAndDoneOnce) {
  for (int i = 1; i <= 20; ++i) {
    middleman_.lose_next_answer();
    EXPECT_EQ(far_->add("sum", 1), i);
  }
  EXPECT_EQ(client_->add("sum", 0), 20);
  middleman_.lose_next_answer();
  const auto exchanged = far_->compare_set("mine", std::nullopt, "first");
  EXPECT_TRUE(exchanged.stored) << "and not: somebody else was faster";
  middleman_.lose_next_answer();
  EXPECT_TRUE(far_->erase("mine"));
  middleman_.lose_next_answer();
  far_->set("key", "value");
  middleman_.lose_next_answer();
  EXPECT_EQ(far_->try_get("key"), "value");
  EXPECT_EQ(middleman_.cuts(), 24u);
}

TEST_F(CutStore, ManyThreadsThroughManyCutsCountRight) {
  constexpr int kThreads = 4, kAdds = 200;  // each thread adds at least so often, and until there were enough cuts
  std::atomic<int64_t> added{0};
  std::vector<std::thread> threads;
  std::atomic<int> running = kThreads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < kAdds || middleman_.cuts() <= 5; ++k) {
        EXPECT_GT(far_->add("sum", 1), 0);
        ++added;
      }
      --running;
    });
  size_t last = 0;
  while (running > 0) {
    if (const auto sum = static_cast<size_t>(client_->add("sum", 0)); sum / 20 != last) {
      last = sum / 20;
      last % 2 ? middleman_.cut() : middleman_.lose_next_answer();
    }
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(client_->add("sum", 0), added.load());
  EXPECT_GT(middleman_.cuts(), 5u);
}

TEST_F(CutStore, AWaitGoesOnBehindACut) {
  std::thread waits([&] { EXPECT_EQ(far_->get("late", soon()), "come"); });
  EXPECT_TRUE(eventually([&] { return table_->num_waiting() == 1; }));
  middleman_.set(State::kDown);
  EXPECT_TRUE(eventually([&] { return table_->num_waiting() == 0; })) << "the server waits for nobody";
  middleman_.set(State::kOpen);
  EXPECT_TRUE(eventually([&] { return table_->num_waiting() == 1; }));
  client_->set("late", "come");
  waits.join();
  middleman_.cut();
  EXPECT_THROW(far_->get("never", Deadline::after(std::chrono::milliseconds(300))), TimeoutError);
}

TEST_F(CutStore, AServerThatIsGoneIsNotWaitedFor) {
  server_.reset();
  const auto start = Clock::now();
  EXPECT_THROW(client_->add("sum", 1), Unavailable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(4));
}

TEST_F(CutStore, ACutForGoodIsToldWithinSeconds) {
  middleman_.set(State::kDown);
  const auto start = Clock::now();
  EXPECT_THROW(far_->add("sum", 1), Unavailable);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(9));
  EXPECT_GT(Clock::now() - start, std::chrono::seconds(3)) << "it might have healed";
}

TEST_F(CutStore, AnotherServerAtTheSameAddressKnowsNothingOfIt) {
  const std::string where = address();
  far_->set("key", "value");
  middleman_.set(State::kDown);
  server_.reset();
  server_ = serve_store(where, secret_);
  middleman_.set(State::kOpen);
  try {
    far_->add("sum", 1);
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("another serves at its address"), std::string::npos) << error.what();
  }
  EXPECT_EQ(server_->local()->num_keys(), 0);
}

}  // namespace
}  // namespace muster
