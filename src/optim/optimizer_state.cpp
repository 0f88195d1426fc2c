// State of optimizers as an argument of calls (muster/rpc/modules.h). It is here because it knows the optimizers.
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/modules.h"
#include "optim/torch_states.h"

namespace muster::rpc {
namespace {

using torch::optim::Optimizer;

std::string archive_of(Optimizer& optimizer) {
  optim::define_scratch_of_lbfgs(optimizer);
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return std::move(out).str();
}

torch::serialize::InputArchive opened(const std::string& bytes) {
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(bytes.data(), bytes.size());
  } catch (const c10::Error& error) {
    throw CorruptError(text("the state of an optimizer does not parse: ", error.what_without_backtrace()));
  }
  return archive;
}

void load_archive(Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  try {
    optimizer.load(archive);
  } catch (const c10::Error& error) {
    throw Mismatch(text("the state belongs to another kind of optimizer: ", error.what_without_backtrace()));
  }
}

// The states that an optimizer is to get, by the numbers of their parameters.
class NewStates {
 public:
  explicit NewStates(const Optimizer& optimizer)
      : type_(typeid(optimizer)), parameters_(optim::parameters_of(optimizer)) {}

  // Copies, because the values may be another optimizer's own.
  void set(const std::string& name, const at::Tensor& values) {
    const auto [state, field, parameter] = find(name);
    if (!field.tensor || optim::shape_of(*state, field, parameter) != values.sizes())
      throw Mismatch(text("the optimizer's '", name, "' has another shape than the state's, which is [",
                          join(values.sizes()), "]"));
    *field.tensor = values.to(parameter.device(), values.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  void set(const std::string& name, int64_t number) {
    const auto place = find(name);
    if (!place.field.number) throw Mismatch(text("the optimizer's '", name, "' is not a number"));
    *place.field.number = number;
  }

  optim::States take() {
    optim::States all;
    for (auto& [number, state] : states_) all[parameters_[number].unsafeGetTensorImpl()] = std::move(state);
    return all;
  }

 private:
  struct Place {
    torch::optim::OptimizerParamState* state;
    optim::Field field;
    const at::Tensor& parameter;
  };
  Place find(const std::string& name) {
    if (const auto place = optim::place_of(name); place && place->parameter < parameters_.size()) {
      optim::State& state = states_[place->parameter];
      if (!state) state = optim::new_state_for(type_);
      for (const optim::Field& field : optim::fields_of(*state))
        if (field.name == place->field) return {state.get(), field, parameters_[place->parameter]};
    }
    throw Mismatch(text("the optimizer has no '", name, "', which the state has"));
  }

  const std::type_info& type_;
  const std::vector<at::Tensor> parameters_;
  std::map<size_t, optim::State> states_;
};

}  // namespace

OptimizerState state_of(const Optimizer& given) {
  auto& optimizer = const_cast<Optimizer&>(given);  // it is as before when this returns
  if (!optim::new_state_for(typeid(optimizer))) return {.archive = archive_of(optimizer)};
  optim::StateAside aside(optimizer);  // save() has no way to leave the state out
  OptimizerState state{.archive = archive_of(optimizer)};
  const auto parameters = optim::parameters_of(optimizer);
  for (size_t i = 0; i < parameters.size(); ++i)
    for (const auto& [field, tensor, number] : optim::fields_of(aside.kept(), parameters[i])) {
      std::string name = text(i, "/", field);
      if (number)
        state.numbers.emplace_back(std::move(name), *number);
      else if (tensor->defined())
        state.tensors.emplace_back(std::move(name), *tensor);
    }
  return state;
}

void load(Optimizer& optimizer, const OptimizerState& state) {
  const at::NoGradGuard no_grad;
  auto archive = opened(state.archive);
  if (!optim::new_state_for(typeid(optimizer))) {
    if (!state.tensors.empty() || !state.numbers.empty())
      throw Mismatch("the state belongs to another kind of optimizer");
    return load_archive(optimizer, archive);
  }
  NewStates states(optimizer);
  for (const auto& [name, values] : state.tensors) {
    if (!values.defined()) throw Mismatch(text("the state's '", name, "' is undefined"));
    states.set(name, values);
  }
  for (const auto& [name, number] : state.numbers) states.set(name, number);
  {
    const optim::StateAside aside(optimizer);
    load_archive(optimizer, archive);
  }
  optimizer.state() = states.take();
}

}  // namespace muster::rpc
