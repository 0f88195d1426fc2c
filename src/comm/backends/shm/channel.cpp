#include "comm/backends/shm/channel.h"

#include <sched.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/copy.h"
#include "base/random.h"
#include "base/text.h"
#include "comm/kit/failure_note.h"
#include "shm/exchange.h"

namespace muster::comm::shm_backend {
namespace {

using std::chrono::nanoseconds;

// How long a rank waits until its peers say where they called an operation that does not match.
constexpr nanoseconds kSiteTakes = std::chrono::milliseconds(200);

const char* advice_for(ErrorCode code) {
  switch (code) {
    case ErrorCode::kPeerLost:
      return "Look at its last lines on standard error";
    case ErrorCode::kTimeout:
      return "Look whether the missing rank hangs, or raise the timeout";
    case ErrorCode::kMismatch:
      return kMismatchAdvice;
    default:
      return "";
  }
}

template <size_t kSize>
void put(const std::string& text, char (&to)[kSize]) {
  const size_t length = std::min(text.size(), kSize - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}
template <size_t kSize>
std::string string_in(const char (&from)[kSize]) {
  return {from, strnlen(from, kSize)};
}

// No position; the lowest bits, which positions do not have, are 0.
uint64_t new_stamp_key() {
  std::array<unsigned char, sizeof(uint64_t)> bytes{};
  random_bytes(bytes);
  uint64_t key = 0;
  std::memcpy(&key, bytes.data(), sizeof key);
  return (key | uint64_t{1} << 63) / kRecordLine * kRecordLine;
}

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::kIdle:
      return "finished";
    case Phase::kAnnounced:
      return "announced, waiting for the others";
    case Phase::kStaging:
      return "contributing its data";
    case Phase::kReducing:
      return "reducing";
    case Phase::kCollecting:
      return "collecting the result";
    case Phase::kFinishing:
      return "finishing";
  }
  return "?";
}

}  // namespace

Channel::Channel(Store& store, const std::string& prefix, int rank, int size, ChannelOptions options,
                 std::shared_ptr<shm::PeerWatch> watch, Deadline deadline)
    : rank_(rank),
      size_(size),
      layout_(size, options.board),
      options_(std::move(options)),
      watch_(std::move(watch)),
      ring_committed_(size, false),
      announced_(static_cast<size_t>(size)),
      stragglers_(size) {
  if (rank == 0) {
    fd_ = shm::create_memfd("muster-group", layout_.total());
    // Only the control blocks (and what lies before staging) are committed here: they are small and always needed. The
    // owners of the rest commit it when they first use it.
    shm::commit(fd_.get(), 0, layout_.staging_at(0));
    segment_ = shm::map_memfd(fd_.get());
    new (base()) GroupHeader;
    for (int r = 0; r < size; ++r) new (&control(r)) RankControl;
    for (auto& word : board()) new (&word) std::atomic<uint64_t>(0);
    header().size = static_cast<uint32_t>(size);
    header().stamp_key = new_stamp_key();
    header().magic = kMagic;
  }
  std::vector<int> given;
  if (rank == 0) given.push_back(fd_.get());
  auto members = shm::exchange(store, prefix, rank, size, given, deadline, {options_.pids, options_.shown_ranks});
  if (rank != 0) {
    if (members[0].fds.empty()) throw CorruptError("rank 0 sent no shared segment");
    fd_ = std::move(members[0].fds[0]);
    segment_ = shm::map_memfd(fd_.get());
    if (segment_->size() < layout_.total() || header().magic != kMagic || header().size != static_cast<uint32_t>(size))
      throw CorruptError("the group's shared segment has the wrong size or format",
                         "Run the same version of Muster on all ranks");
  }
  control(rank).pid.store(::getpid(), std::memory_order_relaxed);
  control(rank).presence.store(Presence::kHere, std::memory_order_release);

  std::vector<pid_t> pids;
  for (const auto& member : members) pids.push_back(member.pid);
  try {
    subscription_ = watch_->subscribe({pids.begin(), pids.end()}, [this, pids](pid_t dead) {
      for (int r = 0; r < size_; ++r) {
        if (pids[static_cast<size_t>(r)] != dead) continue;
        if (left(r))
          ring_everybody();
        else
          lose(r, text("rank ", shown(r), " (pid ", dead, ") died"), dead);
      }
    });
  } catch (const std::exception& error) {
    fail(ErrorCode::kUnavailable, rank, text("rank ", shown(rank), " cannot watch its peers: ", error.what()));
    throw;
  }
}

Channel::~Channel() { leave(); }

// --- one operation ---

void Channel::position(Phase phase) {
  control(rank_).position.store(pack_position(seq_, current_.call.op, phase), std::memory_order_relaxed);
}

uint64_t Channel::begin_operation(const Descriptor& descriptor, std::span<const std::byte> payload, Deadline deadline) {
  check();
  const uint64_t seq = ++seq_;
  current_ = descriptor;
  deadline_ = deadline;
  Slot& mine = slot(rank_, seq);
  mine.descriptor = descriptor;
  mine.descriptor.arrived = cycles();
  if (payload.data() != mine.payload) copy_bytes(mine.payload, payload.data(), payload.size());
  if (payload.data() != mine.payload)  // else the caller put it there, and has corrupted the part that others read
    corrupt({mine.payload, payload.size()}, seq);
  position(Phase::kAnnounced);
  control(rank_).core.store(::sched_getcpu(), std::memory_order_relaxed);
  mine.seq.store(seq, std::memory_order_release);
  control(rank_).bell.ring();
  if (options_.faults) options_.faults->at(FaultPhase::kPosted, seq - 1, deadline);

  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    wait({peer, Awaited::kAnnounced, seq}, slot(peer, seq).seq);
  }
  compare(descriptor, seq);
  stragglers_.note([&](int r) { return slot(r, seq).descriptor.arrived; });
  if (options_.faults) options_.faults->at(FaultPhase::kMiddle, seq - 1, deadline);
  return seq;
}

void Channel::end_operation() { position(Phase::kIdle); }

void Channel::compare(const Descriptor& mine, uint64_t seq) {
  bool equal = true;
  for (int peer = 0; peer < size_; ++peer) equal = equal && slot(peer, seq).descriptor.call == mine.call;
  if (equal) [[likely]]
    return;
  mismatch(seq);
}

// All ranks see the same descriptors, so all find the same pair and report the same error. The ranks tell each other
// only now where they called, so that operations that match do not pay for it.
void Channel::mismatch(uint64_t seq) {
  int other = 1;
  while (other < size_ - 1 && slot(other, seq).descriptor.call == slot(0, seq).descriptor.call) ++other;
  tell_sites(0, other);
  fail(ErrorCode::kMismatch, shown(other),
       describe_mismatch(seq - 1, name(), {shown(0), site_of(0, seq)}, slot(0, seq).descriptor.call,
                         {shown(other), site_of(other, seq)}, slot(other, seq).descriptor.call));
  throw_failure();
}

void Channel::tell_sites(int a, int b) {
  auto& mine = control(rank_).sites[seq_ % kSlots];
  const std::string site = find_site(site_);
  site.copy(mine.text, sizeof mine.text - 1);
  mine.text[std::min(site.size(), sizeof mine.text - 1)] = '\0';
  mine.of.store(seq_, std::memory_order_release);
  control(rank_).bell.ring();
  const auto told = [&] { return site_told(a, seq_) && site_told(b, seq_); };
  for (const auto patience = Deadline::after(kSiteTakes); !told() && !failed() && !patience.passed();)
    for (const int r : {a, b})
      control(r).bell.sleep(std::min(kNap, patience.left()), [&] { return failed() || site_told(r, seq_); });
}

// "train.cpp:17"; "" if it is not known.
std::string Channel::site_of(int peer, uint64_t seq) const {
  const auto& theirs = control(peer).sites[seq % kSlots];
  if (!site_told(peer, seq)) return {};
  return {theirs.text, strnlen(theirs.text, sizeof theirs.text)};
}

// --- progress ---

std::atomic<uint64_t>& Channel::counter(int peer, Counter which) const {
  RankControl& block = control(peer);
  switch (which) {
    case Counter::kStaged:
      return block.staged;
    case Counter::kReduced:
      return block.reduced;
    case Counter::kDone:
      break;
  }
  return block.done;
}

void Channel::publish(Counter which, uint64_t value) {
  static constexpr Phase kNext[] = {Phase::kReducing, Phase::kCollecting, Phase::kFinishing};
  counter(rank_, which).store(value, std::memory_order_release);
  position(kNext[static_cast<size_t>(which)]);
  control(rank_).bell.ring();
}

void Channel::await(int peer, Counter which, uint64_t value) {
  static constexpr Awaited::Event kEvents[] = {Awaited::kStaged, Awaited::kReduced, Awaited::kDone};
  wait({peer, kEvents[static_cast<size_t>(which)], value}, counter(peer, which));
}

void Channel::await_all(Counter which, uint64_t value) {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) await(peer, which, value);
}

std::atomic<uint64_t>& Channel::word_of(const Awaited& awaited) const {
  switch (awaited.event) {
    case Awaited::kAnnounced:
      return slot(awaited.peer, awaited.value).seq;
    case Awaited::kStaged:
      return counter(awaited.peer, Counter::kStaged);
    case Awaited::kReduced:
      return counter(awaited.peer, Counter::kReduced);
    case Awaited::kDone:
      break;
  }
  return counter(awaited.peer, Counter::kDone);
}

// Returns `peer` or, if that rank waits for another one, the end of the chain of waits. A chain ends with a rank that
// does not wait, or that has what it waits for and still does not move.
int Channel::who_holds_up(int peer) const {
  for (int steps = 0; steps < size_; ++steps) {
    const Awaited theirs = Awaited::unpack(control(peer).awaits.load(std::memory_order_acquire));
    if (theirs.peer < 0 || theirs.peer >= size_ || theirs.peer == rank_) break;
    if (word_of(theirs).load(std::memory_order_acquire) >= theirs.value) break;
    peer = theirs.peer;
  }
  return peer;
}

bool Channel::shares_core(int peer) const {
  const int here = ::sched_getcpu();
  control(rank_).core.store(here, std::memory_order_relaxed);
  return control(peer).core.load(std::memory_order_relaxed) == here;
}

void Channel::wait_longer(const Awaited& awaited, const std::atomic<uint64_t>& word) {
  const int peer = awaited.peer;
  const auto ready = [&word, value = awaited.value] { return word.load(std::memory_order_acquire) >= value; };
  const auto over = [&] { return ready() || failed(); };
  // If there is a core for each rank but the peer shares this one, this rank sleeps instead of yielding. If both ranks
  // only yield to each other, the scheduler does not move one of them (seen: two ranks on one core for minutes, the
  // other core idle). A thread that sleeps is woken on an idle core.
  const bool crowded = options_.spin.count() > 0 && shares_core(peer);
  if (!crowded && shm::yield_until(yield_, over) && ready()) return;
  const auto began = Clock::now();
  struct Told {
    explicit Told(std::atomic<uint64_t>& word, const Awaited& what) : awaits(word) {
      awaits.store(what.pack(), std::memory_order_release);
    }
    ~Told() { awaits.store(0, std::memory_order_relaxed); }
    std::atomic<uint64_t>& awaits;
  } const told(control(rank_).awaits, awaited);
  shm::Bell& bell = control(peer).bell;
  for (;;) {
    bell.sleep(std::min(kNap, deadline_.left()), [&] { return ready() || failed() || left(peer); });
    if (ready()) return;
    check();
    if (left(peer)) {
      if (ready()) return;  // the peer published this before it left
      peer_left(peer);
    }
    if (deadline_.passed()) {
      // Ranks that have not come to this operation are missing as well.
      const int culprit = who_holds_up(peer);
      std::vector<int> missing;
      for (int r = 0; r < size_; ++r)
        if (r == culprit || (r != rank_ && slot(r, seq_).seq.load(std::memory_order_acquire) < seq_))
          missing.push_back(r);
      timed_out(current_, seq_, Clock::now() - began, missing);
    }
  }
}

// --- memory ---

void Channel::commit_staging() {
  if (staging_committed_) [[likely]]
    return;
  shm::commit(fd_.get(), layout_.staging_at(rank_), layout_.staging_bytes());
  staging_committed_ = true;
}

void Channel::commit_ring(int to) {
  if (ring_committed_[static_cast<size_t>(to)]) [[likely]]
    return;
  shm::commit(fd_.get(), layout_.ring_at(rank_, to), layout_.ring_bytes());
  ring_committed_[static_cast<size_t>(to)] = true;
}

// --- failure ---

void Channel::lose(int rank, const std::string& what, pid_t pid) {
  fail(ErrorCode::kPeerLost, shown(rank), what, {}, pid != 0 ? pid : control(rank).pid.load(std::memory_order_relaxed));
}

void Channel::fail(ErrorCode code, int subject, const std::string& what, const std::vector<int>& missing, int pid,
                   std::optional<int> finder, const std::string& advice) {
  {
    const std::lock_guard lock(failure_mutex_);
    if (!reported_) {
      reported_ = true;
      RankControl& mine = control(rank_);
      put(what, mine.failure);
      put(advice, mine.advice);
      mine.lost_pid = pid;
      mine.finder = finder.value_or(shown(rank_));
      mine.missing_count = static_cast<uint32_t>(std::min(missing.size(), std::size(mine.missing)));
      std::copy_n(missing.begin(), mine.missing_count, mine.missing);
      uint64_t nobody = 0;
      header().abort.compare_exchange_strong(nobody,
                                             (static_cast<uint64_t>(code) + 1) |
                                                 uint64_t{static_cast<uint16_t>(subject)} << 8 |
                                                 static_cast<uint64_t>(rank_) << 32,
                                             std::memory_order_acq_rel);
    }
  }
  ring_everybody();
}

void Channel::throw_failure() const {
  const uint64_t word = header().abort.load(std::memory_order_acquire);
  if (word == 0) throw Aborted(text("group '", name(), "' is closing on rank ", shown(rank_)));
  const auto reporter = static_cast<int>(word >> 32 & 0xffff);
  const RankControl& block = control(reporter);
  FailureReport failure{.code = static_cast<ErrorCode>((word & 0xff) - 1),
                        .subject = static_cast<int>(word >> 8 & 0xffff),
                        .pid = block.lost_pid,
                        .finder = block.finder,
                        .what = string_in(block.failure),
                        .advice = string_in(block.advice)};
  const size_t missing = std::min<size_t>(block.missing_count, std::size(block.missing));
  failure.missing.assign(block.missing, block.missing + missing);
  if (failure.advice.empty()) failure.advice = advice_for(failure.code);
  std::rethrow_exception(error_of(failure, shown(rank_), where(rank_)));
}

void Channel::timed_out(const Descriptor& descriptor, uint64_t seq, nanoseconds waited,
                        const std::vector<int>& missing) {
  std::vector<std::string> reports;
  std::vector<int> shown_missing;
  for (const int r : missing) {
    shown_missing.push_back(shown(r));
    reports.push_back(text("rank ", shown(r), " (pid ", control(r).pid.load(std::memory_order_relaxed),
                           "; its last: ", where(r), ")"));
  }
  fail(ErrorCode::kTimeout, missing.empty() ? 0 : shown_missing.front(),
       text(describe(descriptor.call), " (#", seq - 1, " of group '", name(), "') on rank ", shown(rank_),
            " timed out after ", describe(waited), ", waiting for ", join(reports)),
       shown_missing);
  throw_failure();
}

void Channel::outside_of_heap(int peer, size_t bytes) {
  fail(ErrorCode::kUnavailable, shown(peer),
       text("rank ", shown(peer), " announced ", bytes, " bytes at ", announced_[static_cast<size_t>(peer)],
            " of its heap, which has ", heap_bytes(peer), ": the announcement is damaged"));
  throw_failure();
}

void Channel::peer_left(int peer) {
  lose(peer, text("rank ", shown(peer), " left group '", name(), "' (its last: ", where(peer), ") while rank ",
                  shown(rank_), " waited for it in ", describe(current_.call), " (#", seq_ - 1, ")"));
  throw_failure();
}

std::string Channel::where(int peer) const {
  const uint64_t position = control(peer).position.load(std::memory_order_relaxed);
  if (position == 0) return "no operation yet";
  return text(comm::to_string(static_cast<OpKind>(position >> 8 & 0xff)), " #", (position >> 16) - 1, ", ",
              to_string(static_cast<Phase>(position & 0xff)));
}

void Channel::ring_everybody() {
  for (int r = 0; r < size_; ++r) {
    control(r).bell.ring();
    control(r).inbox.ring();
  }
}

// The peers can see that this rank has left before `stopping_` ends its own operations: until an operation has ended,
// peers may read its tensors.
void Channel::leave(const std::string& cause) {
  watch_->unsubscribe(subscription_);
  if (cause.empty())
    control(rank_).presence.store(Presence::kLeft, std::memory_order_release);
  else
    lose(rank_, ended_by(shown(rank_), cause));
  stopping_.store(true, std::memory_order_seq_cst);
  ring_everybody();
}

}  // namespace muster::comm::shm_backend
