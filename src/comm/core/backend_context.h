// What a backend's create function is given: the group that it serves, what the ranks of this host share, and how this
// backend is to behave.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/core/members.h"
#include "muster/comm/fault_plan.h"
#include "muster/store/store.h"

namespace muster::shm {
class Arena;
class BlackBox;
class Mapping;
class PeerWatch;
}  // namespace muster::shm

namespace muster::comm {

class Backend;
struct HostArrivals;

// The group, as all of its ranks know it.
struct GroupContext {
  std::string name = "world";
  std::string store_prefix;  // unique to the group
  std::shared_ptr<Store> store;
  int rank = 0, size = 1;
  std::chrono::milliseconds timeout{300'000};
  std::vector<Member> members;    // by rank in this group; empty: all on this host
  std::vector<int> global_ranks;  // of the members, for the black box
  std::vector<int> shown_ranks;   // how messages and errors number the ranks; empty: unchanged
};

// What the World lends to the group: things that belong to this process, or to all ranks of this host.
struct HostContext {
  std::vector<std::shared_ptr<shm::Mapping>>
      heaps;                          // by rank in this group; null for ranks of other hosts; may be empty
  std::shared_ptr<shm::Arena> arena;  // of this rank's heap
  std::shared_ptr<shm::PeerWatch> watch;
  std::shared_ptr<shm::BlackBox> black_box;  // may be null
  bool ranks_are_threads = false;            // other ranks share this process
  int local_ranks = 1;                       // ranks that compete for this host's cores
  int cores = 1;                             // that these ranks may use together (base/cores.h)
};

// How the backend is to behave.
struct BackendOptions {
  FaultPlan faults;
  std::string inner;  // of hierarchical: the backend between hosts
  size_t board = 0;   // words of Backend::board()
  // For a group of the hosts' leaders over a wire: where the group counts which host and rank come last.
  std::shared_ptr<HostArrivals> host_arrivals;
  // For PyTorch's ProcessGroup (muster/comm/process_group.h): the backend is called "muster" there, and c10d's
  // interface and works throw c10d's errors.
  bool for_pytorch = false;
  std::function<void(const Backend*)> on_leave;  // called once, when the membership has ended; may be empty
};

struct BackendContext {
  GroupContext group;
  HostContext host;
  BackendOptions options;
};

}  // namespace muster::comm
