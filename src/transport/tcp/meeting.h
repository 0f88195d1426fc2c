// How workers come together: of each pair the one of higher rank connects, the other accepts.
//
// Who connects to the port is nobody until the handshake is over. Until then it has a socket, in TLS a connection of
// OpenSSL's, and a time limit; kMaxHandshakes are under way at most, further ones wait in the kernel's backlog, so a
// flood of connections takes a bounded amount of memory and descriptors. A refusal is logged once for each address.
// When all have come, the port is closed: nobody connects later, since nobody connects again.
//
// Thread-safety: belongs to the transport's thread, but for the constructor.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/fd.h"
#include "muster/base/deadline.h"
#include "store/tcp_address.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/tcp_transport.h"

namespace muster::transport {

inline constexpr int kMaxHandshakes = 64;
inline constexpr std::chrono::seconds kHandshakeLimit{5};  // for who has proved nothing

struct TlsPair {
  explicit TlsPair(const Secret& key)
      : client(key, store::TlsContext::Side::kClient), server(key, store::TlsContext::Side::kServer) {}
  store::TlsContext client, server;
};

class Meeting {
 public:
  static constexpr uint64_t kIds = uint64_t{1} << 32;  // the poller's ids from here on are the meeting's

  // Another worker, and where it is: empty for one that connects with us.
  struct Other {
    int rank = 0;
    HelloKey key{};
    std::vector<store::SocketAddress> addresses;
  };
  // Called for each worker that has come; again with a newer connection where it had to try twice.
  using OnMet = std::function<void(const Hello& other, std::unique_ptr<Stream> stream)>;

  // `tls`: null for plain TCP. `listening`: none where nobody connects with us.
  Meeting(const TcpOptions& options, Poller& poller, const TlsPair* tls, UniqueFd listening, const HelloKey& own,
          std::vector<Other> others, OnMet on_met);
  ~Meeting();

  void begin();
  void on_ready(uint64_t id);
  void tick(Clock::time_point now);

  bool is_complete() const { return missing_.empty(); }
  std::exception_ptr failure() const { return failure_; }
  // Who has not come, and what is known of why.
  std::vector<int> missing() const { return {missing_.begin(), missing_.end()}; }
  std::string describe_missing() const;

 private:
  struct Dial {
    Other other;
    size_t next = 0;          // of its addresses
    uint64_t handshake = 0;   // 0: none under way
    Clock::time_point again;  // then: when to try next
    std::string reason;
    std::exception_ptr refusal;  // of one of the addresses in this round
  };
  struct Entrant {
    std::unique_ptr<Handshake> handshake;
    Dial* dial = nullptr;  // null: it came to us
    std::string host;
    Clock::time_point limit;
    uint32_t events = 0;
  };

  void accept_some();
  void listen(bool on);
  void try_next(Dial& dial);
  void failed(Dial& dial, const std::string& reason, std::exception_ptr refusal);
  uint64_t enter(Entrant entrant);
  void step(uint64_t id);
  void leave(uint64_t id);
  void refuse(const std::string& host, const std::string& why);
  Hello judge(const Hello& other) const;
  Hello hello_to(int rank) const;
  std::string name_of(int rank) const;

  const TcpOptions& options_;
  Poller& poller_;
  const TlsPair* const tls_;
  UniqueFd listening_;
  const HelloKey own_;
  std::map<int, HelloKey> keys_;  // of those who connect with us
  std::vector<std::unique_ptr<Dial>> dials_;
  const OnMet on_met_;
  std::set<int> missing_;
  std::map<uint64_t, Entrant> entrants_;
  uint64_t next_id_ = kIds + 1;
  int accepted_ = 0;  // of the entrants
  bool listens_ = false;
  std::set<std::string> logged_;
  std::exception_ptr failure_;
};

}  // namespace muster::transport
