#include "comm/backends/hierarchical/hierarchical_backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "comm/byte_parts.h"
#include "comm/failure_note.h"
#include "comm/flatten.h"

namespace muster::comm::hierarchical_backend {
namespace {

using std::chrono::milliseconds;

// Steps inside a host wait a little longer than those between hosts, so that what went wrong between them is heard
// first.
constexpr milliseconds kSlack{250};
constexpr int kResultTag = -1;  // below the tags of users

// In what a reduction is carried from one step to the next.
at::ScalarType carrier(const Operation& operation) {
  const at::ScalarType dtype = operation.tensor.scalar_type();
  const bool rounds =
      operation.op == ReduceOp::SUM || operation.op == ReduceOp::AVG || operation.op == ReduceOp::PRODUCT;
  return rounds && (dtype == at::kHalf || dtype == at::kBFloat16) ? at::kFloat : dtype;
}

// AVG of integers divides once, after the sum in 64 bits: only a backend that sees all contributions can.
bool needs_all_at_once(const Operation& operation) {
  return operation.op == ReduceOp::AVG && at::isIntegralType(operation.tensor.scalar_type(), /*includeBool=*/true);
}

// Of AVG: by parts, as the kernels do, where a complex division would round otherwise.
void divide(const at::Tensor& sum, int ranks) { (sum.is_complex() ? at::view_as_real(sum) : sum).div_(ranks); }

}  // namespace

HierarchicalBackend::HierarchicalBackend(const BackendContext& context)
    : LaneBackend(context, "hierarchical"), on_leave_(context.on_leave) {
  const int n = context.size;
  std::vector<int> number;  // by host of the World: its number here
  for (int r = 0; r < n; ++r) {
    const auto world_host =
        context.members.empty() ? size_t{0} : static_cast<size_t>(context.members[static_cast<size_t>(r)].host);
    if (number.size() <= world_host) number.resize(world_host + 1, -1);
    if (number[world_host] < 0) {
      number[world_host] = static_cast<int>(ranks_of_.size());
      ranks_of_.emplace_back();
    }
    host_.push_back(number[world_host]);
    place_.push_back(static_cast<int>(ranks_of_[static_cast<size_t>(host_.back())].size()));
    ranks_of_[static_cast<size_t>(host_.back())].push_back(r);
  }
  own_host_ = host_of(context.rank);
  local_rank_ = place_[static_cast<size_t>(context.rank)];

  // Each of the three groups is one of Muster's own, under names of its own in the store.
  const auto make = [&](const std::string& backend, const std::string& prefix, const std::vector<int>& ranks) {
    BackendContext inner = context;
    inner.store_prefix = text(context.store_prefix, '/', prefix);
    inner.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), context.rank) - ranks.begin());
    inner.size = static_cast<int>(ranks.size());
    inner.faults = {};
    inner.black_box = nullptr;
    inner.for_pytorch = false;
    inner.on_leave = nullptr;
    inner.inner.clear();
    inner.shown_ranks = ranks;
    inner.heaps.clear();
    inner.members.clear();
    for (const int r : ranks) {
      const auto i = static_cast<size_t>(r);
      if (!context.heaps.empty()) inner.heaps.push_back(context.heaps[i]);
      if (!context.members.empty()) inner.members.push_back(context.members[i]);
    }
    return create_backend(backend, inner);
  };
  const std::string between = context.inner.empty() ? "gloo" : context.inner;
  std::vector<int> leaders, everybody;
  for (const auto& ranks : ranks_of_) leaders.push_back(ranks[0]);
  for (int r = 0; r < n; ++r) everybody.push_back(r);
  local_ = make("shm", text("host", own_host_), ranks_of_[static_cast<size_t>(own_host_)]);
  if (leads()) leaders_ = make(between, "leaders", leaders);
  all_ = make(between, "all", everybody);
  if (context.rank == 0) {
    MUSTER_LOG(kInfo) << "group '" << group_name() << "': " << n << " ranks on " << ranks_of_.size()
                      << " hosts; shm inside each, " << between << " between their first ranks";
  }
}

// --- membership and failure ---

void HierarchicalBackend::leave(const std::string& cause) {
  if (has_left_.exchange(true)) return;
  for (Inner* const group : {&leaders_, &all_, &local_})
    if (*group) (*group)->leave(cause);
  stop_lane();
  if (on_leave_) on_leave_(this);
}

void HierarchicalBackend::fail(const Error& cause) {
  for (Inner* const group : {&leaders_, &all_, &local_})
    if (*group) (*group)->fail(cause);
}

void HierarchicalBackend::abort() { fail(Aborted(text("rank ", getRank(), " aborted group '", group_name(), "'"))); }

// Whether the group has failed shows in each of its parts, and each says so itself when it is used next.
void HierarchicalBackend::check() const {
  if (has_left_) throw Aborted(text("group '", group_name(), "' is closing on rank ", getRank()));
}

template <typename Fn>
void HierarchicalBackend::guarded(Fn&& fn) {
  try {
    fn();
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error& error) {
    fail(error);
    throw;
  } catch (const std::exception& error) {
    fail(Unavailable(text("rank ", getRank(), " failed: ", error.what())));
    throw;
  }
}

// --- collectives ---

Operation HierarchicalBackend::step(const Operation& whole, OpKind kind, const at::Tensor& tensor, int peer,
                                    Deadline deadline) const {
  const auto left = std::chrono::ceil<milliseconds>(deadline.left());
  return {.kind = kind,
          .op = whole.op == ReduceOp::AVG ? ReduceOp::SUM : whole.op,
          .peer = peer,
          .tensor = tensor,
          .timeout = std::clamp(left, milliseconds(1), milliseconds(std::chrono::hours(24 * 365))),
          .announced = descriptor_of(whole),
          .site = whole.site};
}

void HierarchicalBackend::execute(const Operation& operation, Deadline deadline, bool) {
  check();
  ++sequence_;
  guarded([&] { execute_in_steps(operation, deadline); });
}

void HierarchicalBackend::execute_in_steps(const Operation& operation, Deadline deadline) {
  const at::NoGradGuard no_grad;
  const auto local_barrier = [&] {
    local_->run(step(operation, OpKind::kBarrier, {}, 0, Deadline::after(deadline.left() + kSlack)));
  };
  const auto leaders_barrier = [&] {
    if (leads()) leaders_->run(step(operation, OpKind::kBarrier, {}, 0, deadline));
  };
  const auto directly = [&] {
    // A rank that calls something else waits in its host's group or in the leaders': there the two must meet.
    local_barrier();
    leaders_barrier();
    Operation whole = operation;
    whole.timeout = step(operation, operation.kind, {}, 0, deadline).timeout;
    all_->run(whole);
  };
  switch (operation.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return needs_all_at_once(operation) ? directly() : all_reduce(operation, deadline);
    case OpKind::kBroadcast:
      return broadcast(operation, deadline);
    case OpKind::kAllGather:
      return all_gather(operation, deadline);
    case OpKind::kReduceScatter:
      return needs_all_at_once(operation) ? directly() : reduce_scatter(operation, deadline);
    case OpKind::kBarrier:
      local_barrier();
      leaders_barrier();
      return local_barrier();
    default:
      return directly();
  }
}

void HierarchicalBackend::all_reduce(const Operation& operation, Deadline deadline) {
  const Deadline inside = Deadline::after(deadline.left() + kSlack);
  const bool to_one = operation.kind == OpKind::kReduce;
  const at::Tensor& tensor = operation.tensor;
  const auto dtype = carrier(operation);
  at::Tensor sum = tensor;
  if (dtype != tensor.scalar_type())
    sum = tensor.to(dtype);
  else if (to_one && leads() && getRank() != operation.peer)
    sum = tensor.clone();  // a leader that is not the root keeps what it holds
  local_->run(step(operation, OpKind::kReduce, sum, 0, inside));
  if (leads()) {
    if (to_one)
      leaders_->run(step(operation, OpKind::kReduce, sum, host_of(operation.peer), deadline));
    else
      leaders_->run(step(operation, OpKind::kAllReduce, sum, 0, deadline));
    if (operation.op == ReduceOp::AVG) divide(sum, getSize());
    if ((!to_one || getRank() == operation.peer) && !sum.is_same(tensor)) tensor.copy_(sum);
  }
  if (!to_one) {
    local_->run(step(operation, OpKind::kBroadcast, tensor, 0, inside));
    return;
  }
  // The root's leader has the result; the root may be another.
  const int root_place = place_[static_cast<size_t>(operation.peer)];
  if (own_host_ != host_of(operation.peer) || root_place == 0) return;
  if (leads()) {
    Operation handing = step(operation, OpKind::kSend, sum.to(tensor.scalar_type()), root_place, inside);
    handing.tag = kResultTag;
    local_->run(handing);
  } else if (getRank() == operation.peer) {
    Operation taking = step(operation, OpKind::kRecv, tensor, 0, inside);
    taking.tag = kResultTag;
    local_->run(taking);
  }
}

void HierarchicalBackend::broadcast(const Operation& operation, Deadline deadline) {
  const Deadline inside = Deadline::after(deadline.left() + kSlack);
  const int host = host_of(operation.peer);
  const auto in_host = [&](int root) {
    local_->run(step(operation, OpKind::kBroadcast, operation.tensor, root, inside));
  };
  if (own_host_ == host) in_host(place_[static_cast<size_t>(operation.peer)]);
  if (leads()) leaders_->run(step(operation, OpKind::kBroadcast, operation.tensor, host, deadline));
  if (own_host_ != host) in_host(0);
}

void HierarchicalBackend::all_gather(const Operation& operation, Deadline deadline) {
  const Deadline inside = Deadline::after(deadline.left() + kSlack);
  Flatten flat;
  const at::Tensor input = flat.input(operation.tensor).view(-1);
  const int64_t count = input.numel();
  // All parts, the hosts' one after another.
  const at::Tensor all = at::empty({getSize(), count}, input.options());
  std::vector<at::Tensor> by_host;
  int64_t row = 0;
  for (const auto& ranks : ranks_of_) {
    by_host.push_back(all.narrow(0, row, static_cast<int64_t>(ranks.size())));
    row += by_host.back().size(0);
  }
  const at::Tensor& own = by_host[static_cast<size_t>(own_host_)];
  Operation collecting = step(operation, OpKind::kGather, input, 0, inside);
  if (leads()) collecting.outputs = {own};
  local_->run(collecting);
  if (leads()) {
    Operation exchanging = step(operation, OpKind::kAllGather, own.clone(), 0, deadline);
    exchanging.outputs = by_host;
    leaders_->run(exchanging);
  }
  local_->run(step(operation, OpKind::kBroadcast, all, 0, inside));
  const auto outputs = flat.outputs(operation.outputs);
  const auto parts = parts_of<Bytes>(outputs, static_cast<size_t>(getSize()), input.nbytes());
  ConstBytes from = data_of(all);
  for (const auto& ranks : ranks_of_)
    for (const int r : ranks) {
      if (input.nbytes() > 0) std::memcpy(parts[static_cast<size_t>(r)], from, input.nbytes());
      from += input.nbytes();
    }
  flat.copy_back();
}

void HierarchicalBackend::reduce_scatter(const Operation& operation, Deadline deadline) {
  const Deadline inside = Deadline::after(deadline.left() + kSlack);
  const int64_t count = operation.tensor.numel();
  Flatten flat;
  const auto inputs = flat.inputs(operation.inputs);
  // All parts, those of each host's ranks one after another.
  at::Tensor all = at::empty({getSize(), count}, operation.tensor.options());
  const auto parts = parts_of<ConstBytes>(inputs, static_cast<size_t>(getSize()), operation.tensor.nbytes());
  Bytes to = data_of(all);
  for (const auto& ranks : ranks_of_)
    for (const int r : ranks) {
      if (count > 0) std::memcpy(to, parts[static_cast<size_t>(r)], operation.tensor.nbytes());
      to += operation.tensor.nbytes();
    }
  all = all.to(carrier(operation));
  local_->run(step(operation, OpKind::kReduce, all, 0, inside));
  Operation handing = step(operation, OpKind::kScatter, operation.tensor, 0, inside);
  if (leads()) {
    std::vector<at::Tensor> by_host;
    int64_t row = 0;
    for (const auto& ranks : ranks_of_) {
      by_host.push_back(all.narrow(0, row, static_cast<int64_t>(ranks.size())));
      row += by_host.back().size(0);
    }
    at::Tensor own = by_host[static_cast<size_t>(own_host_)].clone();
    Operation exchanging = step(operation, OpKind::kReduceScatter, own, 0, deadline);
    exchanging.inputs = by_host;
    leaders_->run(exchanging);
    if (operation.op == ReduceOp::AVG) divide(own, getSize());
    own = own.to(operation.tensor.scalar_type());
    handing.inputs = {own};
  }
  local_->run(handing);
}

// --- messages ---

Operation HierarchicalBackend::routed(const Operation& message, Inner& over) const {
  if (message.peer == kAnySource && ranks_of_.size() > 1)
    throw InvalidArgument(
        text(to_string(message.kind), ": backend 'hierarchical' cannot receive from any source over several hosts"),
        "Name the source, or use backend gloo or mpi");
  if (message.tag < 0) throw InvalidArgument(text(to_string(message.kind), ": tag ", message.tag, " is negative"));
  Operation inner = message;
  over = all_;
  if (message.peer == kAnySource || host_of(message.peer) == own_host_) {
    over = local_;
    if (message.peer != kAnySource) inner.peer = place_[static_cast<size_t>(message.peer)];
  }
  return inner;
}

void HierarchicalBackend::run_message(const Operation& operation, Deadline deadline) {
  check();
  Inner over;
  Operation inner = routed(operation, over);
  inner.timeout = step(operation, operation.kind, {}, 0, deadline).timeout;
  guarded([&] { over->run(inner); });
}

void HierarchicalBackend::submit_message(const WorkPtr& work, Deadline deadline) {
  check();
  Inner over;
  Operation inner = routed(work->operations()[0], over);
  inner.timeout = step(inner, inner.kind, {}, 0, deadline).timeout;
  c10::intrusive_ptr<c10d::Work> under_way;
  guarded([&] { under_way = over->submit(std::move(inner)); });
  under_way->getFuture()->addCallback([this, work, under_way](c10::ivalue::Future& done) {
    std::exception_ptr error = done.hasError() ? done.exception_ptr() : nullptr;
    if (!error) {
      const Operation& message = work->operations()[0];
      count(message);
      if (message.kind == OpKind::kRecv)
        work->set_source(message.peer != kAnySource
                             ? message.peer
                             : ranks_of_[static_cast<size_t>(own_host_)][static_cast<size_t>(under_way->sourceRank())]);
    } else {
      try {
        guarded([&] { std::rethrow_exception(error); });
      } catch (...) {
      }
    }
    work->complete(std::move(error));
  });
}

c10::intrusive_ptr<Backend> create(const BackendContext& context) {
  return c10::make_intrusive<HierarchicalBackend>(context);
}

std::string why_not() { return {}; }

}  // namespace muster::comm::hierarchical_backend
