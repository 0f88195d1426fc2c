// Collectives over several hosts: inside each host, between the hosts' first ranks, and inside each host for the
// result.
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include "base/copy.h"
#include "comm/backends/hierarchical/hierarchical_backend.h"
#include "comm/kit/flatten.h"
#include "comm/kit/tensor_bytes.h"

namespace muster::comm::hierarchical_backend {
namespace {

constexpr int kResultTag = -1;  // below the tags of users

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
  const at::NoGradGuard no_grad;
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

void HierarchicalBackend::all_reduce(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  const bool to_one = operation.kind == OpKind::kReduce;
  const at::Tensor& tensor = operation.tensor;
  const auto dtype = carrier(operation);
  at::Tensor sum = tensor;
  if (dtype != tensor.scalar_type())
    sum = tensor.to(dtype);
  else if (to_one && leads() && getRank() != operation.peer)
    sum = tensor.clone();  // a leader that is not the root must not change its tensor
  run_in_host(step(operation, OpKind::kReduce, sum, 0, deadline));
  if (leads()) {
    const bool converts = operation.between_hosts && at::isFloatingType(dtype) && *operation.between_hosts != dtype;
    if (converts && operation.op == ReduceOp::AVG) divide(sum, getSize());  // a sum might not fit
    const at::Tensor travelling = converts ? sum.to(*operation.between_hosts) : sum;
    Operation with_others = to_one ? step(operation, OpKind::kReduce, travelling, host_of(operation.peer), between)
                                   : step(operation, OpKind::kAllReduce, travelling, 0, between);
    with_others.announced->dtype = static_cast<uint8_t>(travelling.scalar_type());
    between_hosts(with_others);
    if (converts)
      sum.copy_(travelling);
    else if (operation.op == ReduceOp::AVG)
      divide(sum, getSize());
    if ((!to_one || getRank() == operation.peer) && !sum.is_same(tensor)) tensor.copy_(sum);
  }
  if (!to_one) {
    run_in_host(step(operation, OpKind::kBroadcast, tensor, 0, last_wait(deadline)));
    return;
  }
  // The leader of the root's host has the result. If the root is another rank, the leader sends it the result.
  const int root_place = place_[static_cast<size_t>(operation.peer)];
  if (own_host_ != host_of(operation.peer) || root_place == 0) return;
  if (leads()) {
    Operation handing = step(operation, OpKind::kSend, sum.to(tensor.scalar_type()), root_place, last_wait(deadline));
    handing.tag = kResultTag;
    run_in_host(handing);
  } else if (getRank() == operation.peer) {
    Operation taking = step(operation, OpKind::kRecv, tensor, 0, last_wait(deadline));
    taking.tag = kResultTag;
    run_in_host(taking);
  }
}

void HierarchicalBackend::broadcast(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  const int host = host_of(operation.peer);
  const auto in_host = [&](int root, Deadline until) {
    run_in_host(step(operation, OpKind::kBroadcast, operation.tensor, root, until));
  };
  if (own_host_ == host) in_host(place_[static_cast<size_t>(operation.peer)], deadline);
  if (leads()) between_hosts(step(operation, OpKind::kBroadcast, operation.tensor, host, between));
  if (own_host_ != host) in_host(0, last_wait(deadline));
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

void HierarchicalBackend::all_gather(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  Flatten flat;
  const at::Tensor input = flat.input(operation.tensor).view(-1);
  const int64_t count = input.numel();
  // The parts of all ranks, ordered by host.
  const at::Tensor all = at::empty({getSize(), count}, input.options());
  const auto by_host = rows_by_host(all);
  const at::Tensor& own = by_host[static_cast<size_t>(own_host_)];
  Operation collecting = step(operation, OpKind::kGather, input, 0, deadline);
  if (leads()) collecting.outputs = {own};
  run_in_host(collecting);
  if (leads()) {
    Operation exchanging = step(operation, OpKind::kAllGather, own.clone(), 0, between);
    exchanging.outputs = by_host;
    between_hosts(exchanging);
  }
  run_in_host(step(operation, OpKind::kBroadcast, all, 0, last_wait(deadline)));
  const auto outputs = flat.outputs(operation.outputs);
  const auto parts = parts_of<Bytes>(outputs, static_cast<size_t>(getSize()), input.nbytes());
  ConstBytes from = data_of(all);
  for (const auto& ranks : ranks_of_)
    for (const int r : ranks) {
      copy_bytes(parts[static_cast<size_t>(r)], from, input.nbytes());
      from += input.nbytes();
    }
  flat.copy_back();
}

void HierarchicalBackend::reduce_scatter(const Operation& operation, Deadline deadline) {
  const Deadline between = later(deadline, 1);
  const int64_t count = operation.tensor.numel();
  Flatten flat;
  const auto inputs = flat.inputs(operation.inputs);
  // The parts for all ranks, ordered by host.
  at::Tensor all = at::empty({getSize(), count}, operation.tensor.options());
  const auto parts = parts_of<ConstBytes>(inputs, static_cast<size_t>(getSize()), operation.tensor.nbytes());
  Bytes to = data_of(all);
  for (const auto& ranks : ranks_of_)
    for (const int r : ranks) {
      copy_bytes(to, parts[static_cast<size_t>(r)], operation.tensor.nbytes());
      to += operation.tensor.nbytes();
    }
  all = all.to(carrier(operation));
  run_in_host(step(operation, OpKind::kReduce, all, 0, deadline));
  Operation handing = step(operation, OpKind::kScatter, operation.tensor, 0, last_wait(deadline));
  if (leads()) {
    const auto by_host = rows_by_host(all);
    at::Tensor own = by_host[static_cast<size_t>(own_host_)].clone();
    Operation exchanging = step(operation, OpKind::kReduceScatter, own, 0, between);
    exchanging.inputs = by_host;
    between_hosts(exchanging);
    if (operation.op == ReduceOp::AVG) divide(own, getSize());
    own = own.to(operation.tensor.scalar_type());
    handing.inputs = {own};
  }
  run_in_host(handing);
}

}  // namespace muster::comm::hierarchical_backend
