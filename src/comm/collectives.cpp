// The free functions: each makes an Operation and hands it to the group's backend. No dispatcher in between.
#include "muster/comm/collectives.h"

#include "comm/group_state.h"

namespace muster {
namespace {

using comm::Operation;
using comm::OpKind;

void run(const Group& group, const Operation& operation) { group.backend().run(operation); }
Work submit(const Group& group, Operation operation) { return Work(group.backend().submit(std::move(operation))); }

Operation reduction(OpKind kind, const at::Tensor& tensor, const ReduceOptions& options, int peer = 0) {
  return {.kind = kind, .op = options.op, .peer = peer, .tensor = tensor, .timeout = options.timeout};
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
Operation all_to_all(const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options) {
  return {.kind = OpKind::kAllToAll,
          .inputs = {input},
          .outputs = {output},
          .input_splits = options.input_splits,
          .output_splits = options.output_splits,
          .timeout = options.timeout};
}
Operation message(OpKind kind, const at::Tensor& tensor, int peer, const MessageOptions& options) {
  return {.kind = kind, .peer = peer, .tag = options.tag, .tensor = tensor, .timeout = options.timeout};
}

}  // namespace

// Each pair of functions: the same Operation, run or submitted.
#define MUSTER_COLLECTIVE(name, parameters, operation)    \
  void name parameters { run(options.group, operation); } \
  Work name##_async parameters { return submit(options.group, operation); }

MUSTER_COLLECTIVE(all_reduce, (const at::Tensor& tensor, const ReduceOptions& options),
                  reduction(OpKind::kAllReduce, tensor, options))
MUSTER_COLLECTIVE(broadcast, (const at::Tensor& tensor, int src, const CollectiveOptions& options),
                  movement(OpKind::kBroadcast, tensor, options, src))
MUSTER_COLLECTIVE(reduce, (const at::Tensor& tensor, int dst, const ReduceOptions& options),
                  reduction(OpKind::kReduce, tensor, options, dst))
MUSTER_COLLECTIVE(all_gather,
                  (const std::vector<at::Tensor>& outputs, const at::Tensor& input, const CollectiveOptions& options),
                  with_outputs(movement(OpKind::kAllGather, input, options), outputs))
MUSTER_COLLECTIVE(all_gather_into_tensor,
                  (const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options),
                  with_outputs(movement(OpKind::kAllGather, input, options), {output}))
MUSTER_COLLECTIVE(reduce_scatter,
                  (const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOptions& options),
                  with_inputs(reduction(OpKind::kReduceScatter, output, options), inputs))
MUSTER_COLLECTIVE(reduce_scatter_tensor,
                  (const at::Tensor& output, const at::Tensor& input, const ReduceOptions& options),
                  with_inputs(reduction(OpKind::kReduceScatter, output, options), {input}))
MUSTER_COLLECTIVE(gather,
                  (const at::Tensor& input, const std::vector<at::Tensor>& outputs, int dst,
                   const CollectiveOptions& options),
                  with_outputs(movement(OpKind::kGather, input, options, dst), outputs))
MUSTER_COLLECTIVE(scatter,
                  (const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
                   const CollectiveOptions& options),
                  with_inputs(movement(OpKind::kScatter, output, options, src), inputs))
MUSTER_COLLECTIVE(all_to_all_single,
                  (const at::Tensor& output, const at::Tensor& input, const AllToAllOptions& options),
                  all_to_all(output, input, options))
MUSTER_COLLECTIVE(barrier, (const CollectiveOptions& options),
                  (Operation{.kind = OpKind::kBarrier, .timeout = options.timeout}))
#undef MUSTER_COLLECTIVE

void send(const at::Tensor& tensor, int dst, const MessageOptions& options) {
  run(options.group, message(OpKind::kSend, tensor, dst, options));
}
void recv(const at::Tensor& tensor, int src, const MessageOptions& options) {
  run(options.group, message(OpKind::kRecv, tensor, src, options));
}
Work isend(const at::Tensor& tensor, int dst, const MessageOptions& options) {
  return submit(options.group, message(OpKind::kSend, tensor, dst, options));
}
Work irecv(const at::Tensor& tensor, int src, const MessageOptions& options) {
  return submit(options.group, message(OpKind::kRecv, tensor, src, options));
}

}  // namespace muster
