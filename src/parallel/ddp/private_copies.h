// Mixed precision of DistributedDataParallel: each rank's own copies of its parameters, for operators (compute_copy.h).
//
// Each forward() begins with make(), which converts all parameters. Operators use the copies while a ForwardWithCopies
// lives, and in the second call of an activation_checkpoint(). At all other times they use the parameters themselves.
//
// A parameter may get new storage, as by torch::load(); make() finds that.
//
// Thread-safety: one thread, as an nn::Module.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "parallel/modules/compute_copy.h"
#include "parallel/modules/same_module.h"

namespace muster::ddp {

class PrivateCopies {
 public:
  // `dtypes`: by parameter, in which operators use it. InvalidArgument for a parameter that is to have a copy, and is
  // not dense and on the CPU, or belongs to a FullyShardedDataParallel.
  PrivateCopies(const std::vector<parallel::NamedTensor>& parameters, const std::vector<at::ScalarType>& dtypes);
  PrivateCopies(const PrivateCopies&) = delete;
  PrivateCopies& operator=(const PrivateCopies&) = delete;
  ~PrivateCopies();

  void make();
  const std::shared_ptr<parallel::CopyPhase>& phase() const { return phase_; }

 private:
  struct Entry {
    std::string name;
    at::Tensor parameter;
    at::ScalarType dtype;  // of the copy
    at::Tensor values;     // the parameter's, without being watched
  };
  void use_copy(size_t number);

  std::vector<Entry> entries_;
  const std::shared_ptr<parallel::CopyPhase> phase_ = std::make_shared<parallel::CopyPhase>();
};

}  // namespace muster::ddp
