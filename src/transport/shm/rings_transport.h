// The transport of shm_transport.h: one worker's inbox, and the others'.
//
//   shm_transport.cpp   connecting, sleeping, closing
//   sending.cpp         which way a message goes, and its record in the peer's inbox
//   receiving.cpp       reading this worker's own inbox, and deaths of peers
//
// Thread-safety: as Transport says; one thread at a time polls.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/fork_count.h"
#include "transport/shm/peer.h"
#include "transport/shm/shm_transport.h"

namespace muster::transport::shm_rings {

using std::chrono::nanoseconds;

constexpr size_t align(size_t n) { return shm::round_up(n, kRecordAlign); }
constexpr const char* kLeft = "this worker has left";  // why sends fail once this end is closed or closing

class ShmTransport final : public PolledTransport, public std::enable_shared_from_this<ShmTransport> {
 public:
  ShmTransport(ShmOptions options, Receiver& receiver);
  ~ShmTransport() override;
  void meet(const shm::NoticeBoard& directory, Deadline deadline);

  std::string_view name() const override { return "shm"; }
  void send(int peer, Message message) override;
  size_t backlog(int peer) const override;
  void wait_below(int peer, size_t bytes, Deadline deadline) override;
  bool poll() override;
  bool pending() const override;
  void announce_waiting() override;
  void sleep(nanoseconds limit) override;
  void wake() override;
  void hush(bool on) override;
  void sleep_second(nanoseconds limit, const std::function<bool()>& unless) override;
  void wake_second() override;
  void close(Deadline flush) override;

  void give_back(Lease& lease);

 private:
  struct Plan;  // what send() has decided about a message

  Peer& peer_of(int rank) const;
  [[noreturn]] void throw_lost(const Peer& peer) const;
  std::string who(const Peer& peer) const;
  void plan_pieces(Peer& peer, const Message& message, Plan& plan);
  std::shared_ptr<std::byte> block(size_t bytes);
  bool forked() const { return fork_count() != forks_; }
  static Lease* lease_of(Peer& peer, const Piece& piece);
  static bool is_leased(Peer& peer, const Piece& piece);
  static uint64_t end_lease(Peer& peer, const Piece& piece);
  void take_records_of(Peer& peer, Message& message, Plan& plan);
  void fill(std::byte* at, const Message& message, const Plan& plan, uint64_t block_token) const;
  std::byte* reserve(Peer& peer, size_t bytes);
  void publish(Peer& peer, size_t bytes);
  void announce(Peer& peer, bool can_wait = false);
  static void ring(Peer& peer) { peer.header->bell.ring() || peer.header->second.ring(); }
  bool flush(Peer& peer);
  void put_release(Peer& peer, uint64_t token);
  bool drain(Peer& peer, bool to_the_end);
  void deliver(Peer& peer, const std::byte* record, const RecordHeader& header);
  Piece incoming(Peer& peer, const std::byte* record, size_t record_bytes, const PieceRecord& told);
  bool look_around();
  void lose(Peer& peer, const std::string& cause);
  bool flushed();

  const ShmOptions options_;
  Receiver& receiver_;
  const pid_t process_ = ::getpid();
  const int forks_ = fork_count();
  int place_ = 0;
  size_t capacity_ = 0;
  UniqueFd fd_;
  std::shared_ptr<shm::Mapping> inbox_;
  InboxHeader* header_ = nullptr;
  std::vector<std::unique_ptr<Peer>> peers_;  // by place
  std::vector<int> place_of_;                 // by rank; -1: not on this host
  uint64_t watched_ = 0;
  std::atomic<bool> around_{false};  // a peer has died
  std::atomic<bool> woken_{false};   // wake() was called
  std::atomic<bool> second_woken_{false};
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> waiting_since_{0};      // nanoseconds: since when a peer was not told of a message; 0: none
  std::vector<Piece> pieces_;                  // of the message being delivered,
  std::string message_;                        // and what its record said
  std::vector<std::atomic<uint64_t>> unread_;  // rings that were not read to their end; written by the polling thread
};

}  // namespace muster::transport::shm_rings
