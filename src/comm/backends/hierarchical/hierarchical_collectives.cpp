// Collectives over several hosts: inside each host, between the hosts' first ranks, and inside each host for the
// result.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

#include "base/copy.h"
#include "comm/backends/hierarchical/hierarchical_backend.h"
#include "comm/kit/flatten.h"
#include "comm/kit/tensor_bytes.h"

namespace muster::comm::hierarchical_backend {
namespace {

constexpr int kResultTag = -1;  // below the tags of users
// How many elements move together: kSlice for each host, within these bounds.
constexpr int64_t kSlice = int64_t{64} << 10, kBlock = int64_t{512} << 10, kLargestBlock = int64_t{4} << 20;

// The dtype in which a reduction's values go from one step to the next.
at::ScalarType carrier(const Operation& operation) {
  const at::ScalarType dtype = operation.tensor.scalar_type();
  const bool rounds = operation.op == ReduceOp::SUM || operation.op == ReduceOp::AVG ||
                      operation.op == ReduceOp::PRODUCT || operation.op == ReduceOp::PREMUL_SUM;
  return rounds && (dtype == at::kHalf || dtype == at::kBFloat16) ? at::kFloat : dtype;
}

// AVG of integers divides once, after a sum in 64 bits. Only a backend that sees all contributions can do that.
bool needs_all_at_once(const Operation& operation) {
  return operation.op == ReduceOp::AVG && at::isIntegralType(operation.tensor.scalar_type(), /*includeBool=*/true);
}

// For AVG. Divides the real and imaginary parts like the kernels do, because a complex division would round
// differently.
void divide(const at::Tensor& sum, int ranks) { (sum.is_complex() ? at::view_as_real(sum) : sum).div_(ranks); }

}  // namespace

void HierarchicalBackend::execute_in_steps(const Operation& operation, Deadline deadline) {
  const BelowAutograd below;
  const auto local_barrier = [&](Deadline until) { run_in_host(step(operation, OpKind::kBarrier, {}, 0, until)); };
  const auto leaders_barrier = [&] {
    if (leads()) between_hosts(step(operation, OpKind::kBarrier, {}, 0, later(deadline, 1)));
  };
  const auto directly = [&] {
    // A rank that calls another operation waits in its host's group or in the leaders'. The barriers in those groups
    // find the mismatch.
    local_barrier(deadline);
    leaders_barrier();
    Operation whole = operation;
    if (whole.op == ReduceOp::PREMUL_SUM) whole.op = ReduceOp::SUM;  // the tensors are multiplied already
    whole.timeout = step(operation, operation.kind, {}, 0, later(deadline, 2)).timeout;
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
      local_barrier(deadline);
      leaders_barrier();
      return local_barrier(last_wait(deadline));
    default:
      return directly();
  }
}

void HierarchicalBackend::in_blocks(const at::Tensor& tensor, const Steps& steps) {
  const int64_t count = tensor.numel();
  // In elements, because hosts compare their numbers, and not all dtypes.
  const auto length = std::clamp(static_cast<int64_t>(ranks_of_.size()) * kSlice, kBlock, kLargestBlock);
  if (count <= length || !all_->takes_blocks()) {  // all_ has the backend of the leaders' group
    steps.first(0, count);
    if (leads()) between_hosts(steps.between());
    return steps.last(0, count);
  }
  if (!leads()) {
    const auto block = [&](const auto& step) {
      return [&](size_t i) {
        const auto begin = static_cast<int64_t>(i) * length;
        step(begin, std::min(length, count - begin));
      };
    };
    const auto number = static_cast<size_t>((count + length - 1) / length);
    return in_turns(
        number, block(steps.first), [](size_t) {}, block(steps.last));
  }
  // The leaders' group, which calls this, must not take an error here for one of its own.
  const auto hook = [&](const auto& step) {
    return [&](size_t begin, size_t elements) {
      try {
        guarded([&] { step(static_cast<int64_t>(begin), static_cast<int64_t>(elements)); });
      } catch (const InvalidArgument& error) {
        fail(error);
        throw;
      }
    };
  };
  steps.first(0, length);  // before the announcement: the host comes with its last rank
  const auto first = hook(steps.first), last = hook(steps.last);
  const bool no_step_yet = first_step_;
  const Blocks blocks{.length = static_cast<size_t>(length),
                      .ready =
                          [&](size_t begin, size_t elements) {
                            if (begin > 0) first(begin, elements);
                          },
                      .done =
                          [&](size_t begin, size_t elements) {
                            first_step_ = false;  // an injected fault must not end the leaders' group in here
                            last(begin, elements);
                          }};
  Operation between = steps.between();
  between.blocks = &blocks;
  between_hosts(between);
  if (no_step_yet) after_first_step();
}

void HierarchicalBackend::all_reduce(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  const bool to_one = operation.kind == OpKind::kReduce, is_root = getRank() == operation.peer;
  const bool writes = !to_one || is_root;
  const auto dtype = carrier(operation);
  const bool converts = operation.between_hosts && at::isFloatingType(dtype) && *operation.between_hosts != dtype;
  // The leader of the root's host has the result. If the root is another rank, the leader sends it the result.
  const bool hands_over =
      to_one && own_host_ == host_of(operation.peer) && place_[static_cast<size_t>(operation.peer)] != 0;
  Flatten flat;
  const at::Tensor tensor = (writes ? flat.in_place(operation.tensor) : flat.input(operation.tensor)).view(-1);
  // A leader that is not the root must not change its tensor.
  const bool apart = dtype != tensor.scalar_type() || (to_one && leads() && !is_root);
  const at::Tensor sums = apart ? at::empty_like(tensor, dtype) : tensor;
  const at::Tensor travelling = converts && leads() ? at::empty_like(tensor, *operation.between_hosts) : sums;
  const auto sum_in_host = [&](int64_t begin, int64_t length) {
    const at::Tensor sum = sums.narrow(0, begin, length);
    if (apart) sum.copy_(tensor.narrow(0, begin, length));
    run_in_host(step(operation, OpKind::kReduce, sum, 0, begin == 0 ? deadline : last_wait(deadline)));
    if (!converts || !leads()) return;
    if (operation.op == ReduceOp::AVG) divide(sum, getSize());  // a sum might not fit
    travelling.narrow(0, begin, length).copy_(sum);
  };
  const auto between_leaders = [&] {
    Operation with_others = to_one ? step(operation, OpKind::kReduce, travelling, host_of(operation.peer), between)
                                   : step(operation, OpKind::kAllReduce, travelling, 0, between);
    with_others.announced->dtype = static_cast<uint8_t>(travelling.scalar_type());
    return with_others;
  };
  const auto hand_out = [&](int64_t begin, int64_t length) {
    const at::Tensor part = tensor.narrow(0, begin, length), sum = sums.narrow(0, begin, length);
    if (leads() && (!to_one || own_host_ == host_of(operation.peer))) {
      if (converts)
        sum.copy_(travelling.narrow(0, begin, length));
      else if (operation.op == ReduceOp::AVG)
        divide(sum, getSize());
      if (apart && writes) part.copy_(sum);
    }
    if (!to_one) return run_in_host(step(operation, OpKind::kBroadcast, part, 0, last_wait(deadline)));
    if (!hands_over || !(leads() || is_root)) return;
    Operation handing =
        step(operation, leads() ? OpKind::kSend : OpKind::kRecv, leads() ? sum.to(tensor.scalar_type()) : part,
             leads() ? place_[static_cast<size_t>(operation.peer)] : 0, last_wait(deadline));
    handing.tag = kResultTag;
    run_in_host(handing);
  };
  in_blocks(tensor, {.first = sum_in_host, .between = between_leaders, .last = hand_out});
  flat.copy_back();
}

void HierarchicalBackend::broadcast(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  const int host = host_of(operation.peer);
  Flatten flat;
  const at::Tensor tensor =
      (getRank() == operation.peer ? flat.input(operation.tensor) : flat.output(operation.tensor)).view(-1);
  const auto in_host = [&](int64_t begin, int64_t length, int root, Deadline until) {
    run_in_host(step(operation, OpKind::kBroadcast, tensor.narrow(0, begin, length), root, until));
  };
  const auto to_leader = [&](int64_t begin, int64_t length) {
    if (own_host_ != host) return;
    in_host(begin, length, place_[static_cast<size_t>(operation.peer)], begin == 0 ? deadline : last_wait(deadline));
  };
  const auto between_leaders = [&] { return step(operation, OpKind::kBroadcast, tensor, host, between); };
  const auto from_leader = [&](int64_t begin, int64_t length) {
    if (own_host_ != host) in_host(begin, length, 0, last_wait(deadline));
  };
  in_blocks(tensor, {.first = to_leader, .between = between_leaders, .last = from_leader});
  flat.copy_back();
}

std::vector<at::Tensor> HierarchicalBackend::rows_by_host(const at::Tensor& all) const {
  std::vector<at::Tensor> rows;
  int64_t row = 0;
  for (const auto& ranks : ranks_of_) {
    rows.push_back(all.narrow(0, row, static_cast<int64_t>(ranks.size())));
    row += rows.back().size(0);
  }
  return rows;
}

at::Tensor HierarchicalBackend::parts_by_host(const std::vector<at::Tensor>& parts, int64_t count) const {
  if (!by_host_ || parts.size() != 1) return {};
  return parts[0].view({getSize(), count});
}

template <typename Copy>
void HierarchicalBackend::for_parts(const std::vector<at::Tensor>& parts, const at::Tensor& rows, Copy&& copy) const {
  const size_t bytes = rows.nbytes() / static_cast<size_t>(getSize());
  const auto by_rank = parts_of<Bytes>(parts, static_cast<size_t>(getSize()), bytes);
  Bytes row = data_of(rows);
  for (const auto& ranks : ranks_of_)
    for (const int r : ranks) {
      copy(by_rank[static_cast<size_t>(r)], row, bytes);
      row += bytes;
    }
}

void HierarchicalBackend::all_gather(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  Flatten flat;
  at::Tensor input = flat.input(operation.tensor).view(-1);
  const int64_t count = input.numel();
  const auto outputs = flat.outputs(operation.outputs);
  const at::Tensor in_place = parts_by_host(outputs, count);
  // The parts of all ranks, ordered by host.
  const at::Tensor all = in_place.defined() ? in_place : at::empty({getSize(), count}, input.options());
  if (in_place.defined() && input.is_alias_of(all) && data_of(input) != data_of(all[getRank()])) input = input.clone();
  const auto by_host = rows_by_host(all);
  const at::Tensor& own = by_host[static_cast<size_t>(own_host_)];
  Operation collecting = step(operation, OpKind::kAllGather, input, 0, deadline);
  collecting.outputs = {own};
  run_in_host(collecting);
  if (leads()) {
    Operation exchanging = step(operation, OpKind::kAllGather, own, 0, between);
    exchanging.outputs = by_host;
    between_hosts(exchanging);
  }
  int64_t begin = 0;  // of this host's parts, in elements
  for (int host = 0; host < own_host_; ++host) begin += by_host[static_cast<size_t>(host)].numel();
  const int64_t end = begin + own.numel();
  const at::Tensor flat_all = all.view(-1);
  std::vector<at::Tensor> others = {flat_all.narrow(0, 0, begin), flat_all.narrow(0, end, all.numel() - end)};
  std::erase_if(others, [](const at::Tensor& part) { return part.numel() == 0; });
  if (count == 0) others = {flat_all};  // so that all learn what the leader has learned
  for (const at::Tensor& part : others) run_in_host(step(operation, OpKind::kBroadcast, part, 0, last_wait(deadline)));
  if (!in_place.defined())
    for_parts(outputs, all, [](Bytes part, ConstBytes row, size_t bytes) { copy_bytes(part, row, bytes); });
  flat.copy_back();
}

void HierarchicalBackend::reduce_scatter(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  const int64_t count = operation.tensor.numel();
  const auto dtype = carrier(operation);
  Flatten flat;
  const auto inputs = flat.inputs(operation.inputs);
  // The parts for all ranks, ordered by host. The leader's become sums, so it needs its own.
  at::Tensor all = parts_by_host(inputs, count);
  if (!all.defined()) {
    all = at::empty({getSize(), count}, operation.tensor.options());
    for_parts(inputs, all, [](ConstBytes part, Bytes row, size_t bytes) { copy_bytes(row, part, bytes); });
    all = all.to(dtype);
  } else if (leads() || dtype != all.scalar_type()) {
    all = all.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  }
  run_in_host(step(operation, OpKind::kReduce, all, 0, deadline));
  std::vector<at::Tensor> parts_here;
  if (leads()) {
    const auto by_host = rows_by_host(all);
    at::Tensor own = by_host[static_cast<size_t>(own_host_)];
    Operation exchanging = step(operation, OpKind::kReduceScatter, own, 0, between);
    exchanging.inputs = by_host;
    between_hosts(exchanging);
    if (operation.op == ReduceOp::AVG) divide(own, getSize());
    own = own.to(operation.tensor.scalar_type());
    parts_here = {own};
  }
  // Made only now, because its timeout counts from here.
  Operation handing = step(operation, OpKind::kScatter, operation.tensor, 0, last_wait(deadline));
  handing.inputs = parts_here;
  run_in_host(handing);
}

}  // namespace muster::comm::hierarchical_backend
