// The free functions. Each makes an Operation and hands it to the group's backend, without PyTorch's dispatcher.
#include "muster/comm/collectives.h"

#include "base/text.h"
#include "comm/kit/validate.h"
#include "comm/world/group_state.h"
#include "muster/base/error.h"

namespace muster {
namespace {

using comm::Operation;
using comm::OpKind;

void run(comm::Backend& backend, Operation operation, const Site& site) {
  operation.site = site;
  backend.run(operation);
}
void run(const Group& group, Operation operation, const Site& site) {
  run(comm::backend_of(group), std::move(operation), site);
}
comm::SmallCall small(OpKind kind, const at::Tensor& tensor, const at::Tensor* other, std::chrono::milliseconds timeout,
                      const Site& site, int peer = 0, ReduceOp op = ReduceOp::SUM) {
  return {.kind = kind, .op = op, .peer = peer, .tensor = &tensor, .other = other, .timeout = timeout, .site = site};
}
Work submit(const Group& group, Operation operation, const Site& site) {
  operation.site = site;
  return Work(comm::backend_of(group).submit(std::move(operation)));
}

Operation reduction(OpKind kind, const at::Tensor& tensor, const ReduceOptions& options, int peer = 0) {
  if (options.between_hosts) comm::validate_float("ReduceOptions::between_hosts", *options.between_hosts);
  return {.kind = kind,
          .op = options.op,
          .peer = peer,
          .tensor = tensor,
          .factor = options.factor,
          .between_hosts = options.between_hosts,
          .timeout = options.timeout};
}
Operation all_reduction(const at::Tensor& tensor, const ReduceOptions& options) {
  const bool sparse = tensor.defined() && tensor.layout() == at::kSparse;
  return reduction(sparse ? OpKind::kAllReduceSparse : OpKind::kAllReduce, tensor, options);
}
Operation movement(OpKind kind, const at::Tensor& tensor, const CollectiveOptions& options, int peer = 0) {
  return {.kind = kind, .peer = peer, .tensor = tensor, .timeout = options.timeout};
}
Operation with_outputs(Operation operation, std::vector<at::Tensor> outputs) {
  operation.outputs = std::move(outputs);
  return operation;
}
Operation with_inputs(Operation operation, std::vector<at::Tensor> inputs) {
  operation.inputs = std::move(inputs);
  return operation;
}
Operation all_to_all_operation(const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options) {
  return {.kind = OpKind::kAllToAll,
          .inputs = {input},
          .outputs = {output},
          .input_splits = options.input_splits,
          .output_splits = options.output_splits,
          .timeout = options.timeout};
}
constexpr int kHighestTag = (1 << 28) - 2;  // Muster's own are above (broadcast_bytes.cpp)
[[noreturn]] void refuse_tag(int tag) {
  throw InvalidArgument(text("the tag of a message: expected 0 to ", kHighestTag, ", got ", tag),
                        text("Use 0 … ", kHighestTag));
}
int checked(int tag) {
  if (tag < 0 || tag > kHighestTag) [[unlikely]]
    refuse_tag(tag);
  return tag;
}
Operation message(OpKind kind, const at::Tensor& tensor, int peer, const MessageOptions& options) {
  return {.kind = kind, .peer = peer, .tag = checked(options.tag), .tensor = tensor, .timeout = options.timeout};
}

}  // namespace

// Each macro defines a pair of functions that run or submit the same Operation. The blocking function of a small
// collective first tries run_small(), which needs no Operation.
#define MUSTER_COLLECTIVE(name, parameters, operation)          \
  void name parameters { run(options.group, operation, site); } \
  Work name##_async parameters { return submit(options.group, operation, site); }
#define MUSTER_SMALL_COLLECTIVE(name, parameters, small, operation) \
  void name parameters {                                            \
    comm::Backend& backend = comm::backend_of(options.group);       \
    if (!backend.run_small(small)) run(backend, operation, site);   \
  }                                                                 \
  Work name##_async parameters { return submit(options.group, operation, site); }

MUSTER_SMALL_COLLECTIVE(all_reduce, (const at::Tensor& tensor, const ReduceOptions& options, const Site& site),
                        (small(OpKind::kAllReduce, tensor, nullptr, options.timeout, site, 0, options.op)),
                        all_reduction(tensor, options))
MUSTER_SMALL_COLLECTIVE(broadcast,
                        (const at::Tensor& tensor, int src, const CollectiveOptions& options, const Site& site),
                        (small(OpKind::kBroadcast, tensor, nullptr, options.timeout, site, src)),
                        movement(OpKind::kBroadcast, tensor, options, src))
MUSTER_SMALL_COLLECTIVE(reduce, (const at::Tensor& tensor, int dst, const ReduceOptions& options, const Site& site),
                        (small(OpKind::kReduce, tensor, nullptr, options.timeout, site, dst, options.op)),
                        reduction(OpKind::kReduce, tensor, options, dst))
MUSTER_SMALL_COLLECTIVE(scan, (const at::Tensor& tensor, const ReduceOptions& options, const Site& site),
                        (small(OpKind::kScan, tensor, nullptr, options.timeout, site, 0, options.op)),
                        reduction(OpKind::kScan, tensor, options))
MUSTER_COLLECTIVE(all_gather,
                  (const std::vector<at::Tensor>& outputs, const at::Tensor& input, const CollectiveOptions& options,
                   const Site& site),
                  with_outputs(movement(OpKind::kAllGather, input, options), outputs))
MUSTER_SMALL_COLLECTIVE(all_gather_into_tensor,
                        (const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options,
                         const Site& site),
                        (small(OpKind::kAllGather, input, &output, options.timeout, site)),
                        with_outputs(movement(OpKind::kAllGather, input, options), {output}))
MUSTER_COLLECTIVE(reduce_scatter,
                  (const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOptions& options,
                   const Site& site),
                  with_inputs(reduction(OpKind::kReduceScatter, output, options), inputs))
MUSTER_SMALL_COLLECTIVE(reduce_scatter_tensor,
                        (const at::Tensor& output, const at::Tensor& input, const ReduceOptions& options,
                         const Site& site),
                        (small(OpKind::kReduceScatter, output, &input, options.timeout, site, 0, options.op)),
                        with_inputs(reduction(OpKind::kReduceScatter, output, options), {input}))
MUSTER_COLLECTIVE(gather,
                  (const at::Tensor& input, const std::vector<at::Tensor>& outputs, int dst,
                   const CollectiveOptions& options, const Site& site),
                  with_outputs(movement(OpKind::kGather, input, options, dst), outputs))
MUSTER_COLLECTIVE(scatter,
                  (const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
                   const CollectiveOptions& options, const Site& site),
                  with_inputs(movement(OpKind::kScatter, output, options, src), inputs))
MUSTER_SMALL_COLLECTIVE(
    all_to_all_single,
    (const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options, const Site& site),
    (small(options.input_splits.empty() && options.output_splits.empty() ? OpKind::kAllToAll : OpKind::kNothing, output,
           &input, options.timeout, site)),
    all_to_all_operation(output, input, options))
MUSTER_COLLECTIVE(all_to_all,
                  (const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                   const CollectiveOptions& options, const Site& site),
                  with_inputs(with_outputs(movement(OpKind::kAllToAll, {}, options), outputs), inputs))
MUSTER_SMALL_COLLECTIVE(barrier, (const CollectiveOptions& options, const Site& site),
                        (comm::SmallCall{.timeout = options.timeout, .site = site}),
                        (Operation{.kind = OpKind::kBarrier, .timeout = options.timeout}))
#undef MUSTER_SMALL_COLLECTIVE
#undef MUSTER_COLLECTIVE

void all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const ReduceOptions& options, const Site& site) {
  all_reduce_coalesced_async(tensors, options, site).wait();
}
Work all_reduce_coalesced_async(const std::vector<at::Tensor>& tensors, const ReduceOptions& options,
                                const Site& site) {
  std::vector<Operation> operations;
  for (const auto& tensor : tensors) {
    operations.push_back(all_reduction(tensor, options));
    operations.back().site = site;
  }
  return operations.empty() ? Work() : Work(comm::backend_of(options.group).submit_batch(std::move(operations)));
}

namespace {

bool small_message(OpKind kind, const at::Tensor& tensor, int peer, const MessageOptions& options, const Site& site) {
  return comm::backend_of(options.group)
      .run_small({.kind = kind,
                  .peer = peer,
                  .tensor = &tensor,
                  .timeout = options.timeout,
                  .site = site,
                  .tag = checked(options.tag)});
}

}  // namespace

void send(const at::Tensor& tensor, int dst, const MessageOptions& options, const Site& site) {
  if (small_message(OpKind::kSend, tensor, dst, options, site)) return;
  run(options.group, message(OpKind::kSend, tensor, dst, options), site);
}
int recv(const at::Tensor& tensor, int src, const MessageOptions& options, const Site& site) {
  if (src == kAnySource) {
    Work work = irecv(tensor, src, options, site);
    work.wait();
    return work.source_rank();
  }
  if (small_message(OpKind::kRecv, tensor, src, options, site)) return src;
  run(options.group, message(OpKind::kRecv, tensor, src, options), site);
  return src;
}
Work isend(const at::Tensor& tensor, int dst, const MessageOptions& options, const Site& site) {
  return submit(options.group, message(OpKind::kSend, tensor, dst, options), site);
}
Work irecv(const at::Tensor& tensor, int src, const MessageOptions& options, const Site& site) {
  return submit(options.group, message(OpKind::kRecv, tensor, src, options), site);
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations, const Site& site) {
  std::vector<Work> works;
  for (auto op = operations.begin(); op != operations.end();) {  // those of one group begin together
    comm::Backend& backend = comm::backend_of(op->options.group);
    std::vector<Operation> messages;
    for (; op != operations.end() && &comm::backend_of(op->options.group) == &backend; ++op) {
      messages.push_back(
          message(op->kind == P2POp::kSend ? OpKind::kSend : OpKind::kRecv, op->tensor, op->peer, op->options));
      messages.back().site = site;
    }
    for (auto& work : backend.submit_messages(std::move(messages))) works.push_back(Work(std::move(work)));
  }
  return works;
}

void monitored_barrier(const CollectiveOptions& options, bool wait_all_ranks) {
  c10d::BarrierOptions barrier;
  if (options.timeout != kDefaultTimeout) barrier.timeout = options.timeout;
  comm::backend_of(options.group).monitoredBarrier(barrier, wait_all_ranks);
}

}  // namespace muster
