#include "muster/optim/optimizers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
namespace {

// A group's parameters: Module::parameters() has one that modules share as often as it occurs.
std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> once;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : parameters)
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) once.push_back(parameter);
  return once;
}

// Numbers of torch.optim's groups that no optimizer here has: of its schedulers, and what chooses its kernels.
bool is_only_pythons(std::string_view name) {
  static constexpr std::string_view kGroups = "param_groups.";
  static const std::set<std::string_view> all{
      "base_momentum", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused",
      "initial_lr",    "max_lr",     "max_momentum",           "min_lr",         "swa_lr"};
  return name.starts_with(kGroups) && all.contains(name.substr(name.rfind('.') + 1));
}

}  // namespace

namespace optim {
namespace detail {

void write_option(torch::serialize::OutputArchive& archive, const char* name, const OptionValue& value) {
  archive.write(name, value.size() == 1 ? c10::IValue(value[0]) : c10::IValue(value));
}

OptionValue read_option(torch::serialize::InputArchive& archive, const char* name, size_t size) {
  c10::IValue value;
  OptionValue numbers;
  if (archive.try_read(name, value)) {
    if (value.isDouble())
      numbers = {value.toDouble()};
    else if (value.isDoubleList())
      numbers = value.toDoubleVector();
  }
  if (numbers.size() != size)
    throw CorruptError(text("the archive does not hold the option \"", name, "\" of this optimizer"),
                       "Load what save() of the same class has written");
  return numbers;
}

}  // namespace detail

void KeptState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(values.step));
  for (size_t i = 0; i < names().size(); ++i)
    if (values.kept[i].defined()) archive.write(names()[i], values.kept[i], /*is_buffer=*/true);
}

void KeptState::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue step;
  archive.read("step", step);
  values.step = step.toInt();
  for (size_t i = 0; i < names().size(); ++i) {
    at::Tensor tensor;
    if (archive.try_read(names()[i], tensor, /*is_buffer=*/true)) values.kept[i] = std::move(tensor);
  }
}

}  // namespace optim

at::Tensor TorchOptimizerBase::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  struct Step {
    std::unique_ptr<optim::FunctionalOptimizer> optimizer;
    std::vector<at::Tensor> parameters, gradients;
  };
  std::vector<Step> steps;  // of all groups, so that none is made if one is refused
  for (const auto& group : param_groups_) {
    Step& step = steps.emplace_back(Step{.optimizer = functional(group.options())});
    std::unordered_set<const void*> seen;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      step.parameters.push_back(parameter);
      step.gradients.push_back(parameter.grad());
    }
    step.optimizer->require_steppable(step.parameters, step.gradients);
  }
  for (const Step& step : steps) {
    std::vector<optim::ParameterState*> states;
    for (const at::Tensor& parameter : step.parameters) {
      auto& state = state_[parameter.unsafeGetTensorImpl()];
      if (!state) state = new_state();
      states.push_back(&static_cast<optim::KeptState&>(*state).values);
    }
    step.optimizer->step(step.parameters, step.gradients, states);
  }
  return loss;
}

void TorchOptimizerBase::throw_other_options() {
  throw InvalidArgument("a group of parameters has options of another class than this optimizer's",
                        "Make the group with group() of the optimizer's own class");
}

void TorchOptimizerBase::require_new(const std::vector<at::Tensor>& parameters) const {
  for (const auto& group : param_groups_)
    for (const at::Tensor& parameter : group.params())
      if (std::any_of(parameters.begin(), parameters.end(),
                      [&](const at::Tensor& one) { return one.is_same(parameter); }))
        throw InvalidArgument("a parameter is in two groups of an optimizer", "Put it in one of them");
}

void TorchOptimizerBase::load_with(const std::function<void()>& read) {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (const auto& group : param_groups_) options.push_back(group.options().clone());
  auto states = std::exchange(state_, {});  // an archive only adds to it
  // libtorch moves a state to its parameter, and then, where the group has the parameter again, nothing over it.
  std::vector<std::pair<at::Tensor*, at::Tensor>> again;
  std::set<const void*> seen;
  for (auto& group : param_groups_)
    for (at::Tensor& parameter : group.params())
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second)
        again.emplace_back(&parameter, std::exchange(parameter, at::empty({0})));
  const auto put_back = [&] {
    for (auto& [place, parameter] : again) {
      state_.erase(place->unsafeGetTensorImpl());
      *place = std::move(parameter);
    }
    again.clear();
  };
  try {
    read();
    put_back();
    check_loaded();
  } catch (...) {
    put_back();
    state_ = std::move(states);
    for (size_t g = 0; g < options.size(); ++g) {
      auto before = std::move(options[g]);
      // Into the object that is there: the program may have a reference to it.
      exchange_options(param_groups_[g].options(), [&](const std::string& name, std::vector<double> value) {
        exchange_options(*before, [&](const std::string& other, std::vector<double> was) {
          if (other == name) value = was;
          return was;
        });
        return value;
      });
    }
    throw;
  }
}

void TorchOptimizerBase::check_loaded() {
  const at::NoGradGuard no_grad;
  for (const auto& group : param_groups_) {
    const auto functional = this->functional(group.options());  // checks the options
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      if (!found->second) {
        state_.erase(found);
        continue;
      }
      auto& state = static_cast<optim::KeptState&>(*found->second);
      for (size_t i = 0; i < state.names().size(); ++i) {
        at::Tensor& kept = state.values.kept[i];
        if (!kept.defined()) continue;
        const at::Tensor like = functional->empty_kept(i, optim::as_real(parameter));
        if (kept.sizes() != like.sizes())
          throw InvalidArgument(
              text(state.names()[i], " in the archive: expected shape ", like.sizes(), ", got ", kept.sizes()),
              "Load the archive of an optimizer of the same parameters");
        kept = kept.to(like.options());  // the archive may be of parameters of another dtype, or on another device
      }
    }
  }
}

bool TorchOptimizerBase::set_momentum(double momentum) {
  bool has_one = false;
  for (auto& group : param_groups_)
    exchange_options(group.options(), [&](const std::string& name, std::vector<double> value) {
      const bool is_one = name == "momentum" || name == "betas";
      has_one |= is_one;
      if (is_one) value[0] = momentum;
      return value;
    });
  return has_one;
}

std::map<std::string, at::Tensor> TorchOptimizerBase::state_dict() const {
  require_complete_states();
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> all;
  size_t number = 0;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto options = param_groups_[g].options().clone();
    const bool counts_steps = functional(*options)->counts_steps();
    exchange_options(*options, [&](const char* name, std::vector<double> value) {
      all[text("param_groups.", g, ".", name)] =
          value.size() == 1 ? at::scalar_tensor(value[0], at::kDouble) : at::tensor(value, at::kDouble);
      return value;
    });
    for (const at::Tensor& parameter : each_once(param_groups_[g].params())) {
      const std::string prefix = text("state.", number++, ".");
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      const auto& state = static_cast<const optim::KeptState&>(*found->second);
      if (counts_steps) all[prefix + "step"] = at::scalar_tensor(state.values.step, at::kFloat);  // as in Python
      for (size_t i = 0; i < state.names().size(); ++i)
        if (state.values.kept[i].defined()) all[prefix + state.names()[i]] = state.values.kept[i].clone();
    }
  }
  return all;
}

void TorchOptimizerBase::load_state_dict(const std::map<std::string, at::Tensor>& given) {
  const at::NoGradGuard no_grad;
  std::set<std::string> known;
  const auto find = [&](const std::string& name, at::IntArrayRef sizes) {
    const auto found = given.find(name);
    if (found == given.end()) return at::Tensor();
    known.insert(name);
    if (!found->second.defined() || found->second.sizes() != sizes)
      throw InvalidArgument(text("'", name, "': expected shape ", sizes, ", got ",
                                 found->second.defined() ? text(found->second.sizes()) : "no tensor"));
    return found->second;
  };
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  std::vector<std::pair<at::Tensor, std::unique_ptr<optim::KeptState>>> states;
  size_t number = 0;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    options.push_back(param_groups_[g].options().clone());
    exchange_options(*options.back(), [&](const char* name, std::vector<double> value) {
      const bool is_one = value.size() == 1;
      const at::Tensor loaded = find(text("param_groups.", g, ".", name),
                                     is_one ? std::vector<int64_t>{} : std::vector<int64_t>{std::ssize(value)});
      if (!loaded.defined()) return value;
      const at::Tensor numbers = loaded.to(at::kDouble).contiguous();
      return std::vector<double>(numbers.const_data_ptr<double>(), numbers.const_data_ptr<double>() + numbers.numel());
    });
    const auto functional = this->functional(*options.back());                          // checks the options
    const std::string decouples = text("param_groups.", g, ".decoupled_weight_decay");  // the class says that here
    if (const auto found = given.find(decouples); found != given.end() && !known.contains(decouples)) {
      const bool is_adamw = dynamic_cast<const optim::AdamW*>(functional.get()) != nullptr;
      if (!found->second.defined() || found->second.numel() != 1 || (found->second.item<double>() != 0) != is_adamw)
        throw InvalidArgument(text("'", decouples, "' is that of ", is_adamw ? "Adam" : "AdamW"),
                              "Load the state into an optimizer of the same class");
    }
    for (const at::Tensor& parameter : each_once(param_groups_[g].params())) {
      const std::string prefix = text("state.", number++, ".");
      auto state = new_state();
      for (size_t i = 0; i < state->names().size(); ++i) {
        const at::Tensor like = functional->empty_kept(i, optim::as_real(parameter));
        if (const at::Tensor loaded = find(prefix + state->names()[i], like.sizes()); loaded.defined())
          state->values.kept[i] = loaded.to(like.options(), /*non_blocking=*/false, /*copy=*/true);
      }
      const at::Tensor step = functional->counts_steps() ? find(prefix + "step", {}) : at::Tensor();
      const auto& kept = state->values.kept;
      const bool has_kept =
          std::any_of(kept.begin(), kept.end(), [](const at::Tensor& each) { return each.defined(); });
      if (step.defined())
        state->values.step = static_cast<int64_t>(step.to(at::kDouble).item<double>());
      else if (has_kept && functional->counts_steps())
        throw InvalidArgument(text("'", prefix, "step' is missing"));
      else if (has_kept)
        state->values.step = 1;  // nobody asks how many there were
      else
        state = nullptr;
      states.emplace_back(parameter, std::move(state));
    }
  }
  for (const auto& [name, tensor] : given)
    if (!known.contains(name) && !is_only_pythons(name))
      throw InvalidArgument(text("this optimizer of ", number, " parameters has no '", name, "'"),
                            "Load what an optimizer of the same class and parameters has saved");
  for (size_t g = 0; g < param_groups_.size(); ++g) param_groups_[g].set_options(std::move(options[g]));
  for (auto& [parameter, state] : states) {
    if (state)
      state_[parameter.unsafeGetTensorImpl()] = std::move(state);
    else
      state_.erase(parameter.unsafeGetTensorImpl());
  }
}

}  // namespace muster
