// A rank's membership in a group over a Wire: how it begins, how it ends, and the frame of an operation.
#include "comm/wire/wire_backend.h"

#include <unistd.h>

#include <utility>

#include "base/text.h"
#include "base/thread.h"
#include "comm/kit/failure_note.h"
#include "comm/kit/tensor_bytes.h"
#include "shm/peer_watch.h"
#include "store/kit/outage.h"

namespace muster::comm {
namespace {

constexpr std::chrono::milliseconds kFarewell{
    1000};  // limit of a rank's note that it leaves; much less than --stop-grace

}  // namespace

WireBackend::WireBackend(const BackendContext& context, std::string name, std::unique_ptr<Wire> wire)
    : QueuedBackend(context, std::move(name)),
      wire_(std::move(wire)),
      store_(context.group.store),
      prefix_(context.group.store_prefix),
      members_(context.group.members),
      watch_(context.host.watch),
      announcements_(static_cast<size_t>(context.group.size)),
      last_calls_(static_cast<size_t>(context.group.size)),
      stragglers_(context.group.size, Stragglers::Unit::kNanoseconds),
      arrivals_(context.options.host_arrivals),
      numbers_(static_cast<size_t>(context.group.size)) {
  const auto& global = context.group.global_ranks;  // if empty, this group is the World
  for (int r = 0; r < getSize(); ++r)
    if ((global.empty() ? r : global[static_cast<size_t>(r)]) == 0) store_rank_ = r;
  for (int step = 1; step < getSize(); ++step) others_.push_back((getRank() + step) % getSize());
  wire_->on_gone([this](int peer) {
    {
      const std::lock_guard lock(state_mutex_);
      gone_.insert(peer);
      if (left_) return;
    }
    try {
      wait_on_a_thread([this, peer] { look_after(peer); });
    } catch (const Unavailable&) {
      // Not here, where the wire may hold a lock that its close() needs. Ranks that wait find out themselves.
    }
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
  try {
    subscription_ = watch_->subscribe(watched, [this, pids](pid_t dead) {
      // note_death() asks the store, which may not answer. So it does not run on the watch's thread, which also tells
      // other groups of deaths.
      on_a_thread_or_here([this, pids, dead] { note_death(pids, dead); });
    });
  } catch (...) {
    wire_->close();
    end_threads();
    throw;
  }
}

WireBackend::~WireBackend() { leave({}); }

void WireBackend::leave_group(const std::string& cause) {
  const Aborted closing(text("group '", group_name(), "' is closing on rank ", shown(getRank())));
  const FailureReport ended = own_end(cause);
  bool leaves_in_order = false;
  {
    const std::lock_guard lock(state_mutex_);
    if (std::exchange(left_, true)) return;
    leaves_in_order = cause.empty() && !failure_;
    if (!failure_)
      failure_ = cause.empty() ? std::make_exception_ptr(closing) : error_of(ended, ended.finder, last_operation());
    failure_known_.notify_all();
  }
  if (watch_ && subscription_) watch_->unsubscribe(subscription_);
  const store::CallsBy soon(Deadline::after(kFarewell));
  const auto if_the_store_answers = [](const auto& tell) {
    try {
      tell();
    } catch (const std::exception&) {
      // The process that serves the store has gone, so nobody could read what it says.
    }
  };
  if_the_store_answers([&] {
    if (!cause.empty()) store_->compare_set(key(kCause), std::nullopt, write_failure(ended));
    store_->set(key(text("left/", getRank())), text(finished_.load()));
  });
  wire_->close();
  if (leaves_in_order) if_the_store_answers([&] { erase_keys(); });
}

// A long job may make groups again and again.
void WireBackend::erase_keys() {
  Wire::Keys keys = wire_->keys();
  if (store_->add(key("gone"), 1) == getSize()) {  // all have left
    keys.own.insert(keys.own.end(), keys.of_all.begin(), keys.of_all.end());
    for (int r = 0; r < getSize(); ++r) keys.own.push_back(key(text("left/", r)));
    keys.own.push_back(key("gone"));
  }
  for (const std::string& each : keys.own) store_->erase(each);
}

void WireBackend::end_threads() {
  {
    const std::lock_guard lock(threads_mutex_);
    stop_threads_ = true;
    job_.notify_all();
  }
  for (auto& thread : threads_) join_or_detach(thread);
}

void WireBackend::fail_group(const Error& cause) {
  const std::string last = last_operation();
  const auto error = error_of(failure_of(cause, shown(getRank())), shown(getRank()), last);
  {
    const std::lock_guard lock(state_mutex_);
    if (!failure_) failure_ = error;
    failure_known_.notify_all();
  }
  wire_->close();
  record_failure(error, last);  // tells the others; last, because the store may not answer
}

void WireBackend::check() const {
  const std::lock_guard lock(state_mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void WireBackend::execute(const Operation& operation, Deadline deadline, bool) {
  check();
  guarded(
      [&] {
        run_on_bytes(operation, getRank(), getSize(), deadline, [this](const ByteCall& call) { execute_call(call); });
        finished_ = sequence_.load();
      },
      [&] { return text(describe(descriptor_of(operation)), " (#", sequence_ - 1, " of group '", group_name(), "')"); },
      kAllRanks, Clock::now());
}

}  // namespace muster::comm
