// c10d::Backend's interface in terms of Operation. c10d passes vectors that hold one tensor, for the days of several
// GPUs a process.
#include "base/text.h"
#include "comm/backend.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <typename T>
const T& only(const std::vector<T>& list, const char* what) {
  if (list.size() != 1) throw InvalidArgument(text(what, " takes one tensor a rank, not ", list.size()));
  return list[0];
}

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  if (op.op_ > c10d::ReduceOp::MAX)
    throw InvalidArgument(text("reduce operation number ", int{op.op_}, " is not supported"),
                          "Use SUM, AVG, PRODUCT, MIN or MAX");
  return static_cast<ReduceOp>(op.op_);
}
static_assert(static_cast<int>(ReduceOp::SUM) == c10d::ReduceOp::SUM &&
              static_cast<int>(ReduceOp::AVG) == c10d::ReduceOp::AVG &&
              static_cast<int>(ReduceOp::PRODUCT) == c10d::ReduceOp::PRODUCT &&
              static_cast<int>(ReduceOp::MIN) == c10d::ReduceOp::MIN &&
              static_cast<int>(ReduceOp::MAX) == c10d::ReduceOp::MAX);

std::chrono::milliseconds timeout(std::chrono::milliseconds given) {
  return given == c10d::kUnsetTimeout ? std::chrono::milliseconds(0) : given;
}

}  // namespace

std::string_view to_string(OpKind kind) {
  static constexpr std::string_view kNames[] = {"all_reduce",     "broadcast", "reduce",  "all_gather",
                                                "reduce_scatter", "gather",    "scatter", "all_to_all",
                                                "barrier",        "send",      "recv"};
  return kNames[static_cast<size_t>(kind)];
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return submit({.kind = OpKind::kAllReduce,
                 .op = reduce_op(options.reduceOp),
                 .tensor = only(tensors, "allreduce"),
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return submit({.kind = OpKind::kBroadcast,
                 .peer = static_cast<int>(options.rootRank),
                 .tensor = only(tensors, "broadcast"),
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return submit({.kind = OpKind::kReduce,
                 .op = reduce_op(options.reduceOp),
                 .peer = static_cast<int>(options.rootRank),
                 .tensor = only(tensors, "reduce"),
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return submit({.kind = OpKind::kAllGather,
                 .tensor = only(inputs, "allgather"),
                 .outputs = only(outputs, "allgather"),
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return submit(
      {.kind = OpKind::kAllGather, .tensor = input, .outputs = {output}, .timeout = timeout(options.timeout)});
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const bool root = getRank() == options.rootRank;
  return submit({.kind = OpKind::kGather,
                 .peer = static_cast<int>(options.rootRank),
                 .tensor = only(inputs, "gather"),
                 .outputs = root ? only(outputs, "gather") : Tensors{},
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const bool root = getRank() == options.rootRank;
  return submit({.kind = OpKind::kScatter,
                 .peer = static_cast<int>(options.rootRank),
                 .tensor = only(outputs, "scatter"),
                 .inputs = root ? only(inputs, "scatter") : Tensors{},
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& options) {
  return submit({.kind = OpKind::kReduceScatter,
                 .op = reduce_op(options.reduceOp),
                 .tensor = only(outputs, "reduce_scatter"),
                 .inputs = only(inputs, "reduce_scatter"),
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& options) {
  return submit({.kind = OpKind::kReduceScatter,
                 .op = reduce_op(options.reduceOp),
                 .tensor = output,
                 .inputs = {input},
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return submit({.kind = OpKind::kAllToAll,
                 .inputs = {input},
                 .outputs = {output},
                 .input_splits = input_splits,
                 .output_splits = output_splits,
                 .timeout = timeout(options.timeout)});
}

WorkPtr Backend::send(Tensors& tensors, int destination, int tag) {
  return submit({.kind = OpKind::kSend, .peer = destination, .tag = tag, .tensor = only(tensors, "send")});
}

WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  return submit({.kind = OpKind::kRecv, .peer = source, .tag = tag, .tensor = only(tensors, "recv")});
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return submit({.kind = OpKind::kBarrier, .timeout = timeout(options.timeout)});
}

}  // namespace muster::comm
