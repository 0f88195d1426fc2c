#include "muster/parallel/zero_redundancy_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/objects.h"
#include "muster/optim/lbfgs.h"
#include "optim/torch_states.h"
#include "parallel/kit/coalesced.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/modules/balance.h"
#include "parallel/modules/same_module.h"
#include "parallel/tape/watched.h"

namespace muster {
namespace {

using Key = const c10::TensorImpl*;
Key key_of(const at::Tensor& parameter) { return parameter.unsafeGetTensorImpl(); }

// New values of parameters on their way from their owners to all ranks.
class ParameterBroadcast {
 public:
  // Starts it. `owners`: by parameter, a rank in the group. Small parameters of an owner travel together.
  ParameterBroadcast(const std::vector<at::Tensor>& parameters, const std::vector<int>& owners, Group group)
      : group_(std::move(group)) {
    const at::NoGradGuard no_grad;
    std::vector<parallel::CoalescedBytes> small(static_cast<size_t>(group_.size()));
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor parameter = parallel::unwatched(parameters[i]);
      if (parameter.nbytes() == 0) continue;
      sent_.push_back(parameters[i]);
      if (parallel::CoalescedBytes::takes(parameter))
        small[static_cast<size_t>(owners[i])].add(parameter);
      else
        works_.push_back(broadcast_async(parameter, owners[i], {.group = group_}));
    }
    for (size_t owner = 0; owner < small.size(); ++owner) {
      parallel::CoalescedBytes& together = small[owner];
      if (together.empty()) continue;
      const bool is_mine = static_cast<int>(owner) == group_.rank();
      works_.push_back(
          broadcast_async(is_mine ? together.packed() : together.buffer(), static_cast<int>(owner), {.group = group_}));
      if (!is_mine) to_unpack_.push_back(std::move(together));
    }
  }

  const std::vector<Work>& works() const { return works_; }
  // When they have completed.
  void end() {
    for (const parallel::CoalescedBytes& together : to_unpack_) together.unpack();
    // Also on the owner, because SGD leaves no trace there: so a backward() through an older graph throws on all ranks.
    for (const at::Tensor& parameter : sent_) torch::autograd::impl::bump_version(parameter);
  }

 private:
  const Group group_;
  std::vector<Work> works_;
  std::vector<parallel::CoalescedBytes> to_unpack_;
  std::vector<at::Tensor> sent_;
};

// Takes all gradients away while it lives.
class GradientsAside {
 public:
  explicit GradientsAside(const torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups())
      for (const at::Tensor& parameter : group.params())
        if (at::Tensor& grad = parameter.mutable_grad(); grad.defined())
          kept_.emplace_back(parameter, std::exchange(grad, at::Tensor()));
  }
  GradientsAside(const GradientsAside&) = delete;
  GradientsAside& operator=(const GradientsAside&) = delete;
  ~GradientsAside() {
    for (auto& [parameter, grad] : given_) parameter.mutable_grad() = at::Tensor();
    for (auto& [parameter, grad] : kept_) parameter.mutable_grad() = std::move(grad);
  }
  void give(const at::Tensor& parameter, const at::Tensor& grad) {
    given_.emplace_back(parameter, grad);
    parameter.mutable_grad() = grad;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_, given_;
};

at::Tensor on_device_of(const at::Tensor& parameter, const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(parameter.device()) : tensor;
}

// What travels of a state: whether there is one, its numbers and its tensors. On the CPU.
using PackedState = std::tuple<bool, std::vector<int64_t>, std::vector<at::Tensor>>;

PackedState packed(torch::optim::OptimizerParamState* state) {
  PackedState all{state != nullptr, {}, {}};
  if (!state) return all;
  for (const optim::Field& field : optim::fields_of(*state))
    if (field.number)
      std::get<1>(all).push_back(*field.number);
    else
      std::get<2>(all).push_back(field.tensor->defined() ? field.tensor->cpu().contiguous() : *field.tensor);
  return all;
}

}  // namespace

struct ShardedOptimizer::Impl {
  ShardedOptimizer& self;
  torch::optim::Optimizer& optimizer;
  const std::type_info& inner_class;
  const Group group;  // resolved
  parallel::Balance balance;
  std::unordered_map<Key, int> owners;  // ranks in the group
  std::vector<at::Tensor> known;        // the parameters: so that no other one gets the address of one of them
  std::unordered_set<Key> updated;      // in backward(), since the last step()
  std::exception_ptr failure;           // of such an update: the other ranks go on, so step() throws it
  bool lacks_states = false;            // those of other ranks: since a step() or load(), until consolidate()

  bool is_mine(const at::Tensor& parameter) const { return owners.at(key_of(parameter)) == group.rank(); }
  void take_new_parameters();
  void drop_states_of_others();
  std::exception_ptr step_with(const std::vector<std::pair<at::Tensor, at::Tensor>>& gradients,
                               GradientsAside& aside) const;
  HookFuture step_bucket(const std::vector<GradBucket::Place>& places, const at::Tensor& buffer,
                         const at::Tensor& result);
  ParameterBroadcast broadcast_parameters(const std::vector<at::Tensor>& parameters) const {
    std::vector<int> of;
    for (const at::Tensor& parameter : parameters) of.push_back(owners.at(key_of(parameter)));
    return {parameters, of, group};
  }
};

void ShardedOptimizer::Impl::take_new_parameters() {
  std::vector<parallel::NamedTensor> fresh;
  const auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      const std::string name = text("parameter ", i, " of group ", g);
      if (parallel::is_shared(parameter))  // maybe since the last step
        throw InvalidArgument(text(name, " belongs to a FullyShardedDataParallel"),
                              "Use the optimizer's own class, whose states are sharded there");
      if (owners.contains(key_of(parameter))) continue;
      if (parameter.layout() != at::kStrided || parameter.is_meta())
        throw InvalidArgument(text(name, " is not a dense tensor with values"),
                              "ZeroRedundancyOptimizer sends parameters from their owners to all ranks");
      fresh.push_back({name, parameter});
    }
  if (fresh.empty()) return;
  parallel::require_same_on_all_ranks(fresh, inner_class.name(), group);
  const std::vector<int> divided = balance.divide(fresh, parallel::CoalescedBytes::kMost);
  for (size_t i = 0; i < fresh.size(); ++i) {
    owners.emplace(key_of(fresh[i].tensor), divided[i]);
    known.push_back(fresh[i].tensor);
  }
}

void ShardedOptimizer::Impl::drop_states_of_others() {
  lacks_states = true;
  std::vector<void*> others;
  for (const auto& [parameter, state] : optimizer.state())
    if (const auto found = owners.find(static_cast<Key>(parameter));
        found != owners.end() && found->second != group.rank())
      others.push_back(parameter);
  for (void* const parameter : others) optimizer.state().erase(parameter);
}

// The step of the class for the parameters of this rank that are among these, with these gradients. Returns what it
// throws: the other ranks wait for this one's parameters.
std::exception_ptr ShardedOptimizer::Impl::step_with(const std::vector<std::pair<at::Tensor, at::Tensor>>& gradients,
                                                     GradientsAside& aside) const {
  for (const auto& [parameter, grad] : gradients)
    if (is_mine(parameter)) aside.give(parameter, grad);
  const parallel::UnwatchedGuard with_own_values;
  try {
    self.step_inner();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// What becomes of a bucket's parameters when their gradients are there. The future gives `result`.
HookFuture ShardedOptimizer::Impl::step_bucket(const std::vector<GradBucket::Place>& places, const at::Tensor& buffer,
                                               const at::Tensor& result) {
  std::vector<at::Tensor> sent;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  for (const auto& place : places) {
    const at::Tensor& parameter = place.parameter;
    if (!owners.contains(key_of(parameter))) continue;  // another optimizer's
    sent.push_back(parameter);
    gradients.emplace_back(parameter, place.in(buffer));
    updated.insert(key_of(parameter));
  }
  {
    GradientsAside aside(optimizer);
    const auto thrown = step_with(gradients, aside);
    if (!failure) failure = thrown;
  }
  const auto broadcast = std::make_shared<ParameterBroadcast>(broadcast_parameters(sent));
  return HookFuture(broadcast->works(), result).then([broadcast](const at::Tensor& as_before) {
    broadcast->end();
    return as_before;
  });
}

ShardedOptimizer::ShardedOptimizer(torch::optim::Optimizer& optimizer, const std::type_info& inner_class,
                                   ZeroRedundancyOptions options)
    : impl_(new Impl{.self = *this,
                     .optimizer = optimizer,
                     .inner_class = inner_class,
                     .group = options.group.resolved(),
                     .balance = parallel::Balance(options.group.resolved().size())}) {
  if (!impl_->group.is_member())
    throw InvalidArgument("this rank is not a member of the ZeroRedundancyOptimizer's group");
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) || dynamic_cast<const LBFGS*>(&optimizer))
    throw InvalidArgument("LBFGS cannot be a ZeroRedundancyOptimizer, because its step takes all parameters together",
                          "Use LBFGS itself on every rank");
  impl_->take_new_parameters();
}

ShardedOptimizer::~ShardedOptimizer() = default;

const std::type_info& ShardedOptimizer::inner_class() const { return impl_->inner_class; }
const Group& ShardedOptimizer::group() const { return impl_->group; }

int ShardedOptimizer::owner(const at::Tensor& parameter) {
  Impl& s = *impl_;
  auto found = s.owners.find(key_of(parameter));
  if (found == s.owners.end()) {
    s.take_new_parameters();
    found = s.owners.find(key_of(parameter));
  }
  if (found == s.owners.end()) throw InvalidArgument("the tensor is not a parameter of this ZeroRedundancyOptimizer");
  return s.group.global_rank(found->second);
}

void ShardedOptimizer::step_shared() {
  Impl& s = *impl_;
  s.take_new_parameters();
  s.drop_states_of_others();
  std::vector<at::Tensor> sent;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  for (const auto& group : s.optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.requires_grad() || s.updated.contains(key_of(parameter))) continue;
      sent.push_back(parameter);
      if (parameter.grad().defined()) gradients.emplace_back(parameter, parameter.grad());
    }
  std::exception_ptr failure = std::exchange(s.failure, nullptr);
  {
    GradientsAside aside(s.optimizer);
    const auto now = s.step_with(gradients, aside);
    if (!failure) failure = now;
  }
  s.updated.clear();
  ParameterBroadcast broadcast = s.broadcast_parameters(sent);
  for (Work work : broadcast.works()) work.wait();
  broadcast.end();
  if (failure) std::rethrow_exception(failure);
}

CommHook ShardedOptimizer::step_in_backward(CommHook average) {
  if (!average) throw InvalidArgument("the hook that averages is empty");
  return [weak = std::weak_ptr(impl_), average = std::move(average)](GradBucket& bucket) {
    const auto alive = [weak] {
      if (auto impl = weak.lock()) return impl;
      throw InvalidArgument("the ZeroRedundancyOptimizer whose step_in_backward() is the communication hook has ended",
                            "Keep it as long as the DistributedDataParallel");
    };
    if (bucket.index() == 0) {
      alive()->take_new_parameters();
      alive()->drop_states_of_others();
    }
    return average(bucket).then([alive, places = bucket.places(), n = bucket.buffer().numel(),
                                 scale = bucket.scale()](const at::Tensor& averages) -> HookFuture {
      if (!averages.defined() || averages.numel() != n) return averages;  // backward() refuses it
      return alive()->step_bucket(places, scale == 1 ? averages : averages * scale, averages);
    });
  };
}

void ShardedOptimizer::consolidate(int to) {
  Impl& s = *impl_;
  const int n = s.group.size(), rank = s.group.rank();
  if (to < 0 || to >= n) throw InvalidArgument(text("rank of the optimizer: expected 0 to ", n - 1, ", got ", to));
  if (!optim::new_state_for(s.inner_class))
    throw InvalidArgument("the states of this optimizer's class are not known, so they cannot be sent",
                          "Use torch's SGD, Adam, AdamW, RMSprop or Adagrad, or a class of optimizers.h");
  s.take_new_parameters();
  auto& states = s.optimizer.state();
  for (const auto& group : s.optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      void* const key = parameter.unsafeGetTensorImpl();
      const int owner = s.owners.at(key_of(parameter));
      if (owner == to) continue;
      if (rank == owner) {
        const auto found = states.find(key);
        send_object(packed(found == states.end() ? nullptr : found->second.get()), to, {.group = s.group});
      } else if (rank == to) {
        auto [exists, numbers, tensors] = recv_object<PackedState>(owner, {.group = s.group});
        if (!exists) continue;
        optim::State state = optim::new_state_for(s.inner_class);
        size_t number = 0, tensor = 0;
        for (const optim::Field& field : optim::fields_of(*state))
          if (field.number)
            *field.number = numbers.at(number++);
          else
            *field.tensor = on_device_of(parameter, tensors.at(tensor++));
        states[key] = std::move(state);
      }
    }
  if (rank == to) s.lacks_states = false;
}

void ShardedOptimizer::drop_states_of_others() { impl_->drop_states_of_others(); }

void ShardedOptimizer::require_all_states() const {
  const Impl& s = *impl_;
  if (s.group.size() > 1 && s.lacks_states)
    throw InvalidArgument(
        "this rank has the optimizer's states of its own parameters only",
        "Call consolidate() on all ranks before, and save on the rank that it names; or use a Snapshot");
}

}  // namespace muster
