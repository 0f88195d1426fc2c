#include "base/text.h"
#include "comm/group_state.h"
#include "comm/stragglers.h"
#include "muster/base/error.h"
#include "muster/comm/work.h"
#include "muster/comm/world.h"

namespace muster {

Group::Group() = default;
Group::Group(const Group&) = default;
Group::Group(Group&&) noexcept = default;
Group& Group::operator=(const Group&) = default;
Group& Group::operator=(Group&&) noexcept = default;
Group::~Group() = default;
Group::Group(std::shared_ptr<State> state) : state_(std::move(state)) {}

const Group::State& Group::state() const { return state_ ? *state_ : World::current().group().state(); }

Group Group::resolved() const { return state_ ? *this : World::current().group(); }

int Group::rank() const { return state().rank; }
int Group::size() const { return static_cast<int>(state().ranks.size()); }
const std::vector<int>& Group::ranks() const { return state().ranks; }

int Group::global_rank(int group_rank) const {
  if (group_rank < 0 || group_rank >= size())
    throw InvalidArgument(text("rank ", group_rank, " is outside a group of ", size()));
  return state().ranks[static_cast<size_t>(group_rank)];
}

comm::Backend& Group::backend() const {
  const State& s = state();
  if (!s.backend) throw InvalidArgument("this rank is not a member of the group", "Ask is_member() first");
  return *s.backend;
}

std::string_view Group::backend_name() const {
  backend();
  for (const auto& entry : comm::backends())
    if (entry.name == state().backend->getBackendName()) return entry.name;
  return "other";
}

CommStats Group::stats() const { return backend().stats(); }

std::vector<Straggler> Group::stragglers() const {
  const auto* const known = backend().stragglers();
  return known ? known->by_rank() : std::vector<Straggler>();
}

std::string Group::straggler_verdict(std::chrono::nanoseconds at_least) const {
  return backend().straggler_verdict(at_least);
}

c10::intrusive_ptr<c10d::Backend> Group::c10d_backend() const {
  backend();
  return state().backend;
}

// --- Work ---

Work::Work() = default;
Work::Work(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
Work::Work(const Work&) = default;
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(const Work&) = default;
Work& Work::operator=(Work&&) noexcept = default;
Work::~Work() = default;

void Work::wait() {
  if (work_) work_->wait();
}

bool Work::wait_for(std::chrono::milliseconds timeout) {
  if (!work_) return true;
  if (timeout <= timeout.zero()) {  // c10d would take it for "no timeout"
    if (!work_->isCompleted()) return false;
    work_->wait();
    return true;
  }
  return work_->wait(timeout);
}

bool Work::is_completed() const { return !work_ || work_->isCompleted(); }
int Work::source_rank() const { return work_ ? work_->sourceRank() : -1; }

}  // namespace muster
