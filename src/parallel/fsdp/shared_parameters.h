// The parameters of a module, once per host: the parameters of all its ranks are the same memory.
//
// Each parameter has an *owner* on each host, the only rank of the host that may change it; its bytes lie in the
// owner's memory (shared_tensors.h). Or each of a parameter's *parts* has an owner (row_parts.h): a part is a tensor of
// its own, on the parameter's memory, and what changes it also changes the parameter. The tensors of the module stay
// the same objects; only their storage changes. The hosts' copies stay equal, because their owners get the same
// gradients and make the same updates. Or each parameter has one owner among the ranks of all hosts.
//
// In mixed precision some parameters have a copy in another dtype, which lies in shared memory in the same way, and
// which operators use instead (compute_copy.h) from a before_forward() to the next end of a backward() or
// synchronize(), while a ForwardWithCopies lives, and in the second call of an activation_checkpoint().
// before_forward() makes it, and gather(). Then only the copies are gathered for operators; the parameters stay where
// they are at home, except after gather().
//
// If a device computes, each parameter has a copy on this rank's device (device_copies.h), which operators use at the
// same times. It is made from what operators would use on the CPU.
//
// Nobody may read a parameter while its owner writes. The order of a step gives that:
//
//   before_forward()     returns on no rank before every rank has come: all updates are over
//   forward, backward    all ranks read
//   end of backward()    returns on no rank before backward() is over on all (gradient_reducer.h): all reads are over
//   step()               owners write
//
// From a before_forward() to the next end of a backward() or synchronize(), which all ranks come to alike, nobody may
// write. So a module in eval() mode or in no_sync() need not wait again in between (may_go_on()), and ranks may
// evaluate unequal parts.
//
// changes() finds what breaks this order: a parameter that a rank changed without owning it, or while others might
// read; new storage or another shape; and one that requires grad, but did not when it was shared. It finds in-place
// changes by autograd's version counters, and those of the owner while others might read also by some of the
// parameter's bytes. By these bytes it also finds that hosts have different values. before_forward() lets all ranks
// know, and throws the same on all. After an update it moves on the version counters of the other ranks' parameters,
// so that a backward() through an old graph fails as in one process.
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
#include <optional>
#include <string>
#include <vector>

#include "muster/comm/group.h"
#include "muster/comm/world.h"
#include "parallel/fsdp/device_copies.h"
#include "parallel/fsdp/owners.h"
#include "parallel/fsdp/shared_tensors.h"
#include "parallel/fsdp/units.h"
#include "parallel/kit/hosts.h"
#include "parallel/kit/pinned_memory.h"
#include "parallel/modules/compute_copy.h"
#include "parallel/modules/same_module.h"

namespace muster::fsdp {

class SharedParameters {
 public:
  // Gives a parameter that this rank owns its first values.
  using Fill = std::function<void(const parallel::NamedTensor& parameter, const at::Tensor& values)>;
  // The device that computes, if it is not the CPU.
  struct OnDevice {
    at::Device device;
    std::vector<Unit> units;  // of all parameters
    size_t most = 0;          // as DeviceCopies'
  };
  // Collective. Each parameter is there once; compute_dtypes: by parameter, in which operators use it. If `fill` throws
  // on a rank, this throws on every rank.
  SharedParameters(const std::vector<parallel::NamedTensor>& parameters,
                   const std::vector<at::ScalarType>& compute_dtypes, const Ownership& ownership, parallel::Hosts hosts,
                   const Group& group, const World& world, const Gathering& gathering, const Fill& fill,
                   const std::optional<OnDevice>& on_device = {});
  SharedParameters(const SharedParameters&) = delete;
  SharedParameters& operator=(const SharedParameters&) = delete;
  ~SharedParameters();

  // What this rank has changed since before_forward(), for the two functions below; by parameter. Each number holds a
  // finding and the rank that has it, so that the largest of all ranks' is what counts.
  struct Changes {
    std::vector<int64_t> worst;              // the kind of change
    std::vector<int64_t> largest, smallest;  // some of the values, as the owners have them, and their complement
  };
  Changes changes(bool makes_graph) const;  // makes_graph: parameters that require grad may get some
  // Whether no rank may have written since before_forward(). Throws if this one has. If it has replaced tensors, all
  // ranks must come to before_forward().
  bool may_go_on(const Changes& changes) const;
  // Collective.
  void before_forward(Changes changes);
  // Collective: all reads so far are over on all ranks.
  void synchronize();
  // Collective: as synchronize(); then this host has all values, until the next call of one of these functions.
  void gather();
  bool has_all() const { return has_all_; }  // since gather()
  // To be called when backward() is over on this rank, and then when it is on all ranks.
  void own_reads_are_over();
  void reads_are_over();

  const std::vector<at::Tensor>& parts() const { return parts_; }  // in the order of Ownership::parts

  // Bytes of memory that holds parameters for this rank's host, and belongs to this rank; the kernel counts them.
  size_t bytes_here() const { return used_->bytes_here() + (kept_ ? kept_->bytes_here() : 0); }

  // Of what operators use; in order.
  std::vector<size_t> units_here() const {
    if (on_device_) return on_device_->units_here();
    return used_->gatherer() ? used_->gatherer()->units_here() : std::vector<size_t>{};
  }

  const std::shared_ptr<parallel::CopyPhase>& phase() const { return phase_; }

 private:
  struct Entry {
    std::string name;
    at::Tensor tensor;  // the module's, or that of a part
    at::Tensor shared;  // in shared memory, of the same shape and layout
    at::Tensor copy;    // the same in another dtype; undefined if the CPU's operators use `shared`
    Owner owner;
    bool is_mine = false;  // this rank owns it
    bool is_trained = true;
    bool is_in_parts = false;
    size_t whole = 0;      // of a part: the parameter's entry; else its own
    uint32_t version = 0;  // of `tensor`, at the last look
    uint64_t sample = 0;   // some bytes of it, then, if it is this rank's own
  };

  std::vector<size_t> make_memory(const std::vector<parallel::NamedTensor>& parameters,
                                  const std::vector<at::ScalarType>& compute_dtypes, const std::vector<Owner>& owners,
                                  const World& world, const Gathering& gathering, bool on_device);
  void make_copies_for_operators(const std::vector<parallel::NamedTensor>& parameters,
                                 const std::vector<size_t>& kept_at, const std::optional<OnDevice>& on_device);
  bool has_copy(const Entry& entry) const { return entry.copy.defined() || on_device_; }  // for operators
  void add_parts(const Ownership& ownership, const std::vector<size_t>& kept_at);
  void use_shared_memory(Entry& entry) const;
  void remember(Entry& entry) const;
  void make_copies();
  void for_each_gatherer(const std::function<void(Gatherer&)>& fn) const;
  void throw_if_wrong(const Changes& of_all);
  void throw_if_hosts_differ(const Changes& of_all) const;

  const Group group_;
  const parallel::Hosts hosts_;
  std::vector<Entry> entries_;  // parameters, then parts
  std::vector<at::Tensor> parts_;
  std::unique_ptr<SharedTensors> used_;  // what operators use: parameters, or their copies
  std::unique_ptr<SharedTensors> kept_;  // parameters that have copies in another dtype; null if there are none
  std::vector<std::shared_ptr<parallel::PinnedMemory>> pinned_;  // of what the device reads
  std::unique_ptr<DeviceCopies> on_device_;                      // null if the CPU computes
  bool has_all_ = false;
  // `reading`: since before_forward(). `is_step`: until synchronize() or gather(). Both are the same on all ranks.
  const std::shared_ptr<parallel::CopyPhase> phase_ = std::make_shared<parallel::CopyPhase>();
};

}  // namespace muster::fsdp
