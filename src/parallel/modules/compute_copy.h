// The copies that operators compute with instead of parameters: in mixed precision (muster/parallel/mixed_precision.h),
// and on a device, if the parameters stay in the host's memory (FsdpOptions::compute_device).
//
// A parameter has a `Sharing` (shared_tensor.h) whose `instead` gives out views of its copy, and is watched
// (watched.h). Each operator that reads the parameter gets a view of its own. For autograd the view is computed from
// the parameter, by a conversion: so the parameter is the leaf, and its gradient has the parameter's dtype and device.
//
// A gradient that comes from a device crosses two nodes. The first one, in the device's thread, lets the device write
// it into pinned memory and does not wait. So backward goes on there. The second one, in the thread that called
// backward(), waits until it has arrived.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "muster/parallel/mixed_precision.h"
#include "parallel/modules/same_module.h"

namespace muster::parallel {

// When operators use copies, and which. The memory of the parameters knows it, and may survive whoever makes the
// copies.
struct CopyPhase {
  bool reading = false;  // also outside of forward()
  int forwards = 0;      // that live
  bool is_step = false;  // whether there are copies of this step: for the second call of activation_checkpoint()
  // By number; undefined where operators use the parameter itself. Empty when their maker is gone.
  std::vector<at::Tensor> copies;
  bool on_device = false;  // whether the copies are
  std::thread::id forward_thread = {};

  bool is_time() const;  // for operators to use the copies
  // For `Sharing::instead`: a view of copies[number] if it is time and the parameter has this dtype; else undefined.
  // The copy has the strides of the parameter's memory. The view shares the version of `parameter`: if that is updated,
  // a backward() over an older graph throws. InvalidArgument if there is a forward-mode derivative.
  at::Tensor instead_of(const at::Tensor& parameter, at::ScalarType dtype, size_t number) const;
};

// While it lives, operators use the copies.
class [[nodiscard]] ForwardWithCopies {
 public:
  explicit ForwardWithCopies(std::shared_ptr<CopyPhase> phase) : phase_(std::move(phase)) {
    ++phase_->forwards;
    phase_->is_step = true;
    phase_->forward_thread = std::this_thread::get_id();
  }
  ForwardWithCopies(const ForwardWithCopies&) = delete;
  ForwardWithCopies& operator=(const ForwardWithCopies&) = delete;
  ~ForwardWithCopies() { --phase_->forwards; }

 private:
  const std::shared_ptr<CopyPhase> phase_;
};

// InvalidArgument if a dtype cannot be used.
void check(const MixedPrecision& precision);
// Whether operators may use copies.
bool makes_copies(const MixedPrecision& precision);
// The dtype in which forward() and backward() use each parameter.
std::vector<at::ScalarType> compute_dtypes(const torch::nn::Module& module, const std::vector<NamedTensor>& parameters,
                                           const MixedPrecision& precision);
// In which its gradient travels between hosts, if not in its own.
std::vector<std::optional<at::ScalarType>> reduce_dtypes(const torch::nn::Module& module,
                                                         const std::vector<NamedTensor>& parameters,
                                                         const MixedPrecision& precision);
// To buffer_dtype, for good.
void convert_buffers(const torch::nn::Module& module, const MixedPrecision& precision);
// For require_same_on_all_ranks().
std::string words_of(const torch::nn::Module& module, const MixedPrecision& precision,
                     const std::vector<at::ScalarType>& compute_dtypes);

}  // namespace muster::parallel
