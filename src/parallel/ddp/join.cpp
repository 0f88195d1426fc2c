#include "parallel/ddp/join.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "base/auto_reset.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/ddp/replica.h"

namespace muster::ddp {

namespace {

constexpr int kEvents = 5, kChoices = 4;

std::string words_of(const Meetings::Step& step) {
  std::string words = step.event == Meetings::Event::kForward ? "forward()" : "backward()";
  if (step.replica > 0) words += text(" of number ", step.replica, " of JoinOptions::with");
  if (step.more) words += " and in that of another";
  return words;
}

}  // namespace

Meetings::Meeting Meetings::meet(const Step& mine) {
  if (error_) std::rethrow_exception(error_);
  try {
    return meet_once(mine);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
}

Meetings::Meeting Meetings::meet_once(const Step& mine) {
  const at::Tensor steps = at::zeros({group_.size()}, at::kInt);
  int32_t* const of_ranks = steps.mutable_data_ptr<int32_t>();
  const int chosen = (options_.divide_by_initial_world_size ? 1 : 0) + (options_.throw_on_early_termination ? 2 : 0);
  of_ranks[group_.rank()] =
      static_cast<int>(mine.event) + kEvents * (chosen + kChoices * ((mine.more ? 1 : 0) + 2 * mine.replica));
  all_reduce(steps, {.group = group_});
  for (int rank = 0; rank < group_.size(); ++rank)
    if (static_cast<Event>(of_ranks[rank] % kEvents) == Event::kFailed && mine.event != Event::kFailed)
      throw Aborted(text("rank ", group_.global_rank(rank), " left join() with an error"), "Look at its error");
  Meeting meeting;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const int of_rank = of_ranks[rank], above = of_rank / kEvents;
    if (above % kChoices != chosen)
      throw Mismatch(text("rank ", rank, " has other JoinOptions than rank ", group_.rank()),
                     "Give all ranks the same divide_by_initial_world_size and throw_on_early_termination");
    const Step step{.event = static_cast<Event>(of_rank % kEvents),
                    .replica = above / kChoices / 2,
                    .more = above / kChoices % 2 != 0};
    if (step.event == Event::kNoData) continue;
    if (!meeting.active.empty() && step != meeting.step)
      throw Mismatch(text("rank ", rank, " is in ", words_of(step), " where rank ", meeting.active[0], " is in ",
                          words_of(meeting.step)),
                     "Within join(), ranks with data must call forward() and backward() alike");
    meeting.step = step;
    meeting.active.push_back(rank);
  }
  if (!meeting.active.empty()) last_active_ = meeting.active[0];
  const size_t without = static_cast<size_t>(group_.size()) - meeting.active.size();
  if (without > 0 && meeting.step.event != Event::kNoData) {
    const std::string what = text(without, " of ", group_.size(), " ranks have no more data");
    if (options_.throw_on_early_termination)
      throw InvalidArgument(what, "Give all ranks as many batches, or do not set throw_on_early_termination");
    if (meeting.step.event == Event::kBackwardWithGraph)
      throw InvalidArgument(what + ", and backward() with create_graph needs some on all", "Use it outside of join()");
  }
  return meeting;
}

Meetings::Meeting Replica::Impl::meet(Meetings::Event mine) {
  Meetings::Step step{.event = mine};
  if (mine != Meetings::Event::kNoData) step.replica = place_in_join;
  for (const Impl* const other : joined) step.more = step.more || (other != this && other->gradients->is_in_backward());
  const auto meeting = meetings->meet(step);
  if (!meeting.active.empty())
    joined[static_cast<size_t>(meeting.step.replica)]->gradients->set_contributors(
        static_cast<int>(meeting.active.size()), !meetings->options().divide_by_initial_world_size);
  return meeting;
}

// What ranks with data do, until there are none. `failure` becomes what the other ranks' backward() threw, too, who may
// go on.
void Replica::Impl::follow(std::exception_ptr& failure) {
  std::vector<const std::function<void()>*> after;  // the backward() that is under way
  for (;;) {
    const auto meeting = meet(Meetings::Event::kNoData);
    if (meeting.active.empty()) return;
    Impl& s = *joined[static_cast<size_t>(meeting.step.replica)];
    if (meeting.step.event == Meetings::Event::kForward) {
      parallel::broadcast_together(s.buffers, s.group, meeting.active[0]);
      continue;
    }
    try {
      s.gradients->backward_without_data();
      if (s.after_backward) after.push_back(&s.after_backward);
    } catch (const InvalidArgument&) {
      if (!failure) failure = std::current_exception();
    }
    if (meeting.step.more) continue;
    for (const auto* const each : std::exchange(after, {})) (*each)();
  }
}

void Replica::join(const std::function<void()>& body, JoinOptions options) {
  Impl& s = *impl_;
  thread_local bool is_in_join = false;
  if (is_in_join)
    throw InvalidArgument("join() is called within join()",
                          "Give one join() the other DistributedDataParallels in JoinOptions::with");
  const AutoReset<bool> in_join(is_in_join, true);
  std::vector<Impl*> joined{&s};
  for (const Joined& other : options.with) joined.push_back(other.replica_->impl_.get());
  for (size_t i = 0; i < joined.size(); ++i) {
    if (std::find(joined.begin(), joined.begin() + static_cast<std::ptrdiff_t>(i), joined[i]) !=
        joined.begin() + static_cast<std::ptrdiff_t>(i))
      throw InvalidArgument("join() gets a DistributedDataParallel twice", "Name each once");
    if (&comm::backend_of(joined[i]->group) != &comm::backend_of(s.group))
      throw InvalidArgument("join() gets DistributedDataParallels of different groups", "Give them one group");
    joined[i]->require_no_synchronized_norm("join(), because ranks without data do not call its layers");
  }
  for (Impl* const each : joined) each->gradients->end_failed_backward();

  const auto meetings = std::make_shared<Meetings>(s.group, options);
  for (size_t i = 0; i < joined.size(); ++i) {
    Impl& each = *joined[i];
    each.meetings = meetings;
    each.joined = joined;
    each.place_in_join = static_cast<int>(i);
    each.after_backward = i == 0 ? options.after_backward : options.with[i - 1].after_backward_;
    each.gradients->set_averages_at_end(joined.size() > 1);
  }
  struct End {
    const std::vector<Impl*>& joined;
    ~End() {
      for (Impl* const each : joined) {
        each->meetings.reset();
        each->joined.clear();
        each->after_backward = {};
        each->gradients->set_averages_at_end(false);
        each->gradients->set_contributors(each->group.size(), false);
      }
    }
  } const end{joined};
  std::exception_ptr failure;
  try {
    body();
    for (Impl* const each : joined) each->gradients->end_failed_backward();
    s.follow(failure);
  } catch (...) {
    if (!failure) failure = std::current_exception();
    // The first error says more than those of what follows.
    try {
      // Makes up for a backward() that threw, within join() as on the other ranks.
      for (Impl* const each : joined) each->gradients->end_failed_backward();
    } catch (const std::exception&) {
    }
    try {
      if (!meetings->are_over()) s.meet(Meetings::Event::kFailed);
    } catch (const std::exception&) {
    }
    std::rethrow_exception(failure);
  }
  const at::NoGradGuard no_grad;
  for (const Impl* const each : joined)
    parallel::broadcast_together(each->everything, each->group, meetings->last_active());
  if (failure) std::rethrow_exception(failure);
}

}  // namespace muster::ddp
