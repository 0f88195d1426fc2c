#include "parallel/modules/same_module.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/kit/coalesced.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/watched.h"

namespace muster::parallel {
namespace {

// What ranks must agree on, as text: "layer.weight Float [3, 4]", and more if the tensor is unusual.
std::string signature(const std::vector<NamedTensor>& tensors, size_t index) {
  const auto& [name, tensor] = tensors[index];
  std::string words = text(name, " ", c10::toString(tensor.scalar_type()), " [", join(tensor.sizes()), "]");
  if (!tensor.is_contiguous()) words += text(" strides [", join(tensor.strides()), "]");
  if (!tensor.requires_grad()) words += " without gradient";
  if (tensor.is_meta()) words += " without values";
  if (tensor.is_cuda()) words += " on a CUDA device";
  for (size_t earlier = 0; earlier < index; ++earlier)
    if (tensors[earlier].tensor.is_same(tensor)) words += text(" shared with ", tensors[earlier].name);
  return words;
}

}  // namespace

std::vector<NamedTensor> ModuleTensors::trainable() const {
  std::vector<NamedTensor> some;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(some),
               [](const NamedTensor& parameter) { return parameter.tensor.requires_grad(); });
  return some;
}

ModuleTensors tensors_of(const torch::nn::Module& module) {
  ModuleTensors tensors;
  for (const auto& item : module.named_parameters()) {
    tensors.all.push_back({item.key(), item.value()});
    const bool is_known = std::any_of(tensors.parameters.begin(), tensors.parameters.end(),
                                      [&](const NamedTensor& other) { return other.tensor.is_same(item.value()); });
    if (!is_known) tensors.parameters.push_back({item.key(), item.value()});
  }
  for (const auto& item : module.named_buffers()) {
    tensors.all.push_back({item.key(), item.value()});
    tensors.buffers.push_back({item.key(), item.value()});
  }
  return tensors;
}

void require_same_on_all_ranks(const std::vector<NamedTensor>& tensors, const std::string& options,
                               const Group& group) {
  const auto line = [&](size_t i) { return i < tensors.size() ? signature(tensors, i) : "options " + options; };
  std::string mine;
  for (size_t i = 0; i <= tensors.size(); ++i) mine += line(i) + "\n";
  // Broadcast rank 0's list: first its length, then its text.
  at::Tensor length = at::zeros({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(mine.size());
  broadcast(length, 0, {.group = group});
  const int64_t size = *length.const_data_ptr<int64_t>();
  at::Tensor list = at::zeros({size}, at::kByte);
  if (group.rank() == 0) std::memcpy(list.mutable_data_ptr(), mine.data(), mine.size());
  broadcast(list, 0, {.group = group});
  const std::string theirs(static_cast<const char*>(list.const_data_ptr()), static_cast<size_t>(size));

  // Find the first difference, as an index; then every rank learns whether and where any rank differs.
  constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();
  int64_t first = kNowhere;
  std::string here, there;
  if (mine != theirs) {
    size_t a = 0, b = 0;
    for (first = 0;; ++first) {
      here = mine.substr(a, mine.find('\n', a) - a);
      there = theirs.substr(b, theirs.find('\n', b) - b);
      if (here != there || here.empty()) break;
      a += here.size() + 1;
      b += there.size() + 1;
    }
  }
  const int64_t own_first = first;
  at::Tensor where = at::zeros({1}, at::kLong);
  *where.mutable_data_ptr<int64_t>() = first;
  all_reduce(where, {.op = ReduceOp::MIN, .group = group});
  if (*where.const_data_ptr<int64_t>() == kNowhere) return;
  const auto or_none = [](const std::string& signature) {
    return signature.empty() ? std::string("nothing") : signature;
  };
  throw Mismatch(own_first == kNowhere ? text("another rank's module differs from rank 0's, which has ",
                                              line(static_cast<size_t>(*where.const_data_ptr<int64_t>())))
                                       : text("rank ", group.rank(), "'s module differs from rank 0's: it has ",
                                              or_none(here), " where rank 0 has ", or_none(there)),
                 "Build the same module on every rank");
}

void require_own_memory(const std::vector<NamedTensor>& parameters) {
  std::map<const void*, std::string> known;  // by storage
  for (const auto& [name, tensor] : parameters) {
    if (tensor.numel() == 0) continue;
    const auto [other, is_new] = known.emplace(tensor.storage().unsafeGetStorageImpl(), name);
    if (!is_new)
      throw InvalidArgument(text(other->second, " and ", name, " are two tensors in the same memory"),
                            "Register one tensor under both names, or give each its own memory");
  }
}

void give_values(const at::Tensor& tensor, const at::Tensor& values) {
  if (tensor.device() == values.device()) return tensor.set_data(values);
  // set_data() refuses most changes of the device. Like it, forget the accumulator, which knows the old one.
  tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
  if (auto* const meta = torch::autograd::impl::get_autograd_meta(tensor)) meta->grad_accumulator_.reset();
}

void require_values_on_all_ranks(const std::vector<NamedTensor>& tensors, const Group& group) {
  const auto missing =
      std::find_if(tensors.begin(), tensors.end(), [](const NamedTensor& each) { return !is_here(each.tensor); });
  auto index = static_cast<int64_t>(tensors.end() - missing);  // from the end; 0: none
  all_reduce(at::from_blob(&index, {1}, at::kLong), {.op = ReduceOp::MAX, .group = group});
  if (index == 0) return;
  throw InvalidArgument(
      text("the values of ", (tensors.end() - index)->name, " are on another host now"),
      "Call gather() of the FullyShardedDataParallel that has them, on all ranks, before another is made");
}

void throw_if_any_failed(const std::exception_ptr& failure, const Group& group, const char* what) {
  int64_t failed[2] = {0, 0};  // a rank, plus 1; whether a resource was missing
  if (failure) try {
      failed[0] = group.rank() + 1;
      std::rethrow_exception(failure);
    } catch (const Unavailable&) {
      failed[1] = 1;
    } catch (...) {
    }
  all_reduce(at::from_blob(failed, {2}, at::kLong), {.op = ReduceOp::MAX, .group = group});
  if (failure) std::rethrow_exception(failure);
  if (failed[0] == 0) return;
  const std::string message = text("rank ", group.global_rank(static_cast<int>(failed[0]) - 1), " ", what);
  if (failed[1] != 0) throw Unavailable(message, "Look at its error");
  throw InvalidArgument(message, "Look at its error");
}

void broadcast_together(const std::vector<NamedTensor>& tensors, const Group& group, int root) {
  const at::NoGradGuard no_grad;
  CoalescedBytes small;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.is_meta()) continue;
    const at::Tensor values = unwatched(tensor);
    if (CoalescedBytes::takes(values))
      small.add(values);
    else
      broadcast(values, root, {.group = group});
  }
  if (small.empty()) return;
  const bool is_root = group.rank() == root;
  broadcast(is_root ? small.packed() : small.buffer(), root, {.group = group});
  if (!is_root) small.unpack();
}

}  // namespace muster::parallel
