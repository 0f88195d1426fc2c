#include "muster/optim/meta.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/autograd.h>

#include <unordered_map>

#include <map>
#include "autograd/graph/small_graph.h"

#include "base/text.h"
#include "muster/base/error.h"
#include "optim/add_scaled.h"

namespace muster::optim {
namespace {

using at::Tensor;
using Slot = detail::ModuleSlots::Slot;

Tensor replica(const Tensor& tensor, CopyMode by, std::optional<at::Device> device) {
  Tensor result = tensor;
  if (device)
    result = tensor.to(*device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/by != CopyMode::kReference);
  else if (by != CopyMode::kReference)
    result = tensor.clone();
  if (by != CopyMode::kDeepCopy) return result;
  return result.detach().set_requires_grad(tensor.requires_grad());
}

Tensor cut(const Tensor& tensor) {
  return tensor.defined() ? tensor.detach().set_requires_grad(tensor.requires_grad()) : tensor;
}

std::string shape(const Tensor& tensor) { return text(tensor.sizes(), " ", tensor.scalar_type()); }

void check(const Slot* slot, const std::string& name, const Tensor& tensor) {
  if (!slot) throw Mismatch(text("the module has no tensor '", name, "', which the state has"));
  if (!tensor.defined()) throw Mismatch(text("the state's '", name, "' is undefined, the module's is not"));
  if (slot->get().sizes() != tensor.sizes())
    throw Mismatch(
        text("the state's '", name, "': expected ", shape(slot->get()), ", as the module's, got ", shape(tensor)));
}

}  // namespace

ModuleState extract_state_dict(const torch::nn::Module& module, ExtractOptions options) {
  ModuleState state(rpc::state_of(module), options.detach_buffers);
  std::unordered_map<const at::TensorImpl*, Tensor> known;  // a tensor of several names gets one replica
  const auto replace = [&](Tensor& tensor, CopyMode by) {
    if (!tensor.defined()) return;
    Tensor& made = known[tensor.unsafeGetTensorImpl()];
    if (!made.defined()) made = replica(tensor, by, options.device);
    tensor = made;
  };
  const ModuleState originals = state;  // keeps the addresses
  for (auto& [name, tensor] : state.parameters) replace(tensor, options.by);
  if (!options.with_buffers) state.buffers.clear();
  for (auto& [name, tensor] : state.buffers) replace(tensor, options.detach_buffers ? CopyMode::kDeepCopy : options.by);
  return state;
}

void recover_state_dict(torch::nn::Module& module, const ModuleState& state) {
  const detail::ModuleSlots slots(module);
  Tensors given(slots.all().size());  // for each slot
  const auto give = [&](const std::string& name, const Tensor& tensor) {
    const Slot* const slot = slots.find(name);
    check(slot, name, tensor);
    Tensor& to = given[static_cast<size_t>(slot - slots.all().data())];
    if (to.defined() && !to.is_same(tensor))
      throw Mismatch(
          text("the module's '", name, "' is the same tensor as '", slot->name, "', in the state it is not"));
    to = tensor;
  };
  for (const auto& [name, tensor] : state.parameters) give(name, tensor);
  for (size_t i = 0; i < given.size(); ++i)
    if (const Slot& slot = slots.all()[i]; !slot.is_buffer && !given[i].defined())
      throw Mismatch(text("the state has no parameter '", slot.name, "', which the module has"));
  for (const auto& [name, tensor] : state.buffers)
    if (tensor.defined()) give(name, tensor);
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    const Slot& slot = slots.all()[i];
    slot.set(slot.is_buffer && state.detach_buffers ? given[i].detach().clone() : given[i]);
  }
}

void stop_gradient(torch::nn::Module& module) {
  const detail::ModuleSlots slots(module);
  for (const Slot& slot : slots.all()) slot.set(cut(slot.get()));
}

void stop_gradient(ModuleState& state) {
  for (auto& [name, tensor] : state.parameters) tensor = cut(tensor);
  for (auto& [name, tensor] : state.buffers) tensor = cut(tensor);
}

void stop_gradient(OptState& state) {
  muster::detail::for_each_tensor(state, [](Tensor& tensor) { tensor = cut(tensor); });
}

OptState copy_state(const OptState& state, CopyMode by, std::optional<at::Device> device) {
  OptState result = state;
  muster::detail::for_each_tensor(result, [&](Tensor& tensor) { tensor = replica(tensor, by, device); });
  return result;
}

void detail::Lent::put(const std::vector<Tensor*>& places, const Tensor& tensor) {
  before_.emplace_back(places, *places.front());
  for (Tensor* const place : places) *place = tensor;
}

detail::Lent::~Lent() {
  for (auto one = before_.rbegin(); one != before_.rend(); ++one)
    for (Tensor* const place : one->first) *place = one->second;
}

detail::Swapped::Swapped(torch::nn::Module& module, const NamedTensors& tensors) {
  const ModuleSlots slots(module);
  std::map<const Tensor*, Tensor> given;  // by place
  for (const auto& [name, tensor] : tensors) {
    check(slots.find(name), name, tensor);
    const auto [other, is_new] = given.try_emplace(slots.find(name)->places.front(), tensor);
    if (!is_new && !other->second.is_same(tensor))
      throw Mismatch(text("'", name, "' is another name of a tensor for which another value is given, too"),
                     "Give one of the two, or the same for both");
  }
  for (const auto& [name, tensor] : tensors) lent_.put(slots.find(name)->places, tensor);
}

std::shared_ptr<torch::nn::Module> detail::clone_module(const torch::nn::Module& module, ExtractOptions options) {
  // clone() makes the copy's parameters anew, with random numbers, before it copies the values.
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  Tensor random;
  {
    const std::lock_guard lock(generator.mutex());
    random = generator.get_state();
  }
  auto copy = module.clone();
  {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(random);
  }
  recover_state_dict(*copy, extract_state_dict(module, options));
  return copy;
}

MetaOptimizer::MetaOptimizer(torch::nn::Module& module, GradientTransformation transformation)
    : transformation_(std::move(transformation)) {
  add_param_group(module);
}

void MetaOptimizer::add_param_group(torch::nn::Module& module) { parts_.push_back({detail::ModuleSlots(module), {}}); }

void MetaOptimizer::step(const Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad())
    throw InvalidArgument(text("the loss of step(): expected one element that requires grad, got ",
                               loss.defined() ? shape(loss) : "an undefined tensor"));
  struct Step {
    Part* part;
    OptState state;
    std::vector<std::pair<const Slot*, Tensor>> tensors;
  };
  std::vector<Step> steps;  // made when all of them are known, so that an error leaves everything as it was
  for (Part& part : parts_) {
    std::vector<const Slot*> slots;
    Tensors parameters, inputs;
    for (const Slot& slot : part.slots.all()) {
      if (slot.is_buffer) continue;
      slots.push_back(&slot);
      parameters.push_back(slot.get());
      if (slot.get().requires_grad()) inputs.push_back(slot.get());
    }
    if (inputs.empty()) continue;  // without inputs, autograd would accumulate into all leaves
    auto gradients = autograd::small_grad(loss, inputs);
    if (!gradients)
      gradients = torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, /*create_graph=*/true,
                                        /*allow_unused=*/true);
    Tensors updates(parameters.size());
    for (size_t i = 0, next = 0; i < parameters.size(); ++i)
      if (parameters[i].requires_grad()) updates[i] = (*gradients)[next++];
    Step step{&part, part.begun ? part.state : transformation_.init_list(parameters), {}};
    const double factor = transformation_.update_unscaled(updates, step.state, parameters);
    const Tensors stepped = add_scaled(std::move(parameters), updates, factor);
    for (size_t i = 0; i < stepped.size(); ++i)
      if (updates[i].defined()) step.tensors.emplace_back(slots[i], stepped[i]);
    steps.push_back(std::move(step));
  }
  for (Step& step : steps) {
    step.part->state = std::move(step.state);
    step.part->begun = true;
    for (const auto& [slot, tensor] : step.tensors) slot->set(tensor);
  }
}

std::vector<OptState> MetaOptimizer::state_dict() const { return extract_state_dict(); }

std::vector<OptState> MetaOptimizer::extract_state_dict(CopyMode by, std::optional<at::Device> device) const {
  std::vector<OptState> states;
  for (const Part& part : parts_) states.push_back(copy_state(part.state, by, device));
  return states;
}

void MetaOptimizer::load_state_dict(const std::vector<OptState>& states) {
  if (states.size() != parts_.size())
    throw InvalidArgument(
        text("the states: expected one for each of this optimizer's ", parts_.size(), " modules, got ", states.size()));
  for (size_t i = 0; i < parts_.size(); ++i) {
    parts_[i].state = states[i];
    parts_[i].begun = !(states[i].tensors.empty() && states[i].counts.empty() && states[i].parts.empty());
  }
}

void MetaOptimizer::stop_gradient() {
  for (Part& part : parts_) optim::stop_gradient(part.state);
}

}  // namespace muster::optim
