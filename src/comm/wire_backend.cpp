#include "comm/wire_backend.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <optional>
#include <sstream>

#include "base/text.h"
#include "base/thread.h"
#include "comm/algorithms/reduce_kernels.h"
#include "comm/failure_note.h"
#include "comm/flatten.h"
#include "shm/peer_watch.h"
#include "store/outage.h"

namespace muster::comm {
namespace {

using std::chrono::milliseconds;

// How long a rank whose wire broke waits for the word of ranks on other hosts; who has said nothing then is lost.
constexpr milliseconds kGrace{3000};
// The same for ranks that certainly live: their word will come, but a busy machine may take its time.
constexpr milliseconds kPatience{30000};
constexpr milliseconds kNotes{5000};     // for a look at the store that does not answer, or a word to it
constexpr milliseconds kFarewell{1000};  // for a rank's word that it leaves; much less than a launcher's --stop-grace
constexpr milliseconds kLook{2};         // between two looks at the store
// Scratch memory of a reduction, at most.
constexpr size_t kBlock = size_t{32} << 20;

constexpr size_t kInline = 128;  // bytes that an announcement carries

constexpr WireTag kAnnounce{WireKind::kAnnouncement, 0}, kData{WireKind::kData, 0};

// memcpy with null pointers is undefined even for no bytes, and empty tensors have them.
void copy_bytes(Bytes to, ConstBytes from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

std::string seconds(Clock::duration duration) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << std::chrono::duration<double>(duration).count() << " s";
  return std::move(out).str();
}

}  // namespace

struct WireBackend::Announcement {
  uint64_t number = 0;
  CallDescriptor call;
  uint64_t part = 0;  // bytes of an all_to_all that follow for the rank that reads this
  char site[88] = {};
  uint64_t payload_bytes = 0;
  std::array<std::byte, kInline> payload{};

  std::string at() const {  // " (train.cpp:17)", or nothing where that is not known
    const std::string_view known(site, ::strnlen(site, sizeof site));
    return known.empty() ? std::string() : text(" (", known, ")");
  }
};

struct WireBackend::MessageHeader {
  uint64_t bytes = 0;
  uint32_t number = 0;  // the tag of the payload, where it does not fit here
  uint8_t dtype = 0;
  std::array<uint8_t, 3> unused{};
  std::array<std::byte, 240> payload{};
};

// The transfers of one step. Empty ones are no messages.
class WireBackend::Transfers {
 public:
  Transfers(Wire& wire, Deadline deadline) : wire_(wire), deadline_(deadline) {}
  void send(int peer, WireTag tag, const void* data, size_t bytes) {
    if (bytes > 0) list_.push_back(wire_.send(peer, tag, static_cast<ConstBytes>(data), bytes));
  }
  void receive(int peer, WireTag tag, void* data, size_t bytes) {
    if (bytes > 0) list_.push_back(wire_.receive(peer, tag, static_cast<Bytes>(data), bytes));
  }
  void wait() {
    for (auto& transfer : list_) transfer->wait(deadline_);
    list_.clear();
  }

 private:
  Wire& wire_;
  const Deadline deadline_;
  std::vector<std::unique_ptr<Wire::Transfer>> list_;
};

WireBackend::WireBackend(const BackendContext& context, std::string name, std::unique_ptr<Wire> wire)
    : LaneBackend(context, std::move(name)),
      wire_(std::move(wire)),
      store_(context.store),
      prefix_(context.store_prefix),
      pid_(::getpid()),
      members_(context.members),
      shown_ranks_(context.shown_ranks),
      watch_(context.watch),
      on_leave_(context.on_leave),
      announcements_(static_cast<size_t>(context.size)),
      numbers_(static_cast<size_t>(context.size)) {
  for (int step = 1; step < getSize(); ++step) others_.push_back((getRank() + step) % getSize());
  static_assert(sizeof(Announcement) == 256 && sizeof(MessageHeader) == 256);
  wire_->on_gone([this](int peer) {
    {
      const std::lock_guard lock(state_mutex_);
      gone_.insert(peer);
      if (left_) return;
    }
    wait_on_a_thread([this, peer] { look_after(peer); });
  });
  if (!watch_ || members_.empty()) return;
  // Processes of this host are watched: their end is known at once, and for sure.
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  std::vector<pid_t> pids(n, 0);
  for (size_t r = 0; r < n; ++r)
    if (members_[r].host == members_[me].host) pids[r] = members_[r].pid;
  std::vector<pid_t> watched;
  for (const pid_t pid : pids)
    if (pid > 0) watched.push_back(pid);
  subscription_ = watch_->subscribe(watched, [this, pids](pid_t dead) {
    bool lost = false;
    for (size_t r = 0; r < pids.size(); ++r) {
      // A process may end that has left the group; who waits for its rank nevertheless hears that from the wire.
      if (pids[r] != dead || has_left(static_cast<int>(r))) continue;
      {
        const std::lock_guard lock(state_mutex_);
        dead_.insert(static_cast<int>(r));
      }
      lost = true;
      say(text("died/", r));  // to ranks on other hosts
    }
    if (!lost) return;
    say_broke(false);
    wire_->close();
  });
}

// The wire to `peer` has ended. Where it left as ranks do, that concerns only who waits for it, and finds out by that.
// Otherwise the group has failed, and who waits for others must hear of it, too.
void WireBackend::look_after(int peer) {
  try {
    for (const auto grace = Deadline::after(kGrace); !grace.passed(); std::this_thread::sleep_for(kLook)) {
      {
        const std::lock_guard lock(state_mutex_);
        if (left_ || failure_ || explaining_) return;
      }
      const store::CallsBy soon(Deadline::after(kNotes));
      if (store_->try_get(key(text("left/", peer)))) return;
      if (settled_elsewhere() || store_->try_get(key(text("broke/", peer)))) break;
    }
  } catch (const std::exception&) {
    return;  // the store has gone, perhaps with a rank that left; who waits in vain finds out by himself
  }
  // An operation under way speaks for itself: it may have timed out, which broke the connections, and say so next.
  if (under_way_ == 0) say_broke(false);
  wire_->close();
}

// Said before the own wire is closed, so that those who see it end know that this rank lives. That it timed out is said
// by explain() and stays said, whatever look_after() sees of this rank's own broken connections.
void WireBackend::say_broke(bool timed_out) {
  try {
    const store::CallsBy soon(Deadline::after(kNotes));
    const std::string broke = key(text("broke/", getRank())), far = text(sequence_.load());
    if (timed_out)
      store_->set(broke, far + " timed out");
    else
      store_->compare_set(broke, std::nullopt, far);
  } catch (const std::exception&) {  // explain() finds out that the store has gone
  }
}

void WireBackend::say(const std::string& fact) {
  try {
    const store::CallsBy soon(Deadline::after(kNotes));
    store_->set(key(fact), "1");
  } catch (const std::exception&) {  // explain() finds out that the store has gone
  }
}

bool WireBackend::has_died(int r) const {
  {
    const std::lock_guard lock(state_mutex_);
    if (dead_.count(r)) return true;
  }
  return store_->try_get(key(text("died/", r))).has_value();
}

// Whether rank `r` runs for certain: its process is on this host, watched, and has not ended.
bool WireBackend::lives(int r) const {
  if (!watch_ || members_.empty()) return false;
  const auto member = static_cast<size_t>(r), me = static_cast<size_t>(getRank());
  const std::lock_guard lock(state_mutex_);
  return members_[member].host == members_[me].host && members_[member].pid > 0 && !dead_.count(r);
}

bool WireBackend::has_left(int rank) const {
  try {
    const store::CallsBy soon(Deadline::after(kNotes));
    return store_->try_get(key(text("left/", rank))).has_value();
  } catch (const std::exception&) {
    return false;  // the store has gone with its rank
  }
}

WireBackend::~WireBackend() { leave({}); }

// --- membership and failure ---

void WireBackend::leave(const std::string& cause) {
  if (pid_ != ::getpid()) return;  // a fork: the membership is its parent's
  {
    const std::lock_guard lock(state_mutex_);
    if (std::exchange(left_, true)) return;
    if (!failure_)
      failure_ =
          std::make_exception_ptr(Aborted(text("group '", group_name(), "' is closing on rank ", shown(getRank()))));
    explained_.notify_all();
  }
  if (watch_ && subscription_) watch_->unsubscribe(subscription_);
  try {
    const store::CallsBy soon(Deadline::after(kFarewell));
    if (!cause.empty())
      store_->compare_set(key("cause"), std::nullopt,
                          write_failure(PeerLost(shown(getRank()), static_cast<int>(pid_),
                                                 text("rank ", shown(getRank()), " ended: ", cause))));
    store_->set(key(text("left/", getRank())), "1");
  } catch (const std::exception&) {
    // Whoever serves the store has gone; so nobody can read it.
  }
  wire_->close();
  {
    const std::lock_guard lock(threads_mutex_);
    stop_threads_ = true;
    job_.notify_all();
  }
  for (auto& thread : threads_) thread.join();
  stop_lane();
  if (on_leave_) on_leave_(this);
}

void WireBackend::abort() { fail(Aborted(text("rank ", shown(getRank()), " aborted group '", group_name(), "'"))); }

void WireBackend::fail(const Error& cause) {
  if (pid_ != ::getpid()) return;
  settle(read_failure(write_failure(cause)));
  wire_->close();
}

void WireBackend::check() const {
  const std::lock_guard lock(state_mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

std::exception_ptr WireBackend::settled_elsewhere() const {
  const auto note = store_->try_get(key("cause"));
  return note ? read_failure(*note) : nullptr;
}

std::exception_ptr WireBackend::settle(const std::exception_ptr& error) {
  std::exception_ptr result = error;
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    try {
      const store::CallsBy soon(Deadline::after(kNotes));
      const auto kept = store_->compare_set(key("cause"), std::nullopt, write_failure(ours));
      if (!kept.stored && kept.value) result = read_failure(*kept.value);
    } catch (const std::exception&) {  // the store has gone with its rank: everybody keeps what he has seen
    }
  } catch (...) {
  }
  const std::lock_guard lock(state_mutex_);
  if (!failure_) failure_ = result;
  explained_.notify_all();
  return failure_;
}

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
    explain(what(), false, broken.what(), peer, began);
  } catch (const Timeout&) {
    explain(what(), true, {}, peer, began);
  } catch (const Error& ours) {
    const auto settled = settle(std::current_exception());
    wire_->close();
    std::rethrow_exception(settled);
  } catch (const std::exception& error) {
    // Whatever stops one rank in the middle (no memory, say) stops the group.
    const auto settled = settle(std::make_exception_ptr(
        Unavailable(text("rank ", shown(getRank()), " failed in ", what(), ": ", error.what()))));
    wire_->close();
    std::rethrow_exception(settled);
  }
}

// `peer`: whom a message was for or from; -1 where all ranks take part.
void WireBackend::explain(const std::string& what, bool timed_out, const std::string& symptom, int peer,
                          Clock::time_point began) {
  const auto waited = Clock::now() - began;
  std::set<int> gone;  // whose wire had ended before this rank closed its own
  {
    // What this rank knows already: it has left, the group had failed before, or another of its threads is finding out.
    std::unique_lock lock(state_mutex_);
    if (std::exchange(explaining_, true)) explained_.wait(lock, [this] { return failure_ != nullptr; });
    if (failure_) std::rethrow_exception(failure_);
    gone = gone_;
  }
  say_broke(timed_out);
  wire_->close();
  const int n = getSize(), me = getRank();
  const auto name = [&](int r) {
    const pid_t pid = members_.empty() ? 0 : members_[static_cast<size_t>(r)].pid;
    return pid > 0 ? text("rank ", shown(r), " (pid ", pid, ")") : text("rank ", shown(r));
  };
  const auto pid_of = [&](int r) { return members_.empty() ? 0 : members_[static_cast<size_t>(r)].pid; };
  const auto lost = [&](int r, const std::string& how) {
    return std::make_exception_ptr(PeerLost(shown(r), pid_of(r),
                                            text(name(r), how, " [", what, " on rank ", shown(me), "]"),
                                            "Look at its last lines on standard error"));
  };
  std::exception_ptr cause;
  const uint64_t mine = sequence_;
  std::vector<std::optional<uint64_t>> said(static_cast<size_t>(n));  // how far each rank was when its wire broke
  said[static_cast<size_t>(me)] = mine;
  const auto silent = [&](int r) { return !said[static_cast<size_t>(r)]; };
  try {
    const auto grace = Deadline::after(kGrace), patience = Deadline::after(kPatience);
    for (;; std::this_thread::sleep_for(kLook)) {
      const store::CallsBy soon(Deadline::after(kNotes));
      if ((cause = settled_elsewhere())) break;
      bool another_timed_out = false;  // whose closing is what this rank saw, and who will say so
      bool all = true, word_comes = false;
      for (int r = 0; r < n && !cause; ++r) {
        if (r == me) continue;
        if (has_died(r)) {
          cause = lost(r, " died");
        } else if (store_->try_get(key(text("left/", r))) && silent(r) && !timed_out) {
          cause = std::make_exception_ptr(PeerLost(
              shown(r), pid_of(r),
              text("rank ", shown(r), " left group '", group_name(), "' while rank ", shown(me), " waited in ", what)));
        } else if (const auto far = store_->try_get(key(text("broke/", r)))) {
          said[static_cast<size_t>(r)] = std::stoull(*far);
          another_timed_out = another_timed_out || far->ends_with(" timed out");
        } else {
          all = false;
          word_comes = word_comes || (gone.count(r) && lives(r));
        }
      }
      if (cause || patience.passed()) break;
      // Who timed out knows whom it waited for, and needs no more than a moment's news of how far they are.
      if (timed_out ? all || grace.passed() : !another_timed_out && !word_comes && (all || grace.passed())) break;
    }
  } catch (const std::exception& silent) {
    if (!store::comes_again(*store_)) cause = lost(0, text(" is gone, and with it the store (", silent.what(), ")"));
    // Of one that nobody here serves, its absence says nothing of any rank. What is known without it:
    const std::lock_guard lock(state_mutex_);
    if (!cause && !dead_.empty()) cause = lost(*dead_.begin(), " died");
    if (!cause && !timed_out && peer < 0 && n > 2)
      cause = std::make_exception_ptr(
          Unavailable(text("the connections of group '", group_name(), "' broke in ", what, ": ", symptom,
                           ". Which rank is lost is not known: ", silent.what())));
  }
  if (!cause) {
    std::vector<int> missing;
    for (int r = 0; r < n; ++r)
      if (peer >= 0 ? r == peer : !said[static_cast<size_t>(r)] || *said[static_cast<size_t>(r)] < mine)
        missing.push_back(r);
    // Where some have not even announced this operation, all waited for them, and not for who is slow to speak.
    const auto came = [&](int r) {
      const Announcement& last = announcements_[static_cast<size_t>(r)];
      return last.call.op != OpKind::kNothing && last.number + 1 == mine;
    };
    if (timed_out && peer < 0 && !std::all_of(missing.begin(), missing.end(), came)) std::erase_if(missing, came);
    std::vector<std::string> names;
    std::vector<int> shown_missing;
    for (const int r : missing) {
      const Announcement& last = announcements_[static_cast<size_t>(r)];
      names.push_back(last.call.op == OpKind::kNothing
                          ? text(name(r), " (no operation yet)")
                          : text(name(r), " (its last: ", to_string(last.call.op), " #", last.number, ")"));
      shown_missing.push_back(shown(r));
    }
    if (timed_out)
      cause = std::make_exception_ptr(Timeout(
          text(what, " on rank ", shown(me), " timed out after ", seconds(waited), ", waiting for ", join(names)),
          shown_missing, "Look whether the missing rank hangs, or raise the timeout"));
    else {  // the one whose wire ended without a word; else one that said nothing; who has spoken or runs is not lost
      const auto lost_one = [&](int r) { return silent(r) && !lives(r); };
      auto who = std::find_if(missing.begin(), missing.end(), [&](int r) { return lost_one(r) && gone.count(r); });
      if (who == missing.end()) who = std::find_if(missing.begin(), missing.end(), lost_one);
      cause = who != missing.end()
                  ? lost(*who, text(" is lost: ", symptom))
                  : std::make_exception_ptr(Unavailable(
                        text("the connections of group '", group_name(), "' broke in ", what, ": ", symptom)));
    }
  }
  std::rethrow_exception(settle(cause));
}

// --- collectives ---

void WireBackend::execute(const Operation& operation, Deadline deadline, bool) {
  check();
  guarded(
      [&] { execute_on_bytes(operation, deadline); },
      [&] { return text(describe(descriptor_of(operation)), " (#", sequence_ - 1, " of group '", group_name(), "')"); },
      -1, Clock::now());
}

void WireBackend::execute_on_bytes(const Operation& operation, Deadline deadline) {
  const auto n = static_cast<size_t>(getSize());
  Flatten flat;
  const auto bytes = [&] { return operation.tensor.nbytes(); };
  const auto count = [&] { return static_cast<size_t>(operation.tensor.numel()); };
  const auto item = [&] { return static_cast<size_t>(operation.tensor.element_size()); };
  switch (operation.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce: {
      const bool written = operation.kind == OpKind::kAllReduce || getRank() == operation.peer;
      const at::Tensor tensor = written ? flat.in_place(operation.tensor) : flat.input(operation.tensor);
      all_reduce(operation, data_of(tensor), count(), item(), deadline);
      break;
    }
    case OpKind::kBroadcast: {
      const bool root = getRank() == operation.peer;
      const at::Tensor tensor = root ? flat.input(operation.tensor) : flat.output(operation.tensor);
      broadcast(operation, data_of(tensor), bytes(), deadline);
      break;
    }
    case OpKind::kAllGather:
    case OpKind::kGather: {
      const at::Tensor input = flat.input(operation.tensor);
      const auto outputs = flat.outputs(operation.outputs);
      const auto parts = parts_of<Bytes>(outputs, n, bytes());
      if (operation.kind == OpKind::kGather)
        gather(operation, parts, data_of(input), bytes(), deadline);
      else
        all_gather(operation, parts, data_of(input), bytes(), deadline);
      break;
    }
    case OpKind::kReduceScatter:
    case OpKind::kScatter: {
      const at::Tensor output = flat.output(operation.tensor);
      const auto inputs = flat.inputs(operation.inputs);
      const auto parts = parts_of<ConstBytes>(inputs, n, bytes());
      if (operation.kind == OpKind::kScatter)
        scatter(operation, data_of(output), parts, bytes(), deadline);
      else
        reduce_scatter(operation, data_of(output), parts, count(), item(), deadline);
      break;
    }
    case OpKind::kAllToAll: {
      Operation dense = operation;
      dense.inputs = flat.inputs(operation.inputs);
      dense.outputs = flat.outputs(operation.outputs);
      all_to_all(dense, deadline);
      break;
    }
    case OpKind::kBarrier:
      announce(operation, {}, deadline);
      break;
    case OpKind::kNothing:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllReduceSparse:
      break;  // do not come here
  }
  flat.copy_back();
}

void WireBackend::announce(const Operation& operation, std::span<const std::byte> payload, Deadline deadline,
                           const std::vector<uint64_t>& parts) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  Announcement mine{.number = sequence_++, .call = descriptor_of(operation), .payload_bytes = payload.size()};
  describe(operation.site, mine.site);
  if (!payload.empty()) std::memcpy(mine.payload.data(), payload.data(), payload.size());
  std::vector<Announcement> sent(n, mine);
  for (size_t r = 0; r < parts.size(); ++r) sent[r].part = parts[r];
  announcements_[me] = sent[me];
  Transfers transfers(*wire_, deadline);
  for (size_t step = 1; step < n; ++step) {
    const size_t to = (me + step) % n, from = (me + n - step) % n;
    transfers.receive(static_cast<int>(from), kAnnounce, &announcements_[from], sizeof(Announcement));
    transfers.send(static_cast<int>(to), kAnnounce, &sent[to], sizeof(Announcement));
  }
  transfers.wait();
  // Everybody sees the same announcements, so everybody finds the same pair and says the same.
  const auto called = [&](size_t r) { return text(describe(announcements_[r].call), announcements_[r].at()); };
  for (size_t r = 1; r < n; ++r)
    if (announcements_[r].call != announcements_[0].call)
      throw Mismatch(
          describe_mismatch(mine.number, group_name(), shown(0), called(0), shown(static_cast<int>(r)), called(r)),
          kMismatchAdvice);
}

const std::byte* WireBackend::payload_of(int rank) const {
  return announcements_[static_cast<size_t>(rank)].payload.data();
}

void WireBackend::all_reduce(const Operation& operation, Bytes data, size_t count, size_t item, Deadline deadline) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  const ReduceKernel kernel = reduce_kernel(operation.tensor.scalar_type(), operation.op);
  const bool wanted = operation.kind == OpKind::kAllReduce || getRank() == operation.peer;
  std::vector<ConstBytes> sources(n);
  if (count * item <= kInline) {
    announce(operation, {data, count * item}, deadline);
    for (size_t r = 0; r < n; ++r) sources[r] = payload_of(static_cast<int>(r));
    const std::array<Bytes, 1> destination = {data};
    if (wanted) kernel(destination, sources, count);
    return;
  }
  announce(operation, {}, deadline);
  // Blocks of n slices; rank r reduces slice r of each.
  const size_t slice = std::min((count + n - 1) / n, std::max<size_t>(kBlock / n / item, 1));
  const at::Tensor scratch = at::empty({static_cast<int64_t>(n * slice * item)}, at::kByte);
  for (size_t block = 0; block < count; block += n * slice) {
    const auto begin = [&](size_t r) { return std::min(count, block + r * slice); };
    const auto length = [&](size_t r) { return std::min(count, block + (r + 1) * slice) - begin(r); };
    Bytes const own = wanted ? data + begin(me) * item : data_of(scratch) + me * slice * item;
    Transfers slices(*wire_, deadline);
    for (const int peer : others_) {
      const auto r = static_cast<size_t>(peer);
      slices.receive(peer, kData, data_of(scratch) + r * slice * item, length(me) * item);
      slices.send(peer, kData, data + begin(r) * item, length(r) * item);
    }
    slices.wait();
    for (size_t r = 0; r < n; ++r) sources[r] = r == me ? data + begin(me) * item : data_of(scratch) + r * slice * item;
    const std::array<Bytes, 1> destination = {own};
    kernel(destination, sources, length(me));
    Transfers results(*wire_, deadline);
    for (const int peer : others_) {
      const auto r = static_cast<size_t>(peer);
      if (wanted) results.receive(peer, kData, data + begin(r) * item, length(r) * item);
      if (operation.kind == OpKind::kAllReduce || peer == operation.peer)
        results.send(peer, kData, own, length(me) * item);
    }
    results.wait();
  }
}

// Down a binomial tree: rank v (counted from the root) has it from v without its highest bit.
void WireBackend::broadcast(const Operation& operation, Bytes data, size_t bytes, Deadline deadline) {
  const int n = getSize(), root = operation.peer, v = (getRank() - root + n) % n;
  const bool small = bytes <= kInline;
  announce(operation, small && v == 0 ? std::span<const std::byte>(data, bytes) : std::span<const std::byte>{},
           deadline);
  if (small) {
    copy_bytes(data, payload_of(root), v == 0 ? 0 : bytes);
    return;
  }
  const auto rank = [&](int u) { return (u + root) % n; };
  int highest = 1;
  while (highest * 2 <= v) highest *= 2;
  if (v > 0) {
    Transfers from(*wire_, deadline);
    from.receive(rank(v - highest), kData, data, bytes);
    from.wait();
  }
  Transfers to(*wire_, deadline);
  for (int bit = v == 0 ? 1 : highest * 2; v + bit < n; bit *= 2) to.send(rank(v + bit), kData, data, bytes);
  to.wait();
}

void WireBackend::all_gather(const Operation& operation, std::span<const Bytes> outputs, ConstBytes input, size_t bytes,
                             Deadline deadline) {
  const bool small = bytes <= kInline;
  announce(operation, small ? std::span(input, bytes) : std::span<const std::byte>{}, deadline);
  copy_bytes(outputs[static_cast<size_t>(getRank())], input, bytes);
  Transfers transfers(*wire_, deadline);
  for (const int peer : others_) {
    Bytes const output = outputs[static_cast<size_t>(peer)];
    if (small) {
      copy_bytes(output, payload_of(peer), bytes);
    } else {
      transfers.receive(peer, kData, output, bytes);
      transfers.send(peer, kData, input, bytes);
    }
  }
  transfers.wait();
}

void WireBackend::gather(const Operation& operation, std::span<const Bytes> outputs, ConstBytes input, size_t bytes,
                         Deadline deadline) {
  const bool small = bytes <= kInline, root = getRank() == operation.peer;
  announce(operation, small ? std::span(input, bytes) : std::span<const std::byte>{}, deadline);
  Transfers transfers(*wire_, deadline);
  if (!root) {
    if (!small) transfers.send(operation.peer, kData, input, bytes);
  } else {
    copy_bytes(outputs[static_cast<size_t>(getRank())], input, bytes);
    for (const int peer : others_)
      if (small)
        copy_bytes(outputs[static_cast<size_t>(peer)], payload_of(peer), bytes);
      else
        transfers.receive(peer, kData, outputs[static_cast<size_t>(peer)], bytes);
  }
  transfers.wait();
}

void WireBackend::scatter(const Operation& operation, Bytes output, std::span<const ConstBytes> inputs, size_t bytes,
                          Deadline deadline) {
  announce(operation, {}, deadline);
  Transfers transfers(*wire_, deadline);
  if (getRank() != operation.peer) {
    transfers.receive(operation.peer, kData, output, bytes);
  } else {
    copy_bytes(output, inputs[static_cast<size_t>(getRank())], bytes);
    for (const int peer : others_) transfers.send(peer, kData, inputs[static_cast<size_t>(peer)], bytes);
  }
  transfers.wait();
}

void WireBackend::reduce_scatter(const Operation& operation, Bytes output, std::span<const ConstBytes> inputs,
                                 size_t count, size_t item, Deadline deadline) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  const ReduceKernel kernel = reduce_kernel(operation.tensor.scalar_type(), operation.op);
  announce(operation, {}, deadline);
  const size_t slice = std::min(count, std::max<size_t>(kBlock / n / item, 1));
  const at::Tensor scratch = at::empty({static_cast<int64_t>(n * slice * item)}, at::kByte);
  std::vector<ConstBytes> sources(n);
  for (size_t begin = 0; begin < count; begin += slice) {
    const size_t length = std::min(slice, count - begin);
    Transfers transfers(*wire_, deadline);
    for (const int peer : others_) {
      const auto r = static_cast<size_t>(peer);
      sources[r] = data_of(scratch) + r * slice * item;
      transfers.receive(peer, kData, data_of(scratch) + r * slice * item, length * item);
      transfers.send(peer, kData, inputs[r] + begin * item, length * item);
    }
    sources[me] = inputs[me] + begin * item;
    transfers.wait();
    const std::array<Bytes, 1> destination = {output + begin * item};
    kernel(destination, sources, length);
  }
}

// The parts' sizes travel with the announcement, and both ends compare them.
void WireBackend::all_to_all(const Operation& operation, Deadline deadline) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  std::vector<ConstBytes> inputs;
  std::vector<Bytes> outputs;
  std::vector<uint64_t> sizes, expected;
  cut(operation.inputs, operation.input_splits, n, inputs, sizes);
  cut(operation.outputs, operation.output_splits, n, outputs, expected);
  announce(operation, {}, deadline, sizes);
  for (size_t r = 0; r < n; ++r)
    if (announcements_[r].part != expected[r])
      throw Mismatch(text("all_to_all: rank ", shown(static_cast<int>(r)), announcements_[r].at(), " sends ",
                          announcements_[r].part, " bytes to rank ", shown(getRank()), announcements_[me].at(),
                          ", which expects ", expected[r]),
                     kMismatchAdvice);
  copy_bytes(outputs[me], inputs[me], sizes[me]);
  Transfers transfers(*wire_, deadline);
  for (const int peer : others_) {
    const auto r = static_cast<size_t>(peer);
    transfers.receive(peer, kData, outputs[r], expected[r]);
    transfers.send(peer, kData, inputs[r], sizes[r]);
  }
  transfers.wait();
}

// --- messages ---

// A message under way: its header, which carries small ones whole; then the receiver's word that it is ready, and the
// payload.
class WireBackend::MessageTransfer {
 public:
  MessageTransfer(WireBackend& backend, const Operation& operation) : backend_(backend), operation_(operation) {
    tensor_ = sends() ? flat_.input(operation.tensor) : flat_.output(operation.tensor);
    const WireTag tag{WireKind::kMessage, static_cast<uint32_t>(operation.tag)};
    if (!sends()) {
      head_ = backend_.wire_->receive(operation.peer, tag, reinterpret_cast<Bytes>(&header_), sizeof header_);
      return;
    }
    header_.bytes = tensor_.nbytes();
    header_.dtype = static_cast<uint8_t>(tensor_.scalar_type());
    if (fits())
      copy_bytes(header_.payload.data(), data_of(tensor_), header_.bytes);
    else
      header_.number = backend.numbers_[static_cast<size_t>(operation.peer)]++ % kWireTags;
    head_ = backend_.wire_->send(operation.peer, tag, reinterpret_cast<ConstBytes>(&header_), sizeof header_);
  }

  // Returns the peer.
  int wait(Deadline deadline) {
    const int peer = head_->wait(deadline);
    if (sends()) {
      if (!fits()) {
        std::byte word{};
        backend_.wire_->receive(peer, ready(), &word, 1)->wait(deadline);
        backend_.wire_->send(peer, payload(), data_of(tensor_), header_.bytes)->wait(deadline);
      }
      return peer;
    }
    if (header_.bytes != tensor_.nbytes() || header_.dtype != static_cast<uint8_t>(tensor_.scalar_type()))
      throw Mismatch(
          text("recv on rank ", backend_.shown(backend_.getRank()), " expects ",
               show(tensor_.nbytes(), tensor_.scalar_type()), " with tag ", operation_.tag, ", but rank ",
               backend_.shown(peer), " sent ", show(header_.bytes, static_cast<at::ScalarType>(header_.dtype))),
          kMismatchAdvice);
    if (fits()) {
      copy_bytes(data_of(tensor_), header_.payload.data(), header_.bytes);
    } else {
      const std::byte word{1};
      const auto body = backend_.wire_->receive(peer, payload(), data_of(tensor_), header_.bytes);
      backend_.wire_->send(peer, ready(), &word, 1)->wait(deadline);
      body->wait(deadline);
    }
    flat_.copy_back();
    return peer;
  }

 private:
  bool sends() const { return operation_.kind == OpKind::kSend; }
  bool fits() const { return header_.bytes <= header_.payload.size(); }
  WireTag ready() const { return {WireKind::kReady, header_.number}; }
  WireTag payload() const { return {WireKind::kPayload, header_.number}; }
  static std::string show(size_t bytes, at::ScalarType dtype) {
    return text(bytes / c10::elementSize(dtype), " x ", c10::toString(dtype), " (", bytes, " bytes)");
  }

  WireBackend& backend_;
  const Operation& operation_;
  Flatten flat_;
  at::Tensor tensor_;
  MessageHeader header_;
  std::unique_ptr<Wire::Transfer> head_;
};

void WireBackend::check_message(const Operation& operation) const {
  check();
  if (operation.tag < 0 || static_cast<uint32_t>(operation.tag) >= kWireTags)
    throw InvalidArgument(text("tag ", operation.tag, " is not one of backend '", getBackendName(), "'"),
                          text("Use 0 … ", kWireTags - 1));
}

std::unique_ptr<WireBackend::MessageTransfer> WireBackend::post(const Operation& operation) {
  const std::lock_guard lock(post_mutex_);
  return std::make_unique<MessageTransfer>(*this, operation);
}

std::string WireBackend::describe_message(const Operation& operation) const {
  return text(to_string(operation.kind), " of ", operation.tensor.numel(), " x ",
              c10::toString(operation.tensor.scalar_type()), " with tag ", operation.tag,
              operation.kind == OpKind::kSend ? " to " : " from ",
              operation.peer == kAnySource ? std::string("any rank") : text("rank ", shown(operation.peer)));
}

void WireBackend::run_message(const Operation& operation, Deadline deadline) {
  check_message(operation);
  guarded([&] { post(operation)->wait(deadline); }, [&] { return describe_message(operation); }, operation.peer,
          Clock::now());
}

void WireBackend::submit_message(const WorkPtr& work, Deadline deadline) {
  const Operation& operation = work->operations()[0];
  check_message(operation);
  const auto began = Clock::now();
  std::shared_ptr<MessageTransfer> transfer;
  guarded([&] { transfer = post(operation); }, [&] { return describe_message(operation); }, operation.peer, began);
  wait_on_a_thread([this, work, transfer, deadline, began] {
    const Operation& message = work->operations()[0];
    std::exception_ptr error;
    try {
      int peer = message.peer;
      guarded([&] { peer = transfer->wait(deadline); }, [&] { return describe_message(message); }, message.peer, began);
      count(message);
      if (message.kind == OpKind::kRecv) work->set_source(peer);
    } catch (...) {
      error = std::current_exception();
    }
    work->complete(std::move(error));
  });
}

// A wire's transfers can only be waited for, one by one; so each message under way has a thread.
void WireBackend::wait_on_a_thread(std::function<void()> job) {
  std::unique_lock lock(threads_mutex_);
  if (stop_threads_) {  // the wire is closed: nothing waits for long
    lock.unlock();
    return job();
  }
  jobs_.push_back(std::move(job));
  job_.notify_one();
  if (idle_ >= jobs_.size()) return;
  threads_.push_back(start_thread("muster-message", [this] {
    std::unique_lock mine(threads_mutex_);
    for (;;) {
      ++idle_;
      job_.wait(mine, [this] { return stop_threads_ || !jobs_.empty(); });
      --idle_;
      if (jobs_.empty()) return;
      const auto next = std::move(jobs_.front());
      jobs_.pop_front();
      mine.unlock();
      next();
      mine.lock();
    }
  }));
}

}  // namespace muster::comm
