// Tensors that lie once on each host, in memory that its ranks share: each in that of its owner.
//
//   rank 0's memfd:  | a.weight | c.bias |        rank 1's memfd:  | b.weight | a.bias |
//
// All ranks of a host map all of them. So the owner's pages are on its NUMA node, and the kernel frees the memory when
// no rank uses it any more, in whatever order they end.
//
// Or each tensor has one owner among the ranks of all hosts. Then the other hosts have its values only while they need
// them (gatherer.h).
//
// Errors: Unavailable, on every rank, if a host has too little memory when they ask; those of shm::exchange() and of
// the collectives. Thread-safety: one thread, as an nn::Module.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "muster/comm/group.h"
#include "muster/comm/world.h"
#include "parallel/fsdp/gatherer.h"
#include "parallel/fsdp/owners.h"
#include "parallel/fsdp/parameter_layout.h"
#include "parallel/fsdp/row_parts.h"
#include "parallel/fsdp/units.h"
#include "parallel/kit/hosts.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/modules/same_module.h"
#include "shm/mapping.h"

namespace muster::fsdp {

// For owners on one host each.
struct Gathering {
  std::vector<Unit> units;  // of all parameters; none: each parameter has an owner on each host
  size_t most = 0;          // as Gatherer's
};

class SharedTensors {
 public:
  struct Setup {
    const std::vector<Owner>& owners;  // by tensor
    const parallel::Hosts& hosts;
    const Group& group;
    const World& world;
    const Gathering& gathering;
    size_t bytes_beside = 0;  // that a host will need for other tensors
    std::function<bool(size_t index)> is_copy = [](size_t) { return false; };  // Sharing::is_copy of a tensor
    // Sharing::instead of a tensor.
    std::function<std::function<at::Tensor(const at::Tensor&)>(size_t index)> instead = [](size_t) { return nullptr; };
  };
  // Collective. `like`: names, shapes, dtypes and strides. Nothing is committed yet.
  SharedTensors(const std::vector<parallel::NamedTensor>& like, const Setup& setup);

  const at::Tensor& operator[](size_t index) const { return tensors_[index]; }
  // A part of the tensor with its memory. Each host has an owner of it.
  at::Tensor rows(const RowPart& part, size_t index, const Owner& owner) const;
  // Takes memory for a tensor of this rank's, before it is written for the first time.
  void commit(size_t index) const;
  size_t bytes_of_host() const { return layout_.at_most; }  // that it needs at most
  // Bytes that are there now, and belong to this rank; the kernel counts them.
  size_t bytes_here() const { return shm::committed(memory_.get()); }
  // The memory of the owners of this host.
  const std::vector<std::shared_ptr<shm::Mapping>>& mapped() const { return mapped_; }
  Gatherer* gatherer() const { return gatherer_.get(); }  // null if each host has an owner of each tensor

 private:
  parallel::Sharing sharing_of(const std::string& name, const Owner& owner) const;

  const ParameterLayout layout_;
  const parallel::Hosts hosts_;
  const Group group_;
  const std::vector<Owner> owners_;
  UniqueFd memory_;  // of this rank
  std::vector<std::shared_ptr<shm::Mapping>> mapped_;
  std::shared_ptr<Gatherer> gatherer_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace muster::fsdp
