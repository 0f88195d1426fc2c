#include "parallel/ddp/join.h"

#include <ATen/ops/zeros.h>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::ddp {

Meetings::Meeting Meetings::meet(Event mine) {
  const at::Tensor events = at::zeros({group_.size()}, at::kInt);
  int32_t* const of_ranks = events.mutable_data_ptr<int32_t>();
  constexpr int32_t kEvents = 4;
  const int32_t chosen =
      (options_.divide_by_initial_world_size ? 1 : 0) + (options_.throw_on_early_termination ? 2 : 0);
  of_ranks[group_.rank()] = static_cast<int32_t>(mine) + kEvents * chosen;
  all_reduce(events, {.group = group_});
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
  if (without == 0 || meeting.event == Event::kNoData) return meeting;
  const std::string what = text(without, " of ", group_.size(), " ranks have no more data");
  if (options_.throw_on_early_termination)
    throw InvalidArgument(what, "Give all ranks as many batches, or do not set throw_on_early_termination");
  if (meeting.event == Event::kBackwardWithGraph)
    throw InvalidArgument(what + ", and backward() with create_graph needs some on all", "Use it outside of join()");
  return meeting;
}

}  // namespace muster::ddp
