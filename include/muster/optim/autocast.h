// Autocast: while it lives, operators that gain from fewer bits get their floating-point inputs in them.
//
//   torch::Tensor loss;
//   {
//     const muster::Autocast autocast(torch::kBFloat16);
//     loss = loss_function(net->forward(x), y);
//   }
//   loss.backward();                                   // outside: backward uses each operator's own dtypes
//
// Matrix products and convolutions compute in the dtype, operators that need more digits in float32; the lists are
// those of PyTorch. A parameter is converted once, and the result kept until an outermost guard ends, if an operator
// gets the parameter itself: from torch::linear() and convolutions. libtorch's nn::Linear gives it transposed, a view,
// which is converted each time. libtorch has one such cache per process, so threads that use one module must not do so
// in different dtypes at the same time. Guards nest; one with `enabled` false switches off.
//
// Thread-safety: it is its thread's, with this exception. Errors: InvalidArgument for a dtype that is not bfloat16 or
// float16, and if the device's type has no autocast. Source: torch.autocast.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace muster {

class Autocast {
 public:
  explicit Autocast(c10::ScalarType dtype = c10::kBFloat16, c10::DeviceType device = c10::kCPU, bool enabled = true);
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  const c10::DeviceType device_;
  const bool enabled_before_;
  const c10::ScalarType dtype_before_;
};

}  // namespace muster
