// Functional optimizers as chains of gradient transformations. Every step is recorded by autograd, so gradients flow
// through it: to the parameters before it, to the state, and to the learning rate.
//
//   const auto adam = optim::adam({.lr = 1e-3});
//   optim::OptState state = adam.init(parameters);
//   auto gradients = torch::autograd::grad({loss}, parameters, {}, true, true);
//   auto [updates, next] = adam.update(gradients, state, parameters);
//   parameters = optim::apply_updates(parameters, updates);
//
//   const auto own = optim::chain(optim::clip_grad_norm(1.0), optim::scale_by_adam(), optim::scale(-1e-3));
//
// Parameters, gradients and updates are trees of tensors (comm/tensor_tree.h): a std::vector, a std::map, a
// torch::OrderedDict, a struct with tree(). Trees of one call must have the same leaves, in the same order. The leaves
// of a tree that are undefined have no gradient: they have no update, and their state stays.
//
//   update(updates, state, parameters, options)
//     updates      same shapes and dtypes as the parameters
//     state        from init() or the last update(); not changed, unless .inplace
//     parameters   only weight decay reads them; may be left out otherwise
//     .inplace     may overwrite the updates and the tensors of the state, to save memory: use what is returned, and
//                  nothing else. For training without gradients through the step.
//
// Errors: InvalidArgument: options out of their range (when the transformation is made); trees of different lengths, a
// state of another transformation, missing parameters (update()). Thread-safety: a transformation is immutable; several
// threads may use it, each with a state of its own.
// Source: torchopt (transform, alias, schedule, combine); Optax. Where TorchOpt drops the state of a parameter that
// once had no gradient, this keeps it.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "muster/comm/tensor_msgpack.h"
#include "muster/comm/tensor_tree.h"

namespace muster::optim {

using Tensors = std::vector<at::Tensor>;

// What a transformation remembers of its parameters, as a tree of tensors. Copies share the tensors.
struct OptState {
  Tensors tensors;              // of each kind that the transformation keeps, one per parameter
  std::vector<int64_t> counts;  // of each parameter: updates so far
  std::vector<OptState> parts;  // of the transformations in a chain, or of the masked one
  auto tree() { return std::tie(tensors, parts); }
  MSGPACK_DEFINE(tensors, counts, parts);  // calls may carry it, with its graph
};

struct UpdateOptions {
  bool inplace = false;
};

// A number that may change from update to update, and that gradients may flow to.
class Rate {
 public:
  using Value = std::variant<double, at::Tensor>;

  Rate(double value) : value_(value) {}
  Rate(at::Tensor value) : value_(std::move(value)) {}  // of one element, such as a learning rate that is learned
  // A schedule: a function of the number of updates so far, which returns a number or a tensor of one element.
  template <typename F>
  requires std::invocable<const F&, int64_t> &&(!std::same_as<F, Rate>)Rate(F schedule)
      : schedule_([schedule = std::move(schedule)](int64_t count) -> Value { return schedule(count); }) {}

  Value operator()(int64_t count) const { return schedule_ ? schedule_(count) : value_; }
  bool constant() const { return !schedule_; }

 private:
  Value value_;
  std::function<Value(int64_t)> schedule_;
};

class GradientTransformation {
 public:
  // Your own transformation. `update` replaces tensors in the updates and in the state by new ones. It may overwrite
  // the tensors themselves if options.inplace is set.
  using Init = std::function<OptState(at::TensorList parameters)>;
  using Update =
      std::function<void(Tensors& updates, OptState& state, at::TensorList parameters, UpdateOptions options)>;
  GradientTransformation(Init init, Update update);

  template <typename Tree>
  OptState init(const Tree& parameters) const;
  template <typename Tree>
  std::pair<Tree, OptState> update(const Tree& updates, const OptState& state, const Tree& parameters = {},
                                   UpdateOptions options = {}) const;

  // The same for lists, and in place of the arguments.
  OptState init_list(at::TensorList parameters) const { return parts_->init(parameters); }
  void update_list(Tensors& updates, OptState& state, at::TensorList parameters, UpdateOptions options = {}) const;

  // The same except for the multiplication by a constant with which most chains end: returns the constant, for a caller
  // who multiplies while adding.
  double update_unscaled(Tensors& updates, OptState& state, at::TensorList parameters) const;

 private:
  using Unscaled = std::function<double(Tensors& updates, OptState& state, at::TensorList parameters)>;
  struct Parts {
    Init init;
    Update update;
    Unscaled unscaled;  // none: there is no such multiplication
  };
  GradientTransformation(Init init, Update update, Unscaled unscaled);
  void check(const Tensors& updates, at::TensorList parameters) const;

  friend GradientTransformation scale(double by);
  friend GradientTransformation chain(std::vector<GradientTransformation> transformations);

  std::shared_ptr<const Parts> parts_;
};

namespace detail {

template <typename T>
inline constexpr bool is_unordered = false;
template <typename K, typename V, typename H, typename E>
inline constexpr bool is_unordered<std::unordered_map<K, V, H, E>> = true;

[[noreturn]] void keys_differ();

// Throws InvalidArgument if two dictionaries have different keys.
template <typename Tree>
void check_keys(const Tree& a, const Tree& b) {
  if constexpr (muster::detail::is_map<Tree> || muster::detail::is_ordered_dict<Tree>) {
    const auto key = [](const auto& item) -> const auto& {
      if constexpr (muster::detail::is_map<Tree>) {
        return item.first;
      } else {
        return item.key();
      }
    };
    if (a.size() != b.size()) keys_differ();
    for (auto one = a.begin(), other = b.begin(); one != a.end(); ++one, ++other)
      if (key(*one) != key(*other)) keys_differ();
  }
}

template <typename Tree>
Tensors leaves_of(const Tree& tree) {
  static_assert(!is_unordered<Tree>, "a std::unordered_map has no order: use a std::map or a torch::OrderedDict");
  if constexpr (std::same_as<Tree, Tensors>) {
    return tree;
  } else {
    static_assert(muster::detail::HasTensors<Tree>::value,
                  "this type has no tensors: comm/tensor_tree.h says which do");
    Tensors leaves;
    Tree copy = tree;  // iteration may copy what shared pointers hold
    muster::detail::for_each_leaf(copy, [&](const at::Tensor& leaf) { leaves.push_back(leaf); });
    return leaves;
  }
}

// The tree with these leaves.
template <typename Tree>
Tree with_leaves(Tree tree, Tensors leaves) {
  if constexpr (std::same_as<Tree, Tensors>) {
    return leaves;
  } else {
    auto next = leaves.begin();
    muster::detail::for_each_leaf(tree, [&](at::Tensor& leaf) { leaf = std::move(*next++); });
    return tree;
  }
}

// The same of several trees, of those with these numbers, in this order.
template <size_t... kNumbers, typename... Trees>
Tensors leaves_of_numbered(const std::tuple<Trees...>& trees) {
  Tensors leaves;
  const auto append = [&](Tensors its) { leaves.insert(leaves.end(), its.begin(), its.end()); };
  (append(leaves_of(std::get<kNumbers>(trees))), ...);
  return leaves;
}
template <size_t... kNumbers, typename... Trees>
std::tuple<Trees...> with_leaves_of_numbered(std::tuple<Trees...> trees, const Tensors& leaves) {
  auto next = leaves.begin();
  const auto put = [&](auto& tree) { muster::detail::for_each_leaf(tree, [&](at::Tensor& leaf) { leaf = *next++; }); };
  (put(std::get<kNumbers>(trees)), ...);
  return trees;
}

Tensors apply_updates(Tensors parameters, const Tensors& updates, bool inplace);

}  // namespace detail

template <typename Tree>
OptState GradientTransformation::init(const Tree& parameters) const {
  return init_list(detail::leaves_of(parameters));
}

template <typename Tree>
std::pair<Tree, OptState> GradientTransformation::update(const Tree& updates, const OptState& state,
                                                         const Tree& parameters, UpdateOptions options) const {
  Tensors leaves = detail::leaves_of(updates), its = detail::leaves_of(parameters);
  if (!its.empty()) detail::check_keys(updates, parameters);
  OptState next = state;
  update_list(leaves, next, its, options);
  return {detail::with_leaves(updates, std::move(leaves)), std::move(next)};
}

// parameters + updates. `inplace` adds to the parameters themselves, without recording it.
template <typename Tree>
Tree apply_updates(const Tree& parameters, const Tree& updates, UpdateOptions options = {}) {
  detail::check_keys(parameters, updates);
  return detail::with_leaves(
      parameters, detail::apply_updates(detail::leaves_of(parameters), detail::leaves_of(updates), options.inplace));
}

// One after the other.
GradientTransformation chain(std::vector<GradientTransformation> transformations);
template <std::same_as<GradientTransformation>... T>
GradientTransformation chain(const GradientTransformation& first, const T&... rest) {
  return chain(std::vector<GradientTransformation>{first, rest...});
}

// ---------------------------------------------------------------------------------- transformations; g is the update

GradientTransformation identity();
GradientTransformation scale(double by);
GradientTransformation scale_by_schedule(Rate by);
GradientTransformation nan_to_num(double nan = 0, std::optional<double> posinf = {}, std::optional<double> neginf = {});

// Scales all updates together so that the norm of all of them is at most max_norm. The factor counts as a constant.
// norm_type: any number above 0, or infinity. error_if_nonfinite: throws InvalidArgument for a norm that is not finite.
GradientTransformation clip_grad_norm(double max_norm, double norm_type = 2, bool error_if_nonfinite = false);

// Which leaves a masked transformation applies to: one entry per leaf, or a function of the leaves. The others' updates
// pass unchanged.
using Mask = std::variant<std::vector<bool>, std::function<std::vector<bool>(at::TensorList)>>;
GradientTransformation masked(GradientTransformation inner, Mask mask);

// g + weight_decay * parameter
GradientTransformation add_decayed_weights(double weight_decay, std::optional<Mask> mask = {});

// The moments of the following transformations are created with requires_grad if moment_requires_grad is set, so that
// gradients with respect to a state from init() exist.

// trace = momentum * trace + (1 - dampening) * g, the first trace is g; the update is the trace, or, with nesterov,
// g + momentum * trace.
struct TraceOptions {
  double momentum = 0.9, dampening = 0;
  bool nesterov = false, moment_requires_grad = false;
};
GradientTransformation trace(TraceOptions options = {});

// fused: one pass over the memory forward and one backward, for parameters that are dense, contiguous, on the CPU, and
// float or double; otherwise, and for derivatives beyond the second of a step, the same formulas one operator after the
// other.
struct ScaleByAdamOptions {
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, eps_root = 0;
  bool moment_requires_grad = false, fused = true;
};
GradientTransformation scale_by_adam(ScaleByAdamOptions options = {});

struct ScaleByAdamaxOptions {
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-6;
  bool moment_requires_grad = false;
};
GradientTransformation scale_by_adamax(ScaleByAdamaxOptions options = {});
using ScaleByRAdamOptions = ScaleByAdamaxOptions;
GradientTransformation scale_by_radam(ScaleByRAdamOptions options = {});

struct ScaleByAdadeltaOptions {
  double rho = 0.9, eps = 1e-6;
  bool moment_requires_grad = false;
};
GradientTransformation scale_by_adadelta(ScaleByAdadeltaOptions options = {});

// g / (sqrt(mean of g²) + eps); scale_by_stddev subtracts the squared mean of g first.
struct ScaleByRmsOptions {
  double alpha = 0.9, eps = 1e-8, initial_scale = 0;
};
GradientTransformation scale_by_rms(ScaleByRmsOptions options = {});
using ScaleByStddevOptions = ScaleByRmsOptions;
GradientTransformation scale_by_stddev(ScaleByStddevOptions options = {});

// g / (sqrt(sum of g²) + eps), and 0 where the sum is 0
struct ScaleByRssOptions {
  double initial_accumulator_value = 0, eps = 1e-10;
};
GradientTransformation scale_by_rss(ScaleByRssOptions options = {});

// ------------------------------------------------------------------------------------------------------------
// schedules

using Schedule = std::function<double(int64_t count)>;

// From init_value to end_value in transition_steps updates, after transition_begin of them.
struct PolynomialScheduleOptions {
  double init_value, end_value, power;
  int64_t transition_steps, transition_begin = 0;
};
Schedule polynomial_schedule(PolynomialScheduleOptions options);
struct LinearScheduleOptions {
  double init_value, end_value;
  int64_t transition_steps, transition_begin = 0;
};
Schedule linear_schedule(LinearScheduleOptions options);

// init_value * decay_rate ^ ((count - transition_begin) / transition_steps), the exponent rounded down with staircase;
// never beyond end_value.
struct ExponentialDecayOptions {
  double init_value, decay_rate;
  int64_t transition_begin = 0, transition_steps = 1;
  bool staircase = false;
  std::optional<double> end_value = {};
};
Schedule exponential_decay(ExponentialDecayOptions options);

// -----------------------------------------------------------------------------------------------------------
// optimizers Chains of the above, with the names and defaults of torchopt. The names of the options' types begin with
// Func, since SGDOptions and the others are those of optim/functional_optimizer.h.

struct FuncSGDOptions {
  Rate lr;  // no default
  double momentum = 0, weight_decay = 0, dampening = 0;
  bool nesterov = false, moment_requires_grad = false, maximize = false;
};
struct FuncAdamOptions {
  Rate lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0, eps_root = 0;
  bool moment_requires_grad = false, maximize = false, fused = true;
};
struct FuncAdamWOptions {
  Rate lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 1e-2, eps_root = 0;
  std::optional<Mask> mask = {};
  bool moment_requires_grad = false, maximize = false, fused = true;
};
struct FuncAdagradOptions {
  Rate lr = 1e-2;
  double lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10;
  bool maximize = false;
};
struct FuncRMSpropOptions {
  Rate lr = 1e-2;
  double alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0, initial_scale = 0;
  bool centered = false, nesterov = false, maximize = false;
};
struct FuncAdadeltaOptions {
  Rate lr = 1e-3;
  double rho = 0.9, eps = 1e-6, weight_decay = 0;
  bool moment_requires_grad = false, maximize = false;
};
struct FuncAdamaxOptions {
  Rate lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-6, weight_decay = 0;
  bool moment_requires_grad = false, maximize = false;
};
using FuncRAdamOptions = FuncAdamaxOptions;

GradientTransformation sgd(FuncSGDOptions options);
GradientTransformation adam(FuncAdamOptions options = {});
GradientTransformation adamw(FuncAdamWOptions options = {});
GradientTransformation adagrad(FuncAdagradOptions options = {});
GradientTransformation rmsprop(FuncRMSpropOptions options = {});
GradientTransformation adadelta(FuncAdadeltaOptions options = {});
GradientTransformation adamax(FuncAdamaxOptions options = {});
GradientTransformation radam(FuncRAdamOptions options = {});

}  // namespace muster::optim
