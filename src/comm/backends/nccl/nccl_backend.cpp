#include "comm/backends/nccl/nccl_backend.h"

#ifdef MUSTER_HAS_NCCL

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/text.h"
#include "comm/kit/operation_work.h"
#include "muster/store/c10d_store.h"

namespace muster::comm::nccl_backend {
namespace {

using Nccl = c10d::ProcessGroupNCCL;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

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

class NcclBackend final : public Backend {
 public:
  NcclBackend(const BackendContext& context, c10::intrusive_ptr<Nccl> nccl)
      : Backend(context.group.rank, context.group.size),
        nccl_(std::move(nccl)),
        group_name_(context.group.name),
        timeout_(context.group.timeout),
        on_leave_(context.options.on_leave) {
    for_pytorch_ = context.options.for_pytorch;
  }
  ~NcclBackend() override { leave({}); }

  void run(const Operation& operation) override { submit(operation)->wait(); }
  WorkPtr submit(Operation operation) override {
    counters_.count(operation);
    return issue(operation);
  }
  WorkPtr submit_batch(std::vector<Operation> operations) override {
    if (operations.empty()) throw InvalidArgument("a batch of operations is empty");
    WorkPtr last;  // the operations are on one stream, so all are complete when the last is
    for (auto& operation : operations) last = submit(std::move(operation));
    return last;
  }
  CommStats stats() const override { return counters_.stats(); }
  const std::string& group_name() const override { return group_name_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  const std::string getBackendName() const override { return for_pytorch_ ? "muster" : "nccl"; }

  void leave(const std::string&) override {
    if (std::exchange(left_, true)) return;
    nccl_->shutdown();
    if (on_leave_) on_leave_(this);
  }
  void fail(const Error&) override { nccl_->abort(); }
  void abort() override { nccl_->abort(); }
  void shutdown() override { leave({}); }

 private:
  WorkPtr issue(const Operation& operation) {
    std::vector<at::Tensor> tensors = {operation.tensor};
    std::vector<at::Tensor> outputs = operation.outputs, inputs = operation.inputs;
    const auto timeout = operation.timeout.count() > 0 ? operation.timeout : timeout_;
    switch (operation.kind) {
      case OpKind::kAllReduce: {
        c10d::AllreduceOptions options;
        options.reduceOp = reduce_op(operation), options.timeout = timeout;
        return nccl_->allreduce(tensors, options);
      }
      case OpKind::kReduce: {
        c10d::ReduceOptions options;
        options.reduceOp = reduce_op(operation), options.rootRank = operation.peer, options.timeout = timeout;
        return nccl_->reduce(tensors, options);
      }
      case OpKind::kBroadcast: {
        c10d::BroadcastOptions options;
        options.rootRank = operation.peer, options.timeout = timeout;
        return nccl_->broadcast(tensors, options);
      }
      case OpKind::kAllGather: {
        if (outputs.size() == 1) return nccl_->_allgather_base(outputs[0], tensors[0], {.timeout = timeout});
        std::vector<std::vector<at::Tensor>> lists = {outputs};
        return nccl_->allgather(lists, tensors, {.timeout = timeout});
      }
      case OpKind::kReduceScatter: {
        c10d::ReduceScatterOptions options;
        options.reduceOp = reduce_op(operation), options.timeout = timeout;
        if (inputs.size() == 1) return nccl_->_reduce_scatter_base(tensors[0], inputs[0], options);
        std::vector<std::vector<at::Tensor>> lists = {inputs};
        return nccl_->reduce_scatter(tensors, lists, options);
      }
      case OpKind::kGather: {
        std::vector<std::vector<at::Tensor>> lists;
        if (getRank() == operation.peer) lists.push_back(outputs);
        c10d::GatherOptions options;
        options.rootRank = operation.peer, options.timeout = timeout;
        return nccl_->gather(lists, tensors, options);
      }
      case OpKind::kScatter: {
        std::vector<std::vector<at::Tensor>> lists;
        if (getRank() == operation.peer) lists.push_back(inputs);
        c10d::ScatterOptions options;
        options.rootRank = operation.peer, options.timeout = timeout;
        return nccl_->scatter(tensors, lists, options);
      }
      case OpKind::kAllToAll: {
        auto input_splits = operation.input_splits, output_splits = operation.output_splits;
        c10d::AllToAllOptions options;
        options.timeout = timeout;
        if (inputs.size() == 1 && outputs.size() == 1)
          return nccl_->alltoall_base(outputs[0], inputs[0], output_splits, input_splits, options);
        return nccl_->alltoall(outputs, inputs, options);
      }
      case OpKind::kBarrier: {
        c10d::BarrierOptions options;
        options.timeout = timeout;
        return nccl_->barrier(options);
      }
      case OpKind::kSend:
        return nccl_->send(tensors, operation.peer, operation.tag);
      case OpKind::kRecv:
        if (operation.peer == kAnySource) break;
        return nccl_->recv(tensors, operation.peer, operation.tag);
      case OpKind::kAllReduceSparse:
      case OpKind::kScan:
      case OpKind::kNothing:
        break;
    }
    throw InvalidArgument(text(to_string(operation.kind), ": NCCL has no such operation"), "Use backend shm or gloo");
  }

  const c10::intrusive_ptr<Nccl> nccl_;
  const std::string group_name_;
  const std::chrono::milliseconds timeout_;
  const std::function<void(const Backend*)> on_leave_;
  OperationCounters counters_;
  bool left_ = false;
};

}  // namespace

c10::intrusive_ptr<Backend> create(const BackendContext& context) {
  const auto options = Nccl::Options::create();
  options->timeout = context.group.timeout;
  const auto store = to_c10d(make_prefix_store(context.group.store, context.group.store_prefix + "/nccl"));
  return c10::make_intrusive<NcclBackend>(
      context, c10::make_intrusive<Nccl>(store, context.group.rank, context.group.size, options));
}

std::string unavailable_reason() {
  return at::globalContext().hasCUDA() ? std::string() : "libtorch finds no CUDA device here";
}

}  // namespace muster::comm::nccl_backend

#else

namespace muster::comm::nccl_backend {

c10::intrusive_ptr<Backend> create(const BackendContext&) { throw Unavailable(unavailable_reason()); }
std::string unavailable_reason() {
  return "Muster was built without NCCL: use a libtorch with CUDA, install nccl.h and CUDA's headers, and build again";
}

}  // namespace muster::comm::nccl_backend

#endif
