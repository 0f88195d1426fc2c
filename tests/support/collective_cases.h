// One case of each collective: fill the tensors, issue the operation, and compare every output with the reference, to
// the bit.
//
// Thread-safety: a Case belongs to one rank's thread.
#pragma once

#include <functional>
#include <ostream>
#include <string_view>
#include <vector>

#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "support/patterns.h"
#include "support/tensors.h"

namespace muster::test {

struct Case {
  World& world;
  Group group;
  at::ScalarType dtype = at::kFloat;
  ReduceOp op = ReduceOp::SUM;
  int64_t count = 1;  // elements of the operation's unit: the tensor, or one rank's part
  Kind kind = Kind::kOrdinary;
  int root = 0;
  bool async = false;
  int64_t shift = 0;  // where in the pattern: another for each case, so that a stale result is a wrong one
};
std::ostream& operator<<(std::ostream& out, const Case& c);

// Waits for an operation and checks its results.
using Finish = std::function<void()>;

struct Collective {
  std::string_view name;
  bool reduces = false;  // so `op` counts, and the dtype must be reducible
  bool slices = false;   // a turn of the pipeline carries a slice for each rank, not one piece
  Finish (*start)(const Case&) = nullptr;
};

const std::vector<Collective>& collectives();  // all but barrier
const Collective& collective(std::string_view name);

}  // namespace muster::test
