#include "parallel/batch_norm/whole_batch_norm.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/functional.h"
#include "parallel/batch_norm/batch_norm_gradient.h"
#include "parallel/batch_norm/batch_part.h"

namespace muster::parallel {
namespace {

using at::Tensor;

Tensor or_undefined(const std::optional<Tensor>& tensor) { return tensor.value_or(Tensor()); }
std::optional<Tensor> if_defined(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

// In which statistics and gradients per channel are computed.
at::ScalarType math_type(const Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

std::shared_ptr<const Group> not_ended(const std::weak_ptr<const Group>& group) {
  if (auto locked = group.lock()) return locked;
  throw Aborted("the World in which this batch norm was synchronized has ended",
                "Call convert_sync_batchnorm() in the new World, or eval(); make a SyncBatchNorm anew");
}

void require_usable(const BatchNormCall& call) {
  const Tensor& input = call.input;
  if (input.dim() < 2)
    throw InvalidArgument(text("the input of a synchronized batch norm: expected two dimensions or more, got size [",
                               join(input.sizes()), "]"),
                          "Its input has two dimensions or more: batch, channels, and any others");
  if (!input.is_floating_point())
    throw InvalidArgument(text("the input of a synchronized batch norm: expected floating-point numbers, got ",
                               c10::toString(input.scalar_type())),
                          "Convert it to a floating-point dtype");
  if (input.is_meta())
    throw InvalidArgument("a synchronized batch norm is given an input without values, on the device meta",
                          "For shapes only, convert the net afterwards, or call eval()");
  const std::array<std::pair<const char*, Tensor>, 4> all{{{"weight", or_undefined(call.weight)},
                                                           {"bias", or_undefined(call.bias)},
                                                           {"running_mean", or_undefined(call.running_mean)},
                                                           {"running_var", or_undefined(call.running_var)}}};
  for (const auto& [name, tensor] : all) {
    if (!tensor.defined()) continue;
    if (tensor.numel() != input.size(1))
      throw InvalidArgument(text("the input of a synchronized batch norm: expected ", tensor.numel(), " channels, as ",
                                 name, " has, got ", input.size(1), " in size [", join(input.sizes()), "]"),
                            "Dimension 1 of the input is that of the channels");
    if (tensor.is_meta())
      throw InvalidArgument(text(name, " of a synchronized batch norm has no values, because it is on the device meta"),
                            "Give it values first, for example by FsdpOptions::init");
    if (tensor.scalar_type() != input.scalar_type() && tensor.scalar_type() != math_type(input))
      throw InvalidArgument(text(name, " of a synchronized batch norm is ", c10::toString(tensor.scalar_type()),
                                 ", and its input is ", c10::toString(input.scalar_type())),
                            "Let both be the same, or the input bfloat16 or float16 and the module float32");
  }
}

// --- the statistics ---

struct Statistics {
  double count = 0;       // of values per channel
  Tensor mean, variance;  // float64, on the CPU; the variance divides by the count
};

// Count, means and variances of this rank's batch, float64.
Tensor own_statistics(const Tensor& input) {
  const int64_t channels = input.size(1), count = input.numel() / channels;
  const Tensor own = at::zeros({2 * channels + 1}, input.options().dtype(at::kDouble));
  if (count == 0) return own;
  // libtorch computes with bfloat16 in float32 if there are running statistics of float32.
  std::optional<Tensor> running;
  if (math_type(input) != input.scalar_type()) running = at::zeros({channels}, input.options().dtype(math_type(input)));
  const auto [mean, variance] =
      at::batch_norm_update_stats(input, running, running ? std::optional(running->clone()) : std::nullopt, 0);
  own[0].fill_(count);
  own.slice(0, 1, channels + 1).copy_(mean);
  own.slice(0, channels + 1).copy_(variance);
  return own;
}

// `all`: what own_statistics() gives for each part, [parts, 2 * channels + 1].
Statistics merge(const Tensor& all, int64_t channels) {
  const int64_t parts = all.size(0);
  Statistics merged{.mean = at::zeros({channels}, at::kDouble), .variance = at::zeros({channels}, at::kDouble)};
  const double* const values = all.const_data_ptr<double>();
  double* const mean = merged.mean.mutable_data_ptr<double>();
  double* const variance = merged.variance.mutable_data_ptr<double>();
  const auto of_part = [&](int64_t part) { return values + part * (2 * channels + 1); };
  for (int64_t p = 0; p < parts; ++p) merged.count += *of_part(p);
  for (int64_t p = 0; p < parts; ++p) {
    const double* const its = of_part(p);
    if (*its == 0) continue;
    const double share = *its / merged.count;
    for (int64_t c = 0; c < channels; ++c) mean[c] += share * its[1 + c];
  }
  for (int64_t p = 0; p < parts; ++p) {
    const double* const its = of_part(p);
    if (*its == 0) continue;
    const double share = *its / merged.count;
    for (int64_t c = 0; c < channels; ++c) {
      const double apart = its[1 + c] - mean[c];
      variance[c] += share * (its[1 + channels + c] + apart * apart);
    }
  }
  return merged;
}

// Who shares the batch.
struct Sharers : torch::CustomClassHolder {
  Sharers(std::weak_ptr<const Group> of, const BatchNormCall& call)
      : group(std::move(of)), part(BatchPart::current()), has_part(BatchPart::current() != nullptr) {
    if (!has_part) return;
    // In mixed precision, weight and bias may be copies, which nobody knows.
    for (const auto* const tensor : {&call.running_mean, &call.weight, &call.bias})
      if (norm < 0 && *tensor && (*tensor)->defined()) norm = BatchPart::current()->number_of(**tensor);
    if (norm < 0 && or_undefined(call.running_mean).defined()) norm = BatchPart::kOfAnotherModule;
  }
  std::weak_ptr<const Group> group;
  std::weak_ptr<BatchPart> part;
  bool has_part;
  int64_t norm = -1;  // by which the part knows the batch norm
};

Statistics statistics_of_all(const Tensor& input, const Group& group, const Sharers& sharers) {
  const at::NoGradGuard values_only;
  const Tensor own = own_statistics(input.detach());
  if (const auto part = sharers.part.lock()) return merge(part->gather(own, sharers.norm, group), input.size(1));
  const Tensor all = at::empty({group.size(), own.numel()}, own.options());
  all_gather_into_tensor(all, own, {.group = group});
  return merge(all.cpu(), input.size(1));
}

// In place.
void add_up_over_parts(const Tensor& sums, const Group& group, const Sharers& sharers) {
  const auto part = sharers.part.lock();
  if (!part) return all_reduce(sums, {.group = group});
  const Tensor all = part->gather(sums, sharers.norm, group);
  sums.zero_();
  for (int64_t p = 0; p < all.size(0); ++p) sums.add_(all[p]);
}

void update(const Tensor& running, const Tensor& value, double momentum) {
  const at::NoGradGuard values_only;
  running.copy_(at::add(running.to(at::kDouble) * (1 - momentum), value.to(running.device()), momentum));
}

// --- autograd ---

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What backward() gives for input, weight and bias.
struct Gradients {
  Tensor input, weight, bias;
};

// Of operators that have derivatives themselves. The statistics are computed again, as functions of the input.
Gradients differentiable_gradients(const Tensor& gradient, const Tensor& input, const Tensor& weight, double count,
                                   double eps, const Group& group, bool wants_input) {
  std::vector<int64_t> others{0}, wide(static_cast<size_t>(input.dim()), 1);
  for (int64_t d = 2; d < input.dim(); ++d) others.push_back(d);
  wide[1] = input.size(1);
  const auto mean_of_all = [&](const Tensor& sums) { return functional::all_reduce(sums, {.group = group}) / count; };
  const Tensor x = input.to(math_type(input)), dy = gradient.to(math_type(input));
  const Tensor centered = x - mean_of_all(x.sum(others)).view(wide);
  const Tensor deviation = at::rsqrt(mean_of_all((centered * centered).sum(others)) + eps).view(wide);
  const Tensor normalized = centered * deviation;
  Gradients result{.weight = (dy * normalized).sum(others), .bias = dy.sum(others)};
  if (!wants_input) return result;
  const Tensor means = mean_of_all(at::cat({result.bias, result.weight}));
  const int64_t channels = input.size(1);
  const Tensor shift = means.slice(0, 0, channels).view(wide), slope = means.slice(0, channels).view(wide);
  result.input = (dy - shift - normalized * slope) * deviation;
  if (weight.defined()) result.input = result.input * weight.to(x.scalar_type()).view(wide);
  return result;
}

Gradients plain_gradients(const Tensor& gradient, const Tensor& input, const Tensor& weight, const Tensor& mean,
                          const Tensor& variance, double count, double eps, const Group& group, const Sharers& sharers,
                          bool wants_input) {
  const int64_t channels = input.size(1);
  const Tensor scale = weight.defined() ? weight.to(mean.scalar_type()) : Tensor();
  Gradients result;
  if (input.numel() == 0) {
    result = {.weight = at::zeros_like(mean), .bias = at::zeros_like(mean)};
  } else {
    // In evaluation, libtorch's gradients of weight and bias are the sums that are needed here. The kernels of CUDA
    // want what forward() has saved.
    std::optional<Tensor> saved_mean, saved_deviation;
    if (!input.is_cpu()) saved_mean = mean, saved_deviation = at::rsqrt(variance + eps);
    std::tie(std::ignore, result.weight, result.bias) =
        at::native_batch_norm_backward(gradient.contiguous(input.suggest_memory_format()), input, scale, mean, variance,
                                       saved_mean, saved_deviation, /*train=*/false, eps, {false, true, true});
  }
  if (!wants_input) return result;
  const Tensor sums = at::cat({result.bias, result.weight}).to(at::kDouble);
  add_up_over_parts(sums, group, sharers);
  const Tensor deviation = at::rsqrt(variance.to(at::kDouble) + eps);
  const auto rounded = [&](const Tensor& tensor) { return tensor.to(mean.scalar_type()).contiguous(); };
  result.input = batch_norm_gradient(gradient, input, rounded(scale.defined() ? deviation * scale : deviation),
                                     rounded(sums.slice(0, 0, channels) / count), mean,
                                     rounded(deviation * sums.slice(0, channels) / count));
  return result;
}

// Normalizes with given statistics; in backward() they are functions of the input, on all ranks.
struct Normalize final : torch::autograd::Function<Normalize> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const std::optional<Tensor>& weight,
                        const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& variance, double count,
                        double eps, const c10::intrusive_ptr<Sharers>& sharers) {
    context->save_for_backward({input, or_undefined(weight), mean, variance});
    context->saved_data["count"] = count;
    context->saved_data["eps"] = eps;
    context->saved_data["sharers"] = c10::IValue::make_capsule(sharers);
    context->saved_data["has_bias"] = bias.has_value();
    if (input.numel() == 0) return at::empty_like(input);
    const auto converted = [&](const std::optional<Tensor>& tensor) {
      return tensor ? std::optional(tensor->to(mean.scalar_type())) : std::nullopt;
    };
    return std::get<0>(at::native_batch_norm(input, converted(weight), converted(bias), mean, variance,
                                             /*training=*/false,
                                             /*momentum=*/0, eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
    const double count = context->saved_data["count"].toDouble(), eps = context->saved_data["eps"].toDouble();
    const auto sharers = c10::static_intrusive_pointer_cast<Sharers>(context->saved_data["sharers"].toCapsule());
    const auto group = not_ended(sharers->group);
    if (sharers->has_part && sharers->part.expired())
      throw InvalidArgument("a synchronized batch norm's backward() comes after that of backward_by_shards()",
                            "Return the loss, which backward_by_shards() differentiates");
    if (sharers->has_part && at::GradMode::is_enabled())
      throw InvalidArgument("backward_by_shards() has no create_graph for a synchronized batch norm",
                            "Use BatchNorm, which each shard computes by itself");
    const bool wants_input = context->needs_input_grad(0);
    Gradients result =
        at::GradMode::is_enabled()
            ? differentiable_gradients(gradients[0], input, weight, count, eps, *group, wants_input)
            : plain_gradients(gradients[0], input, weight, mean, variance, count, eps, *group, *sharers, wants_input);
    if (result.input.defined()) result.input = result.input.to(input.scalar_type());
    if (!weight.defined()) result.weight.reset();
    if (!context->saved_data["has_bias"].toBool()) result.bias.reset();
    return {result.input, result.weight, result.bias, {}, {}, {}, {}, {}};  // autograd converts them
  }
};

}  // namespace

Tensor local_batch_norm(const BatchNormCall& call, bool training) {
  return at::native::batch_norm(call.input, call.weight, call.bias, call.running_mean, call.running_var, training,
                                call.momentum, call.eps, at::globalContext().userEnabledCuDNN());
}

Tensor whole_batch_norm(const BatchNormCall& call, const std::weak_ptr<const Group>& of) {
  require_usable(call);
  const auto group = not_ended(of);
  const Tensor& input = call.input;
  const auto sharers = c10::make_intrusive<Sharers>(of, call);
  if (input.size(1) == 0 || (group->size() == 1 && !sharers->has_part)) return local_batch_norm(call, true);
  const Statistics all = statistics_of_all(input, *group, *sharers);
  if (all.count == 0) return local_batch_norm(call, true);
  TORCH_CHECK(all.count != 1, "Expected more than 1 value per channel when training, got input size ", input.sizes(),
              ", and nothing on the other ranks");
  if (const Tensor running = or_undefined(call.running_mean); running.defined())
    update(running, all.mean, call.momentum);
  if (const Tensor running = or_undefined(call.running_var); running.defined())
    update(running, all.variance * (all.count / (all.count - 1)), call.momentum);
  const auto here = input.options().dtype(math_type(input)).requires_grad(false);
  return Normalize::apply(input, if_defined(call.weight), if_defined(call.bias), all.mean.to(here),
                          all.variance.to(here), all.count, call.eps, sharers);
}

}  // namespace muster::parallel
