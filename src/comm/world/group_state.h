// What a Group handle refers to, and how a group ends.
//
// When a rank drops its last handle of a group, it leaves the group, which closes sockets, joins threads and unmaps
// memory. But an operation goes on when its Work is dropped, so a group with operations under way lingers until they
// have ended. A group also lingers if its last handle is dropped in a callback of a future, on a thread that the end of
// the group would join. The next new_group() ends the lingering groups that are idle by then. The World's end ends all.
//
// Thread-safety: all methods of LingeringGroups.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "comm/core/backend.h"
#include "muster/base/error.h"
#include "muster/comm/group.h"

namespace muster {

struct Group::State {
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (backend && !world_has_left) backend->warn_of_straggler();
  }

  int rank = -1;                              // in the group, -1: not a member
  std::vector<int> ranks;                     // global
  std::vector<int> shown_ranks;               // how its errors number the ranks; empty: as the group does
  c10::intrusive_ptr<comm::Backend> backend;  // null if this rank is not a member
  std::string name, store_prefix;
  mutable std::atomic<uint64_t> splits{0};  // calls of split() so far
  // Makes another group of the same World, for split(). Not after the World has left.
  std::function<Group(const std::string& name, const std::string& store_prefix, const std::vector<int>& ranks,
                      const std::vector<int>& shown_ranks, const GroupOptions& options)>
      make_group;
  std::atomic<bool> world_has_left{false};
};

class LingeringGroups {
 public:
  using State = Group::State;

  void take(std::unique_ptr<State> state) {
    if (may_end(*state)) return;
    c10::intrusive_ptr<comm::Backend> failed;
    std::optional<std::string> why;
    {
      const std::lock_guard lock(mutex_);
      if ((why = aborted_)) failed = state->backend;
      states_.push_back(std::move(state));
    }
    if (failed) fail(*failed, *why);
  }
  void end_idle() {
    std::vector<std::unique_ptr<State>> over;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    for (auto& state : states_)
      if (may_end(*state)) over.push_back(std::move(state));
    std::erase(states_, nullptr);
  }
  // Makes those that are still in use fail, and those that come later.
  void abort(const std::string& why) {
    std::vector<c10::intrusive_ptr<comm::Backend>> backends;
    {
      const std::lock_guard lock(mutex_);
      aborted_ = why;
      for (const auto& state : states_) backends.push_back(state->backend);
    }
    for (const auto& backend : backends) fail(*backend, why);
  }
  std::vector<std::unique_ptr<State>> all() {
    const std::lock_guard lock(mutex_);
    return std::exchange(states_, {});
  }

 private:
  static void fail(comm::Backend& backend, const std::string& why) noexcept try {
    if (!backend.known_failure()) backend.fail(Aborted(why));
  } catch (const std::exception& error) {
    MUSTER_LOG(kError) << "a group cannot be aborted: " << error.what();
  }
  static bool may_end(const State& state) {
    return !state.backend || (state.backend->is_idle() && !comm::in_callback_of_future());
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<State>> states_;
  std::optional<std::string> aborted_;  // why
};

}  // namespace muster
