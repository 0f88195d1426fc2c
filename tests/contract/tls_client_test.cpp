// The client of the store over TLS: servers that are none, and addresses.
#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "base/fd.h"
#include "contract/tls_store_fixture.h"
#include "store/address/tcp_address.h"

namespace muster::test::tls_stores {
namespace {

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

}  // namespace
}  // namespace muster::test::tls_stores
