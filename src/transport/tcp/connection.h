// The connection with one peer: what is on its way to it, and what comes from it.
//
// send() writes immediately, from the caller's own thread, if nothing waits before the message. What the socket does
// not take waits for the transport's thread, which writes it when the socket is ready again. If the waiting part lies
// in memory that the caller may write to again, it is copied before send() returns; the transport's thread goes on
// writing meanwhile. Only that thread reads and ends the connection.
//
// The end is one event, whatever its cause: the peer's good-bye, the end of its connection, silence, an invalid frame.
// What the peer sent before is delivered first, even if our own writing has already failed: a failed write only stops
// the writing, and reading finds the end.
//
// What owns the memory of a message may be the user's, whose destructor may send: it is destroyed without the lock.
//
// Thread-safety: send(), backlog(), wait_below() and beat() from any thread; everything else from the transport's
// thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "muster/base/deadline.h"
#include "transport/heart.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/socket_stream.h"
#include "transport/transport.h"

namespace muster::transport {

struct PeerInfo {
  int rank = 0, pid = 0;
  std::string name;                     // "worker1 (pid 7)"
  std::chrono::milliseconds heartbeat;  // it is lost after being silent for this long
  std::chrono::milliseconds beat;       // we write to it at least this often
};

class Connection {
 public:
  Connection(PeerInfo peer, std::unique_ptr<SocketStream> stream, const Limits& limits, Poller& poller, Turns& turns);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(Message message);
  size_t backlog() const { return backlog_.load(std::memory_order_acquire); }
  void wait_below(size_t bytes, Deadline deadline);
  // From now on send() throws PeerLost, because this worker has left.
  void stop_sending();

  // Begins to read and to watch for silence.
  void start(Receiver& receiver);
  void on_ready(uint32_t events, Receiver& receiver);
  // Sends a heartbeat, or some of what waits, if nothing was written for beat_every(). It destroys nothing of users:
  // their destructors may wait for what the transport's thread holds.
  void beat(Clock::time_point now);
  // The same; and ends the connection on silence, unless something that came before `now` may still be unread.
  void tick(Clock::time_point now, bool all_read, Receiver& receiver);
  // Says good-bye after all that was sent.
  void say_goodbye();
  bool has_ended() const { return ended_; }
  std::chrono::milliseconds beat_every() const { return peer_.beat; }
  // Closes without telling the receiver.
  void close(const std::string& cause);

 private:
  // Holds mutex_. When it ends, it destroys spent_ without the lock.
  class Lock {
   public:
    explicit Lock(Connection& connection) : connection_(connection), lock_(connection.mutex_) {}
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    void lock() { lock_.lock(); }
    void unlock() { lock_.unlock(); }

   private:
    Connection& connection_;
    std::unique_lock<std::mutex> lock_;
  };

  void beat_locked(Clock::time_point now);
  void append(Outgoing frame, size_t enough);
  void keep_last(Lock& lock, std::vector<Outgoing::Lent>& lent);
  bool write_some(size_t enough);  // mutex_ held; false if the connection is broken
  void update_backlog();           // mutex_ held: after writing
  void stop_writing();             // mutex_ held
  void read_some(Receiver& receiver);
  bool take(std::span<const std::byte> bytes, Receiver& receiver);
  bool on_frame(Receiver& receiver);
  void end(const std::string& cause, Receiver& receiver, bool said_goodbye = false);
  [[noreturn]] void throw_lost() const;

  const PeerInfo peer_;
  const Limits limits_;
  Poller& poller_;
  Turns& turns_;
  const std::unique_ptr<SocketStream> stream_;

  // Used for writing, under the lock.
  mutable std::mutex mutex_;
  std::condition_variable room_;
  int waiting_ = 0;
  std::list<Outgoing> queue_;
  std::list<Outgoing> spent_;  // frames that were written or dropped, to be destroyed without the lock
  uint64_t added_ = 0;         // frames, ever: those of queue_ are the last of them
  size_t queued_ = 0;
  std::atomic<size_t> backlog_{0};
  bool broken_ = false;   // nothing can be written any more
  bool leaving_ = false;  // the good-bye is the last of the queue
  bool said_ = false;     // the good-bye is written
  bool refuses_ = false;  // send() throws, because of cause_
  bool watched_ = false, wants_room_ = false;
  Clock::time_point last_written_;
  std::string cause_;

  // Used only by the transport's thread.
  FrameParser parser_;
  Clock::time_point last_heard_;
  bool ended_ = false;
};

}  // namespace muster::transport
