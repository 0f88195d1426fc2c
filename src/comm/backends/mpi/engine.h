// MPI in this process: who calls it, and when. Part of libmuster_mpi.so.
//
// One mutex is around every call of MPI, so MPI_THREAD_SERIALIZED is enough. (MPI_THREAD_MULTIPLE is asked for, for
// programs that call MPI themselves.)
//
// Progress. MPI moves data only inside its calls. Whoever waits for a transfer drives MPI for the whole process, and
// wakes those whose transfers it finds complete; of several waiters one drives and the others sleep. It spins, then
// yields the core, then naps 20 to 200 µs; a newcomer takes over from one that naps. Muster's backend has a thread in
// wait() for each asynchronous operation, so these move while the program computes. What is left is for a thread that
// looks in from time to time while nobody waits: sends that MPI has buffered and not yet written, and goodbyes. It
// comes every millisecond after a transfer was posted, and 50 times a second otherwise, for as long as there is a wire.
//
// Goodbye. MPI tells nobody that a communicator is not used any more. So close() sends each member a goodbye on a
// communicator of its own, with the number of messages that this rank has sent it and the tags of those that it sent in
// vain. Who waits for more than that gets WireBroken; what was sent before still arrives.
//
// Memory. MPI may touch the memory of a transfer until it is complete, and a send cannot be taken back. A Transfer that
// is destroyed unfinished is a receive that can be cancelled, or it closes the wire and waits: for the end of a message
// that has begun to arrive; for the peer's acknowledgement of the goodbye, after which the peer matches the send no
// more. Peers answer from the thread above, so this takes some ten milliseconds. A peer that does not answer in 2 s is
// dead or stopped, and might yet write into memory that is not the transfer's any more: MPI is not called again in this
// process then.
//
// The end. MPI_Finalize runs when the process exits with status 0, if Muster initialised MPI; it waits for all
// processes of the job, as MPI has it. A process that fails leaves it out, whereupon mpirun ends the job.
//
// Thread-safety: all members, except where a Lock is an argument: with it held.
#pragma once

#include <mpi.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/backends/mpi/mpi_wire.h"

namespace muster::comm::mpi_backend {

using Lock = std::unique_lock<std::mutex>;

class Engine;
class Request;

// The communicators of a group, and what is known of its members. Under the engine's mutex.
struct Circle {
  struct Peer {
    uint64_t sent = 0, received = 0;  // messages that have been completed
    bool gone = false;                // has said goodbye:
    Clock::time_point gone_at;
    uint64_t sent_to_us = 0;       // and how many messages it had sent
    std::set<uint32_t> abandoned;  // tags of what it sent in vain, as Request::code() has them
    bool asked = false;            // to acknowledge our goodbye, because that tells of sends in vain
    bool acknowledged = false;
    Clock::time_point acknowledged_at;
  };
  struct Note {  // a goodbye or acknowledgement on its way
    std::vector<uint64_t> words;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  int rank = 0, size = 1;
  std::array<MPI_Comm, kWireKinds> comms{};
  MPI_Comm control = MPI_COMM_NULL;
  std::chrono::nanoseconds spin{0};
  void (*timeout)() = nullptr;
  std::vector<Peer> peers;
  std::set<Request*> unfinished;          // posted and not complete
  std::function<void(int peer)> on_gone;  // may be empty
  bool closed = false;
  bool stained = false;  // MPI still has a request of it: the communicators are not freed

  std::list<Note> notes;

  bool all_gone() const;
  // Who has left, and sends nothing more that has not come.
  std::vector<int> gone() const;
};

// How a wait goes on: spins, yields, naps.
class Backoff {
 public:
  explicit Backoff(std::chrono::nanoseconds spin) : spin_(spin) { reset(); }
  void reset() { began_ = Clock::now(), nap_ = kShortest; }
  enum class Step { kSpin, kYield, kNap };
  Step next();
  std::chrono::microseconds nap() const { return nap_; }
  bool naps() const { return nap_ > kShortest; }

 private:
  static constexpr std::chrono::microseconds kYield{1000}, kShortest{10}, kLongest{200};
  const std::chrono::nanoseconds spin_;
  Clock::time_point began_;
  std::chrono::microseconds nap_{0};
};

class Engine {
 public:
  // The process's, which is never destroyed. Initialises MPI at the first call; Unavailable where that does not work.
  static Engine& get(const WireSite& site);

  // For a call of MPI. Who drives lets others in.
  Lock lock();

  std::shared_ptr<Circle> join(const WireSite& site);
  void close(Lock& lock, Circle& circle);

  // Until the request is complete: true; false at the deadline; WireBroken where it will not be.
  bool await(Lock& lock, Request& request, Deadline deadline);
  // Until MPI does not touch the memory any more.
  void abandon(Lock& lock, Request& request);
  // Wire::take().
  int take(Lock& lock, Circle& circle, WireTag tag, std::byte* data, size_t bytes);
  // Looks whether it is complete.
  void test(Request& request);
  void posted() { posted_ = true; }
  // Null, or why MPI cannot be called any more.
  const char* problem() const;
  // False in a fork, where MPI is the parent's.
  bool owns() const;

 private:
  explicit Engine(const WireSite& site);
  static void at_exit(int status, void* engine);
  static int at_finalize(MPI_Comm, int, void* engine, void*);
  void stop();

  void look(bool thoroughly);
  void pause(Lock& lock, Request& request, Backoff& backoff, Clock::time_point until);
  void say(Circle& circle, int peer, int tag, std::vector<uint64_t> words);
  void hear(Circle& circle);
  void wake(const Circle& circle);
  bool finished(Circle& circle);
  void run_thread();

  const pid_t pid_;
  std::mutex mutex_;
  std::atomic<int> wanting_{0};  // threads that want the mutex, besides who drives
  bool ours_ = false;            // MPI was initialised here
  bool finalized_ = false, poisoned_ = false;

  std::vector<Request*> waiting_;
  Request* driver_ = nullptr;
  bool driver_naps_ = false;
  unsigned looks_ = 0;
  std::vector<MPI_Request> handles_;  // of look(), kept
  std::vector<MPI_Status> statuses_;
  std::vector<int> indices_;

  std::list<std::shared_ptr<Circle>> circles_;  // until they are freed

  std::thread thread_;
  std::condition_variable thread_wakes_;
  bool posted_ = false;
};

// A message under way.
class Request final : public Wire::Transfer {
 public:
  Request(Engine& engine, std::shared_ptr<Circle> circle, bool sending, int peer, WireTag tag)
      : engine_(engine), circle_(std::move(circle)), sending_(sending), peer_(peer), code_(code(tag)) {}
  ~Request() override;

  int wait(Deadline deadline) override;

  static uint32_t code(WireTag tag) { return static_cast<uint32_t>(tag.kind) * kWireTags + tag.value; }

 private:
  friend class Engine;
  friend class MpiWire;

  void finish(const MPI_Status& status, int error);
  // Null, or why it must not be posted.
  const char* refused() const;
  // Null, or why it will not become complete.
  const char* hopeless();
  Engine& engine_;
  const std::shared_ptr<Circle> circle_;
  const bool sending_;
  const int peer_;
  const uint32_t code_;

  MPI_Request handle_ = MPI_REQUEST_NULL;
  bool posted_ = false, done_ = false;  // done without having been posted: it never came to that
  int error_ = MPI_SUCCESS, source_ = -1;
  Clock::time_point began_;                                  // to wait
  Clock::time_point look_again_ = Clock::time_point::max();  // whether it is hopeless, though nothing has happened
  std::condition_variable changed_;
};

std::string describe(int mpi_error);

}  // namespace muster::comm::mpi_backend
