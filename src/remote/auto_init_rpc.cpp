#include "muster/remote/auto_init_rpc.h"

#include "base/log.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::detail {

RpcSession::RpcSession(const AutoInitOptions& options)
    : shutdown_timeout_(options.shutdown_timeout), tolerates_losses_(options.tolerates_losses) {
  if (!World::current_or_null()) world_.emplace(init(options.world));
  rpc::Options rpc = options.rpc;
  if (options.worker_name) rpc.name = options.worker_name(get_world_info());
  rpc::init(rpc);
  rpc_.on = true;
  if (options.worker_init) options.worker_init();
  barrier();
}

void RpcSession::finish() {
  rpc_.on = false;  // even a shutdown that fails ends RPC
  try {
    rpc::shutdown(rpc::Shutdown::kGraceful, shutdown_timeout_);
  } catch (const PeerLost& lost) {
    if (!tolerates_losses_) throw;
    MUSTER_LOG(kWarning) << "the job ends without a worker: " << lost.what();
  }
}

RpcSession::Running::~Running() {
  if (!on) return;
  try {
    rpc::shutdown(rpc::Shutdown::kAbrupt);
  } catch (const std::exception& error) {
    MUSTER_LOG(kWarning) << "the shutdown of RPC failed: " << error.what();
  }
}

}  // namespace muster::detail
