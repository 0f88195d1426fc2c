// What workers keep for gradients of other workers, and that nothing of it is left.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "muster/autograd/context.h"
#include "muster/rpc/call.h"
#include "muster/rpc/worker.h"
#include "rpc/agent/agent.h"
#include "support/patience.h"

namespace muster::test {

struct Left : autograd::Census {
  size_t objects = 0;
  MSGPACK_DEFINE(sub_graphs, arguments, contexts, objects);
};
inline Left left_here() { return {autograd::census(), rpc::census().owned_objects}; }
inline std::string objects_here() { return rpc::current_agent()->objects().describe(); }

// The worker keeps no graph, arguments or context, and `objects` objects. Soon: references are released by message.
template <typename Worker>
void expect_nothing_left_on(const Worker& worker, size_t objects, const std::string& after = {}) {
  const auto until = patience();
  Left left;
  do {
    left = rpc::sync<&left_here>(worker);
  } while ((left.sub_graphs || left.arguments || left.contexts || left.objects != objects) && !until.passed());
  EXPECT_TRUE(left.sub_graphs == 0 && left.arguments == 0 && left.contexts == 0 && left.objects == objects)
      << "worker " << rpc::worker_info(worker).name << " has " << left.sub_graphs << " graphs, " << left.arguments
      << " lists of arguments, " << left.contexts << " contexts and " << left.objects << " objects; " << objects
      << " should be left" << after << "\n"
      << rpc::sync<&objects_here>(worker);
}

// On each worker that lives.
inline void expect_nothing_left(size_t objects = 0) {
  for (const auto& worker : rpc::all_workers())
    if (rpc::is_alive(worker.id)) expect_nothing_left_on(worker.id, objects);
}

}  // namespace muster::test
