// A job of forked ranks (forked.h) in which worker 0 leads and the others serve its calls.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>

#include "muster/rpc/worker.h"
#include "support/forked.h"
#include "support/patience.h"

namespace muster::test {

// What a rank does: worker 0 runs `lead`, the others serve until it is over. Then RPC ends abruptly, because some may
// have died. Returns what `lead` returned; "" on the others.
inline std::string lead_or_serve(const ForkedJob& job, int rank, int n, const rpc::Options& options,
                                 const std::function<std::string()>& lead) {
  at::set_num_threads(1);
  World world = job.join(rank, n);
  const World::Scope scope(world);
  rpc::init(options);
  std::string said;
  if (rank == 0) {
    try {
      said = lead();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    world.store().set("over", "");
  } else {
    world.store().get("over", patience());
  }
  rpc::shutdown(rpc::Shutdown::kAbrupt);
  return said;
}

}  // namespace muster::test
