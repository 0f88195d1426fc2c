#include "parallel/kit/group_beside.h"

#include <utility>
#include <vector>

#include "comm/core/backend.h"
#include "muster/comm/world.h"

namespace muster::parallel {
namespace {

// A component of a World.
struct GroupsBeside {
  struct Pair {
    c10::weak_intrusive_ptr<comm::Backend> group;  // whose address is not used again as long as this refers to it
    std::shared_ptr<const Group> beside;
  };
  std::vector<Pair> pairs;
};

}  // namespace

std::shared_ptr<const Group> existing_group_beside(const Group& group) {
  const auto all = World::current().find<GroupsBeside>();
  if (!all) return nullptr;
  for (const auto& pair : all->pairs)
    if (pair.group._unsafe_get_target() == &comm::backend_of(group)) return pair.beside;
  return nullptr;
}

std::shared_ptr<const Group> group_beside(const Group& group) {
  if (auto beside = existing_group_beside(group)) return beside;
  World& world = World::current();
  auto beside = std::make_shared<const Group>(group.split(0, 0, {.name = "statistics of batches"}));
  if (!world.find<GroupsBeside>()) world.attach(std::make_shared<GroupsBeside>());
  auto& pairs = world.find<GroupsBeside>()->pairs;
  std::erase_if(pairs, [](const auto& pair) { return pair.group.expired(); });
  auto& backend = comm::backend_of(group);
  pairs.push_back({c10::weak_intrusive_ptr<comm::Backend>(
                       c10::intrusive_ptr<comm::Backend>::unsafe_reclaim_from_nonowning(&backend)),
                   beside});
  return beside;
}

}  // namespace muster::parallel
