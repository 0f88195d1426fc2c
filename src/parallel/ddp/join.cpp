#include "parallel/ddp/join.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <exception>
#include <utility>

#include "base/auto_reset.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/ddp/replica.h"

namespace muster::ddp {

Meetings::Meeting Meetings::meet(Event mine) {
  if (error_) std::rethrow_exception(error_);
  try {
    return meet_once(mine);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
}

Meetings::Meeting Meetings::meet_once(Event mine) {
  const at::Tensor events = at::zeros({group_.size()}, at::kInt);
  int32_t* const of_ranks = events.mutable_data_ptr<int32_t>();
  constexpr int32_t kEvents = 5;
  const int32_t chosen =
      (options_.divide_by_initial_world_size ? 1 : 0) + (options_.throw_on_early_termination ? 2 : 0);
  of_ranks[group_.rank()] = static_cast<int32_t>(mine) + kEvents * chosen;
  all_reduce(events, {.group = group_});
  for (int rank = 0; rank < group_.size(); ++rank)
    if (static_cast<Event>(of_ranks[rank] % kEvents) == Event::kFailed && mine != Event::kFailed)
      throw Aborted(text("rank ", group_.global_rank(rank), " left join() with an error"), "Look at its error");
  Meeting meeting;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (of_ranks[rank] / kEvents != chosen)
      throw Mismatch(text("rank ", rank, " has other JoinOptions than rank ", group_.rank()),
                     "Give all ranks the same divide_by_initial_world_size and throw_on_early_termination");
    const auto event = static_cast<Event>(of_ranks[rank] % kEvents);
    if (event == Event::kNoData) continue;
    if (!meeting.active.empty() && event != meeting.event) {
      const auto word = [](Event of) { return of == Event::kForward ? "forward()" : "backward()"; };
      throw Mismatch(text("rank ", rank, " is in ", word(event), " where rank ", meeting.active[0], " is in ",
                          word(meeting.event)),
                     "Within join(), ranks with data must call forward() and backward() alike");
    }
    meeting.event = event;
    meeting.active.push_back(rank);
  }
  if (!meeting.active.empty()) last_active_ = meeting.active[0];
  const size_t without = static_cast<size_t>(group_.size()) - meeting.active.size();
  if (without > 0 && meeting.event != Event::kNoData) {
    const std::string what = text(without, " of ", group_.size(), " ranks have no more data");
    if (options_.throw_on_early_termination)
      throw InvalidArgument(what, "Give all ranks as many batches, or do not set throw_on_early_termination");
    if (meeting.event == Event::kBackwardWithGraph)
      throw InvalidArgument(what + ", and backward() with create_graph needs some on all", "Use it outside of join()");
  }
  return meeting;
}

// What ranks with data do, until there are none. `failure` becomes what the other ranks' backward() threw, too, who may
// go on.
void Replica::Impl::follow(std::exception_ptr& failure) {
  for (;;) {
    const auto meeting = meet(Meetings::Event::kNoData);
    if (meeting.active.empty()) return;
    if (meeting.event == Meetings::Event::kForward) {
      parallel::broadcast_together(buffers, group, meeting.active[0]);
      continue;
    }
    try {
      gradients->backward_without_data();
    } catch (const InvalidArgument&) {
      if (!failure) failure = std::current_exception();
      continue;
    }
    if (meetings->options().after_backward) meetings->options().after_backward();
  }
}

void Replica::join(const std::function<void()>& body, JoinOptions options) {
  Impl& s = *impl_;
  thread_local bool is_in_join = false;
  if (is_in_join) throw InvalidArgument("join() is called within join()", "Join one DistributedDataParallel at a time");
  const AutoReset<bool> in_join(is_in_join, true);
  s.require_no_synchronized_norm("join(), because ranks without data do not call its layers");
  s.gradients->before_forward();
  s.meetings.emplace(s.group, std::move(options));
  struct End {
    Impl& s;
    ~End() {
      s.meetings.reset();
      s.gradients->set_contributors(s.group.size(), false);
    }
  } const end{s};
  std::exception_ptr failure;
  try {
    body();
    s.gradients->before_forward();
    s.follow(failure);
  } catch (...) {
    if (!failure) failure = std::current_exception();
    // The first error says more than those of what follows.
    try {
      s.gradients->before_forward();  // makes up for a backward() that threw, within join() as on the other ranks
    } catch (const std::exception&) {
    }
    try {
      if (!s.meetings->are_over()) s.meetings->meet(Meetings::Event::kFailed);
    } catch (const std::exception&) {
    }
    std::rethrow_exception(failure);
  }
  const at::NoGradGuard no_grad;
  parallel::broadcast_together(s.everything, s.group, s.meetings->last_active());
  if (failure) std::rethrow_exception(failure);
}

}  // namespace muster::ddp
