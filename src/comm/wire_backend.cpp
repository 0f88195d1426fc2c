#include "comm/wire_backend.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "base/copy.h"
#include "base/text.h"
#include "base/thread.h"
#include "comm/algorithms/reduce_kernels.h"
#include "comm/failure_note.h"
#include "comm/flatten.h"
#include "shm/peer_watch.h"
#include "store/outage.h"
#include "store/stored_number.h"

namespace muster::comm {
namespace {

using std::chrono::milliseconds;

// How long a rank whose wire broke waits for ranks on other hosts to report. A rank that has not reported by then is
// lost.
constexpr milliseconds kGrace{3000};
// The same for ranks that certainly run: they will report, but that may take long on a busy machine.
constexpr milliseconds kPatience{30000};
// How long a rank that timed out looks for news of how far the others are; it knows already which ranks it waited for.
// Less than the time that the other ranks of a host wait longer than their leader (hierarchical_backend.cpp).
constexpr milliseconds kNews{1000};
constexpr milliseconds kNotes{5000};     // limit of a read or a write of a store that may not answer
constexpr milliseconds kFarewell{1000};  // limit of a rank's note that it leaves; much less than --stop-grace
constexpr milliseconds kLook{2};         // between two looks at the store
// The largest scratch memory of a reduction.
constexpr size_t kBlock = size_t{32} << 20;

constexpr size_t kInline = 128;  // bytes that an announcement carries

constexpr WireTag kAnnounce{WireKind::kAnnouncement, 0}, kData{WireKind::kData, 0};

}  // namespace

struct WireBackend::Announcement {
  uint64_t number = 0;
  CallDescriptor call;
  uint64_t part = 0;  // bytes of an all_to_all that follow for the rank that reads this
  Arrival before;     // of an earlier one
  char site[84] = {};
  std::array<std::byte, kInline> payload{};

  std::string at() const {  // " (train.cpp:17)", or nothing if that is not known
    const std::string_view known(site, ::strnlen(site, sizeof site));
    return known.empty() ? std::string() : text(" (", known, ")");
  }
};

// The transfers of one step. Empty transfers are left out.
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
      members_(context.members),
      watch_(context.watch),
      announcements_(static_cast<size_t>(context.size)),
      stragglers_(context.size, Stragglers::Unit::kNanoseconds),
      arrivals_(context.host_arrivals),
      numbers_(static_cast<size_t>(context.size)) {
  for (int step = 1; step < getSize(); ++step) others_.push_back((getRank() + step) % getSize());
  static_assert(sizeof(Announcement) == 256);
  wire_->on_gone([this](int peer) {
    {
      const std::lock_guard lock(state_mutex_);
      gone_.insert(peer);
      if (left_) return;
    }
    on_a_thread_or_here([this, peer] { look_after(peer); });
  });
  if (!watch_ || members_.empty()) return;
  // The processes of this host are watched, so this rank learns of their end immediately and for certain.
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  std::vector<pid_t> pids(n, 0);
  for (size_t r = 0; r < n; ++r)
    if (members_[r].host == members_[me].host) pids[r] = members_[r].pid;
  std::vector<shm::PeerWatch::Process> watched;
  for (size_t r = 0; r < n; ++r)
    if (pids[r] > 0) watched.emplace_back(pids[r], members_[r].start);
  subscription_ = watch_->subscribe(watched, [this, pids](pid_t dead) {
    // note_death() asks the store, which may not answer. So it does not run on the watch's thread, which also tells
    // other groups of deaths.
    on_a_thread_or_here([this, pids, dead] { note_death(pids, dead); });
  });
}

// The process `dead` has ended; `pids`: of the ranks on this host, else 0.
void WireBackend::note_death(const std::vector<pid_t>& pids, pid_t dead) {
  const store::CallsBy soon(Deadline::after(kNotes));  // all notes together: a destructor may wait for this
  bool lost = false;
  for (size_t r = 0; r < pids.size(); ++r) {
    // A process that has left the group may end. A rank that still waits for it learns of that from the wire.
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
}

// The wire to `peer` has ended. If the peer left in order, that concerns only the ranks that wait for it, which find
// out themselves. Otherwise the group has failed, and ranks that wait for others must learn of it, too.
void WireBackend::look_after(int peer) {
  const store::CallsBy soon(Deadline::after(kGrace + kNotes));  // all calls together: a destructor may wait for this
  try {
    for (const auto grace = Deadline::after(kGrace); !grace.passed(); std::this_thread::sleep_for(kLook)) {
      {
        const std::lock_guard lock(state_mutex_);
        if (left_ || failure_ || explaining_) return;
      }
      if (store_->try_get(key(text("left/", peer)))) return;
      if (settled_elsewhere() || store_->try_get(key(text("broke/", peer)))) break;
    }
  } catch (const std::exception&) {
    return;  // the store has gone, perhaps with a rank that left; ranks that wait in vain find out themselves
  }
  // An operation under way reports itself: perhaps it timed out, which broke the connections, and will say so next.
  if (under_way_ == 0) say_broke(false);
  wire_->close();
}

// Called before this rank closes its wire, so that ranks that see the wire end know that this rank runs. Only explain()
// says that the rank timed out; a later call by look_after(), which sees this rank's own broken connections, does not
// overwrite that.
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
  if (in_fork()) return;
  {
    const std::lock_guard lock(state_mutex_);
    if (std::exchange(left_, true)) return;
    if (!failure_)
      failure_ =
          std::make_exception_ptr(Aborted(text("group '", group_name(), "' is closing on rank ", shown(getRank()))));
    explained_.notify_all();
  }
  const WithoutInterpreterLock unlocked;
  if (watch_ && subscription_) watch_->unsubscribe(subscription_);
  try {
    const store::CallsBy soon(Deadline::after(kFarewell));
    if (!cause.empty())
      store_->compare_set(
          key("cause"), std::nullopt,
          write_failure(PeerLost(shown(getRank()), ::getpid(), text("rank ", shown(getRank()), " ended: ", cause))));
    store_->set(key(text("left/", getRank())), "1");
  } catch (const std::exception&) {
    // The process that serves the store has gone, so nobody could read the note.
  }
  wire_->close();
  {
    const std::lock_guard lock(threads_mutex_);
    stop_threads_ = true;
    job_.notify_all();
  }
  for (auto& thread : threads_) join_or_detach(thread);
  end_membership();
}

void WireBackend::fail(const Error& cause) {
  if (in_fork()) return;
  const auto error = read_failure(write_failure(cause));
  {
    const std::lock_guard lock(state_mutex_);
    if (!failure_) failure_ = error;
    explained_.notify_all();
  }
  wire_->close();
  settle(error);  // tells the others; last, because the store may not answer
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
    } catch (const std::exception&) {  // the store has gone with its rank: each rank keeps the error that it saw
    }
  } catch (...) {
  }
  const std::lock_guard lock(state_mutex_);
  if (!failure_) failure_ = result;
  explained_.notify_all();
  return failure_;
}

// `peer`: the rank that a message was for or from; -1 if all ranks take part.
void WireBackend::explain(const std::string& what, bool timed_out, const std::string& symptom, int peer,
                          Clock::time_point began) {
  const auto waited = Clock::now() - began;
  std::set<int> gone;  // ranks whose wire had ended before this rank closed its own
  {
    // This rank may know the cause: it has left, the group has failed before, or another of its threads finds it out.
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
    const auto grace = Deadline::after(timed_out ? kNews : kGrace), patience = Deadline::after(kPatience);
    for (;; std::this_thread::sleep_for(kLook)) {
      const store::CallsBy soon(Deadline::after(kNotes));
      if ((cause = settled_elsewhere())) break;
      bool another_timed_out = false;  // a rank timed out: it closed its wire, and will write the cause
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
          // "12" or "12 timed out"
          said[static_cast<size_t>(r)] = static_cast<uint64_t>(
              store::stored_number(text("broke/", r), far->substr(0, far->find(' ')), 0, INT64_MAX));
          another_timed_out = another_timed_out || far->ends_with(" timed out");
        } else {
          all = false;
          word_comes = word_comes || (gone.count(r) && lives(r));
        }
      }
      if (cause || patience.passed()) break;
      if (timed_out ? all || grace.passed() : !another_timed_out && !word_comes && (all || grace.passed())) break;
    }
  } catch (const std::exception& silent) {
    if (!store::comes_again(*store_)) cause = lost(0, text(" is gone, and with it the store (", silent.what(), ")"));
    // If no rank of the job serves the store, its absence says nothing of any rank. What is known without it:
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
    // If some ranks have not even announced this operation, all waited for those, not for ranks that report slowly.
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
          text(what, " on rank ", shown(me), " timed out after ", describe(waited), ", waiting for ", join(names)),
          shown_missing, "Look whether the missing rank hangs, or raise the timeout"));
    else {  // the lost rank: one whose wire ended, else any; but none that has reported, and none that runs
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
  const bool counts = !arrivals_ || std::exchange(arrivals_->counts_next, false);
  Announcement mine{.number = sequence_++, .call = descriptor_of(operation)};
  if (counts) {
    mine.before = arrival_;
    if (arrivals_) {
      mine.before.last = arrivals_->last;
      mine.before.late = std::chrono::duration<float>(arrivals_->late).count();
    }
  }
  describe(operation.site, mine.site);
  copy_bytes(mine.payload.data(), payload.data(), payload.size());
  std::vector<Announcement> sent(n, mine);
  for (size_t r = 0; r < parts.size(); ++r) sent[r].part = parts[r];
  announcements_[me] = sent[me];
  const auto arrived = FastClock::now();
  Transfers transfers(*wire_, deadline);
  for (size_t step = 1; step < n; ++step) {
    const size_t to = (me + step) % n, from = (me + n - step) % n;
    transfers.receive(static_cast<int>(from), kAnnounce, &announcements_[from], sizeof(Announcement));
    transfers.send(static_cast<int>(to), kAnnounce, &sent[to], sizeof(Announcement));
  }
  transfers.wait();
  if (counts) {
    arrival_.waited = std::max(std::chrono::duration<float>(FastClock::now() - arrived).count(), 0.0F);
    count_arrivals();
  }
  // All ranks see the same announcements, so all find the same pair and report the same error.
  const auto called = [&](size_t r) { return text(describe(announcements_[r].call), announcements_[r].at()); };
  for (size_t r = 1; r < n; ++r)
    if (announcements_[r].call != announcements_[0].call) {
      if (announcements_[0].at().empty() || announcements_[r].at().empty()) tell_sites(operation, deadline);
      throw Mismatch(
          describe_mismatch(mine.number, group_name(), shown(0), called(0), shown(static_cast<int>(r)), called(r)),
          kMismatchAdvice);
    }
}

// Python is asked only here for the line that called. It takes half a microsecond, and 5 ms more while another of its
// threads computes. If the wire ends meanwhile, the lines remain unknown, or another rank has written the cause with
// them.
void WireBackend::tell_sites(const Operation& operation, Deadline deadline) {
  auto& mine = announcements_[static_cast<size_t>(getRank())].site;
  const std::string site = find_site(operation.site);
  mine[site.copy(mine, sizeof mine - 1)] = '\0';
  Transfers transfers(*wire_, deadline);
  try {
    for (const int peer : others_) {
      auto& theirs = announcements_[static_cast<size_t>(peer)].site;
      transfers.receive(peer, kAnnounce, theirs, sizeof theirs);
      transfers.send(peer, kAnnounce, mine, sizeof mine);
    }
    transfers.wait();
  } catch (const WireBroken&) {
  } catch (const Timeout&) {
  }
}

// All ranks count the same, because all get the same announcements.
void WireBackend::count_arrivals() {
  if (getSize() < 2) return;
  float least = std::numeric_limits<float>::max(), next = least;  // of the times that ranks waited
  int who = 0;
  for (int r = 0; r < getSize(); ++r) {
    const float waited = announcements_[static_cast<size_t>(r)].before.waited;
    if (!(waited >= 0)) return;
    if (waited < least) {
      next = std::exchange(least, waited);
      who = r;
    } else {
      next = std::min(next, waited);
    }
  }
  const auto nanoseconds = [](float seconds) { return static_cast<uint64_t>(std::clamp(seconds, 0.0F, 1e9F) * 1e9F); };
  (arrivals_ ? arrivals_->hosts : stragglers_).add({who, nanoseconds(next - least)});
  if (!arrivals_) return;
  const Arrival& theirs = announcements_[static_cast<size_t>(who)].before;
  if (theirs.last >= 0 && theirs.last < arrivals_->ranks.size())
    arrivals_->ranks.add({theirs.last, nanoseconds(std::min(next - least, theirs.late))});
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

// Down a binomial tree: rank v (counted from the root) receives the data from rank v without its highest bit.
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

}  // namespace muster::comm
