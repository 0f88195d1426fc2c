// One hold of a worker on an object of some worker: what an RRef is a handle of. objects.h has the counting.
#pragma once

#include <cstdint>
#include <memory>

namespace muster::rpc {

class Agent;

namespace detail {

struct Reference {
  static constexpr int kMine = -1, kGone = -2;

  std::weak_ptr<Agent> agent;
  int owner = 0;
  uint64_t object = 0;
  int holder = kMine;  // whose hold it is: of Agent::keep_for(), the worker's that it goes to, until it has gone

  Reference(std::weak_ptr<Agent> agent, int owner, uint64_t object)
      : agent(std::move(agent)), owner(owner), object(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference();  // lets go
};

}  // namespace detail
}  // namespace muster::rpc
