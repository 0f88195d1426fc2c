#include "parallel/kit/host_memory.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "base/text.h"
#include "comm/world/heaps.h"
#include "comm/world/world_parts.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::parallel {

HostMemory share_memory(size_t bytes, size_t at_most, const Hosts& hosts, const Group& group, const World& world) {
  const World::Parts& parts = world.parts();
  // A number that no other memory in this World has.
  int64_t values[2] = {std::numeric_limits<int64_t>::max(), static_cast<int64_t>(shm::memory_available())};
  if (group.rank() == 0) values[0] = world.store().add(parts.prefix + "/parameters/count", 1);
  all_reduce(at::from_blob(values, {2}, at::kLong), {.op = ReduceOp::MIN, .group = group});
  if (at_most > static_cast<size_t>(values[1]))
    throw Unavailable(
        text("the parameters need ", at_most, " bytes of shared memory, but only ", values[1], " are available"),
        "Use a smaller model, or hosts with more memory");
  const std::string key = text(parts.prefix, "/parameters/", values[0]);
  HostMemory memory{.own = shm::create_memfd("muster-parameters", std::max(bytes, shm::page_size()))};
  memory.mapped = comm::exchange_memory(world.store(), key, group.rank(), hosts.members, memory.own.get(),
                                        Deadline::after(parts.options.timeout), group.ranks());
  return memory;
}

}  // namespace muster::parallel
