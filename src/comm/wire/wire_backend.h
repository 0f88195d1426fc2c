// Collectives and messages over a Wire, for groups whose ranks share no memory.
//
// Every collective begins with an announcement: each rank tells every other rank what it is about to do, in one message
// of 256 bytes, which also carries contributions of up to 128 bytes. So this backend keeps the promise of the shm
// backend: ranks that disagree get a Mismatch that names both sides before data moves. It costs one message time.
//
// Reductions add in rank order with the same kernels as shm, so the bits are the same on every backend. all_reduce
// exchanges slices, reduces this rank's slice, and exchanges the results (Rabenseifner's scheme with direct messages).
// Each rank sends 2(N-1)/N of the tensor. docs/algorithms.md describes the other collectives.
//
// A message is a header, which also carries up to 240 bytes of payload. If the payload is larger, the receiver first
// matches the header with a receive and says that it is ready; then the payload travels. Until then nothing waits in
// the wire.
//
// Each announcement says how long its rank waited for the others' announcements in the previous collective. That tells
// who came last (stragglers.h).
//
// Failure. The first rank that knows a cause (its deadline passed, a peer's process died, ranks disagree) writes it to
// the store, once for the group, and closes its wire. A connection that ends is only a hint: perhaps a rank that knows
// more closed it. So a rank that sees a connection end first writes to the store that its own wire broke, and how far
// it was (broke/<rank>). Then it looks in the store for the cause:
//
//   cause          a rank has found the cause: this is it, as failure_note.h writes it
//   died/<rank>    a rank on the same host saw that process end
//   left/<rank>    the rank left in order, after so many collectives: those that wait for it in a later one, or for a
//                  message from it, wait in vain; for all others it is not the cause
//   broke/<rank>   the rank runs; "timed out" if it will write the cause
//
// A rank that leaves in order erases its own keys of the wire, and the last one those of all, with left/. The notes of
// a group that has failed stay: a rank may still read them.
//
// A rank on this host whose process still runs is never lost: it will report to the store. A rank on another host that
// reports nothing within kGrace is lost. After that the group fails for good, on all ranks, with that error. A rank
// that is in no operation when a peer's connection ends does the same (look_after), so that the ranks that wait for it
// learn of the failure too.
//
// Thread-safety: as Backend.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "comm/core/backend_context.h"
#include "comm/core/stragglers.h"
#include "comm/kit/byte_call.h"
#include "comm/kit/queued_backend.h"
#include "comm/wire/announcement.h"
#include "comm/wire/wire.h"
#include "muster/base/error.h"

namespace muster::comm {

class WireBackend final : public QueuedBackend {
 public:
  WireBackend(const BackendContext& context, std::string name, std::unique_ptr<Wire> wire);
  ~WireBackend() override;

  Taken take_message(const Operation& receive, int from) override;
  bool takes_blocks() const override { return true; }
  const Stragglers* stragglers() const override { return arrivals_ ? &arrivals_->hosts : &stragglers_; }

 protected:
  void require_possible(const Operation& operation) const override;
  void execute(const Operation& operation, Deadline deadline, bool by_waiter) override;
  void run_message(const Operation& operation, Deadline deadline) override;
  void submit_message(const WorkPtr& work, Deadline deadline) override;
  void check() const override;
  bool failed() const override;
  std::exception_ptr known_failure() override;
  void leave_group(const std::string& cause) override;
  void end_threads() override;
  void fail_group(const Error& cause) override;
  uint64_t next_sequence() const override { return sequence_; }

 private:
  struct Envelope;
  class MessageTransfer;

  // --- collectives; all on the thread that executes ---
  void execute_call(const ByteCall& call);
  // Exchanges announcements and compares them.
  void announce(const ByteCall& call, std::span<const std::byte> payload);
  // The same with the call's data if it fits, and returns whether it does. Then payload_of() has the others'.
  bool announce_data(const ByteCall& call);
  // After a mismatch: the ranks tell each other where they called.
  void tell_sites(const ByteCall& call);
  void count_arrivals();  // of the collective before the one that has been announced
  const std::byte* payload_of(int rank) const;
  void all_reduce(const ByteCall& call);  // and reduce
  void reduce_of_two(const ByteCall& call);
  void broadcast(const ByteCall& call);
  void all_gather(const ByteCall& call);
  void gather(const ByteCall& call);
  void scatter(const ByteCall& call);
  void reduce_scatter(const ByteCall& call);
  void scan(const ByteCall& call);
  void all_to_all(const ByteCall& call);

  // --- messages ---
  std::unique_ptr<MessageTransfer> post(const Operation& operation);
  std::string describe_message(const Operation& operation) const;
  void complete_on_a_thread(const WorkPtr& work, std::shared_ptr<MessageTransfer> transfer, Deadline deadline,
                            Clock::time_point began);
  void wait_on_a_thread(std::function<void()> job);  // Unavailable: no thread can be started
  void on_a_thread_or_here(const std::function<void()>& job);
  void work_on_jobs();

  // --- failure ---
  // Runs fn. An error of the wire becomes the group's failure, which is thrown. what() returns the operation's text.
  template <typename Fn, typename What>
  void guarded(Fn&& fn, What&& what, int peer, Clock::time_point began);
  // `peer`: the rank that a message was for or from, kAnySource, or kAllRanks in a collective.
  static constexpr int kAllRanks = kAnySource - 1;
  [[noreturn]] void diagnose_failure(const std::string& what, bool timed_out, const std::string& symptom, int peer,
                                     Clock::time_point began);
  struct Inquiry;
  std::exception_ptr ask_store(Inquiry& inquiry);
  std::exception_ptr known_loss(bool store_rank_may_be_gone, const std::string& symptom) const;
  std::exception_ptr without_store(const Inquiry& inquiry, const std::string& symptom) const;
  std::exception_ptr conclude(const Inquiry& inquiry) const;
  std::exception_ptr lost(int rank, const std::string& how) const;
  pid_t pid_of(int rank) const;
  std::string name_of(int rank) const;  // "rank 3 (pid 4711)"
  // Makes `error` the group's failure, unless it has one already; returns the one that it has. `last`: the operation in
  // which this rank learns of it.
  std::exception_ptr record_failure(const std::exception_ptr& error, const std::string& last);
  std::exception_ptr recorded_failure(const std::string& last) const;
  bool has_left(int rank) const;
  bool has_departed(int rank);
  bool has_died(int rank) const;
  bool lives(int rank) const;
  void look_after(int peer);
  void note_death(const std::vector<pid_t>& pids, pid_t dead);
  void post_fact(const std::string& fact);
  void erase_keys();
  void post_broken(bool timed_out);
  static constexpr const char* kCause = "cause";    // the key of the failure's note
  static constexpr std::chrono::seconds kNotes{5};  // limit of a read or a write of a store that may not answer
  std::string key(const std::string& name) const { return prefix_ + "/" + name; }

  const std::unique_ptr<Wire> wire_;
  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const std::vector<Member> members_;
  const std::shared_ptr<shm::PeerWatch> watch_;
  uint64_t subscription_ = 0;
  int store_rank_ = -1;      // the member that is the World's rank 0, which may serve the store; -1: none is
  std::vector<int> others_;  // the next rank first, so that not all send to the same one

  std::atomic<uint64_t> sequence_{0};        // of the next collective
  std::atomic<uint64_t> finished_{0};        // collectives
  std::vector<Announcement> announcements_;  // by rank, of the operation under way
  // By rank: LastCall::word() of the last collective that all have announced.
  std::vector<std::atomic<uint64_t>> last_calls_;
  Arrival arrival_;  // for the next announcement
  Stragglers stragglers_;
  const std::shared_ptr<HostArrivals> arrivals_;  // may be null

  std::mutex post_mutex_;          // messages get their numbers in the order in which they are posted
  std::vector<uint32_t> numbers_;  // of the next message with a payload to each rank

  mutable std::mutex state_mutex_;
  std::exception_ptr failure_;
  std::condition_variable failure_known_;
  std::atomic<int> under_way_{0};  // operations in guarded()
  bool diagnosing_ = false, left_ = false;
  // Processes that ended; ranks whose wire has ended; ranks that are known to have left.
  std::set<int> dead_, gone_, departed_;

  std::mutex threads_mutex_;  // of the threads that wait for messages; they are kept for later messages
  std::condition_variable job_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stop_threads_ = false;
};

template <typename Fn, typename What>
void WireBackend::guarded(Fn&& fn, What&& what, int peer, Clock::time_point began) {
  struct UnderWay {
    std::atomic<int>& count;
    explicit UnderWay(std::atomic<int>& of) : count(of) { ++count; }
    ~UnderWay() { --count; }
  } const under_way(under_way_);
  try {
    fn();
  } catch (const WireBroken& broken) {
    diagnose_failure(what(), false, broken.what(), peer, began);
  } catch (const TimeoutError&) {
    diagnose_failure(what(), true, {}, peer, began);
  } catch (const Error& ours) {
    const auto known = record_failure(std::current_exception(), what());
    wire_->close();
    std::rethrow_exception(known);
  } catch (const std::exception& error) {
    // An error that stops one rank in the middle (for example, no memory) stops the group.
    const auto known = record_failure(std::make_exception_ptr(Unavailable(
                                          text("rank ", shown(getRank()), " failed in ", what(), ": ", error.what()))),
                                      what());
    wire_->close();
    std::rethrow_exception(known);
  }
}

}  // namespace muster::comm
