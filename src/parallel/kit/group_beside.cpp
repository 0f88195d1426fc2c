#include "parallel/kit/group_beside.h"

#include <utility>
#include <vector>

#include "muster/comm/world.h"

namespace muster::parallel {
namespace {

// A component of a World.
struct GroupsBeside {
  struct Pair {
    Group group;
    std::shared_ptr<const Group> beside;
  };
  std::vector<Pair> pairs;
};

}  // namespace

std::shared_ptr<const Group> existing_group_beside(const Group& group) {
  const auto all = World::current().find<GroupsBeside>();
  if (!all) return nullptr;
  for (const auto& pair : all->pairs)
    if (&comm::backend_of(pair.group) == &comm::backend_of(group)) return pair.beside;
  return nullptr;
}

std::shared_ptr<const Group> group_beside(const Group& group) {
  if (auto beside = existing_group_beside(group)) return beside;
  World& world = World::current();
  auto beside = std::make_shared<const Group>(group.split(0, 0, {.name = "statistics of batches"}));
  if (!world.find<GroupsBeside>()) world.attach(std::make_shared<GroupsBeside>());
  world.find<GroupsBeside>()->pairs.push_back({group.resolved(), beside});
  return beside;
}

}  // namespace muster::parallel
