// How the ranks of a group over a Wire agree on why it failed (wire_backend.h has the protocol).

#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "comm/kit/failure_note.h"
#include "comm/wire/announcement.h"
#include "comm/wire/wire_backend.h"
#include "shm/peer_watch.h"
#include "store/kit/outage.h"
#include "store/kit/stored_number.h"

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
constexpr milliseconds kLook{2};  // between two looks at the store

}  // namespace

// The process `dead` has ended; `pids`: of the ranks on this host, else 0.
void WireBackend::note_death(const std::vector<pid_t>& pids, pid_t dead) {
  const store::CallsBy soon(Deadline::after(kNotes));  // all notes together: a destructor may wait for this
  {
    const std::lock_guard lock(state_mutex_);
    if (left_) return;
  }
  bool lost = false;
  for (size_t r = 0; r < pids.size(); ++r) {
    // A process that has left the group may end. A rank that still waits for it learns of that from the wire.
    if (pids[r] != dead || has_left(static_cast<int>(r))) continue;
    {
      const std::lock_guard lock(state_mutex_);
      dead_.insert(static_cast<int>(r));
    }
    lost = true;
    post_fact(text("died/", r));  // to ranks on other hosts
  }
  if (!lost) return;
  post_broken(false);
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
        if (left_ || failure_ || diagnosing_) return;
      }
      if (store_->try_get(key(text("left/", peer)))) {
        const std::lock_guard lock(state_mutex_);
        departed_.insert(peer);
        return;
      }
      if (store_->try_get(key(kCause)) || store_->try_get(key(text("broke/", peer)))) break;
    }
  } catch (const std::exception&) {
    return;  // the store has gone, perhaps with a rank that left; ranks that wait in vain find out themselves
  }
  // An operation under way reports itself: perhaps it timed out, which broke the connections, and will say so next.
  if (under_way_ == 0) post_broken(false);
  wire_->close();
}

// Called before this rank closes its wire, so that ranks that see the wire end know that this rank runs. Only
// diagnose_failure() says that the rank timed out; a later call by look_after(), which sees this rank's own broken
// connections, does not overwrite that.
void WireBackend::post_broken(bool timed_out) {
  try {
    const store::CallsBy soon(Deadline::after(kNotes));
    const std::string broke = key(text("broke/", getRank())), far = text(sequence_.load());
    if (timed_out)
      store_->set(broke, far + " timed out");
    else
      store_->compare_set(broke, std::nullopt, far);
  } catch (const std::exception&) {  // diagnose_failure() finds out that the store has gone
  }
}

void WireBackend::post_fact(const std::string& fact) {
  try {
    const store::CallsBy soon(Deadline::after(kNotes));
    store_->set(key(fact), "1");
  } catch (const std::exception&) {  // diagnose_failure() finds out that the store has gone
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

bool WireBackend::failed() const {
  {
    const std::lock_guard lock(state_mutex_);
    if (failure_ || gone_.empty()) return failure_ != nullptr;
  }
  try {  // a wire that has ended is only a hint
    const store::CallsBy soon(Deadline::after(kNotes));
    return store_->try_get(key(kCause)).has_value();
  } catch (const std::exception&) {
    return true;  // the store has gone, perhaps with its rank
  }
}

std::exception_ptr WireBackend::known_failure() {
  if (in_fork() || QueuedBackend::has_left()) return nullptr;
  if (auto known = QueuedBackend::known_failure()) return known;
  std::exception_ptr loss;
  try {
    const store::CallsBy soon(Deadline::after(kNotes));
    if (auto recorded = recorded_failure(last_operation())) return recorded;
    loss = known_loss(false, {});
  } catch (const TimeoutError&) {  // a store that is slow
    loss = known_loss(false, {});
  } catch (const std::exception& no_answer) {
    // The connections to other ranks end with the first that is lost, and the store may follow later with any rank.
    bool only_the_stores_rank_is_gone = false;
    {
      const std::lock_guard lock(state_mutex_);
      only_the_stores_rank_is_gone = gone_ == std::set<int>{store_rank_} && !departed_.count(store_rank_);
    }
    loss = known_loss(only_the_stores_rank_is_gone, no_answer.what());
  }
  try {
    if (loss) std::rethrow_exception(loss);
  } catch (const Error& error) {
    return as_own(error);
  }
  return nullptr;
}

std::exception_ptr WireBackend::recorded_failure(const std::string& last) const {
  const auto note = store_->try_get(key(kCause));
  return note ? read_failure(*note, shown(getRank()), last) : nullptr;
}

std::exception_ptr WireBackend::record_failure(const std::exception_ptr& error, const std::string& last) {
  std::exception_ptr result = error;
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    std::string note = write_failure(failure_of(ours, shown(getRank())));
    try {
      const store::CallsBy soon(Deadline::after(kNotes));
      auto kept = store_->compare_set(key(kCause), std::nullopt, note);
      if (!kept.stored && kept.value) note = std::move(*kept.value);
    } catch (const std::exception&) {  // the store has gone with its rank: each rank keeps the error that it saw
    }
    result = read_failure(note, shown(getRank()), last);
  } catch (...) {
  }
  const std::lock_guard lock(state_mutex_);
  if (!failure_) failure_ = result;
  failure_known_.notify_all();
  return failure_;
}

// What a rank finds out about a failure that it has seen.
struct WireBackend::Inquiry {
  const std::string& what;
  bool timed_out;
  const std::string& symptom;
  int peer;
  Clock::duration waited;
  uint64_t mine = 0;        // how far this rank is
  std::set<int> gone = {};  // ranks whose wire had ended before this rank closed its own
  std::set<int> left = {};  // ranks that left in order
  std::vector<std::optional<uint64_t>> reached =
      {};  // how far each rank was when its wire broke; nothing: it has not said

  bool silent(int r) const { return !reached[static_cast<size_t>(r)]; }
};

void WireBackend::diagnose_failure(const std::string& what, bool timed_out, const std::string& symptom, int peer,
                                   Clock::time_point began) {
  constexpr milliseconds kLongest = kPatience + 4 * kNotes;  // with a store that answers late
  Inquiry inquiry{
      .what = what, .timed_out = timed_out, .symptom = symptom, .peer = peer, .waited = Clock::now() - began};
  {
    // This rank may know the cause: it has left, the group has failed before, or another of its threads finds it out.
    std::unique_lock lock(state_mutex_);
    if (std::exchange(diagnosing_, true) &&
        !Deadline::after(kLongest).wait(failure_known_, lock, [this] { return failure_ != nullptr; })) {
      failure_ =
          as_own(Unavailable(text("the connections of group '", group_name(), "' broke in ", what, ": ", symptom,
                                  ". Another thread of this rank has looked for the cause for ", describe(kLongest))));
      failure_known_.notify_all();
    }
    if (failure_) std::rethrow_exception(failure_);
    inquiry.gone = gone_;
  }
  inquiry.reached.resize(static_cast<size_t>(getSize()));
  post_broken(timed_out);
  try {
    wire_->close();
  } catch (const std::exception& error) {  // whoever waits for this rank's word finds it in the store all the same
    MUSTER_LOG(kWarning) << "group '" << group_name() << "': its wire does not close: " << error.what();
  }
  inquiry.mine = sequence_;
  inquiry.reached[static_cast<size_t>(getRank())] = inquiry.mine;
  std::exception_ptr cause;
  try {
    cause = ask_store(inquiry);
  } catch (const std::exception& no_answer) {
    cause = without_store(inquiry, no_answer.what());
  }
  if (!cause) cause = conclude(inquiry);
  std::rethrow_exception(record_failure(cause, what));
}

// Waits until the store has the cause, or until all ranks have reported that will. Null if no report is a cause.
std::exception_ptr WireBackend::ask_store(Inquiry& inquiry) {
  const auto grace = Deadline::after(inquiry.timed_out ? kNews : kGrace), patience = Deadline::after(kPatience);
  for (;; std::this_thread::sleep_for(kLook)) {
    const store::CallsBy soon(Deadline::after(kNotes));
    if (auto cause = recorded_failure(inquiry.what)) return cause;
    bool another_timed_out = false;  // a rank timed out: it closed its wire, and will write the cause
    bool all = true, word_comes = false;
    for (const int r : others_)
      if (has_died(r)) return lost(r, " died");
    for (const int r : others_) {
      if (const auto left = store_->try_get(key(text("left/", r))); left && inquiry.silent(r)) {
        inquiry.left.insert(r);
        const uint64_t finished = store::stored_number(text("left/", r), *left, 0, INT64_MAX);
        const bool is_missed = inquiry.peer == kAllRanks    ? finished < inquiry.mine
                               : inquiry.peer == kAnySource ? inquiry.left.size() == others_.size()
                                                            : r == inquiry.peer;
        if (!is_missed || inquiry.timed_out) continue;
        return std::make_exception_ptr(PeerLost(shown(r), pid_of(r),
                                                text("rank ", shown(r), " left group '", group_name(), "' while rank ",
                                                     shown(getRank()), " waited in ", inquiry.what),
                                                "Look at its last lines on standard error"));
      }
      if (const auto far = store_->try_get(key(text("broke/", r)))) {
        // "12" or "12 timed out"
        inquiry.reached[static_cast<size_t>(r)] = static_cast<uint64_t>(
            store::stored_number(text("broke/", r), far->substr(0, far->find(' ')), 0, INT64_MAX));
        another_timed_out = another_timed_out || far->ends_with(" timed out");
      } else {
        all = false;
        word_comes = word_comes || (inquiry.gone.count(r) && lives(r));
      }
    }
    if (patience.passed()) return nullptr;
    const bool enough = all || grace.passed();
    if (inquiry.timed_out ? enough : enough && !another_timed_out && !word_comes) return nullptr;
  }
}

// What is known of lost ranks if the store does not answer (`symptom`): first of all a death that this rank has seen
// itself. A store that the job's rank 0 serves may be gone with that rank, which may be any of the group's, or none.
// Otherwise the store's silence says nothing of any rank, and the result is null.
std::exception_ptr WireBackend::known_loss(bool store_rank_may_be_gone, const std::string& symptom) const {
  std::optional<int> dead;
  {
    const std::lock_guard lock(state_mutex_);
    if (!dead_.empty()) dead = *dead_.begin();
  }
  if (dead) return lost(*dead, " died");
  if (store_rank_may_be_gone && store_rank_ >= 0 && store_rank_ != getRank() && !lives(store_rank_) &&
      !store::comes_again(*store_))
    return lost(store_rank_, text(" is gone, and with it the store (", symptom, ")"));
  return nullptr;
}

std::exception_ptr WireBackend::without_store(const Inquiry& inquiry, const std::string& symptom) const {
  if (auto loss = known_loss(true, symptom)) return loss;
  if (inquiry.timed_out || inquiry.peer >= 0 || getSize() <= 2) return nullptr;
  return std::make_exception_ptr(
      Unavailable(text("the connections of group '", group_name(), "' broke in ", inquiry.what, ": ", inquiry.symptom,
                       ". Which rank is lost is not known: ", symptom)));
}

// The cause that follows from how far the ranks are.
std::exception_ptr WireBackend::conclude(const Inquiry& inquiry) const {
  std::vector<int> missing;
  for (int r = 0; r < getSize(); ++r)
    if (inquiry.peer >= 0 ? r == inquiry.peer
                          : inquiry.silent(r) || *inquiry.reached[static_cast<size_t>(r)] < inquiry.mine)
      missing.push_back(r);
  // The lost rank: one whose wire ended, else any; but none that has reported or left, and none that runs.
  if (!inquiry.timed_out) {
    const auto lost_one = [&](int r) { return inquiry.silent(r) && !inquiry.left.contains(r) && !lives(r); };
    auto who =
        std::find_if(missing.begin(), missing.end(), [&](int r) { return lost_one(r) && inquiry.gone.count(r); });
    if (who == missing.end()) who = std::find_if(missing.begin(), missing.end(), lost_one);
    if (who != missing.end()) return lost(*who, text(" is lost: ", inquiry.symptom));
    return std::make_exception_ptr(Unavailable(
        text("the connections of group '", group_name(), "' broke in ", inquiry.what, ": ", inquiry.symptom)));
  }
  // If some ranks have not even announced this operation, all waited for those, not for ranks that report slowly.
  const auto last_of = [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    return inquiry.peer == kAllRanks ? LastCall(announcements_[r])  // this thread executes
                                     : LastCall(last_calls_[r].load(std::memory_order_relaxed));
  };
  const auto came = [&](int r) { return last_of(r).op != OpKind::kNothing && last_of(r).number + 1 == inquiry.mine; };
  if (inquiry.peer < 0 && !std::all_of(missing.begin(), missing.end(), came)) std::erase_if(missing, came);
  std::vector<std::string> names;
  std::vector<int> shown_missing;
  for (const int r : missing) {
    const LastCall last = last_of(r);
    names.push_back(last.op == OpKind::kNothing
                        ? text(name_of(r), " (no operation yet)")
                        : text(name_of(r), " (its last: ", to_string(last.op), " #", last.number, ")"));
    shown_missing.push_back(shown(r));
  }
  const std::string what =
      text(inquiry.what, " on rank ", shown(getRank()), " timed out after ", describe(inquiry.waited));
  if (names.empty()) {  // of those that matter, none is behind this rank
    const bool any = inquiry.peer == kAnySource;
    return std::make_exception_ptr(TimeoutError(
        text(what, any ? ": no rank sent it" : ", though all ranks have begun it"), {},
        any ? "Look whether the senders hang, or raise the timeout" : "Raise the timeout, or look at the network"));
  }
  return std::make_exception_ptr(TimeoutError(text(what, ", waiting for ", join(names)), shown_missing,
                                              "Look whether the missing rank hangs, or raise the timeout"));
}

std::exception_ptr WireBackend::lost(int r, const std::string& how) const {
  return std::make_exception_ptr(
      PeerLost(shown(r), pid_of(r), text(name_of(r), how), "Look at its last lines on standard error"));
}

pid_t WireBackend::pid_of(int r) const { return members_.empty() ? 0 : members_[static_cast<size_t>(r)].pid; }

std::string WireBackend::name_of(int r) const {
  const pid_t pid = pid_of(r);
  return pid > 0 ? text("rank ", shown(r), " (pid ", pid, ")") : text("rank ", shown(r));
}

}  // namespace muster::comm
