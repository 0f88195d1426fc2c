#include "parallel/kit/buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace muster::parallel {
namespace {

constexpr int64_t kLine = 128;  // bytes

int64_t padded(const at::Tensor& tensor) {
  const auto item = static_cast<int64_t>(tensor.element_size());
  const int64_t line = kLine / item;
  return (tensor.numel() + line - 1) / line * line;
}

// A tensor like `like` at an offset of `flat`, laid out as autograd lays gradients out. It shares flat's storage but is
// not a view for autograd: optimizers call detach_() on gradients, which views refuse.
at::Tensor tensor_at(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  return at::empty({0}, flat.options()).set_(flat.storage(), offset, like.sizes(), dense_strides(like));
}

// Makes `grad`, which begins a block, the parameter's gradient.
void use_block(Bucket& bucket, Parameter& parameter, const at::Tensor& grad) {
  const int64_t total = padded(grad);
  parameter.view = grad;
  bucket.flat = at::from_blob(
      grad.mutable_data_ptr(), {total + 1}, [storage = grad.storage()](void*) {}, grad.options());
  bucket.used = bucket.flat.narrow(0, total, 1);
  bucket.elements = grad.numel();
}

}  // namespace

std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  return at::empty_like(tensor, tensor.options().device(at::kMeta), at::MemoryFormat::Contiguous).strides().vec();
}

at::Tensor tensor_at(c10::DataPtr memory, const at::Tensor& like) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), like.nbytes(), std::move(memory), nullptr,
                             /*resizable=*/false);
  return at::empty({0}, like.options().device(storage.device()).requires_grad(false))
      .set_(storage, 0, like.sizes(), dense_strides(like));
}

std::vector<Bucket> make_buckets(std::vector<Parameter>& parameters, const std::vector<size_t>& order,
                                 size_t first_bytes, size_t bytes, Heap& heap, GradientBlocks& blocks) {
  std::vector<Bucket> buckets, open;  // open: at most one of each dtype, owner and reduce_dtype
  const auto first_of = [&](const Bucket& b) -> const at::Tensor& { return parameters[b.parameters[0]].tensor; };
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
    const int owner = parameters[index].owner;
    const auto& reduce_dtype = parameters[index].reduce_dtype;
    if (parameters[index].sparse) {
      buckets.push_back({.parameters = {index}, .sparse = true, .reduce_dtype = reduce_dtype});
      continue;
    }
    if (tensor.is_cpu() && tensor.nbytes() >= GradientBlocks::kLarge) {
      buckets.push_back({.parameters = {index}, .large = true, .owner = owner, .reduce_dtype = reduce_dtype});
      continue;
    }
    size_t i = 0;
    while (i < open.size() && (first_of(open[i]).scalar_type() != tensor.scalar_type() || open[i].owner != owner ||
                               open[i].reduce_dtype != reduce_dtype))
      ++i;
    if (i < open.size() && filled(open[i]) + tensor.nbytes() > limit) {
      close(i);
      limit = bytes;
      i = open.size();
    }
    if (i == open.size()) open.push_back({.owner = owner, .reduce_dtype = reduce_dtype});
    open[i].parameters.push_back(index);
  }
  while (!open.empty()) close(0);

  for (size_t b = 0; b < buckets.size(); ++b) {
    Bucket& bucket = buckets[b];
    bucket.pending = bucket.parameters.size();
    for (const size_t index : bucket.parameters) parameters[index].bucket = b;
    if (bucket.sparse) continue;
    if (bucket.large) {
      Parameter& parameter = parameters[bucket.parameters[0]];
      if (parameter.view.defined())
        use_block(bucket, parameter, parameter.view);
      else if (bucket.owner == kEveryRank)
        give_block(bucket, parameter, blocks);
      continue;
    }
    int64_t total = 0;
    for (const size_t index : bucket.parameters) total += padded(parameters[index].tensor);
    const auto count = static_cast<int64_t>(bucket.parameters.size());
    const at::Tensor& first = first_of(bucket);
    bucket.flat = first.is_cpu() ? heap.zeros({total + count}, first.scalar_type())
                                 : at::zeros({total + count}, first.options().requires_grad(false));
    bucket.used = bucket.flat.narrow(0, total, count);
    bucket.elements = total;
    int64_t offset = 0;
    for (const size_t index : bucket.parameters) {
      Parameter& parameter = parameters[index];
      parameter.view = tensor_at(bucket.flat, offset, parameter.tensor);
      parameter.offset = offset;
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
  if (grad.is_conj() || grad.is_neg()) return false;  // other values than its memory has
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

void leave_to_holder(const Bucket& bucket, Parameter& parameter) {
  parameter.view.set_data(parameter.view.clone());
  parameter.view = tensor_at(bucket.flat, parameter.offset, parameter.tensor);
}

void release_block(Bucket& bucket, Parameter& parameter) { parameter.view = bucket.flat = bucket.used = at::Tensor(); }

std::vector<float> shares_used(const Bucket& bucket) {
  std::vector<float> shares(bucket.parameters.size());
  const at::Tensor used = bucket.used.is_complex() ? at::real(bucket.used) : bucket.used;
  at::from_blob(shares.data(), {static_cast<int64_t>(shares.size())}, at::kFloat).copy_(used);
  return shares;
}

}  // namespace muster::parallel
