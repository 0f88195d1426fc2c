// Of gradient_reducer.h: what users choose, and what they ask.
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/gradients/gradient_reducer_impl.h"
#include "parallel/kit/gradient_blocks.h"
#include "parallel/tape/accumulation_hooks.h"

namespace muster::parallel {

size_t bytes_of_mb(double mb) { return static_cast<size_t>(std::min(mb, 1e9) * (1 << 20)); }

bool exceed_first_bucket(const std::vector<NamedTensor>& parameters, const ReducerOptions& options) {
  std::map<at::ScalarType, size_t> small;  // bytes
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    if ((!options.sparse.empty() && options.sparse[i]) || tensor.nbytes() >= GradientBlocks::kLarge) continue;
    if ((small[tensor.scalar_type()] += tensor.nbytes()) > bytes_of_mb(options.first_bucket_cap_mb)) return true;
  }
  return false;
}

ReducerOptions checked(ReducerOptions options) {
  if (!(options.bucket_cap_mb > 0) || !(options.first_bucket_cap_mb > 0))
    throw InvalidArgument(text("bucket_cap_mb and first_bucket_cap_mb: expected numbers above 0, got ",
                               options.bucket_cap_mb, " and ", options.first_bucket_cap_mb),
                          "Use sizes above 0, in MiB");
  if (!options.group.is_member())
    throw InvalidArgument(text("this rank is not a member of ", options.user, "'s group"));
  return options;
}

std::string words_of(const ReducerOptions& options) {
  return text(options.user, " bucket_cap_mb=", options.bucket_cap_mb,
              " first_bucket_cap_mb=", options.first_bucket_cap_mb,
              " find_unused_parameters=", options.find_unused_parameters, " static_graph=", options.static_graph,
              " broadcast_buffers=", options.broadcast_buffers, " sparse=", join(options.sparse));
}

void GradientReducer::require_no_other() const {
  for (const Parameter& parameter : impl_->parameters)
    if (ReadyHook::has_other(torch::autograd::impl::post_acc_grad_hooks(parameter.tensor), impl_.get()))
      throw InvalidArgument(text("parameter ", parameter.name, " belongs to another DistributedDataParallel or ",
                                 "FullyShardedDataParallel, too"),
                            "Destroy the other one, or choose parts of one model with is_unit");
}

void GradientReducer::require_averages(const std::string& what) const {
  for (const Parameter& parameter : impl_->parameters)
    if (parameter.used && parameter.tensor.grad().defined())
      throw InvalidArgument(text(what, ": the gradient of ", parameter.name, " is this rank's own, of a no_sync()"),
                            "Call it after a backward() outside of no_sync(), which averages");
}

std::vector<std::vector<std::string>> GradientReducer::bucket_names() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : impl_->buckets) {
    auto& list = names.emplace_back();
    for (const size_t index : bucket.parameters) list.push_back(impl_->parameters[index].name);
  }
  return names;
}

std::vector<size_t> GradientReducer::bucket_bytes() const {
  std::vector<size_t> bytes;
  for (const auto& bucket : impl_->buckets) {
    size_t& sum = bytes.emplace_back();
    for (const size_t index : bucket.parameters) sum += impl_->parameters[index].tensor.nbytes();
  }
  return bytes;
}
double GradientReducer::bucket_cap_mb() const { return impl_->options.bucket_cap_mb; }

}  // namespace muster::parallel
