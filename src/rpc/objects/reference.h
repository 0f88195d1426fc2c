// One hold of a worker on an object of some worker. An RRef is a handle of it. object_table.h describes the counting.
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
  int holder = kMine;  // who holds: this worker; for Agent::keep_for() the receiving worker, kGone once it was sent

  Reference(std::weak_ptr<Agent> agent, int owner, uint64_t object)
      : agent(std::move(agent)), owner(owner), object(object) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference();  // releases the hold
};

}  // namespace detail
}  // namespace muster::rpc
