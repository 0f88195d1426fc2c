// The store over TLS: the contract, and which clients are refused and at what cost.
#include <openssl/ssl.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "contract/tls_store_fixture.h"

namespace muster::test::tls_stores {
namespace {

using test::endless_get;
using test::open_fds;
using test::RawClient;

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

}  // namespace
}  // namespace muster::test::tls_stores
