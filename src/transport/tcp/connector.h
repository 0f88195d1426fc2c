// How workers connect: of each pair the one of higher rank connects, and the other accepts.
//
// A process that connects to the port is not trusted until the handshake is over. Until then it has a socket, with TLS
// an OpenSSL connection, and a time limit. At most kMaxHandshakes are under way; further ones wait in the kernel's
// backlog, so a flood of connections takes a bounded amount of memory and descriptors. A refusal is logged once for
// each address. When all have connected, the port is closed, because no worker ever connects again.
//
// Thread-safety: belongs to the transport's thread, except for the constructor.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/first_of_each.h"
#include "muster/base/deadline.h"
#include "store/address/tcp_address.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/tcp_transport.h"

namespace muster::transport {

inline constexpr int kMaxHandshakes = 64;
inline constexpr std::chrono::seconds kHandshakeLimit{5};  // for a process that has proved nothing yet

struct TlsPair {
  explicit TlsPair(const Secret& key)
      : client(key, store::TlsContext::Side::kClient), server(key, store::TlsContext::Side::kServer) {}
  store::TlsContext client, server;
};

class Connector {
 public:
  static constexpr uint64_t kIds = uint64_t{1} << 32;  // the poller's ids from here on are the connector's

  // Another worker, and its addresses: empty for one that connects to us.
  struct Other {
    int rank = 0;
    HelloKey key{};
    std::vector<store::SocketAddress> addresses;
  };
  // Called for each worker that has connected; again, with a newer connection, if that worker had to try twice.
  using OnMet = std::function<void(const Hello& other, std::unique_ptr<SocketStream> stream)>;

  // `tls`: null for plain TCP. `listening`: empty if no worker connects to us.
  Connector(const TcpOptions& options, Poller& poller, const TlsPair* tls, UniqueFd listening, const HelloKey& own,
            std::vector<Other> others, OnMet on_met);
  ~Connector();

  void begin();
  void on_ready(uint64_t id);
  void tick(Clock::time_point now);

  bool is_complete() const { return missing_.empty(); }
  void finish();  // nothing is met from now on: the port is closed
  std::exception_ptr failure() const { return failure_; }
  // The workers that have not connected, and the known reasons.
  std::vector<int> missing() const { return {missing_.begin(), missing_.end()}; }
  std::string describe_missing() const;

 private:
  struct Dial {
    Other other;
    size_t next = 0;          // of its addresses
    uint64_t handshake = 0;   // 0: none under way
    Clock::time_point again;  // if none is under way: when to try next
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
  std::map<int, HelloKey> keys_;  // of the workers that connect to us
  std::vector<std::unique_ptr<Dial>> dials_;
  const OnMet on_met_;
  std::set<int> missing_;
  std::map<uint64_t, Entrant> entrants_;
  uint64_t next_id_ = kIds + 1;
  int accepted_ = 0;  // of the entrants
  bool listens_ = false;
  FirstOfEach<std::string> is_first_refusal_{256};  // of an address
  std::exception_ptr failure_;
};

}  // namespace muster::transport
