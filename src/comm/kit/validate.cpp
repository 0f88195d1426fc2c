#include "comm/kit/validate.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <array>

#include "base/text.h"
#include "comm/algorithms/reduce_kernels.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

class Validator {
 public:
  Validator(const Operation& operation, int rank, int size, std::string_view backend)
      : op_(operation), rank_(rank), size_(size), backend_(backend) {}

  void run() const {
    switch (op_.kind) {
      case OpKind::kAllReduce:
      case OpKind::kScan:
        check_written(op_.tensor, "tensor");
        check_reduction();
        break;
      case OpKind::kReduce:
        check_peer("root");
        check_written(op_.tensor, "tensor");  // only the root's is written, but all ranks must find the mistake
        check_reduction();
        break;
      case OpKind::kBroadcast:
        check_peer("root");
        check_written(op_.tensor, "tensor");
        break;
      case OpKind::kAllGather:
        check_tensor(op_.tensor, "input");
        check_parts_of_any_size(op_.outputs, "output");
        break;
      case OpKind::kGather:
        check_peer("root");
        check_tensor(op_.tensor, "input");
        check_parts_of_root(op_.outputs, "output");
        break;
      case OpKind::kScatter:
        check_peer("root");
        check_written(op_.tensor, "output");
        check_parts_of_root(op_.inputs, "input");
        break;
      case OpKind::kReduceScatter:
        check_written(op_.tensor, "output");
        check_parts_of_any_size(op_.inputs, "input");
        check_reduction();
        break;
      case OpKind::kAllToAll:
        check_all_to_all();
        break;
      case OpKind::kAllReduceSparse:
        check_sparse();
        break;
      case OpKind::kSend:
      case OpKind::kRecv:
        if (op_.kind != OpKind::kRecv || op_.peer != kAnySource) check_peer("rank");
        if (op_.kind == OpKind::kSend)
          check_tensor(op_.tensor, "tensor");
        else
          check_written(op_.tensor, "tensor");
        break;
      case OpKind::kBarrier:
      case OpKind::kNothing:
        break;
    }
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(std::string advice, const Parts&... parts) const {
    throw InvalidArgument(text(to_string(op_.kind), ": ", parts...), std::move(advice));
  }

  void check_tensor(const at::Tensor& tensor, std::string_view what) const {
    if (!tensor.defined()) fail("Give every rank a tensor", "the ", what, " is undefined");
    if (!tensor.device().is_cpu())
      fail("Move it with .cpu(), or use a backend for that device", "the ", what, " is on ", tensor.device().str(),
           ", and backend '", backend_, "' takes CPU tensors");
    if (tensor.layout() != at::kStrided)
      fail("Call .to_dense() first", "the ", what, " is sparse, and backend '", backend_, "' takes dense tensors");
    if (tensor.is_neg() || tensor.is_conj())
      fail("Call .resolve_conj().resolve_neg() first", "the ", what, " is a lazy conjugate or negation");
  }

  // Checks a tensor that the operation writes.
  void check_written(const at::Tensor& tensor, std::string_view what) const {
    check_tensor(tensor, what);
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      fail("Call .contiguous() first", "elements of the ", what,
           " overlap in memory (it was expanded), so it cannot hold a result");
  }

  void check_peer(std::string_view what) const {
    if (op_.peer < 0 || op_.peer >= size_)
      fail("Use the rank within the group", what, ": expected a rank from 0 to ", size_ - 1, ", got ", op_.peer);
  }

  void check_reduction() const {
    if (!reduce_kernel(op_.tensor.scalar_type(), op_.op))
      fail("Convert it, e.g. with .to(at::kFloat)", to_string(op_.op), " is not defined here for tensors of ",
           c10::toString(op_.tensor.scalar_type()));
    const at::Tensor& factor = op_.factor_tensor;
    if (op_.op == ReduceOp::PREMUL_SUM && factor.defined() && factor.numel() != 1 &&
        factor.sizes() != op_.tensor.sizes())
      fail("Use one number, or one for each element", "the factor: expected one number or shape ", op_.tensor.sizes(),
           ", got shape ", factor.sizes());
  }

  void check_sparse() const {
    const at::Tensor& tensor = op_.tensor;
    if (!tensor.defined() || tensor.layout() != at::kSparse)
      fail("Use the dense all_reduce, or .to_sparse()", "the tensor is not sparse in coordinate format");
    if (!tensor.device().is_cpu())
      fail("Move it with .cpu()", "the tensor is on ", tensor.device().str(), ", and backend '", backend_,
           "' takes CPU tensors");
    if (op_.op != ReduceOp::SUM && (op_.op != ReduceOp::AVG || !at::isFloatingType(tensor.scalar_type())))
      fail("Use SUM", to_string(op_.op), " is not defined for sparse tensors of ", c10::toString(tensor.scalar_type()));
  }

  // The parts must be one tensor per rank, each like op_.tensor, or one tensor with room for all.
  void check_parts(const std::vector<at::Tensor>& parts, std::string_view name) const {
    const int64_t each = op_.tensor.numel();
    if (parts.size() == 1 && size_ > 1) {
      check_part(parts[0], name, each * size_);
      return;
    }
    if (parts.size() != static_cast<size_t>(size_))
      fail(text("Give one tensor for each of the ", size_, " ranks, or one for all"), name,
           "s: expected one for each rank of a group of ", size_, ", got ", parts.size());
    for (const auto& part : parts) check_part(part, name, each);
  }
  // The same, but a list may have parts of unequal sizes; only this rank's own part must be like op_.tensor.
  void check_parts_of_any_size(const std::vector<at::Tensor>& parts, std::string_view name) const {
    if (parts.size() != static_cast<size_t>(size_) || size_ == 1) return check_parts(parts, name);
    for (size_t r = 0; r < parts.size(); ++r) {
      const bool own = r == static_cast<size_t>(rank_);
      check_part(parts[r], name, own || !parts[r].defined() ? op_.tensor.numel() : parts[r].numel());
    }
  }
  void check_part(const at::Tensor& part, std::string_view name, int64_t numel) const {
    if (name == "output")
      check_written(part, name);
    else
      check_tensor(part, name);
    if (part.numel() != numel || part.scalar_type() != op_.tensor.scalar_type())
      fail("Make sizes and dtypes fit", "an ", name, ": expected ", numel, " x ",
           c10::toString(op_.tensor.scalar_type()), ", got ", part.numel(), " x ", c10::toString(part.scalar_type()));
  }
  void check_parts_of_root(const std::vector<at::Tensor>& parts, std::string_view name) const {
    if (rank_ == op_.peer)
      check_parts(parts, name);
    else if (!parts.empty())
      fail("Give them on the root alone", name, "s were given on rank ", rank_, ", which is not the root (", op_.peer,
           ")");
  }

  void check_all_to_all() const {
    if (op_.inputs.size() == static_cast<size_t>(size_) && size_ > 1) {
      if (op_.outputs.size() != op_.inputs.size())
        fail("Give one input and one output per rank", "outputs: expected one for each rank of a group of ", size_,
             ", got ", op_.outputs.size());
      for (size_t r = 0; r < op_.inputs.size(); ++r) {
        check_tensor(op_.inputs[r], "input");
        check_written(op_.outputs[r], "output");
        for (const auto& tensor : {op_.inputs[r], op_.outputs[r]})
          if (tensor.scalar_type() != op_.inputs[0].scalar_type())
            fail("Use one dtype", "the tensors have different dtypes");
      }
      return;
    }
    if (op_.inputs.size() != 1 || op_.outputs.size() != 1)
      fail("Give one input and one output per rank",
           "inputs and outputs: expected one of each for each rank of a group of ", size_, ", got ", op_.inputs.size(),
           " and ", op_.outputs.size());
    check_tensor(op_.inputs.at(0), "input");
    check_written(op_.outputs.at(0), "output");
    if (op_.inputs[0].scalar_type() != op_.outputs[0].scalar_type())
      fail("Use one dtype", "input and output have different dtypes");
    check_splits(op_.inputs[0], op_.input_splits, "input");
    check_splits(op_.outputs[0], op_.output_splits, "output");
  }
  void check_splits(const at::Tensor& tensor, const std::vector<int64_t>& splits, std::string_view name) const {
    if (splits.empty()) {
      const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
      if (rows % size_ != 0)
        fail("Give the splits, or pad", "the ", name, "'s ", rows, " rows cannot be divided among ", size_, " ranks");
      return;
    }
    if (splits.size() != static_cast<size_t>(size_))
      fail("Give one split per rank", name, " splits: expected one for each of ", size_, " ranks, got ", splits.size());
    if (tensor.dim() == 0) fail("Use a tensor with rows", "splits need at least one dimension");
    for (const int64_t split : splits)
      if (split < 0) fail("Splits count rows", "an ", name, " split: expected 0 or more, got ", split);
    int64_t left = tensor.size(0);  // counted down, because a sum of the caller's splits could overflow
    for (const int64_t split : splits) left = left < 0 || split > left ? -1 : left - split;
    if (left != 0) fail("Make them add up", "the ", name, " splits do not add up to its ", tensor.size(0), " rows");
  }

  const Operation& op_;
  const int rank_, size_;
  const std::string_view backend_;
};

}  // namespace

void validate(const Operation& operation, int rank, int size, std::string_view backend) {
  Validator(operation, rank, size, backend).run();
}

void validate_float(std::string_view option, at::ScalarType dtype) {
  constexpr std::array kUsable = {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble};
  if (std::find(kUsable.begin(), kUsable.end(), dtype) == kUsable.end())
    throw InvalidArgument(text(option, ": expected BFloat16, Half, Float or Double, got ", c10::toString(dtype)),
                          "Use torch::kBFloat16, kHalf, kFloat or kDouble");
}

}  // namespace muster::comm
