// MPI in this process: which thread calls it, and when. Part of libmuster_mpi.so.
//
// One mutex guards every call of MPI, so MPI_THREAD_SERIALIZED is enough. Muster requests MPI_THREAD_MULTIPLE, for
// programs that call MPI themselves, and for the calls that make a group's communicators. These wait for the other
// members, so with MPI_THREAD_MULTIPLE they run without the mutex: threads may make several groups at a time. With less,
// nothing of this process moves until a group is made, and groups must be made one after the other, in the same order
// on all ranks.
//
// Progress. MPI moves data only inside its calls. A thread that waits for a transfer drives MPI for the whole process,
// and wakes the threads whose transfers it finds complete. If several threads wait, one drives and the others sleep.
// The driver spins, then yields the core, then naps for 20 to 200 µs. A thread that begins to wait takes over from a
// driver that naps. Muster's backend has a thread in wait() for each asynchronous operation, so these make progress
// while the program computes. While no thread waits, the engine's own thread handles the rest: sends that MPI has
// buffered and not yet written, and goodbyes. It looks every millisecond after a transfer was posted, and otherwise 50
// times per second, as long as there is a wire.
//
// Goodbye. MPI does not tell members that a communicator is no longer used. So close() sends each member a goodbye on a
// separate communicator. The goodbye contains the number of messages that this rank has sent to that member, and the
// tags of messages that it sent in vain. A rank that waits for more messages than that gets WireBroken; messages that
// were sent before still arrive.
//
// Memory. MPI may use the memory of a transfer until the transfer is complete, and a send cannot be cancelled. When a
// Transfer is destroyed unfinished and is not a receive that can be cancelled, it closes the wire and waits: for the
// end of a message that has begun to arrive, or for the peer's acknowledgement of the goodbye, after which the peer no
// longer matches the send. Peers answer from the engine's own thread, so this takes some ten milliseconds. A peer that
// does not answer within 2 s is dead or stopped, and might still write to memory that no longer belongs to the
// transfer. Then MPI is not called again in this process.
//
// The end. If Muster initialised MPI, MPI_Finalize runs when the process exits with status 0. It waits for all
// processes of the job, as the MPI standard says. A process that fails does not call it, so mpirun ends the job.
//
// Thread-safety: all members from any thread. Members that take a Lock must be called with it held.
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

inline constexpr uint32_t kEverything = ~uint32_t{0};  // in a goodbye, in place of more tags than that

// What a peer sent before its goodbye may arrive a little after it: whole messages (kLateMessage), and the ends of
// transfers that this rank knows of (kLateEnd).
inline constexpr std::chrono::milliseconds kLateMessage{500}, kLateEnd{30};

// The communicators of a group, and what is known of its members. Guarded by the engine's mutex.
struct MpiGroup {
  struct Peer {
    uint64_t sent = 0, received = 0;  // messages that have been completed
    bool gone = false;                // has said goodbye
    Clock::time_point gone_at;
    uint64_t sent_to_us = 0;       // from its goodbye: how many messages it had sent
    std::set<uint32_t> abandoned;  // from its goodbye: Request::code() of the messages that it sent in vain
    bool asked = false;            // to acknowledge our goodbye, because that names messages sent in vain
    bool acknowledged = false;
    Clock::time_point acknowledged_at;
  };
  std::vector<std::string> keys;  // of the store, by rank: each member's rank in MPI_COMM_WORLD
  struct Note {                   // a goodbye or acknowledgement on its way
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
  bool holds_requests = false;  // MPI still has one of its requests, so the communicators are not freed

  std::list<Note> notes;

  bool all_gone() const;
  // The peers that have left and from which nothing is still on its way.
  std::vector<int> gone() const;
};

// The next step of a wait: it spins, then yields, then naps.
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
  // The engine of this process, which is never destroyed. The first call initialises MPI. Unavailable if that fails.
  static Engine& get(const WireContext& site);

  // To be held around a call of MPI. A thread that drives lets other threads have it.
  Lock lock();

  std::shared_ptr<MpiGroup> join(const WireContext& site);
  void close(Lock& lock, MpiGroup& group);

  // Waits until the request is complete. False if the deadline passes; WireBroken if the request cannot complete.
  bool await(Lock& lock, Request& request, Deadline deadline);
  // Waits until MPI does not use the request's memory any more.
  void abandon(Lock& lock, Request& request);
  // Wire::take().
  int take(Lock& lock, MpiGroup& group, WireTag tag, std::byte* data, size_t bytes);
  // Checks whether the request is complete.
  void test(Request& request);
  void posted() { posted_ = true; }
  // The reason why MPI cannot be called any more, or null.
  const char* problem() const;
  // False in a fork, because MPI belongs to the parent.
  bool owns() const;

 private:
  explicit Engine(const WireContext& site);
  static void at_exit(int status, void* engine);
  static int at_finalize(MPI_Comm, int, void* engine, void*);
  void stop();

  void look(bool thoroughly);
  void pause(Lock& lock, Request& request, Backoff& backoff, Clock::time_point until);
  void post_note(MpiGroup& group, int peer, int tag, std::vector<uint64_t> words);
  void receive_notes(MpiGroup& group);
  void wake(const MpiGroup& group);
  bool finished(MpiGroup& group);
  void run_thread();

  const pid_t pid_;
  std::mutex mutex_;
  std::atomic<int> wanting_{0};    // threads that want the mutex, besides the driver
  bool ours_ = false;              // MPI was initialised here
  bool threads_may_call_ = false;  // several at a time: MPI_THREAD_MULTIPLE
  bool finalized_ = false, poisoned_ = false;

  std::vector<Request*> waiting_;
  Request* driver_ = nullptr;
  bool driver_naps_ = false;
  unsigned looks_ = 0;
  std::vector<MPI_Request> handles_;  // buffers of look(), kept for reuse
  std::vector<MPI_Status> statuses_;
  std::vector<int> indices_;

  std::list<std::shared_ptr<MpiGroup>> groups_;  // until they are freed

  std::thread thread_;
  std::condition_variable thread_wakes_;
  bool posted_ = false;
};

// A message under way.
class Request final : public Wire::Transfer {
 public:
  Request(Engine& engine, std::shared_ptr<MpiGroup> group, bool sending, int peer, WireTag tag)
      : engine_(engine), group_(std::move(group)), sending_(sending), peer_(peer), code_(code(tag)) {}
  ~Request() override;

  int wait(Deadline deadline) override;

  static uint32_t code(WireTag tag) { return static_cast<uint32_t>(tag.kind) * kWireTags + tag.value; }

 private:
  friend class Engine;
  friend class MpiWire;

  void finish(const MPI_Status& status, int error);
  // The reason why the request must not be posted, or null.
  const char* refused() const;
  // The reason why the request cannot complete, or null.
  const char* failure_reason();
  Engine& engine_;
  const std::shared_ptr<MpiGroup> group_;
  const bool sending_;
  const int peer_;
  const uint32_t code_;

  MPI_Request handle_ = MPI_REQUEST_NULL;
  bool posted_ = false, done_ = false;
  int error_ = MPI_SUCCESS, source_ = -1;
  Clock::time_point began_;                                  // when await() began to wait
  Clock::time_point look_again_ = Clock::time_point::max();  // when failure_reason() must be called even without news
  std::condition_variable changed_;
};

std::string describe(int mpi_error);

}  // namespace muster::comm::mpi_backend
