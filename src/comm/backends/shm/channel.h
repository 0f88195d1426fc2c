// Channel: one rank's end of a group in shared memory. It has everything that collectives and messages share: the
// segment, announcing an operation and comparing it with the peers' operations, publishing and awaiting progress,
// deadlines, and the group's failure.
//
// An operation, on every rank:
//   begin_operation()  announces it, waits for the peers' announcements and compares them: then all ranks agree
//   an algorithm       moves the data through slots, staging or heaps; publish() and await() keep the ranks in step
//   end_operation()    says that this rank's part is complete
//
// Failure. The first rank that notices a failure (a dead peer, a timeout, a mismatch) writes its reason into its
// control block, sets the abort word by compare-and-swap and rings all bells. Every wait of every rank then throws that
// same reason. A failed group stays failed: memory may be in any state, so nothing is reset in place. To recover, make
// a new group.
//
// Thread-safety: one operation at a time (CollectiveQueue ensures that) and one thread in Messages; fail(), leave() and
// the watch's callback from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "comm/backends/shm/layout.h"
#include "comm/core/stragglers.h"
#include "comm/kit/fault_injector.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"
#include "muster/comm/group.h"
#include "muster/store/store.h"
#include "shm/peer_watch.h"
#include "shm/spin.h"

namespace muster::comm::shm_backend {

// The longest sleep without a look at the deadline. Wake-ups do not depend on it.
inline constexpr std::chrono::nanoseconds kNap = std::chrono::milliseconds(50);

struct ChannelOptions {
  std::string name = "world";                        // for messages
  std::vector<std::shared_ptr<shm::Mapping>> heaps;  // by rank in the group; empty: no direct path
  const FaultInjector* faults = nullptr;             // null: none
  std::chrono::nanoseconds spin{0};
  std::vector<int> shown_ranks;  // how messages and errors number the ranks; empty: unchanged
  std::vector<pid_t> pids;       // by rank in the group, 0 if not known; empty: none is known
  size_t board = 0;              // words; the same on all ranks
};

class Channel {
 public:
  // All ranks call it. `prefix` names the group in the store. Errors: those of shm::exchange().
  Channel(Store& store, const std::string& prefix, int rank, int size, ChannelOptions options,
          std::shared_ptr<shm::PeerWatch> watch, Deadline deadline);
  ~Channel();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return options_.name; }
  int shown(int rank) const {
    return options_.shown_ranks.empty() ? rank : options_.shown_ranks[static_cast<size_t>(rank)];
  }
  const Layout& layout() const { return layout_; }

  // --- one operation ---
  // Announces the operation with `payload` in the slot, and waits for the peers' announcements. Afterwards
  // descriptor(p) and payload(p) may be read until the next begin_operation(). Returns its number.
  uint64_t begin_operation(const Descriptor& descriptor, std::span<const std::byte> payload, Deadline deadline);
  void end_operation();
  uint64_t seq() const { return seq_; }  // of the operation under way
  uint64_t next_seq() const { return seq_ + 1; }
  const Descriptor& descriptor(int peer) const { return slot(peer, seq_).descriptor; }
  std::byte* payload(int peer) const { return slot(peer, seq_).payload; }
  // Where this rank may put the data of its next operation before it announces it. In a failed group a peer may still
  // read there, so these functions throw the failure.
  std::byte* own_payload() {
    check();
    return slot(rank_, seq_ + 1).payload;
  }
  std::byte* own_early() {
    check();
    return early(rank_);
  }

  // --- progress, in turns ---
  enum class Counter { kStaged, kReduced, kDone };
  uint64_t turn() const { return turn_; }      // the first turn of this operation
  void take_turns(uint64_t n) { turn_ += n; }  // every rank the same number
  void publish(Counter counter, uint64_t value);
  void await(int peer, Counter counter, uint64_t value);  // waits until the counter is >= value
  void await_all(Counter counter, uint64_t value);

  // --- memory ---
  std::byte* early(int peer) const { return staging(peer); }
  std::byte* turn_buffer(int peer, uint64_t turn) const {
    return staging(peer) + layout_.early + (turn % kTurnBuffers) * layout_.turn_bytes();
  }
  std::byte* heap(int peer) const { return options_.heaps[static_cast<size_t>(peer)]->data(); }
  size_t heap_bytes(int peer) const {
    return options_.heaps.empty() ? 0 : options_.heaps[static_cast<size_t>(peer)]->size();
  }
  // Whether the `bytes` that a rank announced for the operation under way lie on its heap, and where (announced_data).
  // Fails the group if they would lie outside of it.
  bool on_heap(int peer, size_t bytes) {
    const uint64_t offset = announced_[static_cast<size_t>(peer)] = descriptor(peer).heap_offset;
    if (options_.heaps.empty() || offset >= kEvenParts) return false;
    if (!lies_on_heap(peer, offset, bytes)) [[unlikely]]
      outside_of_heap(peer, bytes);
    return true;
  }
  // False for what no tensor on the peer's heap can be, also if it has no heap. Ask before using what a peer has written.
  bool lies_on_heap(int peer, uint64_t place, uint64_t bytes) const {
    const size_t heap = heap_bytes(peer);
    return heap > 0 && place <= heap && bytes <= heap - place;
  }
  bool all_on_heap(size_t bytes) {
    for (int r = 0; r < size_; ++r)
      if (!on_heap(r, bytes)) return false;
    return true;
  }
  // After on_heap(): what that has checked, whatever the peer writes meanwhile.
  std::byte* announced_data(int peer) const { return heap(peer) + announced_[static_cast<size_t>(peer)]; }
  // After this rank has read what that rank, or every rank (-1), has on its heap, and before it says so. The owner
  // keeps the data until then, unless it leaves or the group fails: then they may have changed meanwhile, and this
  // throws. (As in a seqlock, what was read only counts if no write can have come before these looks.)
  void check_what_was_read(int from) {
    std::atomic_thread_fence(std::memory_order_acquire);
    check();
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && (from < 0 || r == from) && left(r)) [[unlikely]]
        peer_left(r);
  }
  void commit_staging();  // before this rank first uses its staging
  RankControl& control(int peer) const { return *reinterpret_cast<RankControl*>(base() + layout_.control_at(peer)); }
  uint64_t stamp_key() const { return header().stamp_key; }
  std::byte* ring(int from, int to) const { return base() + layout_.ring_at(from, to); }
  void commit_ring(int to);

  // --- injected faults ---
  // `seq`: the operation that the contribution is for.
  void corrupt(std::span<std::byte> contribution, uint64_t seq) {
    if (options_.faults) options_.faults->corrupt(contribution, seq - 1);
  }

  // --- failure ---
  bool failed() const {
    return header().abort.load(std::memory_order_acquire) != 0 || stopping_.load(std::memory_order_acquire);
  }
  void check() const {
    if (failed()) [[unlikely]]
      throw_failure();
  }
  [[noreturn]] void throw_failure() const;
  // Makes the group fail for all ranks, unless it has failed already. `subject`, whose process is `pid`, and `missing`
  // are shown ranks, and so is `finder`, if another rank than this one has found it. advice: if it is not that for all
  // failures of this kind.
  void fail(ErrorCode code, int subject, const std::string& text, const std::vector<int>& missing = {}, int pid = 0,
            std::optional<int> finder = {}, const std::string& advice = {});
  // fail() for a member that is lost; pid: if it is known.
  void lose(int rank, const std::string& text, pid_t pid = 0);
  [[noreturn]] void timed_out(const Descriptor& descriptor, uint64_t seq, std::chrono::nanoseconds waited,
                              const std::vector<int>& missing);
  bool left(int peer) const { return control(peer).presence.load(std::memory_order_acquire) == Presence::kLeft; }
  [[noreturn]] void peer_left(int peer);
  // This rank leaves: cleanly (peers that still need it get PeerLost, "left"), or because it failed with `cause`.
  void leave(const std::string& cause = {});

  std::chrono::nanoseconds spin() const { return options_.spin; }
  // Notes on which core this rank is; returns whether the peer was there when it last did so.
  bool shares_core(int peer) const;
  // For the next operations: where the user called, and how long their waits yield after they have spun and before they
  // sleep (spin.h). A blocking caller yields for longer than a thread that runs beside one that computes.
  void set_caller(const std::source_location& site, std::chrono::nanoseconds yield) {
    site_ = site;
    yield_ = yield;
  }
  // The ranks tell each other where they called the operation under way, which does not match between ranks `a` and
  // `b`; every rank has found the same pair. Returns when both have told, or after a moment.
  void tell_sites(int a, int b);
  std::string site_of(int peer, uint64_t seq) const;  // "train.cpp:17"; "" if it is not known
  const Stragglers& stragglers() const { return stragglers_; }
  std::span<std::atomic<uint64_t>> board() const {
    return {reinterpret_cast<std::atomic<uint64_t>*>(base() + layout_.board_at()), options_.board};
  }
  std::string where(int peer) const;  // "all_reduce #12, collecting": for timeouts

 private:
  std::byte* base() const { return segment_->data(); }
  GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(base()); }
  Slot& slot(int peer, uint64_t seq) const { return control(peer).slots[seq % kSlots]; }
  std::byte* staging(int peer) const { return base() + layout_.staging_at(peer); }
  std::atomic<uint64_t>& counter(int peer, Counter which) const;
  void ring_everybody();
  bool shares_process() const;  // with another rank: ranks are threads
  void compare(const Descriptor& mine, uint64_t seq);
  [[noreturn]] void mismatch(uint64_t seq);
  [[noreturn]] void outside_of_heap(int peer, size_t bytes);
  bool site_told(int peer, uint64_t seq) const {
    return control(peer).sites[seq % kSlots].of.load(std::memory_order_acquire) == seq;
  }
  void position(Phase phase);
  std::atomic<uint64_t>& word_of(const Awaited& awaited) const;
  // `word` is word_of(awaited). The spin is inlined into the caller; it suffices for a peer that comes soon.
  [[gnu::always_inline]] void wait(const Awaited& awaited, const std::atomic<uint64_t>& word) {
    const auto ready = [&] { return word.load(std::memory_order_acquire) >= awaited.value; };
    if (shm::spin_until(options_.spin, [&] { return ready() || failed(); }) && ready()) [[likely]]
      return;
    wait_longer(awaited, word);
  }
  void wait_longer(const Awaited& awaited, const std::atomic<uint64_t>& word);
  int who_holds_up(int peer) const;

  const int rank_, size_;
  const Layout layout_;
  const ChannelOptions options_;
  UniqueFd fd_;
  std::shared_ptr<shm::Mapping> segment_;
  const std::shared_ptr<shm::PeerWatch> watch_;
  uint64_t subscription_ = 0;
  bool staging_committed_ = false;
  std::vector<bool> ring_committed_;  // guarded by Messages
  std::vector<uint64_t> announced_;   // by rank: the place on its heap that on_heap() has checked

  // The operation under way; used only by its thread.
  uint64_t seq_ = 0, turn_ = 0;
  Descriptor current_;
  Stragglers stragglers_;
  Clock::time_point started_;
  Deadline deadline_ = Deadline::never();
  std::chrono::nanoseconds yield_{0};
  std::source_location site_;

  std::mutex failure_mutex_;  // one fail() of this rank at a time
  bool reported_ = false;
  std::atomic<bool> stopping_{false};
};

}  // namespace muster::comm::shm_backend
