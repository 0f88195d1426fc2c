#include "muster/remote/world_info.h"

#include "base/text.h"
#include "muster/comm/world.h"

namespace muster {

WorldInfo get_world_info() {
  const World& world = World::current();
  return {.world_rank = world.rank(),
          .world_size = world.world_size(),
          .local_rank = world.local_rank(),
          .local_world_size = world.local_world_size(),
          .worker_name = get_worker_name()};
}

int get_world_rank() { return World::current().rank(); }
int get_rank() { return get_world_rank(); }
int get_world_size() { return World::current().world_size(); }
int get_local_rank() { return World::current().local_rank(); }
int get_local_world_size() { return World::current().local_world_size(); }
std::string get_worker_name() { return rpc::is_running() ? rpc::worker_info().name : text("worker", get_world_rank()); }
bool is_world_leader() { return get_world_rank() == 0; }
bool is_local_leader() { return get_local_rank() == 0; }

rpc::To WorkerId::to(const rpc::CallOptions& options) const {
  if (among()) throw InvalidArgument("any_worker() names no worker; it says where a part of a remote_call may go");
  const auto* const rank = std::get_if<int>(&id_);
  return rank ? rpc::To(*rank, options) : rpc::To(std::get<std::string>(id_), options);
}

WorkerId any_worker(std::vector<WorkerId> among) {
  return WorkerId(std::make_shared<const std::vector<WorkerId>>(std::move(among)));
}

int get_worker_id() { return rpc::worker_info().id; }
int get_worker_id(const WorkerId& worker) { return worker.to().rank(); }

}  // namespace muster
