// What goes to one peer: messages wait until the peer's window has room, then become packets, which the fabric takes.
//
// The window (packet.h): the peer reports the number of the last message that it has delivered (`taken` in each
// packet's header). At most kWindow bytes are sent beyond that; but two messages are always allowed, and one more is
// always allowed while those beyond cost less than kAcknowledged. So a peer that does not read keeps at most that much
// in memory, whatever the fabric buffers; large messages still overlap; and a sender that must wait has enough under
// way that the peer acknowledges it immediately.
//
// Waiting messages are already packed (packet.h): they are sent as they were when they were pushed.
//
// Thread-safety: none but backlog(); the transport's lock is held. It must outlive the fabric, which reads its packets.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/ucx/fabric.h"
#include "transport/ucx/packet.h"

namespace muster::transport::ucx {

class Outflow {
 public:
  Outflow(int peer, int self, const Key& key) : peer_(peer), self_(self), key_(key) {}
  Outflow(const Outflow&) = delete;
  Outflow& operator=(const Outflow&) = delete;

  void push(Message message, Frame frame);  // `frame`: what pack() has made of it
  void push_goodbye();
  // A separate packet that goes before everything that waits. At most one of each kind waits at a time.
  void push_note(Kind kind);

  // Sends what may go now. `taken`: of the other direction. Returns why it failed, or null.
  const char* pump(Fabric& fabric, uint64_t taken);
  void on_taken(uint64_t number);  // CorruptError for a number that was not sent

  uint64_t posted() const { return posted_; }  // packets, ever
  size_t backlog() const { return backlog_.load(std::memory_order_acquire); }
  bool has_packets() const { return !under_way_.empty(); }  // that the fabric has not taken yet
  bool is_done() const { return queue_.empty() && notes_.empty() && unacknowledged_.empty() && under_way_.empty(); }

  // Drops what waits. From now on only notes are sent; packets under way still end.
  void close();
  // What is no longer needed; to be destroyed without the lock.
  using Spent = std::pair<std::vector<Message>, std::vector<Piece>>;
  Spent spent() { return std::exchange(spent_, {}); }

 private:
  struct Queued {
    Message message;
    Frame frame;
    uint64_t cost = 0;
    bool goodbye = false;
  };
  struct Packet final : Transfer {
    Outflow* flow = nullptr;
    std::list<Packet>::iterator self;
    Header header;
    std::string data;  // or
    Piece piece;
    size_t bytes = 0;                                         // of the backlog
    void on_done(const char*) override { flow->sent(self); }  // the fabric reports an error itself: on_broken()
  };

  Packet& packet(Kind kind, uint64_t number);
  const char* post(Fabric& fabric, Packet& packet, uint64_t taken);
  const char* post_chunks(Fabric& fabric, const Header& header, Piece data, size_t overhead, uint64_t taken);
  const char* post_message(Fabric& fabric, Queued next, uint64_t taken);
  void sent(std::list<Packet>::iterator packet);

  const int peer_, self_;
  const Key key_;
  std::deque<Queued> queue_;
  std::deque<Kind> notes_;
  std::list<Packet> under_way_, spare_;
  uint64_t posted_ = 0;
  uint64_t last_ = 0;                                         // number sent
  std::deque<std::pair<uint64_t, uint64_t>> unacknowledged_;  // number, cost
  uint64_t unacknowledged_cost_ = 0;
  bool closed_ = false;
  std::atomic<size_t> backlog_{0};
  Spent spent_;
};

}  // namespace muster::transport::ucx
