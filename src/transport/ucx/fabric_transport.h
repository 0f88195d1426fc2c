// The transport of ucx_transport.h, over a fabric.
//
//   ucx_transport.cpp   connecting, sending, closing
//   progress.cpp        the thread: events of the fabric, and what the thread does in each of its turns
//
// Thread-safety: as Transport says. One lock guards the state and all calls of the fabric.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "muster/base/error.h"
#include "transport/heart.h"
#include "transport/ucx/fabric.h"
#include "transport/ucx/packet.h"
#include "transport/ucx/peer.h"
#include "transport/ucx/ucx_transport.h"

namespace muster::transport::ucx {

using std::chrono::milliseconds;

class UcxTransport final : public Transport, private FabricEvents {
 public:
  UcxTransport(const UcxOptions& options, Receiver& receiver);
  ~UcxTransport() override;

  void meet(const Directory& directory, Deadline deadline);

  std::string_view name() const override { return "ucx"; }
  void send(int peer, Message message) override;
  size_t backlog(int peer) const override { return to(peer).out.backlog(); }
  void wait_below(int peer, size_t bytes, Deadline deadline) override;
  void close(Deadline flush) override;

 private:
  struct Flush final : Transfer {
    bool begun = false, done = false;
    void on_done(const char*) override { done = true; }  // an error concerns a peer, and is reported by on_broken()
  };
  // What a turn has found for the receiver.
  struct News {
    Peer* peer = nullptr;
    Inflow::Taken message;
    bool lost = false;
  };

  void on_arrival(std::span<const std::byte> header, std::span<const std::byte> data) override;
  void on_offer(std::span<const std::byte> header, size_t bytes, Offer* offer) override;
  void on_broken(int peer, const char* error) override;

  bool is_mine() const { return ::getpid() == pid_; }
  void leak();
  void abandon();
  Peer& to(int peer) const;
  Peer* sender_of(const Header& header);
  template <typename Take>
  bool accept(std::span<const std::byte> header, const Take& take);

  void look_up(const Directory& directory, Deadline deadline);
  void watch();
  void wait_for_all(Deadline deadline);
  std::string describe_missing(std::vector<int>& missing) const;

  void run();
  bool turn();
  void connect_on();
  void take_arrivals(Peer& peer, bool quiet);
  void pump(Peer& peer);
  void deliver(News& news);
  void lose(Peer& peer);
  void carry_out_requests();
  void send_beats(Clock::time_point now);
  void beat_while_busy();
  void tick(Clock::time_point now);
  milliseconds tick_every() const;
  bool spin();
  void sleep(std::chrono::nanoseconds limit);
  void finish();
  void ring();
  [[noreturn]] static void throw_lost(const Peer& peer) { throw PeerLost(peer.rank, peer.pid, peer.cause); }

  const pid_t pid_ = ::getpid();
  const UcxOptions options_;
  Receiver& receiver_;
  const Key key_ = make_key();
  UniqueFd bell_;
  uint64_t watched_ = 0;
  bool watches_ = false;

  mutable std::mutex mutex_;                  // guards what follows, and all calls of the fabric
  std::vector<std::shared_ptr<Peer>> peers_;  // by rank; the table does not change after meet() has made it
  Flush flush_;
  bool said_ready_ = false;
  std::unique_ptr<Fabric> fabric_;  // declared after the peers: it is destroyed before them
  std::vector<Offer*> strays_;      // offers that belong to no peer
  std::vector<News> news_;          // of the turn
  int dropped_ = 0;                 // packets that belong to no peer
  bool sleeping_ = false;
  bool saturated_ = false;  // the last turn may have left something unread
  bool said_goodbye_ = false;
  std::condition_variable changed_;
  bool all_ended_ = false;

  std::atomic<bool> started_{false};  // changed with the lock
  std::atomic<bool> want_close_{false}, want_stop_{false};
  std::mutex closing_;  // one close() at a time
  Turns turns_;         // of the thread
  std::thread thread_;
  std::unique_ptr<Heart> heart_;  // from the start on
};

}  // namespace muster::transport::ucx
