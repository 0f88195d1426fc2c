#ifdef MUSTER_HAS_NCCL

#include "comm/backends/nccl/nccl_calls.h"

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::comm::nccl_backend {
namespace {

c10d::ReduceOp reduce_op(const Operation& operation) {
  c10d::ReduceOp op;
  op.op_ = static_cast<c10d::ReduceOp::RedOpType>(operation.op);  // the constructor refuses PREMUL_SUM
  if (operation.op == ReduceOp::PREMUL_SUM) {
    using Factor = c10d::NCCLPreMulSumSupplement;
    op.supplement_ = operation.factor_tensor.defined() ? c10::make_intrusive<Factor>(operation.factor_tensor)
                                                       : c10::make_intrusive<Factor>(operation.factor);
  }
  return op;
}

// One tensor per rank, also of one tensor with room for all.
std::vector<at::Tensor> parts(const Operation& operation, int size, std::vector<at::Tensor> tensors) {
  if (tensors.size() != 1 || size == 1) return tensors;
  const int64_t each = operation.tensor.numel();
  if (tensors[0].numel() != each * size)
    throw InvalidArgument(text(to_string(operation.kind), ": a tensor for all ranks: expected ", size, " times ", each,
                               " elements, got ", tensors[0].numel()));
  std::vector<at::Tensor> all;
  for (int r = 0; r < size; ++r)
    all.push_back(tensors[0].view({-1}).narrow(0, r * each, each).view(operation.tensor.sizes()));
  return all;
}

}  // namespace

WorkPtr queue_on(Nccl& nccl, const Operation& operation, Contiguous& contiguous) {
  const int rank = nccl.getRank(), size = nccl.getSize();
  const at::Tensor& tensor = operation.tensor;
  const auto written = [&] { return std::vector<at::Tensor>{contiguous.out(tensor)}; };
  const auto read = [&] { return std::vector<at::Tensor>{contiguous.in(tensor)}; };
  switch (operation.kind) {
    case OpKind::kAllReduce: {
      auto tensors = written();
      c10d::AllreduceOptions options;
      options.reduceOp = reduce_op(operation);
      return nccl.allreduce(tensors, options);
    }
    case OpKind::kReduce: {
      auto tensors = rank == operation.peer ? written() : read();
      c10d::ReduceOptions options;
      options.reduceOp = reduce_op(operation), options.rootRank = operation.peer;
      return nccl.reduce(tensors, options);
    }
    case OpKind::kBroadcast: {
      auto tensors = written();
      c10d::BroadcastOptions options;
      options.rootRank = operation.peer;
      return nccl.broadcast(tensors, options);
    }
    case OpKind::kAllGather: {
      auto tensors = read(), outputs = contiguous.out(operation.outputs);
      if (outputs.size() == 1 && size > 1) return nccl._allgather_base(outputs[0], tensors[0]);
      std::vector<std::vector<at::Tensor>> lists = {outputs};
      return nccl.allgather(lists, tensors);
    }
    case OpKind::kReduceScatter: {
      auto tensors = written(), inputs = contiguous.in(operation.inputs);
      c10d::ReduceScatterOptions options;
      options.reduceOp = reduce_op(operation);
      if (inputs.size() == 1) return nccl._reduce_scatter_base(tensors[0], inputs[0], options);
      std::vector<std::vector<at::Tensor>> lists = {inputs};
      return nccl.reduce_scatter(tensors, lists, options);
    }
    case OpKind::kGather: {
      auto tensors = read();
      std::vector<std::vector<at::Tensor>> lists;
      if (rank == operation.peer) lists.push_back(parts(operation, size, contiguous.out(operation.outputs)));
      c10d::GatherOptions options;
      options.rootRank = operation.peer;
      return nccl.gather(lists, tensors, options);
    }
    case OpKind::kScatter: {
      auto tensors = written();
      std::vector<std::vector<at::Tensor>> lists;
      if (rank == operation.peer) lists.push_back(parts(operation, size, contiguous.in(operation.inputs)));
      c10d::ScatterOptions options;
      options.rootRank = operation.peer;
      return nccl.scatter(tensors, lists, options);
    }
    case OpKind::kAllToAll: {
      auto inputs = contiguous.in(operation.inputs), outputs = contiguous.out(operation.outputs);
      auto input_splits = operation.input_splits, output_splits = operation.output_splits;
      c10d::AllToAllOptions options;
      if (inputs.size() == 1 && outputs.size() == 1)
        return nccl.alltoall_base(outputs[0], inputs[0], output_splits, input_splits, options);
      return nccl.alltoall(outputs, inputs, options);
    }
    case OpKind::kSend: {
      auto tensors = read();
      return nccl.send(tensors, operation.peer, operation.tag);
    }
    case OpKind::kRecv: {
      auto tensors = written();
      return nccl.recv(tensors, operation.peer, operation.tag);
    }
    case OpKind::kAllReduceSparse:
    case OpKind::kBarrier:
    case OpKind::kScan:
    case OpKind::kNothing:
      break;
  }
  throw InvalidArgument(text(to_string(operation.kind), ": NCCL has no such operation"),
                        "Move the tensor to the CPU with .cpu()");
}

}  // namespace muster::comm::nccl_backend

#endif
