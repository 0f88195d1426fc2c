// The gradient of a linear layer that is to be differentiated again, as one node.
//
// libtorch records such a gradient operator by operator: two products, a sum and four transpositions. What they compute
// takes a fraction of the time that recording them and, later, going back through them takes. Here the layer's own node
// computes the gradient, to the same bits, and nothing is recorded but one node with the derivative of all of it. That
// derivative is written in operators that autograd knows, so the third order and all above work as ever.
//
// For y = self + x m (at::addmm, as torch::nn::Linear calls it, where m is the transposed weight), with g the gradient
// of y: the gradients are sum(g), g m^T and x^T g; or (x^T g)^T, of the weight itself.
//
// Thread-safety: as libtorch's nodes.
#pragma once

#include "autograd/graph/node.h"

namespace muster::autograd {

// Whether the node is that of an at::addmm whose gradient can be one node, if this is the gradient of its result.
bool is_linear(Node& node, const Tensor& of_result);
// Whether the node only transposes.
bool is_transposition(const Node& node);

// The node's gradients, as its apply() and the engine's checks give them: of self, x and m; of m transposed if
// `transposed`. The gradient of y is defined.
variable_list linear_gradient(Node& node, const Tensor& of_result, bool transposed);

}  // namespace muster::autograd
