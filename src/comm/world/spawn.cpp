#include "muster/comm/spawn.h"

#include "base/text.h"
#include "comm/world/world_starter.h"
#include "muster/base/error.h"
#include "muster/launch/launcher.h"

namespace muster {

void comm::WorldStarter::spawn(int n, const std::function<void(World&)>& fn, const WorldOptions& options) const {
  if (n < 1) throw InvalidArgument(text("spawn(): the number of processes: expected 1 or more, got ", n));
  const auto outcome = launch::launch_function(n, [&] {
    World world = init(options);
    fn(world);
    return 0;
  });
  if (outcome.status != 0) throw RemoteError(outcome.cause);
}

void spawn(int n, const std::function<void(World&)>& fn, const WorldOptions& options) {
  comm::WorldStarter().spawn(n, fn, options);
}

}  // namespace muster
