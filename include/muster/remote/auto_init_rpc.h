// Runs a program whose workers call each other: starts RPC before its main function and shuts it down afterwards.
//
//   int main(int argc, char** argv) {
//     return muster::auto_init_rpc([&] { return train(argc, argv); },
//                                  {.worker_init = [] { torch::manual_seed(muster::get_rank()); }});
//   }
//   muster run -n 8 ./program
//
// In this order: joins the job (muster::init(), unless the thread has a World, as under run_threads() and spawn());
// starts RPC; calls worker_init; waits until all workers have done so, so that no worker is called before it is ready;
// runs main; shuts RPC down gracefully, which waits until no worker makes calls any more; leaves the job, if it had
// joined it.
//
// An exception that leaves worker_init or main ends RPC abruptly: calls to this worker fail with PeerLost, and this
// worker waits for no other. An exception that is never caught ends the process where it was thrown, with its stack.
//
// Returns what main returns. Errors: those of muster::init(), rpc::init(), barrier() and rpc::shutdown(); what
// worker_init and main throw. Thread-safety: one thread of a worker calls it.
// Source: torchopt.distributed.auto_init_rpc.
#pragma once

#include <chrono>
#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "muster/comm/world.h"
#include "muster/remote/world_info.h"
#include "muster/rpc/worker.h"

namespace muster {

struct AutoInitOptions {
  std::function<void()> worker_init = {};                         // seeds, devices, data: with RPC running
  std::function<std::string(const WorldInfo&)> worker_name = {};  // empty: rpc.name, or "worker<rank>"
  rpc::Options rpc = {};
  WorldOptions world = {};                        // used if auto_init_rpc() joins the job
  std::chrono::milliseconds shutdown_timeout{0};  // how long the shutdown waits for the other workers; 0: no limit
  // Whether the job has done its work even if workers have died (calls with .max_retries). Then the shutdown does not
  // throw PeerLost for them. Start the program with `muster run --keep-going`.
  bool tolerates_losses = false;
};

namespace detail {

class RpcSession {
 public:
  explicit RpcSession(const AutoInitOptions& options);
  void finish();

 private:
  struct Running {
    bool on = false;
    ~Running();  // ends RPC abruptly, if it is on
  };
  std::optional<World> world_;
  Running rpc_;
  std::chrono::milliseconds shutdown_timeout_;
  bool tolerates_losses_;
};

}  // namespace detail

template <std::invocable<> Main>
std::invoke_result_t<Main> auto_init_rpc(Main&& main, const AutoInitOptions& options = {}) {
  detail::RpcSession session(options);
  if constexpr (std::is_void_v<std::invoke_result_t<Main>>) {
    std::invoke(std::forward<Main>(main));
    session.finish();
  } else {
    std::invoke_result_t<Main> result = std::invoke(std::forward<Main>(main));
    session.finish();
    return result;
  }
}

}  // namespace muster
