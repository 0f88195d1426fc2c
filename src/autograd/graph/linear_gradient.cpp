#include "autograd/graph/linear_gradient.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <typeinfo>

namespace muster::autograd {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::generated::AddmmBackward0;

class LinearGradient final : public Node {
 public:
  LinearGradient(const Tensor& g, const Tensor& x, const Tensor& m, bool transposed)
      : Node(torch::autograd::collect_next_edges(g, x, m)),
        g_(g, false),
        x_(x, false),
        m_(m, false),
        transposed_(transposed) {}

  variable_list apply(variable_list&& to) override {
    std::unique_lock lock(mutex_);  // another run may release them
    const Tensor g = g_.unpack(), x = x_.unpack(), m = m_.unpack();
    lock.unlock();
    const BelowAutogradUnlessRecorded below;
    const Tensor &of_self = to[0], &of_x = to[1], of_m = transposed_ && to[2].defined() ? to[2].t() : to[2];
    variable_list results(3);
    if (task_should_compute_output(0)) {
      Tensor& sum = results[0];
      if (of_self.defined() && of_x.defined()) {
        sum = at::addmm(of_self, of_x, m);
      } else if (of_x.defined()) {
        sum = of_x.mm(m);
      }
      if (of_m.defined()) {
        if (!sum.defined()) {
          sum = of_self.defined() ? at::addmm(of_self, x, of_m) : x.mm(of_m);
        } else if (below.recorded()) {
          sum = at::addmm(sum, x, of_m);
        } else {
          sum.addmm_(x, of_m);
        }
      } else if (!sum.defined() && of_self.defined()) {
        sum = of_self.expand_as(g);
      }
    }
    if (task_should_compute_output(1) && of_m.defined()) results[1] = g.mm(of_m.t());
    if (task_should_compute_output(2) && of_x.defined()) results[2] = of_x.t().mm(g);
    return results;
  }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    g_.reset_data();
    x_.reset_data();
    m_.reset_data();
  }
  std::string name() const override { return "MusterLinearGradient"; }

 private:
  SavedVariable g_, x_, m_;
  const bool transposed_;
};

bool is_one(const at::Scalar& number) { return !number.isComplex() && number.toDouble() == 1; }

}  // namespace

bool is_linear(Node& node, const Tensor& of_result) {
  if (typeid(node) != typeid(AddmmBackward0) || !of_result.defined() || !of_result.is_floating_point()) return false;
  const auto& addmm = static_cast<const AddmmBackward0&>(node);
  const auto simple = [](const Tensor& one) {
    return !one._fw_grad(0).defined();
  };  // else forward mode is recorded too
  return is_one(addmm.alpha) && is_one(addmm.beta) && addmm.mat1_layout == at::kStrided &&
         addmm.mat2_layout == at::kStrided && of_result.layout() == at::kStrided && simple(of_result) &&
         !addmm.mat1_.has_hooks() && !addmm.mat2_.has_hooks();  // each look at them may compute them again
}

bool is_transposition(const Node& node) { return typeid(node) == typeid(torch::autograd::generated::TBackward0); }

variable_list linear_gradient(Node& node, const Tensor& of_result, bool transposed) {
  variable_list gradients;
  {
    // Below autograd, so that what is computed is neither recorded nor known as a view.
    const at::AutoDispatchBelowADInplaceOrView below;
    gradients = node({of_result});
    torch::autograd::validate_outputs(node.next_edges(), gradients, [&](const std::string& what) {
      return "Function " + node.name() + " returned an " + what;
    });
    if (transposed && gradients[2].defined()) gradients[2] = gradients[2].t();
    // Several gradients may be one tensor, the given one too.
    for (Tensor& one : gradients)
      if (one.defined() && one.use_count() > 1) one = one.alias();
  }
  auto& addmm = static_cast<AddmmBackward0&>(node);
  // The node keeps only what it needs for the gradients that are wanted.
  const bool keeps_x = node.next_edge(2).is_valid(), keeps_m = node.next_edge(1).is_valid();
  const Tensor x = keeps_x ? addmm.mat1_.unpack() : Tensor(), m = keeps_m ? addmm.mat2_.unpack() : Tensor();
  const auto requires_grad = [](const Tensor& one) { return one.defined() && one.requires_grad(); };
  if (!requires_grad(of_result) && !requires_grad(x) && !requires_grad(m)) return gradients;
  const auto derivative = make_node<LinearGradient>(of_result, x, m, transposed);
  for (Tensor& one : gradients) {
    if (!one.defined()) {
      derivative->add_input_metadata(Node::undefined_input());
      continue;
    }
    torch::autograd::impl::set_gradient_edge(one, {derivative, derivative->add_input_metadata(one)});
  }
  return gradients;
}

}  // namespace muster::autograd
