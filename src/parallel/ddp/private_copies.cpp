#include "parallel/ddp/private_copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/watched.h"

namespace muster::ddp {

PrivateCopies::PrivateCopies(const std::vector<parallel::NamedTensor>& parameters,
                             const std::vector<at::ScalarType>& dtypes) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    if (tensor.scalar_type() == dtypes[i]) continue;
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided)
      throw InvalidArgument(text("parameter ", name, " is not a dense CPU tensor"),
                            "DistributedDataParallel computes in mixed precision with dense parameters on the CPU");
    if (parallel::is_shared(tensor))
      throw InvalidArgument(text("parameter ", name, " belongs to a FullyShardedDataParallel"),
                            "Set FsdpOptions::mixed_precision instead");
    entries_.push_back({.name = name, .parameter = tensor, .dtype = dtypes[i]});
  }
  phase_->copies.resize(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) use_copy(i);
}

PrivateCopies::~PrivateCopies() { phase_->copies.clear(); }

// From now on, operators that read the parameter ask for its copy, which has its place in a storage like the
// parameter's.
void PrivateCopies::use_copy(size_t number) {
  const c10::InferenceMode normal(false);
  Entry& entry = entries_[number];
  const at::Tensor values = parallel::unwatched(entry.parameter);
  const auto elements = static_cast<int64_t>(values.storage().nbytes() / values.element_size());
  const at::Tensor memory = at::empty({elements}, values.options().dtype(entry.dtype))
                                .as_strided(values.sizes(), values.strides(), values.storage_offset());
  const at::Tensor copy = parallel::private_tensor(memory, {.name = entry.name, .is_copy = true});
  const auto instead = [number, phase = phase_, dtype = values.scalar_type()](const at::Tensor& tensor) {
    return phase->instead_of(tensor, dtype, number);
  };
  phase_->copies[number] = copy;
  entry.values = parallel::private_tensor(values, {.name = entry.name, .instead = instead});
  entry.parameter.set_data(entry.values);
  parallel::watch(entry.parameter);
}

void PrivateCopies::make() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (!entry.parameter.is_alias_of(entry.values)) use_copy(i);
    phase_->copies[i].copy_(entry.values);
  }
}

}  // namespace muster::ddp
