#include "parallel/modules/parameter_watch.h"

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::parallel {

ParameterWatch::ParameterWatch(const char* user, const std::vector<NamedTensor>& all,
                               const std::vector<NamedTensor>& averaged)
    : user_(user) {
  for (const auto& [name, tensor] : averaged)
    averaged_.push_back(
        {name, tensor, tensor.sizes().vec(), tensor.scalar_type(), tensor.device(), tensor.requires_grad()});
  for (const auto& [name, tensor] : all) {
    all_.push_back(tensor);
    known_.insert(tensor.unsafeGetTensorImpl());
    ignored_.insert(name);
  }
  for (const auto& [name, tensor] : averaged) ignored_.erase(name);
}

std::string ParameterWatch::advice() const { return text("Change the module first, and then make its ", user_); }

void ParameterWatch::check_averaged() const {
  for (const Parameter& was : averaged_) {
    const at::Tensor& is = was.tensor;
    if (is.requires_grad() && !was.requires_grad)
      throw InvalidArgument(text(was.name, " did not require grad when the ", user_, " was made, but does now"),
                            advice());
    if (is.sizes() != at::IntArrayRef(was.sizes) || is.scalar_type() != was.dtype || is.device() != was.device)
      throw InvalidArgument(
          text(was.name, " was ", was.dtype, ' ', at::IntArrayRef(was.sizes), " on ", was.device, " when the ", user_,
               " was made, and is ", is.scalar_type(), ' ', is.sizes(), " on ", is.device()),
          advice());
  }
}

void ParameterWatch::check_for_new(const torch::nn::Module& module) {
  constexpr uint64_t kFirst = 4, kEvery = 16;
  if (++calls_ > kFirst && calls_ % kEvery != 0) return;
  for (const auto& each : module.named_parameters())
    if (each.value().requires_grad() && !known_.contains(each.value().unsafeGetTensorImpl()) &&
        !ignored_.contains(each.key()))
      throw InvalidArgument(
          text("the module did not have its parameter ", each.key(), " when the ", user_, " was made"), advice());
}

}  // namespace muster::parallel
