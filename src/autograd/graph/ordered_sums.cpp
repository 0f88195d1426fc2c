#include "autograd/graph/ordered_sums.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/function_hook.h>

#include <utility>
#include <vector>

namespace muster::autograd {
namespace {

using torch::autograd::AccumulateGrad;

// The mutex under which libtorch's node changes .grad.
std::mutex& mutex_of(Node& node) {
  struct Derived : Node {
    static constexpr std::mutex Node::*mutex() { return &Derived::mutex_; }
  };
  return node.*Derived::mutex();
}

// Sparse + dense is not defined, dense + sparse is.
Tensor with_part(const Tensor& sum, const Tensor& part) { return sum.is_sparse() ? part.add(sum) : sum.add(part); }

bool can_be_copied_into(const Tensor& grad, const Tensor& sum) {
  return grad.layout() == at::kStrided && sum.layout() == at::kStrided && grad.sizes() == sum.sizes();
}

}  // namespace

Tensor sum_of(const Parts& parts, const Tensor& before) {
  Tensor sum = before;
  for (const auto& [place, part] : parts) sum = sum.defined() ? with_part(sum, part) : part;
  return parts.size() == 1 && !before.defined() ? sum.clone() : sum;
}

bool OrderedSums::can_add_to(AccumulateGrad& leaf) { return leaf.pre_hooks().empty() && leaf.post_hooks().empty(); }

bool OrderedSums::Sum::is(const Tensor& now) const {
  return !parts.empty() && now.defined() && grad._unsafe_get_target() == now.unsafeGetTensorImpl() &&
         version == now._version();
}

std::shared_ptr<OrderedSums::Sum> OrderedSums::sum_of_leaf(const Tensor& leaf) {
  std::vector<std::shared_ptr<Sum>> dead;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  sweep_(sums_, [&](const auto& entry) {
    if (entry.second->leaf.use_count() > 0) return false;
    dead.push_back(entry.second);
    return true;
  });
  auto& sum = sums_[leaf.unsafeGetTensorImpl()];
  if (!sum) sum = std::make_shared<Sum>(leaf);
  return sum;
}

void OrderedSums::add(const Path& path, size_t position, AccumulateGrad& leaf, Tensor gradient) {
  const Tensor& variable = leaf.variable;
  if (!gradient.defined() || !variable.requires_grad()) return;
  // Leaves of one graph may have got views of one tensor, and libtorch looks only whether others have this view.
  if (gradient.has_storage() && gradient.storage().use_count() > 1) gradient = gradient.clone();
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard device(variable.device());
  const std::shared_ptr<Sum> sum = sum_of_leaf(variable);
  Parts dropped;  // destroyed without the lock
  const std::lock_guard lock(mutex_of(leaf));
  Tensor& grad = variable.mutable_grad();
  if (!sum->is(grad)) {
    sum->parts.swap(dropped);
    sum->before = grad.defined() ? grad.clone() : Tensor();
  }
  sum->grad.reset();  // if anything below throws, the next sum begins anew with .grad
  const Place place(path, position);
  if (!grad.defined()) {
    AccumulateGrad::accumulateGrad(variable, grad, gradient, 1, [&](Tensor&& first) { grad = std::move(first); });
    sum->parts.emplace(place, Tensor());
  } else {
    for (auto& [at, part] : sum->parts)
      if (!part.defined()) part = grad.clone();
    Tensor& part = sum->parts[place];
    part = part.defined() ? part.add(gradient) : std::move(gradient);
    Tensor total = sum_of(sum->parts, sum->before);
    if (can_be_copied_into(grad, total))
      grad.copy_(total);
    else
      grad = std::move(total);
  }
  sum->grad = Weak(grad.getIntrusivePtr());
  sum->version = grad._version();
  if (const auto& hook = leaf.tensor_post_acc_grad_hooks()) (*hook)(variable);
}

}  // namespace muster::autograd
