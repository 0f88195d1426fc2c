// Collectives and messages over a Wire: for groups whose ranks have no memory in common.
//
// Every collective begins with an announcement: each rank tells every other what it is about to do, in one message of
// 256 bytes, which carries contributions of up to 128 bytes as well. So what the shm backend promises holds here too:
// ranks that disagree get Mismatch before data moves, naming both sides. It costs one message time.
//
// Reductions add in rank order with the same kernels as shm, so the bits are the same on every backend: all_reduce is
// an exchange of slices, the reduction of the own slice, and an exchange of results (Rabenseifner's scheme with direct
// messages), 2(N-1)/N of the tensor sent by each rank. docs/algorithms.md has the others.
//
// A message is a header, which carries up to 240 bytes as well. For larger ones the receiver, when it has matched the
// header with a receive, says that it is ready, and then the payload travels; until then nothing waits in the wire.
//
// Failure. The first rank that knows a cause (its deadline passed, a peer's process died, ranks disagree) writes it to
// the store, once for the group, and closes its wire. A connection that ends is only a hint, for it may be the closing
// of a rank that knows more. So whoever sees one first says in the store that its own wire broke, and how far it was
// (broke/<rank>), and then looks there for the cause:
//
//   cause          somebody has found it: that is it
//   died/<rank>    a rank on the same host saw that process end
//   left/<rank>    it left in order
//   broke/<rank>   it runs; "timed out" if it will write the cause
//
// A rank on this host that still runs is never lost: its word comes. A rank elsewhere that says nothing within kGrace
// is the one that is lost. After that the group fails for good, with that error, everywhere. A rank that is in no
// operation when a peer's connection ends does the same (look_after), so that those who wait for it hear of the failure
// too.
//
// Thread-safety: as Backend.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/byte_parts.h"
#include "comm/descriptor.h"
#include "comm/lane_backend.h"
#include "comm/wire.h"

namespace muster::comm {

class WireBackend final : public LaneBackend {
 public:
  WireBackend(const BackendContext& context, std::string name, std::unique_ptr<Wire> wire);
  ~WireBackend() override;

  void leave(const std::string& cause) override;
  void abort() override;
  void shutdown() override { leave({}); }
  void release_resources() override { leave({}); }
  void fail(const Error& cause) override;

 protected:
  void execute(const Operation& operation, Deadline deadline, bool by_waiter) override;
  void run_message(const Operation& operation, Deadline deadline) override;
  void submit_message(const WorkPtr& work, Deadline deadline) override;
  void check() const override;
  uint64_t next_sequence() const override { return sequence_; }

 private:
  struct Announcement;
  struct MessageHeader;
  class Transfers;
  class MessageTransfer;

  // --- collectives; all on the thread that executes ---
  void execute_on_bytes(const Operation& operation, Deadline deadline);
  // Exchanges announcements and compares them. `parts`: of an all_to_all, the bytes for each rank.
  void announce(const Operation& operation, std::span<const std::byte> payload, Deadline deadline,
                const std::vector<uint64_t>& parts = {});
  const std::byte* payload_of(int rank) const;
  void all_reduce(const Operation& operation, Bytes data, size_t count, size_t item, Deadline deadline);
  void broadcast(const Operation& operation, Bytes data, size_t bytes, Deadline deadline);
  void all_gather(const Operation& operation, std::span<const Bytes> outputs, ConstBytes input, size_t bytes,
                  Deadline deadline);
  void gather(const Operation& operation, std::span<const Bytes> outputs, ConstBytes input, size_t bytes,
              Deadline deadline);
  void scatter(const Operation& operation, Bytes output, std::span<const ConstBytes> inputs, size_t bytes,
               Deadline deadline);
  void reduce_scatter(const Operation& operation, Bytes output, std::span<const ConstBytes> inputs, size_t count,
                      size_t item, Deadline deadline);
  void all_to_all(const Operation& operation, Deadline deadline);  // of contiguous tensors

  // --- messages ---
  void check_message(const Operation& operation) const;
  std::unique_ptr<MessageTransfer> post(const Operation& operation);
  std::string describe_message(const Operation& operation) const;
  void wait_on_a_thread(std::function<void()> job);

  // --- failure ---
  // Runs fn; an error of the wire becomes the group's failure, which is thrown. `what` is called for its text.
  template <typename Fn, typename What>
  void guarded(Fn&& fn, What&& what, int peer, Clock::time_point began);
  [[noreturn]] void explain(const std::string& what, bool timed_out, const std::string& symptom, int peer,
                            Clock::time_point began);
  // Makes `error` the group's failure, unless it has one already; returns the one that it has.
  std::exception_ptr settle(const std::exception_ptr& error);
  std::exception_ptr settled_elsewhere() const;
  bool has_left(int rank) const;
  bool has_died(int rank) const;
  bool lives(int rank) const;
  void look_after(int peer);
  void say(const std::string& fact);
  void say_broke(bool timed_out);
  int shown(int rank) const {
    return shown_ranks_.empty() || rank < 0 ? rank : shown_ranks_[static_cast<size_t>(rank)];
  }
  std::string key(const std::string& name) const { return prefix_ + "/" + name; }

  const std::unique_ptr<Wire> wire_;
  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const pid_t pid_;
  const std::vector<Member> members_;
  const std::vector<int> shown_ranks_;
  const std::shared_ptr<shm::PeerWatch> watch_;
  uint64_t subscription_ = 0;
  const std::function<void(const Backend*)> on_leave_;
  std::vector<int> others_;  // the next rank first, so that not all send to the same

  std::atomic<uint64_t> sequence_{0};        // of the next collective
  std::vector<Announcement> announcements_;  // by rank, of the operation under way

  std::mutex post_mutex_;          // messages get their numbers in the order in which they are posted
  std::vector<uint32_t> numbers_;  // of the next message with a payload to each rank

  mutable std::mutex state_mutex_;
  std::exception_ptr failure_;
  std::condition_variable explained_;
  std::atomic<int> under_way_{0};  // operations in guarded()
  bool explaining_ = false, left_ = false;
  std::set<int> dead_, gone_;  // processes that ended; ranks whose wire has ended

  std::mutex threads_mutex_;  // threads that wait for messages, kept for the next
  std::condition_variable job_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stop_threads_ = false;
};

}  // namespace muster::comm
