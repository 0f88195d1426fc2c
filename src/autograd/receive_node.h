// The callee's end of an argument that asks for a gradient: the node that the tensor it received comes from.
//
// Its gradient belongs to the caller's tape. When an engine reaches the node, either the pass is one that the caller
// (or somebody between) asked for, and takes the gradient along with its answer; or nobody has asked, because a handler
// ran backward() itself, or the result went on to a third worker: then the gradient is sent to the caller, whose engine
// goes on from there, as one step for all arguments of that caller when this worker's engine has come to its end.
//
// One node for each argument and worker: who hears of it from several sides (an RRef's value that was fetched twice)
// shares it, so that its gradients are summed before they are sent on.
//
// It is on the CPU whatever device the tensor came to: a gradient on another device goes through a HostNode first. So
// all who share the node agree, and it runs on the thread that called the engine, not on one that serves a device.
//
// Thread-safety: as libtorch's nodes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "autograd/node.h"
#include "autograd/sweep.h"
#include "rpc/agent.h"

namespace muster::autograd {

// Which argument: of the Arguments (arguments.h) that are object `object` of worker `owner`, the one at `index`.
struct Slot {
  int owner = 0;
  uint64_t object = 0;
  uint32_t index = 0;
  auto operator<=>(const Slot&) const = default;
};

class ReceiveNode final : public Node {
 public:
  // `like`: of the argument's dtype and shape, on the CPU.
  ReceiveNode(std::shared_ptr<rpc::detail::Reference> arguments, Slot slot, const Tensor& like);

  const Slot& slot() const { return slot_; }
  const std::shared_ptr<rpc::detail::Reference>& arguments() const { return arguments_; }

  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "MusterReceive"; }
  // When its last holder lets go; the destructor runs later, while the table has a weak pointer (libtorch 2.13).
  void release_resources() {
    arguments_.reset();
    release_resources_of<Node>(*this);
  }

 private:
  std::shared_ptr<rpc::detail::Reference> arguments_;  // keeps them there
  const Slot slot_;
};

// Brings the gradient of a tensor on another device to the CPU. Differentiable.
class HostNode final : public Node {
 public:
  // `like`: the tensor.
  HostNode(Edge next, const Tensor& like);
  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "MusterToHost"; }
};

// A worker's, by slot.
class ReceiveNodes {
 public:
  PtrTo<ReceiveNode> get(const std::shared_ptr<rpc::detail::Reference>& arguments, uint32_t index, const Tensor& like);
  // Where the gradient of an argument that has come goes.
  Edge edge_of(const std::shared_ptr<rpc::detail::Reference>& arguments, uint32_t index, const Tensor& argument);

 private:
  std::mutex mutex_;
  std::map<Slot, WeakPtrTo<ReceiveNode>> nodes_;
  Sweep sweep_;
};

}  // namespace muster::autograd
