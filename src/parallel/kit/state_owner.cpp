#include "parallel/kit/state_owner.h"

#include "muster/parallel/zero_redundancy_optimizer.h"
#include "parallel/kit/shared_tensor.h"

namespace muster::parallel {

std::optional<StateOwner> state_owner(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  if (const auto* const sharing = sharing_of(parameter))
    return StateOwner{.name = sharing->name,
                      .rank = sharing->owner,
                      .is_this_rank = sharing->is_own,
                      .first = sharing->first_owner,
                      .is_only = sharing->is_only_owner};
  auto* const sharded = dynamic_cast<ShardedOptimizer*>(&optimizer);
  if (!sharded) return std::nullopt;
  const int owner = sharded->owner(parameter);
  const Group& group = sharded->group();
  return StateOwner{.rank = owner, .is_this_rank = owner == group.global_rank(group.rank()), .first = owner};
}

bool keeps_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto owner = state_owner(optimizer, parameter);
  return !owner || owner->is_this_rank;
}

const std::type_info& class_of(const torch::optim::Optimizer& optimizer) {
  const auto* const sharded = dynamic_cast<const ShardedOptimizer*>(&optimizer);
  return sharded ? sharded->inner_class() : typeid(optimizer);
}

}  // namespace muster::parallel
