#include "optim/torch_states.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace muster::optim {

State new_state_for(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  const auto& type = typeid(optimizer);
  if (type == typeid(SGD)) return std::make_unique<SGDParamState>();
  if (type == typeid(Adam)) return std::make_unique<AdamParamState>();
  if (type == typeid(AdamW)) return std::make_unique<AdamWParamState>();
  if (type == typeid(RMSprop)) return std::make_unique<RMSpropParamState>();
  if (type == typeid(Adagrad)) return std::make_unique<AdagradParamState>();
  return nullptr;
}

std::vector<Field> fields_of(torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  const auto adam = [](auto& of) -> std::vector<Field> {
    return {{"step", nullptr, &of.step()},
            {"exp_avg", &of.exp_avg()},
            {"exp_avg_sq", &of.exp_avg_sq()},
            {"max_exp_avg_sq", &of.max_exp_avg_sq()}};
  };
  if (auto* const of = dynamic_cast<SGDParamState*>(&state)) return {{"momentum_buffer", &of->momentum_buffer()}};
  if (auto* const of = dynamic_cast<AdamParamState*>(&state)) return adam(*of);
  if (auto* const of = dynamic_cast<AdamWParamState*>(&state)) return adam(*of);
  if (auto* const of = dynamic_cast<RMSpropParamState*>(&state))
    return {{"step", nullptr, &of->step()},
            {"square_avg", &of->square_avg()},
            {"momentum_buffer", &of->momentum_buffer()},
            {"grad_avg", &of->grad_avg()}};
  if (auto* const of = dynamic_cast<AdagradParamState*>(&state))
    return {{"step", nullptr, &of->step()}, {"sum", &of->sum()}};
  return {};
}

std::vector<std::string_view> zeros_of_first_step(const torch::optim::Optimizer& optimizer,
                                                  const torch::optim::OptimizerParamGroup& group) {
  const auto& type = typeid(optimizer);
  const auto adam = [](bool amsgrad) -> std::vector<std::string_view> {
    if (amsgrad) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  };
  if (type == typeid(torch::optim::Adam))
    return adam(static_cast<const torch::optim::AdamOptions&>(group.options()).amsgrad());
  if (type == typeid(torch::optim::AdamW))
    return adam(static_cast<const torch::optim::AdamWOptions&>(group.options()).amsgrad());
  if (type != typeid(torch::optim::RMSprop)) return {};
  const auto& options = static_cast<const torch::optim::RMSpropOptions&>(group.options());
  std::vector<std::string_view> fields = {"square_avg"};
  if (options.momentum() > 0) fields.emplace_back("momentum_buffer");
  if (options.centered()) fields.emplace_back("grad_avg");
  return fields;
}

}  // namespace muster::optim
