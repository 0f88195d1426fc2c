// c10d::Backend's interface in terms of Operation. c10d passes vectors that hold one tensor; they date from the time of
// several GPUs per process.
#include <span>

#include "base/text.h"
#include "comm/core/backend.h"
#include "comm/core/c10d_errors.h"
#include "comm/kit/operation_work.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <typename T>
const T& only(const std::vector<T>& list, const char* what) {
  if (list.size() != 1) throw InvalidArgument(text(what, ": expected one tensor per rank, got ", list.size()));
  return list[0];
}

static_assert(static_cast<int>(ReduceOp::SUM) == c10d::ReduceOp::SUM &&
              static_cast<int>(ReduceOp::AVG) == c10d::ReduceOp::AVG &&
              static_cast<int>(ReduceOp::PRODUCT) == c10d::ReduceOp::PRODUCT &&
              static_cast<int>(ReduceOp::MIN) == c10d::ReduceOp::MIN &&
              static_cast<int>(ReduceOp::MAX) == c10d::ReduceOp::MAX &&
              static_cast<int>(ReduceOp::BAND) == c10d::ReduceOp::BAND &&
              static_cast<int>(ReduceOp::BOR) == c10d::ReduceOp::BOR &&
              static_cast<int>(ReduceOp::BXOR) == c10d::ReduceOp::BXOR &&
              static_cast<int>(ReduceOp::PREMUL_SUM) == c10d::ReduceOp::PREMUL_SUM);

Operation with_op(Operation operation, const c10d::ReduceOp& op) {
  if (op.op_ > c10d::ReduceOp::PREMUL_SUM)
    throw InvalidArgument(text("there is no reduce operation number ", int{op.op_}));
  operation.op = static_cast<ReduceOp>(op.op_);
  // The class's name from before PyTorch 2.13, which still exists.
  if (const auto* const factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get())) {
    operation.factor = factor->double_factor;
    operation.factor_tensor = factor->tensor_factor;
  }
  return operation;
}

template <typename Options>
Operation with_timeout(Operation operation, const Options& options) {
  if (options.timeout != c10d::kUnsetTimeout) operation.timeout = options.timeout;
  return operation;
}

Operation all_reduce_of(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  const bool sparse = tensor.defined() && tensor.layout() == at::kSparse;
  return with_timeout(
      with_op({.kind = sparse ? OpKind::kAllReduceSparse : OpKind::kAllReduce, .tensor = tensor}, options.reduceOp),
      options);
}

Operation all_gather_of(const at::Tensor& input, Tensors outputs, const c10d::AllgatherOptions& options) {
  return with_timeout({.kind = OpKind::kAllGather, .tensor = input, .outputs = std::move(outputs)}, options);
}

Operation reduce_scatter_of(const at::Tensor& output, Tensors inputs, const c10d::ReduceScatterOptions& options) {
  return with_timeout(
      with_op({.kind = OpKind::kReduceScatter, .tensor = output, .inputs = std::move(inputs)}, options.reduceOp),
      options);
}

}  // namespace

// Runs `call`. For PyTorch, turns Muster's errors into those that PyTorch's users expect.
template <typename Call>
auto Backend::translated(std::chrono::milliseconds own_timeout, Call&& call) {
  try {
    return call();
  } catch (const Error&) {
    if (!for_pytorch_) throw;
    std::rethrow_exception(as_c10d_error(std::current_exception(), own_timeout.count() > 0 ? own_timeout : timeout()));
  }
}

template <typename Make>
WorkPtr Backend::issue(Make&& make, bool async) {
  Operation operation = translated(timeout(), make);
  const auto own_timeout = operation.timeout;
  if (!is_message(operation.kind)) called_.fetch_add(1, std::memory_order_relaxed);
  return translated(own_timeout, [&]() -> WorkPtr {
    if (async) return submit(std::move(operation));
    run(operation);
    return c10::make_intrusive<OperationWork>(getRank(), std::move(operation));
  });
}

template <typename Make>
WorkPtr Backend::issue_batch(Make&& make, bool async) {
  const WorkPtr work = translated(timeout(), [&] {
    auto operations = make();
    called_.fetch_add(operations.size(), std::memory_order_relaxed);
    return submit_batch(std::move(operations));
  });
  if (!async) work->wait(kNoTimeout);
  return work;
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue([&] { return all_reduce_of(only(tensors, "allreduce"), options); }, options.asyncOp);
}

WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return issue_batch(
      [&] {
        std::vector<Operation> operations;
        for (const auto& tensor : tensors) operations.push_back(all_reduce_of(tensor, options));
        return operations;
      },
      options.asyncOp);
}

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return issue(
      [&] {
        return with_timeout({.kind = OpKind::kBroadcast,
                             .peer = static_cast<int>(options.rootRank),
                             .tensor = only(tensors, "broadcast")},
                            options);
      },
      options.asyncOp);
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return issue(
      [&] {
        return with_timeout(with_op({.kind = OpKind::kReduce,
                                     .peer = static_cast<int>(options.rootRank),
                                     .tensor = only(tensors, "reduce")},
                                    options.reduceOp),
                            options);
      },
      options.asyncOp);
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return issue([&] { return all_gather_of(only(inputs, "allgather"), only(outputs, "allgather"), options); },
               options.asyncOp);
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return issue([&] { return all_gather_of(input, {output}, options); }, options.asyncOp);
}

// outputs[r][i]: rank r's inputs[i].
WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) {
  return issue_batch(
      [&] {
        std::vector<Operation> operations;
        for (size_t i = 0; i < inputs.size(); ++i) {
          Tensors parts;
          for (const auto& of_rank : outputs) {
            if (of_rank.size() != inputs.size())
              throw InvalidArgument(text("allgather_coalesced: outputs of a rank: expected one for each of ",
                                         inputs.size(), " inputs, got ", of_rank.size()));
            parts.push_back(of_rank[i]);
          }
          operations.push_back(all_gather_of(inputs[i], std::move(parts), options));
        }
        return operations;
      },
      options.asyncOp);
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  return issue_batch(
      [&] {
        if (outputs.size() != inputs.size())
          throw InvalidArgument(text("allgather_into_tensor_coalesced: outputs: expected one for each of ",
                                     inputs.size(), " inputs, got ", outputs.size()));
        std::vector<Operation> operations;
        for (size_t i = 0; i < inputs.size(); ++i)
          operations.push_back(all_gather_of(inputs[i], {outputs[i]}, options));
        return operations;
      },
      options.asyncOp);
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const bool root = getRank() == options.rootRank;
  return issue(
      [&] {
        return with_timeout({.kind = OpKind::kGather,
                             .peer = static_cast<int>(options.rootRank),
                             .tensor = only(inputs, "gather"),
                             .outputs = root ? only(outputs, "gather") : Tensors{}},
                            options);
      },
      options.asyncOp);
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const bool root = getRank() == options.rootRank;
  return issue(
      [&] {
        return with_timeout({.kind = OpKind::kScatter,
                             .peer = static_cast<int>(options.rootRank),
                             .tensor = only(outputs, "scatter"),
                             .inputs = root ? only(inputs, "scatter") : Tensors{}},
                            options);
      },
      options.asyncOp);
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& options) {
  return issue(
      [&] { return reduce_scatter_of(only(outputs, "reduce_scatter"), only(inputs, "reduce_scatter"), options); },
      options.asyncOp);
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& options) {
  return issue([&] { return reduce_scatter_of(output, {input}, options); }, options.asyncOp);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  return issue_batch(
      [&] {
        if (outputs.size() != inputs.size())
          throw InvalidArgument(text("reduce_scatter_tensor_coalesced: outputs: expected one for each of ",
                                     inputs.size(), " inputs, got ", outputs.size()));
        std::vector<Operation> operations;
        for (size_t i = 0; i < inputs.size(); ++i)
          operations.push_back(reduce_scatter_of(outputs[i], {inputs[i]}, options));
        return operations;
      },
      options.asyncOp);
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return issue(
      [&] {
        return with_timeout({.kind = OpKind::kAllToAll,
                             .inputs = {input},
                             .outputs = {output},
                             .input_splits = input_splits,
                             .output_splits = output_splits},
                            options);
      },
      options.asyncOp);
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return issue([&] { return with_timeout({.kind = OpKind::kAllToAll, .inputs = inputs, .outputs = outputs}, options); },
               options.asyncOp);
}

WorkPtr Backend::send(Tensors& tensors, int destination, int tag) {
  return issue(
      [&] {
        return Operation{.kind = OpKind::kSend, .peer = destination, .tag = tag, .tensor = only(tensors, "send")};
      },
      true);
}

WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  return issue(
      [&] { return Operation{.kind = OpKind::kRecv, .peer = source, .tag = tag, .tensor = only(tensors, "recv")}; },
      true);
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return issue(
      [&] { return Operation{.kind = OpKind::kRecv, .peer = kAnySource, .tag = tag, .tensor = only(tensors, "recv")}; },
      true);
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return issue([&] { return with_timeout({.kind = OpKind::kBarrier}, options); }, options.asyncOp);
}

// The texts are PyTorch's, because its users and tools look for them. Unlike with gloo, all ranks know who is missing.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const Operation barrier = with_timeout({.kind = OpKind::kBarrier}, options);
  const int me = shown_rank(getRank());
  const auto limit = options.timeout == c10d::kUnsetTimeout ? timeout() : options.timeout;
  const auto failure = [&](std::span<const int> missing, const char* why) {
    if (!wait_all_ranks && missing.size() > 1) missing = missing.first(1);
    return text("[Rank ", me, "]: Rank", missing.size() == 1 ? " " : "s ", join(missing),
                " failed to pass monitoredBarrier in ", limit.count(), " ms",
                getRank() == 0 ? ""
                               : text("; Rank ", me,
                                      " successfully reached monitoredBarrier, but received errors while waiting for "
                                      "send/recv from rank ",
                                      shown_rank(0)),
                ". ", why);
  };
  translated(limit, [&] {
    if (limit.count() <= 0)
      throw TimeoutError(text("[Rank ", me, "]: Rank ", me, " timed out in monitoredBarrier after 0 ms"));
    try {
      run(barrier);
    } catch (const TimeoutError& error) {
      throw TimeoutError(failure(error.missing(), error.what()), error.missing());
    } catch (const PeerLost& error) {
      const int rank = error.rank();
      throw PeerLost(rank, error.pid(), failure({&rank, 1}, error.what()));
    }
  });
}

}  // namespace muster::comm
