#include "comm/backends/hierarchical/hierarchical_backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <future>

#include "base/log.h"
#include "base/text.h"
#include "comm/backends/registry.h"
#include "comm/core/stragglers.h"
#include "comm/kit/callbacks_elsewhere.h"
#include "comm/kit/flatten.h"
#include "comm/kit/tensor_bytes.h"

namespace muster::comm::hierarchical_backend {
namespace {

using std::chrono::milliseconds;

// A rank that gives up waiting names the rank that it waited for. It must give up before the ranks that wait for it do.
// So each of an operation's three waits is this much longer than the previous one: inside the host, between hosts, and
// inside the host for the result. A group over a wire looks for news of the others for a second (kNews) before it
// fails.
constexpr milliseconds kSlack{1500};

}  // namespace

HierarchicalBackend::HierarchicalBackend(const BackendContext& context) : QueuedBackend(context, "hierarchical") {
  const int n = context.group.size;
  ranks_of_ =
      by_host(context.group.members.empty() ? std::vector<Member>(static_cast<size_t>(n)) : context.group.members);
  host_.resize(static_cast<size_t>(n));
  place_.resize(static_cast<size_t>(n));
  int next = 0;
  for (size_t host = 0; host < ranks_of_.size(); ++host)
    for (size_t place = 0; place < ranks_of_[host].size(); ++place) {
      host_[static_cast<size_t>(ranks_of_[host][place])] = static_cast<int>(host);
      place_[static_cast<size_t>(ranks_of_[host][place])] = static_cast<int>(place);
      by_host_ = by_host_ && ranks_of_[host][place] == next++;
    }
  own_host_ = host_of(context.group.rank);
  local_rank_ = place_[static_cast<size_t>(context.group.rank)];

  // Each of the three groups is a Muster group with its own prefix in the store.
  const auto hosts = static_cast<int>(ranks_of_.size());
  const auto make = [&](const std::string& backend, const std::string& prefix, const std::vector<int>& ranks) {
    BackendContext inner = context;
    inner.group.store_prefix = text(context.group.store_prefix, '/', prefix);
    inner.group.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), context.group.rank) - ranks.begin());
    inner.group.size = static_cast<int>(ranks.size());
    inner.host.black_box = nullptr;
    inner.options = {.board = backend == "shm" ? HostArrivals::words(n, hosts) : 0,
                     .host_arrivals = prefix == "leaders" ? arrivals_ : nullptr};
    inner.group.shown_ranks.clear();
    inner.host.heaps.clear();
    inner.group.members.clear();
    inner.group.global_ranks.clear();
    for (const int r : ranks) {
      const auto i = static_cast<size_t>(r);
      inner.group.shown_ranks.push_back(shown(r));
      inner.group.global_ranks.push_back(context.group.global_ranks.empty() ? r : context.group.global_ranks[i]);
      if (!context.host.heaps.empty()) inner.host.heaps.push_back(context.host.heaps[i]);
      if (!context.group.members.empty()) inner.group.members.push_back(context.group.members[i]);
    }
    return create_backend(backend, inner);
  };
  const std::string between = context.options.inner.empty() ? "gloo" : context.options.inner;
  std::vector<int> leaders, everybody;
  for (const auto& ranks : ranks_of_) leaders.push_back(ranks[0]);
  for (int r = 0; r < n; ++r) everybody.push_back(r);
  local_ = make("shm", text("host", own_host_), ranks_of_[static_cast<size_t>(own_host_)]);
  arrivals_ = std::make_shared<HostArrivals>(n, hosts, local_->board());
  if (leads()) leaders_ = make(between, "leaders", leaders);
  all_ = make(between, "all", everybody);
  if (context.group.rank == 0) {
    MUSTER_LOG(kInfo) << "group '" << group_name() << "': " << n << " ranks on " << ranks_of_.size()
                      << " hosts; shm inside each, " << between << " between their first ranks";
  }
}

// --- who comes last ---

const Stragglers* HierarchicalBackend::stragglers() const {
  return all_->stragglers() ? &arrivals_->ranks : nullptr;  // the leaders' group has the same backend as all_
}

std::string HierarchicalBackend::straggler_report(std::chrono::nanoseconds at_least) const {
  if (!stragglers()) return {};
  std::string report = arrivals_->ranks.report(group_name(), at_least);
  if (report.empty())
    report = arrivals_->hosts.report(group_name(), at_least, [this](int host) {
      const auto& ranks = ranks_of_[static_cast<size_t>(host)];
      return text("the host of ", ranks.size() == 1 ? "rank " : "ranks ", join(ranks));
    });
  return report;
}

// Runs a leader's step between the hosts.
void HierarchicalBackend::between_hosts(const Operation& step) {
  const LastHere last = find_last();
  arrivals_->counts_next = true;
  leaders_->run(step);
  tell_last(last);
}

HierarchicalBackend::LastHere HierarchicalBackend::find_last() const {
  LastHere found{getRank(), std::chrono::nanoseconds::max()};  // if no other rank of this host had to come before
  if (const auto* const here = local_->stragglers(); !first_step_ && here->size() > 1) {
    found.rank = ranks_of_[static_cast<size_t>(own_host_)][static_cast<size_t>(here->last().rank)];
    found.late = here->time(here->last().late);
  }
  return found;
}

void HierarchicalBackend::tell_last(const LastHere& last) {
  arrivals_->last = last.rank;
  arrivals_->late = last.late;
  if (ranks_of_.size() == 1)  // there is no other host to tell
    arrivals_->ranks.add({last.rank, getSize() > 1 ? static_cast<uint64_t>(last.late.count()) : uint64_t{0}});
}

// --- membership and failure ---

void HierarchicalBackend::leave_group(const std::string& cause) {
  // local_ first: a job of leaders_ may wait in it, and leave() waits for the job.
  for (Inner* const group : {&local_, &leaders_, &all_})
    if (*group) (*group)->leave(cause);
}

void HierarchicalBackend::fail_group(const Error& cause) {
  for (Inner* const group : {&local_, &all_, &leaders_})  // local_ first: it does not need a store that answers
    if (*group) (*group)->fail(cause);
}

// Does not look for a failure of the group: each of the inner groups throws it when it is used next.
void HierarchicalBackend::check() const {
  if (has_left()) throw Aborted(text("group '", group_name(), "' is closing on rank ", shown(getRank())));
}

std::exception_ptr HierarchicalBackend::known_failure() {
  if (in_fork() || has_left()) return nullptr;
  for (const Inner* const group : {&local_, &all_, &leaders_}) {
    if (!*group) continue;
    try {
      if (const auto known = (*group)->known_failure()) std::rethrow_exception(known);
    } catch (const Error& error) {
      return as_own(error);
    }
  }
  return nullptr;
}

bool HierarchicalBackend::failed() const {
  for (const Inner* const group : {&local_, &all_})
    if (const auto* const ours = dynamic_cast<const QueuedBackend*>(group->get()); ours && ours->failed()) return true;
  return has_left();
}

// --- collectives ---

Operation HierarchicalBackend::step(const Operation& whole, OpKind kind, const at::Tensor& tensor, int peer,
                                    Deadline deadline) const {
  const auto left = std::chrono::ceil<milliseconds>(deadline.left());
  return {.kind = kind,
          // An average is divided at the end, and factors have been applied.
          .op = whole.op == ReduceOp::AVG || whole.op == ReduceOp::PREMUL_SUM ? ReduceOp::SUM : whole.op,
          .peer = peer,
          .tensor = tensor,
          .timeout = std::clamp(left, milliseconds(1), milliseconds(std::chrono::hours(24 * 365))),
          .announced = descriptor_of(whole),
          .site = whole.site};
}

Deadline HierarchicalBackend::later(Deadline deadline, int steps) { return deadline.later(steps * kSlack); }

// The deadline of the last step inside the host. A leader does not wait longer there than for the other steps, because
// it waits only for ranks that wait for no other rank. And the leader of another host may already wait for this leader
// in the next operation.
Deadline HierarchicalBackend::last_wait(Deadline deadline) const {
  return leads() ? Deadline::after(std::max<std::chrono::nanoseconds>(deadline.left(), kSlack)) : later(deadline, 2);
}

void HierarchicalBackend::execute(const Operation& operation, Deadline deadline, bool) {
  check();
  set_last_operation(operation.kind, sequence_++);
  deadline_ = deadline;
  first_step_ = true;
  guarded([&] { execute_in_steps(operation, deadline); });
}

void HierarchicalBackend::run_in_host(const Operation& step) {
  local_->run(step);
  if (std::exchange(first_step_, false)) after_first_step();
}

void HierarchicalBackend::after_first_step() const {
  faults().at(FaultPhase::kPosted, sequence_ - 1, deadline_);
  faults().at(FaultPhase::kMiddle, sequence_ - 1, deadline_);
}

// --- messages ---

Operation HierarchicalBackend::routed(const Operation& message, Inner& over) const {
  Operation inner = message;
  over = all_;
  if (message.peer == kAnySource || host_of(message.peer) == own_host_) {
    over = local_;
    if (message.peer != kAnySource) inner.peer = place_[static_cast<size_t>(message.peer)];
  }
  return inner;
}

void HierarchicalBackend::require_possible(const Operation& operation) const {
  if (!is_message(operation.kind)) return;
  if (operation.tag < 0)
    throw InvalidArgument(text(to_string(operation.kind), ": tag: expected 0 or more, got ", operation.tag));
  const bool may_cross = operation.peer == kAnySource || host_of(operation.peer) != own_host_;
  if (const auto* const wire = dynamic_cast<const QueuedBackend*>(all_.get()); wire && may_cross)
    wire->require_possible(operation);
}

bool HierarchicalBackend::must_queue(const Operation& message) {
  if (message.kind != OpKind::kRecv || ranks_of_.size() == 1) return false;
  return message.peer == kAnySource || receives_.has(message.tag);
}

void HierarchicalBackend::run_message(const Operation& operation, Deadline deadline) {
  check();
  Inner over;
  Operation inner = routed(operation, over);
  if (must_queue(operation)) {
    const auto posted = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Work>>>();
    queue(operation, deadline, [posted](const auto& under_way, int, const std::exception_ptr& error) {
      if (error)
        posted->set_exception(error);
      else
        posted->set_value(under_way);
    });
    const auto under_way = posted->get_future().get();
    return guarded([&] { under_way->wait(); });
  }
  inner.timeout = step(operation, operation.kind, {}, 0, deadline).timeout;
  guarded([&] { over->run(inner); });
}

void HierarchicalBackend::submit_message(const WorkPtr& work, Deadline deadline) {
  check();
  Inner over;
  const Operation& message = work->operations()[0];
  Operation inner = routed(message, over);
  if (must_queue(message)) {
    return queue(message, deadline, [this, work](const auto& under_way, int source, const std::exception_ptr& error) {
      if (error)
        work->complete(error);
      else
        complete_after(work, under_way, source);
    });
  }
  inner.timeout = step(inner, inner.kind, {}, 0, deadline).timeout;
  c10::intrusive_ptr<c10d::Work> under_way;
  guarded([&] { under_way = over->submit(std::move(inner)); });
  complete_after(work, under_way, message.peer);
}

void HierarchicalBackend::complete_after(const WorkPtr& work, const c10::intrusive_ptr<c10d::Work>& under_way,
                                         int source) {
  under_way->getFuture()->addCallback([this, work, under_way, source](c10::ivalue::Future& done) {
    std::exception_ptr error = done.hasError() ? done.exception_ptr() : nullptr;
    if (!error) {
      const Operation& message = work->operations()[0];
      count(message);
      if (message.kind == OpKind::kRecv)
        work->set_source(source != kAnySource
                             ? source
                             : ranks_of_[static_cast<size_t>(own_host_)][static_cast<size_t>(under_way->sourceRank())]);
    } else {
      try {
        guarded([&] { std::rethrow_exception(error); });
      } catch (...) {
        error = std::current_exception();
      }
    }
    work->complete(std::move(error));
  });
}

void HierarchicalBackend::queue(const Operation& message, Deadline deadline, Posted posted) {
  hold_memory();
  const auto attempt = [this, message, deadline, began = Clock::now(),
                        posted = std::move(posted)](ReceiveQueue::Turn turn) -> ReceiveQueue::Outcome {
    Taken taken;
    const CallbacksElsewhere elsewhere;  // those of other receives, which may wait for this line
    try {
      if (turn == ReceiveQueue::Turn::kStop)
        throw Aborted(text("group '", group_name(), "' is closing on rank ", shown(getRank())));
      guarded([&] {
        if (turn == ReceiveQueue::Turn::kLate) {
          throw_late(message, began);
        } else if (message.peer == kAnySource) {
          taken = take_from_any(message, deadline, began);
        } else {
          Inner over;
          Operation inner = routed(message, over);
          inner.timeout = step(message, message.kind, {}, 0, deadline).timeout;
          taken = {.work = over->submit(std::move(inner)), .source = message.peer};
        }
      });
    } catch (...) {
      return {.over = true, .then = [posted, error = std::current_exception()] { posted(nullptr, kAnySource, error); }};
    }
    if (!taken.work) return {};
    return {.over = true, .then = [posted, taken] { posted(taken.work, taken.source, nullptr); }};
  };
  receives_.add(message.tag, deadline, attempt);
}

void HierarchicalBackend::throw_late(const Operation& message, Clock::time_point began) const {
  const bool any = message.peer == kAnySource;
  throw TimeoutError(text("recv of ", describe(message_payload(message)), " with tag ", message.tag, " from ",
                          any ? "any rank" : text("rank ", shown(message.peer)), " on rank ", shown(getRank()),
                          " timed out after ", describe(Clock::now() - began), ": ",
                          any ? "no rank sent it" : "an earlier receive from any rank with its tag still waits"),
                     any ? std::vector<int>{} : std::vector<int>{shown(message.peer)},
                     "Look whether the senders hang, or raise the timeout");
}

Backend::Taken HierarchicalBackend::take_from_any(const Operation& message, Deadline deadline,
                                                  Clock::time_point began) {
  check();
  Operation inner = message;
  inner.timeout = step(message, message.kind, {}, 0, deadline).timeout;
  const auto in_host = [&] {
    Taken taken = local_->take_message(inner, first_place_);
    if (!taken.work) return taken;
    local_first_ = false;
    first_place_ = taken.source + 1;
    taken.source = ranks_of_[static_cast<size_t>(own_host_)][static_cast<size_t>(taken.source)];
    return taken;
  };
  const bool looked_here = local_first_;
  Taken taken;
  if (looked_here) taken = in_host();
  if (!taken.work) {
    taken = all_->take_message(inner, 0);
    if (taken.work) local_first_ = true;
  }
  const bool all_gone = taken.all_gone;
  // If all others have left, messages that ranks of this host sent before they left are here by now.
  if (!taken.work && (!looked_here || all_gone)) taken = in_host();
  if (taken.work) return taken;
  if (all_gone)
    throw PeerLost(getSize() == 1 ? -1 : shown(getRank() == 0 ? 1 : 0), 0,
                   text("all other ranks left group '", group_name(), "' while rank ", shown(getRank()),
                        " waited to receive from any of them"));
  if (deadline.passed()) throw_late(message, began);
  return {};
}

c10::intrusive_ptr<Backend> create(const BackendContext& context) {
  return c10::make_intrusive<HierarchicalBackend>(context);
}

std::string unavailable_reason() { return {}; }

}  // namespace muster::comm::hierarchical_backend
