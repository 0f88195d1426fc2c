#include "autograd/graph/small_graph.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "autograd/graph/linear_gradient.h"

namespace muster::autograd {
namespace {

namespace engine = torch::autograd;

// Whether the node is one that libtorch generates for its operators, and so only computes.
bool is_of_an_operator(const Node& node) {
  constexpr std::string_view kGenerated = "N5torch8autograd9generated";  // the namespace, as the ABI writes it
  return std::string_view(typeid(node).name()).starts_with(kGenerated);
}

bool has_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
         !node.post_hooks().empty() || node.tensor_post_acc_grad_hooks();
}

bool is_on_cpu(const Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i)
    if (!node.input_metadata(i).device().is_cpu()) return false;
  return true;
}

// Whether none of these nodes leads to another one, as far as that is found soon.
bool are_independent(const std::vector<const Node*>& nodes) {
  if (nodes.size() == 1) return true;
  edge_list beyond;
  for (const Node* const node : nodes)
    beyond.insert(beyond.end(), node->next_edges().begin(), node->next_edges().end());
  const auto found = reachable(beyond, SmallGraph::kMostNodes);
  return found.size() <= SmallGraph::kMostNodes && std::none_of(found.begin(), found.end(), [&](const Node* node) {
           return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
         });
}

}  // namespace

SmallGraph::Step& SmallGraph::step_of(const Node* node) {
  return steps_[static_cast<size_t>(std::find(nodes_.begin(), nodes_.end(), node) - nodes_.begin())];
}

std::optional<SmallGraph> SmallGraph::of(const edge_list& roots, const std::function<bool(Node&)>& ends,
                                         const std::vector<const Node*>& stops) {
  // Within a run of the engine (in a hook, for example), nodes would ask what that outer run needs from them.
  if (engine::get_current_graph_task_id() >= 0 || engine::AnomalyMode::is_enabled() || at::hasCallbacks()) return {};
  SmallGraph graph;
  graph.stops_ = stops;
  graph.nodes_ = reachable(roots, kMostNodes, stops);
  if (graph.nodes_.size() > kMostNodes) return {};
  for (Node* const node : graph.nodes_) {
    const bool known = is_of_an_operator(*node) || dynamic_cast<engine::AccumulateGrad*>(node) || ends(*node);
    if (!known || has_hooks(*node) || !is_on_cpu(*node)) return {};
    graph.steps_.push_back({.inputs = variable_list(node->num_inputs())});
  }
  const auto count = [&](const edge_list& edges) {
    for (const Edge& edge : edges)
      if (edge.is_valid()) ++graph.step_of(edge.function.get()).missing;
  };
  count(roots);
  for (const Node* const node : graph.nodes_)
    if (!graph.stops_at(node)) count(node->next_edges());
  return graph;
}

bool SmallGraph::stops_at(const Node* node) const {
  return std::find(stops_.begin(), stops_.end(), node) != stops_.end();
}

bool SmallGraph::all_lead_to(const std::vector<const Node*>& ends) const {
  std::vector<const Node*> leading = ends;
  const auto leads = [&](const Node* node) { return std::find(leading.begin(), leading.end(), node) != leading.end(); };
  for (size_t before = 0; before != leading.size();) {  // until no node is added
    before = leading.size();
    for (const Node* const node : nodes_)
      if (!leads(node) && std::any_of(node->next_edges().begin(), node->next_edges().end(),
                                      [&](const Edge& edge) { return leads(edge.function.get()); }))
        leading.push_back(node);
  }
  return std::all_of(nodes_.begin(), nodes_.end(), leads);
}

void SmallGraph::give(const Edge& edge, Tensor gradient) {
  Step& step = step_of(edge.function.get());
  --step.missing;
  if (!gradient.defined()) return;
  Tensor& sum = step.inputs[edge.input_nr];
  if (!sum.defined()) {
    sum = std::move(gradient);
  } else {
    sum = sum.is_sparse() || sum.is_sparse_csr() ? at::add(gradient, sum) : at::add(sum, gradient);
  }
}

void SmallGraph::run(const edge_list& roots, variable_list gradients, bool keep_graph,
                     const std::function<bool(Node&, variable_list&)>& take, bool create_graph) {
  const at::AutoGradMode mode(create_graph);
  engine::validate_outputs(roots, gradients, [](const std::string& what) { return what; });
  for (size_t i = 0; i < roots.size(); ++i) give(roots[i], std::move(gradients[i]));
  for (;;) {
    size_t next = nodes_.size();
    for (size_t i = 0; i < nodes_.size(); ++i)
      if (steps_[i].missing == 0 && (next == nodes_.size() || nodes_[i]->sequence_nr() > nodes_[next]->sequence_nr()))
        next = i;
    if (next == nodes_.size()) return;
    Node* const node = nodes_[next];
    steps_[next].missing = -1;
    variable_list inputs = std::move(steps_[next].inputs);
    const edge_list& edges = node->next_edges();
    variable_list outputs(edges.size());
    if (!take(*node, inputs)) {
      if (create_graph && keep_graph && is_linear(*node, inputs[0])) {
        run_linear(*node, inputs[0]);
        continue;
      }
      if (!keep_graph) node->will_release_variables();
      outputs = (*node)(std::move(inputs));
      if (!keep_graph) node->release_variables();
      engine::validate_outputs(
          edges, outputs, [&](const std::string& what) { return "Function " + node->name() + " returned an " + what; });
    }
    if (stops_at(node)) continue;
    for (size_t i = 0; i < edges.size(); ++i)
      if (edges[i].is_valid()) give(edges[i], std::move(outputs[i]));
  }
}

void SmallGraph::run_linear(Node& node, const Tensor& of_result) {
  // The transposition of the weight goes with the layer, if nothing else gives it a gradient.
  const Edge& weight = node.next_edge(2);
  Node* const after = weight.function.get();
  const auto is_last_to_come = [this](const Node* step) {
    return step_of(step).missing == 1 && !step_of(step).inputs[0].defined();
  };
  const bool transposed = after && is_transposition(*after) && !stops_at(after) && is_last_to_come(after);
  variable_list gradients = linear_gradient(node, of_result, transposed);
  if (transposed) step_of(after).missing = -1;
  for (uint32_t i = 0; i < gradients.size(); ++i)
    if (const Edge& edge = transposed && i == 2 ? after->next_edge(0) : node.next_edge(i); edge.is_valid())
      give(edge, std::move(gradients[i]));
}

std::optional<variable_list> small_grad(const Tensor& root, const variable_list& inputs) {
  if (inputs.empty() || !root.requires_grad() || root.numel() != 1 || root.is_complex()) return {};
  const edge_list roots{engine::impl::gradient_edge(root)};
  std::vector<Edge> wanted;
  std::vector<const Node*> stops;
  for (const Tensor& input : inputs) {
    if (!input.requires_grad()) return {};
    wanted.push_back(engine::impl::gradient_edge(input));
    const Node* const node = wanted.back().function.get();
    if (std::find(stops.begin(), stops.end(), node) == stops.end()) stops.push_back(node);
  }
  if (!are_independent(stops)) return {};
  auto graph = SmallGraph::of(
      roots, [&](Node& node) { return std::find(stops.begin(), stops.end(), &node) != stops.end(); }, stops);
  if (!graph || !graph->all_lead_to(stops)) return {};
  variable_list results(inputs.size());
  graph->run(
      roots, {at::ones_like(root)}, /*keep_graph=*/true,
      [&](Node& node, variable_list& gradients) {
        bool taken = false;
        for (size_t i = 0; i < wanted.size(); ++i) {
          if (wanted[i].function.get() != &node) continue;
          results[i] = gradients[wanted[i].input_nr];
          taken = true;
        }
        return taken;
      },
      /*create_graph=*/true);
  return results;
}

}  // namespace muster::autograd
