#include "optim/torch_states.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <charconv>
#include <type_traits>

#include "muster/optim/optimizers.h"

namespace muster::optim {
namespace {

namespace of_torch = torch::optim;  // this namespace has names as SGD and Adam of its own

template <typename Options>
const Options& options_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const ParamGroupOptions<Options>&>(group.options()).values;
}

}  // namespace

void define_scratch_of_lbfgs(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr) return;
  for (auto& [parameter, state] : optimizer.state())
    if (auto& al = static_cast<torch::optim::LBFGSParamState&>(*state).al())
      for (auto& tensor : *al)
        if (!tensor.defined()) tensor = at::empty({0});
}

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

State new_state_for(const std::type_info& type) {
  if (type == typeid(of_torch::SGD)) return std::make_unique<of_torch::SGDParamState>();
  if (type == typeid(of_torch::Adam)) return std::make_unique<of_torch::AdamParamState>();
  if (type == typeid(of_torch::AdamW)) return std::make_unique<of_torch::AdamWParamState>();
  if (type == typeid(of_torch::RMSprop)) return std::make_unique<of_torch::RMSpropParamState>();
  if (type == typeid(of_torch::Adagrad)) return std::make_unique<of_torch::AdagradParamState>();
  State state;
  AllOptimizers::for_each([&]<typename O>(std::type_identity<TorchOptimizer<O>>) {
    if (type == typeid(TorchOptimizer<O>)) state = std::make_unique<KeptStateOf<O>>();
  });
  return state;
}

std::vector<Field> fields_of(torch::optim::OptimizerParamState& state) {
  const auto adam = [](auto& of) -> std::vector<Field> {
    return {{"step", nullptr, &of.step()},
            {"exp_avg", &of.exp_avg()},
            {"exp_avg_sq", &of.exp_avg_sq()},
            {"max_exp_avg_sq", &of.max_exp_avg_sq()}};
  };
  if (auto* const of = dynamic_cast<of_torch::SGDParamState*>(&state))
    return {{"momentum_buffer", &of->momentum_buffer()}};
  if (auto* const of = dynamic_cast<of_torch::AdamParamState*>(&state)) return adam(*of);
  if (auto* const of = dynamic_cast<of_torch::AdamWParamState*>(&state)) return adam(*of);
  if (auto* const of = dynamic_cast<of_torch::RMSpropParamState*>(&state))
    return {{"step", nullptr, &of->step()},
            {"square_avg", &of->square_avg()},
            {"momentum_buffer", &of->momentum_buffer()},
            {"grad_avg", &of->grad_avg()}};
  if (auto* const of = dynamic_cast<of_torch::AdagradParamState*>(&state))
    return {{"step", nullptr, &of->step()}, {"sum", &of->sum()}};
  std::vector<Field> fields;
  if (auto* const of = dynamic_cast<KeptState*>(&state)) {
    fields.push_back({"step", nullptr, &of->values.step});
    for (size_t i = 0; i < of->names().size(); ++i) fields.push_back({of->names()[i], &of->values.kept[i]});
  }
  return fields;
}

std::vector<Field> fields_of(const States& states, const at::Tensor& parameter) {
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  return found == states.end() ? std::vector<Field>{} : fields_of(*found->second);
}

std::optional<FieldPlace> place_of(std::string_view name) {
  size_t number = 0;
  const char* const last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data(), last, number);
  if (error != std::errc() || end == last || *end != '/') return std::nullopt;
  return FieldPlace{.parameter = number, .field = std::string_view(end + 1, last)};
}

std::vector<int64_t> shape_of(torch::optim::OptimizerParamState& state, const Field& field,
                              const at::Tensor& parameter) {
  if (field.number) return {};
  if (const auto* const of = dynamic_cast<KeptState*>(&state))
    for (size_t i = 0; i < of->names().size(); ++i)
      if (of->names()[i] == field.name) return of->empty_kept(i, as_real(parameter)).sizes().vec();
  return parameter.sizes().vec();
}

std::vector<std::string_view> zeros_of_first_step(const std::type_info& type,
                                                  const torch::optim::OptimizerParamGroup& group) {
  const auto adam = [](bool amsgrad) -> std::vector<std::string_view> {
    if (amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  };
  if (type == typeid(of_torch::Adam)) return adam(static_cast<const of_torch::AdamOptions&>(group.options()).amsgrad());
  if (type == typeid(of_torch::AdamW))
    return adam(static_cast<const of_torch::AdamWOptions&>(group.options()).amsgrad());
  if (type == typeid(muster::Adam)) return adam(options_of<AdamOptions>(group).amsgrad);
  if (type == typeid(muster::AdamW)) return adam(options_of<AdamWOptions>(group).amsgrad);
  if (type != typeid(of_torch::RMSprop)) return {};
  const auto& options = static_cast<const of_torch::RMSpropOptions&>(group.options());
  std::vector<std::string_view> fields = {"square_avg"};
  if (options.momentum() > 0) fields.emplace_back("momentum_buffer");
  if (options.centered()) fields.emplace_back("grad_avg");
  return fields;
}

}  // namespace muster::optim
