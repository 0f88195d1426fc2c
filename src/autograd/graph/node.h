// What the nodes of this layer share. libtorch holds nodes by c10::intrusive_ptr from 2.13 on, by std::shared_ptr
// before.
//
// Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::autograd {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

using NodePtr = decltype(Edge::function);
inline constexpr bool kNodesAreShared = std::is_same_v<NodePtr, std::shared_ptr<Node>>;

namespace detail {
template <typename T, bool kShared>
struct PointerTo {
  using strong = c10::intrusive_ptr<T>;
  using weak = c10::weak_intrusive_ptr<T>;
};
template <typename T>
struct PointerTo<T, true> {
  using strong = std::shared_ptr<T>;
  using weak = std::weak_ptr<T>;
};
}  // namespace detail

template <typename T>
using PtrTo = typename detail::PointerTo<T, kNodesAreShared>::strong;
template <typename T>
using WeakPtrTo = typename detail::PointerTo<T, kNodesAreShared>::weak;

template <typename T, typename... A>
PtrTo<T> make_node(A&&... arguments) {
  if constexpr (kNodesAreShared) {
    return PtrTo<T>(new T(std::forward<A>(arguments)...), [](T* node) { deleteNode(node); });
  } else {
    return PtrTo<T>::make(std::forward<A>(arguments)...);
  }
}

template <typename T>
PtrTo<T> pointer_to(T* node) {
  if constexpr (kNodesAreShared) {
    return std::static_pointer_cast<T>(node->getptr());
  } else {
    return PtrTo<T>::reclaim_copy(node);
  }
}

// Moves a gradient, which came over the CPU (sendable()), to the device that the edge's node expects. Differentiable.
inline Tensor placed(Tensor gradient, const Edge& to) {
  if (!gradient.defined() || !to.is_valid()) return gradient;
  const at::Device device = to.function->input_metadata(to.input_nr).device();
  return gradient.device() == device ? gradient : gradient.to(gradient.options().device(device));
}

// Makes a gradient sendable: dense, and on the CPU. It is sent over the CPU because it may take ways for which there is
// no device map, other than its tensor did: from the callee by its own call, or over a third worker. Differentiable.
inline Tensor sendable(Tensor gradient) {
  if (!gradient.defined()) return gradient;
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  return gradient.is_cpu() ? gradient : gradient.to(gradient.options().device(at::kCPU));
}

// A tensor of the same dtype and shape on the CPU, without memory for its elements.
Tensor on_host(const Tensor& like);

// For a node's apply(): below autograd, unless it is to be recorded. Operators would only look there.
class BelowAutogradUnlessRecorded {
 public:
  BelowAutogradUnlessRecorded() {
    if (!at::GradMode::is_enabled()) below_.emplace();
  }
  bool recorded() const { return !below_; }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_;
};

// Calls release_resources() of the base class, in versions of libtorch that have it.
template <typename Base, typename T>
void release_resources_of(T& node) {
  if constexpr (requires { node.Base::release_resources(); }) node.Base::release_resources();
}

// All nodes that can be reached from `edges`, each once, in an order that depends only on the graph. If there are more
// than `most`, only some of them: more than `most`. It goes to the nodes in `stops`, but not beyond.
std::vector<Node*> reachable(const edge_list& edges, size_t most = SIZE_MAX,
                             const std::vector<const Node*>& stops = {});

// A node without edges that gets no gradient. The nodes of calls have an edge to it: asking the engine for its gradient
// makes the engine run them all, even those with no other path to the requested outputs.
const Edge& sink();

}  // namespace muster::autograd
