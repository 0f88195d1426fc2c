#include "parallel/ddp/buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <limits>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::ddp {
namespace {

constexpr int64_t kLine = 128;  // bytes

int64_t padded(const at::Tensor& tensor) {
  const auto item = static_cast<int64_t>(tensor.element_size());
  const int64_t line = kLine / item;
  return (tensor.numel() + line - 1) / line * line;
}

// A tensor like `like` at an offset of `flat`, laid out as autograd lays gradients out: with the parameter's strides if
// it is dense, else contiguous. It shares flat's storage but is no view to autograd: optimizers call detach_() on
// gradients, which views refuse.
at::Tensor tensor_at(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  const at::Tensor contiguous = at::empty_like(like, like.options().device(at::kMeta), at::MemoryFormat::Contiguous);
  const auto strides = like.is_non_overlapping_and_dense() ? like.strides() : contiguous.strides();
  return at::empty({0}, flat.options()).set_(flat.storage(), offset, like.sizes(), strides);
}

// What ranks must agree on, as text: "layer.weight Float [3, 4]", and more where it is not the usual.
std::string signature(const std::vector<NamedTensor>& tensors, size_t index) {
  const auto& [name, tensor] = tensors[index];
  std::string words = text(name, " ", c10::toString(tensor.scalar_type()), " [", join(tensor.sizes()), "]");
  if (!tensor.is_contiguous()) words += text(" strides [", join(tensor.strides()), "]");
  if (!tensor.requires_grad()) words += " without gradient";
  for (size_t earlier = 0; earlier < index; ++earlier)
    if (tensors[earlier].tensor.is_same(tensor)) words += text(" shared with ", tensors[earlier].name);
  return words;
}

}  // namespace

std::vector<Bucket> make_buckets(std::vector<Parameter>& parameters, const std::vector<size_t>& order,
                                 size_t first_bytes, size_t bytes, Heap& heap) {
  std::vector<Bucket> buckets;
  size_t filled = 0;
  for (const size_t index : order) {
    Parameter& parameter = parameters[index];
    const size_t limit = buckets.size() <= 1 ? first_bytes : bytes;
    const bool same_dtype = !buckets.empty() && parameters[buckets.back().parameters[0]].tensor.scalar_type() ==
                                                    parameter.tensor.scalar_type();
    if (!same_dtype || filled >= limit || filled + parameter.tensor.nbytes() > std::max(limit, bytes)) {
      buckets.emplace_back();
      filled = 0;
    }
    buckets.back().parameters.push_back(index);
    parameter.bucket = buckets.size() - 1;
    filled += parameter.tensor.nbytes();
  }
  for (Bucket& bucket : buckets) {
    int64_t total = 0;
    for (const size_t index : bucket.parameters) total += padded(parameters[index].tensor);
    const auto count = static_cast<int64_t>(bucket.parameters.size());
    bucket.flat = heap.zeros({total + count}, parameters[bucket.parameters[0]].tensor.scalar_type());
    bucket.used = bucket.flat.narrow(0, total, count);
    bucket.pending = bucket.parameters.size();
    int64_t offset = 0;
    for (const size_t index : bucket.parameters) {
      Parameter& parameter = parameters[index];
      const at::Tensor& tensor = parameter.tensor;
      parameter.view = tensor_at(bucket.flat, offset, tensor);
      offset += padded(tensor);
    }
  }
  return buckets;
}

std::vector<size_t> order_of(const std::vector<Bucket>& buckets) {
  std::vector<size_t> order;
  for (const auto& bucket : buckets) order.insert(order.end(), bucket.parameters.begin(), bucket.parameters.end());
  return order;
}

void mark_used(Bucket& bucket, const std::vector<Parameter>& parameters) {
  for (size_t i = 0; i < bucket.parameters.size(); ++i)
    bucket.used.select(0, static_cast<int64_t>(i)).fill_(parameters[bucket.parameters[i]].ready ? 1 : 0);
}

void require_same_on_all_ranks(const std::vector<NamedTensor>& tensors, const std::string& options,
                               const Group& group) {
  std::string mine;
  for (size_t i = 0; i < tensors.size(); ++i) mine += signature(tensors, i) + "\n";
  mine += "options " + options + "\n";
  // Rank 0's list to everybody: first its length, then its text.
  at::Tensor length = at::zeros({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(mine.size());
  broadcast(length, 0, {.group = group});
  const int64_t size = *length.const_data_ptr<int64_t>();
  at::Tensor list = at::zeros({size}, at::kByte);
  if (group.rank() == 0) std::memcpy(list.mutable_data_ptr(), mine.data(), mine.size());
  broadcast(list, 0, {.group = group});
  const std::string theirs(static_cast<const char*>(list.const_data_ptr()), static_cast<size_t>(size));

  // The first difference, as an index; then every rank learns whether and where anybody differs.
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
  throw Mismatch(own_first == kNowhere
                     ? text("another rank's module differs from rank 0's, first in parameter or buffer number ",
                            *where.const_data_ptr<int64_t>())
                     : text("rank ", group.rank(), "'s module differs from rank 0's: it has ", or_none(here),
                            " where rank 0 has ", or_none(there)),
                 "Build the same module on every rank");
}

void broadcast_from_first(const std::vector<NamedTensor>& tensors, const Group& group) {
  const at::NoGradGuard no_grad;
  for (const auto& named : tensors) broadcast(named.tensor.detach(), 0, {.group = group});
}

}  // namespace muster::ddp
