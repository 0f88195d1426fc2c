// The stream under the TCP transport, and how workers come together over it.
#include <sys/socket.h>

#include <array>
#include <future>
#include <utility>

#include "contract/tcp_transport_fixture.h"
#include "muster/base/error.h"
#include "store/address/tcp_address.h"
#include "support/served.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/socket_stream.h"

namespace muster::test::tcp_meshes {
namespace {

using transport::Message;
using transport::Outgoing;

// --- the stream under it ---

struct StreamPair {
  StreamPair(const Secret& secret, size_t records_per_key) : keys(secret) {
    const UniqueFd listening = store::listen_tcp({"127.0.0.1", 0});
    const auto where = store::SocketAddress::of(listening.get());
    int error = 0;
    using Side = store::TlsContext::Side;
    ends[0] = transport::make_tls_stream(store::dial_tcp(where, in_time(), &error), keys.client, Side::kClient,
                                         records_per_key);
    ends[1] = transport::make_tls_stream(UniqueFd(::accept(listening.get(), nullptr, nullptr)), keys.server,
                                         Side::kServer, records_per_key);
  }
  bool shake_hands() {
    bool done[2] = {false, false};
    return eventually([&] {
      for (int i = 0; i < 2; ++i) done[i] = done[i] || ends[i]->shake_hands();
      return done[0] && done[1];
    });
  }
  transport::TlsPair keys;
  std::unique_ptr<transport::SocketStream> ends[2];
};

TEST(TcpTlsStream, BytesComeAlsoWhereKeysChange) {
  for (const size_t records : {size_t{1}, size_t{3}, transport::kRecordsPerKey}) {
    StreamPair pair(Secret::generate(), records);
    ASSERT_TRUE(pair.shake_hands());
    std::string sent(3'000'000, '\0'), got;
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 7 + i / 255);
    std::thread writer([&] {
      size_t at = 0;
      EXPECT_TRUE(eventually([&] {
        while (at < sent.size()) {  // two small parts, which share a record, and a large one
          const size_t left = sent.size() - at, small = std::min<size_t>(left / 2, 100);
          const iovec parts[] = {{sent.data() + at, small},
                                 {sent.data() + at + small, small},
                                 {sent.data() + at + 2 * small, left - 2 * small}};
          const ssize_t n = pair.ends[0]->write(parts, left);
          if (n < 0) return true;
          at += static_cast<size_t>(n);
          if (n == 0 || pair.ends[0]->unsent() > 0) return !pair.ends[0]->flush();
        }
        return pair.ends[0]->flush() && pair.ends[0]->unsent() == 0;
      }));
      EXPECT_EQ(at, sent.size());
    });
    std::vector<std::byte> buffer(10'000);
    EXPECT_TRUE(eventually([&] {
      bool fetch = true;
      for (ssize_t n = 1; n > 0; fetch = false) {
        n = pair.ends[1]->read({}, buffer, fetch);
        EXPECT_GE(n, 0) << pair.ends[1]->why();
        if (n > 0) got.append(reinterpret_cast<const char*>(buffer.data()), static_cast<size_t>(n));
      }
      return got.size() >= sent.size();
    })) << got.size();
    writer.join();
    EXPECT_TRUE(got == sent);
  }
}

TEST(TcpTlsStream, AChangedByteIsTheEnd) {
  StreamPair pair(Secret::generate(), transport::kRecordsPerKey);
  ASSERT_TRUE(pair.shake_hands());
  const std::string garbage =
      std::string("\x17\x03\x03\x00\x20", 5) + std::string(32, 'x');  // a record that was never encrypted
  ASSERT_EQ(::send(pair.ends[0]->fd(), garbage.data(), garbage.size(), 0), static_cast<ssize_t>(garbage.size()));
  std::vector<std::byte> buffer(1000);
  EXPECT_TRUE(eventually([&] { return pair.ends[1]->read({}, buffer, true) == transport::SocketStream::kGone; }));
  EXPECT_THAT(pair.ends[1]->why(), HasSubstr("broke TLS"));
}

// --- coming together ---

TEST(TcpMeeting, WithoutTheSecretThereIsNone) {
  testing::internal::CaptureStderr();
  const auto store = make_memory_store();
  Recorder receivers[2];
  std::string outcome[2];
  std::thread ranks[2];
  for (size_t rank = 0; rank < 2; ++rank)
    ranks[rank] = std::thread([&, rank] {
      try {
        make_tcp_transport(options_of(rank, 2, Secret::generate()), directory_of(store), receivers[rank],
                           rank == 0 ? Deadline::after(std::chrono::seconds(8)) : in_time());
        outcome[rank] = "connected";
      } catch (const Unauthorized& error) {
        outcome[rank] = std::string("Unauthorized: ") + error.what();
      } catch (const TimeoutError& error) {
        outcome[rank] = std::string("TimeoutError: ") + error.what();
      }
    });
  for (auto& rank : ranks) rank.join();
  EXPECT_THAT(outcome[1], HasSubstr("Unauthorized: worker 0 at "));
  EXPECT_THAT(outcome[0], HasSubstr("TimeoutError: workers have not connected in time: worker 1"));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("transport: worker 0 refused a connection from"));
}

// One rank speaks TLS and the other does not, in both directions.
TEST(TcpMeeting, WhoHasNoSecretIsKeptOut) {
  for (const size_t without : {size_t{0}, size_t{1}}) {
    SCOPED_TRACE(without);
    testing::internal::CaptureStderr();
    const auto store = make_memory_store();
    Recorder receivers[2];
    std::thread ranks[2];
    for (size_t rank = 0; rank < 2; ++rank)
      ranks[rank] = std::thread([&, rank] {
        auto options = options_of(rank, 2, rank == without ? std::nullopt : std::optional(Secret::generate()));
        options.host = "127.0.0.1";
        EXPECT_THROW(
            make_tcp_transport(options, directory_of(store), receivers[rank], Deadline::after(std::chrono::seconds(5))),
            TimeoutError);
      });
    for (auto& rank : ranks) rank.join();
    EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("worker 0 refused a connection from 127.0.0.1"));
  }
}

TEST(TcpMeeting, JobsOfAnotherSizeDoNotMeet) {
  testing::internal::CaptureStderr();
  const auto store = make_memory_store();
  Recorder receivers[2];
  std::thread first([&] {
    auto options = options_of(0, 3, std::nullopt);
    options.peers = {1};
    EXPECT_THROW(
        make_tcp_transport(options, directory_of(store), receivers[0], Deadline::after(std::chrono::seconds(8))),
        TimeoutError);
  });
  EXPECT_THROW(make_tcp_transport(options_of(1, 2, std::nullopt), directory_of(store), receivers[1], in_time()),
               Mismatch);
  first.join();
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("worker 1 of 2"));
}

TEST(TcpMeeting, WhoDoesNotComeIsNamed) {
  const auto store = make_memory_store();
  Recorder receiver;
  auto options = options_of(1, 4, std::nullopt);
  options.names = {"zero", "one", "two", "three"};
  store->set("test/tcp/2", Entry{transport::make_hello_key(), 0, {}}.text());
  try {
    make_tcp_transport(options, directory_of(store), receiver, Deadline::after(milliseconds(200)));
    ADD_FAILURE() << "it connected";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.missing(), (std::vector<int>{0, 3}));
    EXPECT_THAT(error.message(), HasSubstr("zero, three"));
  }
}

// The test plays rank 0: its greeting and first message are one TLS record.
TEST(TcpMeeting, AMessageInOneRecordWithTheGreetingComesAtOnce) {
  const Secret secret = Secret::generate();
  const transport::TlsPair keys(secret.derive("muster rpc"));
  const auto store = make_memory_store();
  const UniqueFd listening = store::listen_tcp({"127.0.0.1", 0});
  const transport::HelloKey own = transport::make_hello_key();
  store->set("test/tcp/0", Entry{own, store::SocketAddress::of(listening.get()).port(), {"127.0.0.1"}}.text());
  Recorder receiver;
  Gate gate;
  std::atomic<bool> came{false};
  receiver.on = [&](int, std::string_view body, std::vector<Piece>&) {
    gate.pass();  // a receiver may wait until the transport is made
    EXPECT_EQ(body, "first");
    came = true;
  };
  auto made = std::async(std::launch::async, [&] {
    auto transport = make_tcp_transport(options_of(1, 2, secret), directory_of(store), receiver, in_time());
    gate.open();
    return transport;
  });
  pollfd one{listening.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&one, 1, 20'000), 1);
  const auto stream = transport::make_tls_stream(UniqueFd(::accept(listening.get(), nullptr, nullptr)), keys.server,
                                                 store::TlsContext::Side::kServer);
  ASSERT_TRUE(eventually([&] { return stream->shake_hands(); }));
  std::array<std::byte, transport::kHelloBytes> greeting{};
  ASSERT_TRUE(eventually([&] { return stream->read({}, greeting, true) == static_cast<ssize_t>(greeting.size()); }));
  Hello answer = Hello::parse({reinterpret_cast<const char*>(greeting.data()), greeting.size()});
  EXPECT_TRUE(transport::same_key(answer.key, own));
  answer.key = Entry::parse(store->get("test/tcp/1", in_time())).key;
  std::swap(answer.rank, answer.to);
  std::string bytes = answer.bytes();
  Outgoing frame(Message{"first", {}});
  for (const iovec& part : frame.rest()) bytes.append(static_cast<const char*>(part.iov_base), part.iov_len);
  const iovec all{bytes.data(), bytes.size()};
  EXPECT_EQ(stream->write({&all, 1}, bytes.size()), static_cast<ssize_t>(bytes.size()));
  const auto transport = made.get();
  EXPECT_TRUE(eventually([&] { return came.load(); }));
  stream->end();
  receiver.cause(0);
}

TEST(TcpMeeting, SomeMayMeetWithoutTheOthers) {
  const auto store = make_memory_store();
  Recorder receivers[2];
  std::unique_ptr<Transport> made[2];
  std::thread ranks[2];
  for (size_t i = 0; i < 2; ++i)
    ranks[i] = std::thread([&, i] {
      auto options = options_of(i == 0 ? 2 : 5, 7, std::nullopt);
      options.peers = {i == 0 ? 5 : 2};
      made[i] = make_tcp_transport(options, directory_of(store), receivers[i], in_time());
    });
  for (auto& rank : ranks) rank.join();
  made[0]->send(5, {"x", {}});
  EXPECT_EQ(receivers[1].take(1).at(0).peer, 2);
  EXPECT_THROW(made[0]->send(3, {"x", {}}), InvalidArgument);
}

}  // namespace
}  // namespace muster::test::tcp_meshes
