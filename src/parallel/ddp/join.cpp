#include "parallel/ddp/join.h"

#include <ATen/ops/zeros.h>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::ddp {

Meetings::Meeting Meetings::meet(Event mine) {
  const at::Tensor events = at::zeros({group_.size()}, at::kInt);
  int32_t* const of_ranks = events.mutable_data_ptr<int32_t>();
  of_ranks[group_.rank()] = static_cast<int32_t>(mine);
  all_reduce(events, {.group = group_});
  Meeting meeting;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto event = static_cast<Event>(of_ranks[rank]);
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
  if (options_.throw_on_early_termination && meeting.event != Event::kNoData &&
      meeting.active.size() < static_cast<size_t>(group_.size()))
    throw InvalidArgument(text(static_cast<size_t>(group_.size()) - meeting.active.size(), " of ", group_.size(),
                               " ranks have no more data"),
                          "Give all ranks as many batches, or do not set throw_on_early_termination");
  return meeting;
}

}  // namespace muster::ddp
