// The parameters of a module, once per host: the parameters of all its ranks are the same memory.
//
//   rank 0's memfd:  | a.weight | c.bias |        rank 1's memfd:  | b.weight | a.bias |
//
// Each parameter has an *owner* on each host, the only rank of the host that may change it. Its bytes lie in the owner's
// memfd, which all ranks of the host map. So the owner's pages are on its NUMA node, and the kernel frees the memory when
// no rank uses it any more, in whatever order they end. The tensors of the module stay the same objects; only their
// storage changes. The hosts' copies stay equal, because their owners get the same gradients and make the same updates.
//
// Or each parameter has one owner among the ranks of all hosts. Then the other hosts have its values only while they need
// them (gatherer.h).
//
// Nobody may read a parameter while its owner writes. The order of a step gives that:
//
//   before_forward()     returns on no rank before every rank has come: all updates are over
//   forward, backward    all ranks read
//   end of backward()    returns on no rank before backward() is over on all (gradient_reducer.h): all reads are over
//   step()               owners write
//
// From a before_forward() to the next end of a backward() or synchronize(), which all ranks come to alike, nobody may
// write. So a module in eval() mode or in no_sync() need not wait again in between (may_go_on()), and ranks may evaluate
// unequal parts.
//
// changes() finds what breaks this order: a parameter that a rank changed without owning it, or while others might read;
// new storage or another shape. It finds in-place changes by autograd's version counters, and those of the owner while
// others might read also by some of the parameter's bytes. By these bytes it also finds that hosts have different values.
// before_forward() lets all ranks know, and throws the same on all. After an update it moves on the version counters of
// the other ranks' parameters, so that a backward() through an old graph fails as in one process.
//
// A parameter may get new storage, as by torch::load(). If its owners' have some, before_forward() copies the owners'
// values to the shared memory, and all ranks use that again.
//
// Errors: InvalidArgument as above; Unavailable, on every rank, if a host has too little memory when they ask; those of
// shm::exchange() and of the collectives. Thread-safety: one thread, as an nn::Module.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "muster/comm/group.h"
#include "muster/comm/world.h"
#include "parallel/fsdp/gatherer.h"
#include "parallel/fsdp/owners.h"
#include "parallel/fsdp/units.h"
#include "parallel/hosts.h"
#include "parallel/same_module.h"
#include "shm/mapping.h"

namespace muster::fsdp {

// Collective, when each rank has called a user's function: throws what failed here, or that another rank failed.
void throw_if_any_failed(const std::exception_ptr& failure, const Group& group);

class SharedParameters {
 public:
  // For owners on one host each.
  struct Gathering {
    std::vector<Unit> units;  // of all parameters; none: each parameter has an owner on each host
    size_t most = 0;          // as Gatherer's
  };
  // Gives a parameter that this rank owns its first values.
  using Fill = std::function<void(const parallel::NamedTensor& parameter, const at::Tensor& values)>;
  // Collective. Each parameter is there once. If `fill` throws on a rank, this throws on every rank.
  SharedParameters(const std::vector<parallel::NamedTensor>& parameters, const std::vector<Owner>& owners,
                   parallel::Hosts hosts, const Group& group, const World& world, const Gathering& gathering,
                   const Fill& fill);

  // What this rank has changed since before_forward(), for the two functions below; by parameter. Each number holds a
  // finding and the rank that has it, so that the largest of all ranks' is what counts.
  struct Changes {
    std::vector<int64_t> worst;              // the kind of change
    std::vector<int64_t> largest, smallest;  // some of the values, as the owners have them, and their complement
  };
  Changes changes() const;
  // Whether no rank may have written since before_forward(). Throws if this one has.
  bool may_go_on(const Changes& changes) const;
  // Collective.
  void before_forward(Changes changes);
  // Collective: all reads so far are over on all ranks.
  void synchronize();
  // Collective: as synchronize(); then this host has all values, until the next call of one of these functions.
  void gather();
  bool has_all() const { return gatherer_ && gatherer_->has_all(); }  // since gather()
  // To be called when backward() is over on all ranks.
  void reads_are_over();

  // Bytes of memory that holds parameters for this rank's host, and belongs to this rank; the kernel counts them.
  size_t bytes_here() const { return shm::committed(memory_.get()); }

 private:
  struct Entry {
    std::string name;
    at::Tensor tensor;  // the module's
    at::Tensor shared;  // in shared memory, of the same shape and layout
    Owner owner;
    uint32_t version = 0;  // of `tensor`, at the last look
    uint64_t sample = 0;   // some bytes of it, then, if it is this rank's own
  };

  bool is_mine(const Entry& entry) const { return rank_of(entry.owner, hosts_, group_.rank()) == group_.rank(); }
  void use_shared_memory(Entry& entry) const;
  void remember(Entry& entry) const;
  void throw_if_wrong(const Changes& of_all);
  void throw_if_hosts_differ(const Changes& of_all) const;

  const Group group_;
  const parallel::Hosts hosts_;
  std::vector<Entry> entries_;
  UniqueFd memory_;                     // of this rank
  std::shared_ptr<Gatherer> gatherer_;  // null if each host has an owner of each parameter
  bool reading_ = false;                // since before_forward(); the same on all ranks
};

}  // namespace muster::fsdp
