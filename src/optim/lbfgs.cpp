// LBFGS. The class is not derived from torch::optim::LBFGS of libtorch 2.13, for three reasons:
//   - It computes distances and slopes in doubles, where Python has tensors. With float32 and a line search, parameters
//     of a small net were 4e-2 from Python's after 100 steps. Here they are equal to the bit.
//   - torch::save() throws for its state, because a place of `al` that is not in use is an undefined tensor.
//   - It discards the imaginary parts of products of complex gradients.
#include "muster/optim/lbfgs.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/functional_optimizer.h"
#include "optim/line_search.h"
#include "optim/options.h"

namespace muster {
namespace {

using at::Tensor;
using optim::LBFGSOptions;
using optim::LBFGSState;
using optim::LinePoint;
using optim::Number;

constexpr int64_t kMostCounts = int64_t{1} << 50;  // which a double holds exactly
constexpr double kLeastCurvature = 1e-10;          // a pair with less says nothing reliable

LBFGSOptions checked_lbfgs(LBFGSOptions options) {
  const auto count = [](const char* name, int64_t value) {
    optim::require(value >= 1 && value <= kMostCounts, name, static_cast<double>(value), "1 to 2^50");
  };
  optim::at_least("lr", options.lr, 0);
  count("max_iter", options.max_iter);
  if (options.max_eval == 0) options.max_eval = options.max_iter * 5 / 4;
  count("max_eval", options.max_eval);
  count("history_size", options.history_size);
  optim::require(std::isfinite(options.tolerance_grad), "tolerance_grad", options.tolerance_grad, "a finite number");
  optim::require(std::isfinite(options.tolerance_change), "tolerance_change", options.tolerance_change,
                 "a finite number");
  const auto search = static_cast<int64_t>(options.line_search_fn);
  optim::require(search == 0 || search == 1, "line_search_fn", static_cast<double>(search),
                 "LineSearch::kNone or kStrongWolfe");
  return options;
}

// All parameters as one vector of real numbers.
class FlatParameters {
 public:
  explicit FlatParameters(const std::vector<Tensor>& parameters) : parameters_(parameters) {}

  int64_t numel() const {
    int64_t all = 0;
    for (const Tensor& each : parameters_) all += each.numel() * (each.is_complex() ? 2 : 1);
    return all;
  }
  at::TensorOptions options() const {
    auto dtype = c10::toRealValueType(parameters_[0].scalar_type());
    for (const Tensor& each : parameters_) dtype = c10::promoteTypes(dtype, c10::toRealValueType(each.scalar_type()));
    return parameters_[0].options().dtype(dtype).requires_grad(false);
  }
  Tensor gradient() const {
    std::vector<Tensor> parts;
    for (const Tensor& each : parameters_) {
      Tensor gradient = each.grad();
      if (!gradient.defined()) gradient = at::zeros({each.numel()}, each.options().requires_grad(false));
      if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
      parts.push_back(optim::as_real(gradient).reshape(-1));
    }
    return at::cat(parts);
  }
  void move(const Number& distance, const Tensor& direction) const {
    int64_t begin = 0;
    for (const Tensor& each : parameters_) {
      Tensor values = optim::as_real(each);
      values.add_(direction.narrow(0, begin, values.numel()).view_as(values), distance.value());
      begin += values.numel();
    }
  }
  std::vector<Tensor> values() const {
    std::vector<Tensor> all;
    for (const Tensor& each : parameters_) all.push_back(each.clone(at::MemoryFormat::Contiguous));
    return all;
  }
  void set(const std::vector<Tensor>& values) const {
    for (size_t i = 0; i < values.size(); ++i) Tensor(parameters_[i]).copy_(values[i]);
  }

 private:
  const std::vector<Tensor>& parameters_;
};

double number_of(const Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1 || loss.is_complex())
    throw InvalidArgument(
        text("the closure of LBFGS: expected one real number, got ",
             loss.defined() ? text("a tensor of shape ", loss.sizes(), " and dtype ", loss.dtype()) : "no tensor"),
        "Return the loss, of which backward() was called");
  return loss.item<double>();
}

Number dot_of(const Tensor& a, const Tensor& b) { return Number(a.dot(b)); }
Number largest_of(const Tensor& vector) { return Number(vector.abs().max()); }

// Adds what the last move told about the curvature, and forgets the oldest pair if there are too many.
void remember(LBFGSState& state, const Tensor& gradient, int64_t history_size) {
  const Tensor change = gradient.sub(state.prev_flat_grad), moved = state.d.mul(state.t);
  const Number curvature = dot_of(change, moved);
  if (!(curvature > kLeastCurvature)) return;
  while (std::ssize(state.ro) >= history_size) {
    state.old_dirs.pop_front();
    state.old_stps.pop_front();
    state.ro.pop_front();
  }
  state.old_dirs.push_back(change);
  state.old_stps.push_back(moved);
  state.ro.push_back((1 / curvature).value());
  state.h_diag = (curvature / dot_of(change, change)).value();
}

// The gradient times the inverse of the Hessian that the pairs give, negative: two loops over the pairs.
Tensor quasi_newton_direction(const LBFGSState& state, const Tensor& gradient) {
  const auto dtype = gradient.scalar_type();
  const size_t pairs = state.ro.size();
  Tensor direction = gradient.neg();
  std::vector<Number> factors(pairs, 0);
  for (size_t i = pairs; i-- > 0;) {
    factors[i] = dot_of(state.old_stps[i], direction) * Number(state.ro[i], dtype);
    direction.add_(state.old_dirs[i], (-factors[i]).value());
  }
  direction.mul_(state.h_diag);
  for (size_t i = 0; i < pairs; ++i) {
    const Number factor = dot_of(state.old_dirs[i], direction) * Number(state.ro[i], dtype);
    direction.add_(state.old_stps[i], (factors[i] - factor).value());
  }
  return direction;
}

}  // namespace

LBFGS::LBFGS(std::vector<Tensor> parameters, Options options)
    : LBFGS({torch::optim::OptimizerParamGroup(std::move(parameters))}, options) {}

LBFGS::LBFGS(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options options)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                std::make_unique<OptionsOfGroup>(checked_lbfgs(options))) {
  if (groups.size() != 1)
    throw InvalidArgument(text("LBFGS: expected one group of parameters, got ", groups.size()),
                          "Give all parameters the same options, or make an LBFGS for each group");
  if (groups[0].params().empty()) throw InvalidArgument("LBFGS was given no parameters");
  std::unordered_set<const at::TensorImpl*> seen;
  for (const Tensor& each : groups[0].params()) {
    if (!each.defined() || !(each.is_floating_point() || each.is_complex()))
      throw InvalidArgument("a parameter of LBFGS is not a tensor of floating-point or complex numbers");
    if (each.device() != groups[0].params()[0].device())
      throw InvalidArgument(text("parameters of LBFGS are on ", groups[0].params()[0].device(), " and ", each.device()),
                            "Move all of them to one device");
    if (!seen.insert(each.unsafeGetTensorImpl()).second)
      throw InvalidArgument(text("a parameter of LBFGS, of shape ", each.sizes(), ", was given twice"),
                            "Give each parameter once");
  }
  if (FlatParameters(groups[0].params()).numel() == 0)
    throw InvalidArgument("the parameters of LBFGS have no elements");
  Optimizer::add_param_group(groups[0]);
  if (!groups[0].has_options()) return;
  const auto* const own = dynamic_cast<const OptionsOfGroup*>(&groups[0].options());
  if (!own) throw InvalidArgument("the group of LBFGS has options of another class", "Use LBFGS::OptionsOfGroup");
  param_groups_[0].set_options(std::make_unique<OptionsOfGroup>(checked_lbfgs(own->values)));
}

void LBFGS::add_param_group(const torch::optim::OptimizerParamGroup& /*group*/) {
  throw InvalidArgument("LBFGS has one group of parameters, and takes no other",
                        "Give all parameters to its constructor, or make another LBFGS");
}

LBFGS::Options& LBFGS::options() { return static_cast<OptionsOfGroup&>(param_groups_[0].options()).values; }
const LBFGS::Options& LBFGS::options() const {
  return static_cast<const OptionsOfGroup&>(param_groups_[0].options()).values;
}

const LBFGSState* LBFGS::kept() const {
  const auto found = state_.find(param_groups_[0].params()[0].unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : static_cast<const LBFGSState*>(found->second.get());
}

Tensor LBFGS::step(LossClosure closure) {
  if (!closure)
    throw InvalidArgument("step() of LBFGS needs a closure",
                          "Call step(closure) with a function that calls zero_grad(), computes the loss, calls its "
                          "backward() and returns it");
  if (param_groups_.size() != 1) throw InvalidArgument("LBFGS has one group of parameters, and another was added");
  const Options options = checked_lbfgs(this->options());
  const at::NoGradGuard no_grad;
  const FlatParameters parameters(param_groups_[0].params());
  auto state = std::make_unique<LBFGSState>();  // becomes the optimizer's at the end, unless the closure throws
  if (kept()) *state = *kept();

  int64_t calls = 0;
  const auto call_closure = [&] {
    const at::AutoGradMode with_gradients(true);
    ++calls;
    return closure();
  };
  const Tensor first_loss = call_closure();
  double loss = number_of(first_loss);
  Tensor gradient = parameters.gradient();
  bool is_optimal = largest_of(gradient) <= options.tolerance_grad;

  for (int64_t i = 1; i <= options.max_iter && !is_optimal; ++i) {
    const bool is_first_ever = ++state->n_iter == 1;
    if (is_first_ever) {
      state->d = gradient.neg();
    } else {
      remember(*state, gradient, options.history_size);
      state->d = quasi_newton_direction(*state, gradient);
    }
    const Tensor& direction = state->d;
    state->prev_flat_grad = gradient;  // nothing changes it
    state->prev_loss = loss;
    Number distance = options.lr;
    if (is_first_ever) distance = least(1, 1 / Number(gradient.abs().sum())) * options.lr;
    state->t = distance.value();
    const Number slope = dot_of(gradient, direction);
    if (slope > -options.tolerance_change) break;

    if (options.line_search_fn == optim::LineSearch::kStrongWolfe) {
      const auto begin = parameters.values();
      const auto evaluate = [&](const Number& where) {
        parameters.move(where, direction);
        const double value = number_of(call_closure());
        Tensor there = parameters.gradient();
        parameters.set(begin);
        const Number slope_there = dot_of(there, direction);
        return LinePoint{where, value, std::move(there), slope_there};
      };
      const LinePoint found = strong_wolfe_search(evaluate, {0, loss, gradient, slope}, distance, largest_of(direction),
                                                  options.tolerance_change, options.max_eval - calls);
      loss = found.loss;
      gradient = found.gradient;
      state->t = found.distance.value();
      parameters.move(found.distance, direction);
      is_optimal = largest_of(gradient) <= options.tolerance_grad;
    } else {
      parameters.move(distance, direction);
      if (i < options.max_iter) {  // the last move needs no new gradient: the next step() begins with one
        loss = number_of(call_closure());
        gradient = parameters.gradient();
        is_optimal = largest_of(gradient) <= options.tolerance_grad;
      }
    }
    if (calls >= options.max_eval || largest_of(direction.mul(state->t)) <= options.tolerance_change ||
        std::abs(loss - state->prev_loss) < options.tolerance_change)
      break;
  }
  state->func_evals += calls;
  state_[param_groups_[0].params()[0].unsafeGetTensorImpl()] = std::move(state);
  return first_loss;
}

std::unique_ptr<LBFGSState> LBFGS::fitting(const LBFGSState& given) const {
  const at::NoGradGuard no_grad;
  const FlatParameters parameters(param_groups_[0].params());
  auto state = std::make_unique<LBFGSState>(given);
  if (!state->d.defined()) return state;
  if (state->d.numel() != parameters.numel())
    throw InvalidArgument(text("the state of LBFGS: expected ", parameters.numel(),
                               " numbers, as its parameters have, got ", state->d.numel()),
                          "Load what an LBFGS of the same parameters has saved");
  const auto to_here = [options = parameters.options()](Tensor& tensor) { tensor = tensor.to(options); };
  to_here(state->d);
  to_here(state->prev_flat_grad);
  for (auto* const vectors : {&state->old_dirs, &state->old_stps})
    for (Tensor& each : *vectors) to_here(each);
  return state;
}

void LBFGS::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LBFGSState, OptionsOfGroup>(archive, *this);
}

void LBFGS::load(torch::serialize::InputArchive& archive) {
  auto options_before = param_groups_[0].options().clone();
  auto state_before = std::exchange(state_, {});  // an archive only adds to it
  try {
    torch::optim::serialize<LBFGSState, OptionsOfGroup>(archive, *this);
    checked_lbfgs(options());
    if (kept()) state_[param_groups_[0].params()[0].unsafeGetTensorImpl()] = fitting(*kept());
  } catch (...) {
    param_groups_[0].set_options(std::move(options_before));
    state_ = std::move(state_before);
    throw;
  }
}

std::map<std::string, Tensor> LBFGS::state_dict() const {
  std::map<std::string, Tensor> all;
  Options now = options();
  optim::detail::for_each_option(now, [&](const char* name, const auto& value, const auto&) {
    all[text("param_groups.0.", name)] = at::scalar_tensor(value[0], at::kDouble);
  });
  if (kept())
    for (const auto& [name, tensor] : kept()->tensors()) all["state.0." + name] = tensor;
  return all;
}

void LBFGS::load_state_dict(const std::map<std::string, Tensor>& given) {
  Options loaded = options();
  std::set<std::string> known;
  optim::detail::for_each_option(loaded, [&](const char* option, const auto&, const auto& set) {
    const auto found = given.find(text("param_groups.0.", option));
    if (found == given.end()) return;
    known.insert(found->first);
    if (!found->second.defined() || found->second.dim() != 0)
      throw InvalidArgument(text("'", found->first, "' is not a tensor without dimensions"));
    const double value = found->second.to(at::kDouble).template item<double>();
    const std::string_view name = option;
    if (name != "lr" && !name.starts_with("tolerance") &&
        !(std::trunc(value) == value && std::abs(value) <= kMostCounts))
      throw InvalidArgument(text("'", found->first, "': expected a whole number, got ", value));
    set({value});
  });
  loaded = checked_lbfgs(loaded);
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, tensor] : given) {
    constexpr std::string_view kPrefix = "state.0.";
    if (name.starts_with(kPrefix))
      tensors[name.substr(kPrefix.size())] = tensor;
    else if (!known.contains(name))
      throw InvalidArgument(text("LBFGS has no '", name, "'"), "Load what an LBFGS has saved");
  }
  std::unique_ptr<LBFGSState> state;
  if (!tensors.empty()) {
    LBFGSState read;
    read.set_tensors(tensors);
    state = fitting(read);
  }
  options() = loaded;
  state_.clear();
  if (state) state_[param_groups_[0].params()[0].unsafeGetTensorImpl()] = std::move(state);
}

}  // namespace muster
