#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <thread>

#include "base/text.h"
#include "comm/backends/registry.h"
#include "comm/core/stragglers.h"
#include "comm/kit/operation_work.h"
#include "comm/world/group_state.h"
#include "muster/base/deadline.h"
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
    throw InvalidArgument(text("rank: expected 0 to ", size() - 1, " in a group of ", size(), ", got ", group_rank));
  return state().ranks[static_cast<size_t>(group_rank)];
}

comm::Backend& comm::backend_of(const Group& group) {
  const Group::State& s = group.state();
  if (!s.backend) throw InvalidArgument("this rank is not a member of the group", "Ask is_member() first");
  return *s.backend;
}

Group Group::split(int color, int key, const GroupOptions& options, const Site& site) const {
  comm::Backend& backend = comm::backend_of(*this);
  const State& s = state();
  const auto check_world = [&s] {
    if (s.world_has_left) throw Aborted(text("group '", s.name, "' cannot be split: its World has ended"));
  };
  check_world();
  const at::Tensor mine = at::tensor({int64_t{color}, int64_t{key}}, at::kLong);
  const at::Tensor all = at::empty({size(), 2}, at::kLong);
  backend.run({.kind = comm::OpKind::kAllGather, .tensor = mine, .outputs = {all}, .site = site});
  check_world();  // another thread may have ended it meanwhile
  const auto number = ++s.splits;
  const auto said = all.accessor<int64_t, 2>();
  std::vector<int> members;  // ranks in this group
  for (int r = 0; r < size(); ++r)
    if (said[r][0] == color) members.push_back(r);
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return said[a][1] < said[b][1]; });
  std::vector<int> ranks, shown_ranks;
  for (const int r : members) {
    if (color < 0) break;
    ranks.push_back(global_rank(r));
    if (options.parents_ranks) shown_ranks.push_back(s.shown_ranks.empty() ? r : s.shown_ranks[static_cast<size_t>(r)]);
  }
  return s.make_group(options.name.empty() ? text(s.name, " split ", number, " color ", color) : options.name,
                      text(s.store_prefix, "/split/", number, '/', color), ranks, shown_ranks, options);
}

std::string_view Group::backend_name() const {
  comm::backend_of(*this);
  for (const auto& entry : comm::backends())
    if (entry.name == state().backend->getBackendName()) return entry.name;
  return "other";
}

CommStats Group::stats() const { return comm::backend_of(*this).stats(); }

std::vector<Straggler> Group::stragglers() const {
  const auto* const known = comm::backend_of(*this).stragglers();
  return known ? known->by_rank() : std::vector<Straggler>();
}

std::string Group::straggler_report(std::chrono::nanoseconds at_least) const {
  return comm::backend_of(*this).straggler_report(at_least);
}

c10::intrusive_ptr<c10d::Backend> Group::c10d_backend() const {
  comm::backend_of(*this);
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
  if (dynamic_cast<comm::OperationWork*>(work_.get())) return work_->wait(timeout);
  // Others, as NCCL's, abort their group when the time is over.
  const Deadline deadline = Deadline::after(timeout);
  while (!work_->isCompleted()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  work_->wait();
  return true;
}

bool Work::is_completed() const { return !work_ || work_->isCompleted(); }
int Work::source_rank() const { return work_ ? work_->sourceRank() : -1; }

}  // namespace muster
