// What torch's optimizers and those of muster/optim/optimizers.h keep for each parameter, field by field.
//
// Thread-safety: none; the thread of the optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace muster::optim {

// A field of such a state: a tensor, which may be undefined, or a number.
struct Field {
  std::string_view name;
  at::Tensor* tensor = nullptr;
  int64_t* number = nullptr;
};
using State = std::unique_ptr<torch::optim::OptimizerParamState>;

// Of all parameters, by their TensorImpl.
using States = std::decay_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

// Without the optimizer's state while it lives: an archive that is written or read meanwhile has the options only.
class StateAside {
 public:
  explicit StateAside(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    std::swap(kept_, optimizer_.state());
  }
  StateAside(const StateAside&) = delete;
  StateAside& operator=(const StateAside&) = delete;
  ~StateAside() { std::swap(kept_, optimizer_.state()); }
  States& kept() { return kept_; }

 private:
  torch::optim::Optimizer& optimizer_;
  States kept_;
};

// torch's archives cannot hold the undefined tensors in LBFGS's `al`. This makes them empty ones, which LBFGS writes
// before it reads them. To be called before an optimizer is saved.
void define_scratch_of_lbfgs(torch::optim::Optimizer& optimizer);
// Of all groups, in their order.
std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer);

// A new state of torch's SGD, Adam, AdamW, RMSprop or Adagrad, or of an optimizer of optimizers.h, by the optimizer's
// class; null for all others. A class that is derived from one of torch's may keep something else.
State new_state_for(const std::type_info& type);
// Its fields; none of a state of another class.
std::vector<Field> fields_of(torch::optim::OptimizerParamState& state);
// Those of the parameter's state; none if there is no state.
std::vector<Field> fields_of(const States& states, const at::Tensor& parameter);
// "3/exp_avg": a field of the parameter with this number.
struct FieldPlace {
  size_t parameter = 0;
  std::string_view field;
};
std::optional<FieldPlace> place_of(std::string_view name);
// Of a tensor field of this state of a parameter; empty for a number.
std::vector<int64_t> shape_of(torch::optim::OptimizerParamState& state, const Field& field,
                              const at::Tensor& parameter);
// The tensor fields that the optimizer's first step() for a parameter of this group would make, and fill with zeros.
// None if it makes none, or fills them with something else.
std::vector<std::string_view> zeros_of_first_step(const std::type_info& type,
                                                  const torch::optim::OptimizerParamGroup& group);

}  // namespace muster::optim
