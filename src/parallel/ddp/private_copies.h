// Mixed precision of DistributedDataParallel: each rank's own copies of its parameters, for operators (compute_copy.h).
//
// before_forward() makes them, if a parameter may have changed since. Operators use them from a before_forward() in training
// to the end of a backward() that averages, and while a ForwardWithCopies lives.
//
// A change shows in autograd's version counter or in some of the parameter's bytes; after a backward() that averages, all
// have changed. A parameter may get new storage, as by torch::load(); the next before_forward() finds that.
//
// Thread-safety: one thread, as an nn::Module.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/compute_copy.h"
#include "parallel/same_module.h"

namespace muster::ddp {

class PrivateCopies {
 public:
  // `dtypes`: by parameter, in which operators use it. InvalidArgument for a parameter that is not dense and on the CPU, but is to have a
  // copy, or that belongs to a FullyShardedDataParallel.
  PrivateCopies(const std::vector<parallel::NamedTensor>& parameters, const std::vector<at::ScalarType>& dtypes);
  PrivateCopies(const PrivateCopies&) = delete;
  PrivateCopies& operator=(const PrivateCopies&) = delete;
  ~PrivateCopies();

  void before_forward(bool is_training);
  void reads_are_over();
  const std::shared_ptr<parallel::CopyPhase>& phase() const { return phase_; }

 private:
  struct Entry {
    std::string name;
    at::Tensor parameter;
    at::ScalarType dtype;  // of the copy
    at::Tensor values;     // the parameter's, without being watched
    uint32_t version = 0;
    uint64_t sample = 0;
  };
  void use_copy(size_t number);

  std::vector<Entry> entries_;
  bool may_have_changed_ = true;
  const std::shared_ptr<parallel::CopyPhase> phase_ = std::make_shared<parallel::CopyPhase>();
};

}  // namespace muster::ddp
