// A job of forked ranks (forked.h) in which worker 0 leads and the others serve its calls.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>

#include "muster/remote/auto_init_rpc.h"
#include "support/forked.h"
#include "support/patience.h"

namespace muster::test {

// What a rank does: worker 0 runs `lead`, the others serve until it is over. Some may have died then. Returns what
// `lead` returned; "" on the others.
inline std::string lead_or_serve(const ForkedJob& job, int rank, int n, const rpc::Options& options,
                                 const std::function<std::string()>& lead) {
  at::set_num_threads(1);
  World world = job.join(rank, n);
  const World::Scope scope(world);
  return auto_init_rpc(
      [&]() -> std::string {
        if (rank != 0) return {};
        try {
          return lead();
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
          return {};
        }
      },
      {.rpc = options, .shutdown_timeout = kPatience, .tolerates_losses = true});
}

}  // namespace muster::test
