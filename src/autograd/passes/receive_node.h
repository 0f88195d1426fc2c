// The callee's end of an argument that requires grad: the node that is the grad_fn of the received tensor.
//
// Its gradient belongs to the caller's tape. When an engine reaches the node, there are two cases. If the caller (or a
// worker in between) asked for the pass, the pass returns the gradient with its answer. If nobody asked, because a
// handler ran backward() itself or the result went on to a third worker, the gradient is sent to the caller, whose
// engine continues from there; this is one step for all arguments of that caller, when this worker's engine has
// finished.
//
// There is one node for each argument and worker. If a worker gets the argument several times (an RRef's value that was
// fetched twice), all share the node, so that the gradients are summed before they are sent.
//
// The node is on the CPU, whatever the device of the tensor: a gradient on another device goes through a HostNode
// first. So all that share the node agree, and it runs on the thread that called the engine, not on one that serves a
// device.
//
// Thread-safety: as libtorch's nodes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "autograd/graph/node.h"
#include "autograd/graph/sweep.h"
#include "rpc/agent/agent.h"

namespace muster::autograd {

// Names an argument: the one at `index` in the Arguments (arguments.h) that are object `object` of worker `owner`.
struct Slot {
  int owner = 0;
  uint64_t object = 0;
  uint32_t index = 0;
  auto operator<=>(const Slot&) const = default;
};

class ReceiveNode final : public Node {
 public:
  // `like`: a CPU tensor of the argument's dtype and shape.
  ReceiveNode(std::shared_ptr<rpc::detail::Reference> arguments, Slot slot, const Tensor& like);

  const Slot& slot() const { return slot_; }
  const std::shared_ptr<rpc::detail::Reference>& arguments() const { return arguments_; }

  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "MusterReceive"; }
  // Called when the last strong pointer is gone; the destructor runs only when the table drops its weak pointer
  // (libtorch 2.13).
  void release_resources() {
    arguments_.reset();
    release_resources_of<Node>(*this);
  }

 private:
  std::shared_ptr<rpc::detail::Reference> arguments_;  // keeps the Arguments alive at their owner
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

// A worker's ReceiveNodes, by slot.
class ReceiveNodes {
 public:
  PtrTo<ReceiveNode> get(const std::shared_ptr<rpc::detail::Reference>& arguments, uint32_t index, const Tensor& like);
  // The edge for the gradient of a received argument.
  Edge edge_of(const std::shared_ptr<rpc::detail::Reference>& arguments, uint32_t index, const Tensor& argument);

 private:
  std::mutex mutex_;
  std::map<Slot, WeakPtrTo<ReceiveNode>> nodes_;
  Sweep sweep_;
};

}  // namespace muster::autograd
