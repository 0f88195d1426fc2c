#include "checkpoint/item_values.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/watched.h"

namespace muster::checkpoint {

void require_storable(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
    throw InvalidArgument(text("tensor '", name, "' is sparse, quantized or without data"),
                          "Files hold dense tensors; in a snapshot, add it as an object with save() and load()");
}

at::Tensor on_host(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.to(at::kCPU).contiguous().resolve_conj().resolve_neg();
}

at::Tensor storable(const at::Tensor& tensor, const std::string& name) {
  require_storable(tensor, name);
  const at::NoGradGuard no_grad;
  // A parameter whose values may be elsewhere: clone() throws if they are. Of one with a copy, not the copy.
  const at::Tensor values = parallel::is_spread(tensor) ? tensor.clone() : parallel::unwatched(tensor);
  if (values.scalar_type() != tensor.scalar_type())
    throw InvalidArgument(text("tensor '", name, "' is to be stored while operators use its copy in mixed precision"),
                          "Call synchronize() of the FullyShardedDataParallel before");
  return values.is_cpu() ? on_host(values) : values;
}

void copy_values(at::Tensor to, at::Tensor values) {
  const at::NoGradGuard no_grad;
  for (int64_t d = 0; d < to.dim(); ++d) {
    if (to.stride(d) != 0 || to.size(d) < 2) continue;
    const at::Tensor first = values.narrow(d, 0, 1);
    const at::Tensor equal = (values == first).logical_or((values != values).logical_and(first != first));  // NaN
    if (!equal.all().item<bool>())
      throw InvalidArgument(
          text("a tensor whose slices in dimension ", d, " are one in memory, as expand() makes them, ",
               "cannot take values that differ there"),
          "Restore into a tensor with memory for all of its elements: clone() it");
    to = to.narrow(d, 0, 1);
    values = first;
  }
  to.copy_(values);
}

void put_values(const at::Tensor& to, const at::Tensor& values) {
  if (parallel::belongs_to_another_rank(to)) return;
  if (!parallel::is_watched(to)) {
    copy_values(to, values);
    return;
  }
  copy_values(parallel::unwatched(to), values);
  torch::autograd::impl::bump_version(to);
}

bool takes_bytes_of(const at::Tensor& saved, const at::Tensor& to) {
  return to.defined() && to.layout() == at::kStrided && to.is_cpu() && to.is_contiguous() && !to.is_conj() &&
         !to.is_neg() && to.scalar_type() == saved.scalar_type() && to.sizes() == saved.sizes();
}

at::Tensor without_values(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kMeta).requires_grad(false));
}

std::string shape_of(const at::Tensor& tensor) {
  return text(c10::toString(tensor.scalar_type()), " [", join(tensor.sizes(), " x "), "]");
}

void check_fits(const Entry& saved, const at::Tensor& here) {
  if (saved.tensor.sizes() != here.sizes() || saved.tensor.scalar_type() != here.scalar_type())
    throw InvalidArgument(text("tensor '", saved.full_name(), "' in the snapshot: expected ", shape_of(here),
                               ", as here, got ", shape_of(saved.tensor)),
                          kSameProgram);
}

void check_count(const Entries& entries, size_t count) {
  if (entries.size() != count)
    throw InvalidArgument(text("'", entries.front().item, "' was saved from an object of another type"), kSameProgram);
}

}  // namespace muster::checkpoint
