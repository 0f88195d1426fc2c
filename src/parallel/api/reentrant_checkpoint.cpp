// activation_checkpoint() in PyTorch's reentrant way: one node, whose backward() calls the function again and runs
// backward() of that.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/parallel/activation_checkpoint.h"
#include "optim/recipe.h"
#include "parallel/tape/first_call.h"

namespace muster::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct BothCalls {
  std::shared_ptr<const FirstCall> first;
  ReentrantFunction function;
};

struct Reentrant final : torch::autograd::Function<Reentrant> {
  static variable_list forward(AutogradContext* context, at::TensorList arguments, std::shared_ptr<FirstCall> first,
                               ReentrantFunction function) {
    const variable_list kept = arguments.vec();
    context->save_for_backward(kept);
    context->set_materialize_grads(false);
    variable_list results;
    {
      const FirstCall::WithoutAutocastCache without_cache;  // of casts that have no history
      results = function(kept);
    }
    first->end();
    for (at::Tensor& result : results) result = result.detach();  // others may hold it, such as a module's parameter
    optim::keep(context, BothCalls{std::move(first), std::move(function)});
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid())
      throw InvalidArgument(
          "a reentrant activation_checkpoint() does not go with autograd::grad(), nor with the inputs of backward()",
          "Use backward() without inputs, or leave `reentrant` out");
    if (at::GradMode::is_enabled())
      throw InvalidArgument("a reentrant activation_checkpoint() has no derivatives of derivatives (create_graph)",
                            "Leave `reentrant` out");
    const auto& second = optim::kept<BothCalls>(context);
    variable_list arguments;
    for (const at::Tensor& saved : context->get_saved_variables()) {
      arguments.push_back(saved.detach().set_requires_grad(saved.requires_grad()));
    }
    variable_list results;
    {
      const FirstCall::Again as_then(*second.first);
      results = second.function(arguments);
    }
    if (results.size() != gradients.size())
      throw InvalidArgument(text("the function of activation_checkpoint() is called again in backward(), and returns ",
                                 results.size(), " tensors, and ", gradients.size(), " the first time"),
                            "It must compute the same both times");
    variable_list with_gradients, theirs;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!gradients[i].defined() || !results[i].requires_grad()) continue;
      if (results[i].sizes() != gradients[i].sizes())
        throw InvalidArgument(
            text("the function of activation_checkpoint() is called again in backward(), and returns a tensor [",
                 join(results[i].sizes()), "] where it returned [", join(gradients[i].sizes()), "] the first time"),
            "It must compute the same both times");
      with_gradients.push_back(results[i]);
      theirs.push_back(gradients[i]);
    }
    if (!with_gradients.empty()) torch::autograd::backward(with_gradients, theirs);
    variable_list of_arguments;
    for (const at::Tensor& argument : arguments) of_arguments.push_back(argument.grad());
    of_arguments.resize(arguments.size() + 2);  // FirstCall and the function have none
    return of_arguments;
  }
};

}  // namespace

void throw_no_tensor() {
  throw InvalidArgument("the function of a reentrant activation_checkpoint() returns no tensor",
                        "Return one, or leave `reentrant` out");
}

std::vector<at::Tensor> checkpoint_reentrantly(bool preserve_rng_state, const std::vector<at::Tensor>& arguments,
                                               ReentrantFunction function) {
  if (std::none_of(arguments.begin(), arguments.end(),
                   [](const at::Tensor& each) { return each.defined() && each.requires_grad(); }))
    throw InvalidArgument(
        "no tensor among the arguments of a reentrant activation_checkpoint() requires grad, so backward() would never "
        "come to what the function uses",
        "Let the input require grad, or leave `reentrant` out");
  // libtorch wants defined tensors.
  std::vector<at::Tensor> defined;
  std::vector<size_t> places;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].defined()) continue;
    defined.push_back(arguments[i]);
    places.push_back(i);
  }
  const auto with_undefined = [function = std::move(function), places = std::move(places),
                               count = arguments.size()](const std::vector<at::Tensor>& given) {
    std::vector<at::Tensor> all(count);
    for (size_t i = 0; i < places.size(); ++i) all[places[i]] = given[i];
    return function(all);
  };
  return Reentrant::apply(at::TensorList(defined), std::make_shared<FirstCall>(preserve_rng_state, defined),
                          ReentrantFunction(with_undefined));
}

}  // namespace muster::parallel
