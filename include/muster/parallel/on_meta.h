// on_meta(): makes a module whose tensors have shapes and no memory, for models that are too large for one process.
//
//   auto net = muster::on_meta([] { return std::make_shared<Net>(); });
//   const auto init = [](const std::string& name, at::Tensor values, at::Generator random) {
//     if (values.dim() > 1)
//       values.normal_(0, 0.02, random);
//     else
//       values.fill_(name.ends_with("norm.weight") ? 1 : 0);
//   };
//   auto model = muster::fully_shard(net, {.init = init});
//
// While the guard OnMeta lives, functions that make tensors (empty(), randn(), …) make them on the device "meta" in
// this thread, if no device is named. What a module's constructor does to its parameters (kaiming_uniform_()) has no
// effect, and draws no random numbers. torch::tensor(), which has values, stays on the CPU. An operator that needs
// values, as item(), throws c10::Error. A tensor that the module does not register stays without values: make it with a
// device. The guard is for modules only; nothing of Muster works in its thread while it lives.
//
// Thread-safety: each thread has its own guards. Source: torch.device("meta") as a context manager.
#pragma once

#include <memory>
#include <utility>

namespace muster {

class OnMeta {
 public:
  OnMeta();
  OnMeta(const OnMeta&) = delete;
  OnMeta& operator=(const OnMeta&) = delete;
  ~OnMeta();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

template <typename Fn>
auto on_meta(Fn&& fn) {
  const OnMeta guard;
  return std::forward<Fn>(fn)();
}

}  // namespace muster
