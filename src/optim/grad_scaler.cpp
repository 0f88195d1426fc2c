#include "muster/optim/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

namespace muster {
namespace {

constexpr char kOncePerIteration[] =
    "Call it once per optimizer and iteration, and update() at the end of the iteration";

// What a rank has found in its gradients. Of all ranks', the largest counts.
enum class Finding : int32_t { kFinite, kInfinite, kUnusable };

Finding of_all(Finding mine, const Group& group) {
  if (!World::current_or_null() || group.resolved().size() == 1) return mine;
  const at::Tensor finding = at::full({1}, static_cast<int32_t>(mine), at::kInt);
  all_reduce(finding, {.op = ReduceOp::MAX, .group = group});
  return static_cast<Finding>(finding.item<int32_t>());
}

// Divides them by the scale; returns whether one was infinite or NaN.
bool divide(std::vector<at::Tensor>& gradients, double scale) {
  using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>;
  std::map<Kind, std::vector<at::Tensor>> alike;
  for (const at::Tensor& gradient : gradients)
    alike[{gradient.device().type(), gradient.device().index(), gradient.scalar_type()}].push_back(gradient);
  bool found = false;
  for (auto& [kind, some] : alike) {
    const auto float_on_device = some[0].options().dtype(at::kFloat);
    at::Tensor infinities = at::zeros({1}, float_on_device);
    at::_amp_foreach_non_finite_check_and_unscale_(some, infinities,
                                                   at::full({1}, static_cast<float>(1 / scale), float_on_device));
    found |= infinities.item<float>() != 0;
  }
  return found;
}

std::vector<at::Tensor> gradients_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> gradients;
  std::unordered_set<const void*> seen;  // Module::parameters() has a shared parameter as often as it occurs
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined() || !seen.insert(gradient.unsafeGetTensorImpl()).second) continue;
      if (gradient.scalar_type() == at::kHalf)
        throw InvalidArgument(
            "the gradient of a parameter in float16 is to be unscaled, and would lose what the scale saved",
            "Let parameters be float32, and compute in float16 (Autocast, FsdpOptions::mixed_precision)");
      gradients.push_back(gradient.is_sparse() ? gradient._values() : gradient);
    }
  return gradients;
}

}  // namespace

// The scale is a float32, as PyTorch keeps it.
GradScaler::GradScaler(GradScalerOptions options)
    : options_(std::move(options)), scale_(static_cast<float>(options_.init_scale)) {
  if (!(scale_ > 0) || !std::isfinite(scale_) || !(options_.growth_factor > 1) || !(options_.backoff_factor > 0) ||
      !(options_.backoff_factor < 1) || options_.growth_interval < 1)
    throw InvalidArgument(text("GradScaler: expected init_scale above 0, growth_factor above 1, backoff_factor between "
                               "0 and 1 and growth_interval above 0, got ",
                               options_.init_scale, ", ", options_.growth_factor, ", ", options_.backoff_factor,
                               " and ", options_.growth_interval),
                          "Change the one that is out of range");
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return options_.enabled ? loss * scale_ : loss; }

// An error here must not keep the other ranks waiting.
GradScaler::Seen& GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  Finding mine = Finding::kFinite;
  std::exception_ptr failure;
  try {
    auto gradients = gradients_of(optimizer);
    if (divide(gradients, scale_)) mine = Finding::kInfinite;
  } catch (...) {
    failure = std::current_exception();
    mine = Finding::kUnusable;
  }
  const Finding all = of_all(mine, options_.group);
  if (failure) std::rethrow_exception(failure);
  if (all == Finding::kUnusable)
    throw InvalidArgument("another rank cannot unscale its gradients", "Look at that rank's error");
  return seen_[&optimizer] = {.found_infinity = all == Finding::kInfinite};
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  if (seen_.contains(&optimizer))
    throw InvalidArgument("unscale_() is called for an optimizer that has been unscaled since the last update()",
                          kOncePerIteration);
  unscale(optimizer);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  const auto known = seen_.find(&optimizer);
  if (known != seen_.end() && known->second.has_stepped)
    throw InvalidArgument("step() is called twice for an optimizer since the last update()", kOncePerIteration);
  Seen& seen = known == seen_.end() ? unscale(optimizer) : known->second;
  seen.has_stepped = true;
  if (seen.found_infinity) return false;
  optimizer.step();
  return true;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (seen_.empty())
    throw InvalidArgument("update() is called, but no optimizer has been unscaled or stepped since the last one",
                          "Call step() of the GradScaler before");
  const bool found =
      std::any_of(seen_.begin(), seen_.end(), [](const auto& each) { return each.second.found_infinity; });
  seen_.clear();
  if (found) {
    scale_ = static_cast<float>(scale_ * options_.backoff_factor);
    growth_tracker_ = 0;
  } else if (++growth_tracker_ == options_.growth_interval) {
    const auto grown = static_cast<float>(scale_ * options_.growth_factor);
    if (std::isfinite(grown)) scale_ = grown;
    growth_tracker_ = 0;
  }
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  const auto rounded = static_cast<float>(new_scale);
  if (!(rounded > 0) || !std::isfinite(rounded))
    throw InvalidArgument(text("the new scale: expected a finite number above 0, got ", new_scale),
                          "Use a finite scale above 0");
  scale_ = rounded;
  seen_.clear();
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", c10::IValue(scale_));
  archive.write("growth_tracker", c10::IValue(growth_tracker_));
  archive.write("growth_factor", c10::IValue(options_.growth_factor));
  archive.write("backoff_factor", c10::IValue(options_.backoff_factor));
  archive.write("growth_interval", c10::IValue(options_.growth_interval));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  c10::IValue scale, tracker;
  archive.read("scale", scale);
  archive.read("growth_tracker", tracker);
  // As in PyTorch, these are part of the state: the tracker counts towards the interval. Older archives lack them.
  c10::IValue growth, backoff, interval;
  if (archive.try_read("growth_factor", growth) && archive.try_read("backoff_factor", backoff) &&
      archive.try_read("growth_interval", interval)) {
    options_.growth_factor = growth.toDouble();
    options_.backoff_factor = backoff.toDouble();
    options_.growth_interval = interval.toInt();
  }
  scale_ = scale.toDouble();
  growth_tracker_ = std::min(tracker.toInt(), options_.growth_interval - 1);
  seen_.clear();
}

}  // namespace muster
