#include "parallel/ddp/buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
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
// it is dense, else contiguous. It shares flat's storage but is not a view for autograd: optimizers call detach_() on
// gradients, which views refuse.
at::Tensor tensor_at(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  const at::Tensor contiguous = at::empty_like(like, like.options().device(at::kMeta), at::MemoryFormat::Contiguous);
  const auto strides = like.is_non_overlapping_and_dense() ? like.strides() : contiguous.strides();
  return at::empty({0}, flat.options()).set_(flat.storage(), offset, like.sizes(), strides);
}

// Makes `grad`, which begins a block, the parameter's gradient.
void use_block(Bucket& bucket, Parameter& parameter, const at::Tensor& grad) {
  const int64_t total = padded(grad);
  parameter.view = grad;
  bucket.flat = at::from_blob(
      grad.mutable_data_ptr(), {total + 1}, [storage = grad.storage()](void*) {}, grad.options());
  bucket.used = bucket.flat.narrow(0, total, 1);
}

// What ranks must agree on, as text: "layer.weight Float [3, 4]", and more if the tensor is unusual.
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
                                 size_t first_bytes, size_t bytes, Heap& heap, GradientBlocks& blocks) {
  std::vector<Bucket> buckets, open;  // open: at most one of each dtype
  const auto dtype_of = [&](const Bucket& b) { return parameters[b.parameters[0]].tensor.scalar_type(); };
  const auto filled = [&](const Bucket& b) {
    size_t sum = 0;
    for (const size_t index : b.parameters) sum += parameters[index].tensor.nbytes();
    return sum;
  };
  const auto close = [&](size_t i) {
    buckets.push_back(std::move(open[i]));
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
  };
  size_t limit = first_bytes;
  for (const size_t index : order) {
    const at::Tensor& tensor = parameters[index].tensor;
    if (tensor.nbytes() >= GradientBlocks::kLarge) {
      buckets.push_back({.parameters = {index}, .large = true});
      continue;
    }
    size_t i = 0;
    while (i < open.size() && dtype_of(open[i]) != tensor.scalar_type()) ++i;
    if (i < open.size() && filled(open[i]) + tensor.nbytes() > limit) {
      close(i);
      limit = bytes;
      i = open.size();
    }
    if (i == open.size()) open.emplace_back();
    open[i].parameters.push_back(index);
  }
  while (!open.empty()) close(0);

  for (size_t b = 0; b < buckets.size(); ++b) {
    Bucket& bucket = buckets[b];
    bucket.pending = bucket.parameters.size();
    for (const size_t index : bucket.parameters) parameters[index].bucket = b;
    if (bucket.large) {
      Parameter& parameter = parameters[bucket.parameters[0]];
      if (parameter.view.defined())
        use_block(bucket, parameter, parameter.view);
      else
        give_block(bucket, parameter, blocks);
      continue;
    }
    int64_t total = 0;
    for (const size_t index : bucket.parameters) total += padded(parameters[index].tensor);
    const auto count = static_cast<int64_t>(bucket.parameters.size());
    bucket.flat = heap.zeros({total + count}, dtype_of(bucket));
    bucket.used = bucket.flat.narrow(0, total, count);
    int64_t offset = 0;
    for (const size_t index : bucket.parameters) {
      Parameter& parameter = parameters[index];
      parameter.view = tensor_at(bucket.flat, offset, parameter.tensor);
      offset += padded(parameter.tensor);
    }
  }
  return buckets;
}

bool adopt_block(Bucket& bucket, Parameter& parameter, const at::Tensor& grad, const GradientBlocks& blocks) {
  const at::Tensor& like = parameter.tensor;
  if (grad.scalar_type() != like.scalar_type() || grad.storage_offset() != 0 ||
      grad.storage().nbytes() != like.nbytes() || grad.sizes() != like.sizes() ||
      !grad.is_non_overlapping_and_dense() || !blocks.contains(grad.const_data_ptr()))
    return false;
  // Ranks must agree on the order of the elements in memory.
  const bool as_parameter = like.is_non_overlapping_and_dense();
  if (as_parameter ? grad.strides() != like.strides() : !grad.is_contiguous()) return false;
  // As .grad, autograd takes a tensor that nobody else holds; but if it is a view, others may still hold and read its
  // memory. After accumulation, .grad is the only tensor on its memory if nobody else uses that memory, even if
  // backward gave a view (as for the weight of a Linear) and nobody else held its base.
  if (grad.storage().use_count() != 1) return false;
  use_block(bucket, parameter, grad);
  return true;
}

void give_block(Bucket& bucket, Parameter& parameter, GradientBlocks& blocks) {
  const at::Tensor& like = parameter.tensor;
  const size_t bytes = like.nbytes();
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, blocks.take(bytes), nullptr, /*resizable=*/false);
  const at::Tensor flat =
      at::empty({0}, like.options().requires_grad(false)).set_(storage, 0, {like.numel()}, {int64_t{1}});
  use_block(bucket, parameter, tensor_at(flat, 0, like));
  parameter.view.zero_();
}

void mark_used(Bucket& bucket, const std::vector<Parameter>& parameters) {
  std::vector<float> marks;
  for (const size_t index : bucket.parameters) marks.push_back(parameters[index].used ? 1 : 0);
  bucket.used.copy_(at::from_blob(marks.data(), {static_cast<int64_t>(marks.size())}, at::kFloat));
}

std::vector<float> shares_used(const Bucket& bucket) {
  std::vector<float> shares(bucket.parameters.size());
  at::from_blob(shares.data(), {static_cast<int64_t>(shares.size())}, at::kFloat).copy_(bucket.used);
  return shares;
}

void require_same_on_all_ranks(const std::vector<NamedTensor>& tensors, const std::string& options,
                               const Group& group) {
  std::string mine;
  for (size_t i = 0; i < tensors.size(); ++i) mine += signature(tensors, i) + "\n";
  mine += "options " + options + "\n";
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
  throw Mismatch(own_first == kNowhere
                     ? text("another rank's module differs from rank 0's, first in parameter or buffer number ",
                            *where.const_data_ptr<int64_t>())
                     : text("rank ", group.rank(), "'s module differs from rank 0's: it has ", or_none(here),
                            " where rank 0 has ", or_none(there)),
                 "Build the same module on every rank");
}

void broadcast_from_first(const std::vector<NamedTensor>& tensors, const Group& group) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> small;
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    // Contiguous memory, whose strides are the same on all ranks.
    const bool is_plain = tensor.device().is_cpu() && tensor.is_non_overlapping_and_dense();
    if (is_plain && tensor.nbytes() <= kCoalesced) {
      if (tensor.nbytes() > 0) small.push_back(tensor.detach());
      total += static_cast<int64_t>(tensor.nbytes());
    } else {
      broadcast(tensor.detach(), 0, {.group = group});
    }
  }
  if (small.empty()) return;
  const at::Tensor together = at::empty({total}, at::kByte);
  const auto copy = [&](bool in) {
    auto* at = together.mutable_data_ptr<uint8_t>();
    for (const auto& tensor : small) {
      std::memcpy(in ? at : tensor.mutable_data_ptr(), in ? tensor.const_data_ptr() : at, tensor.nbytes());
      at += tensor.nbytes();
    }
  };
  if (group.rank() == 0) copy(true);
  broadcast(together, 0, {.group = group});
  if (group.rank() != 0) copy(false);
}

}  // namespace muster::ddp
