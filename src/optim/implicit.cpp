#include "muster/optim/implicit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/text.h"
#include "muster/base/error.h"
#include "optim/recipe.h"

namespace muster::optim {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Root {
  detail::Residual residual;
  LinearSolver solve;
};

Tensors checked(Tensors residual, const Tensors& solution) {
  if (residual.size() != solution.size())
    throw InvalidArgument(text("the optimality function: expected ", solution.size(),
                               " tensors, as the solution has, got ", residual.size()));
  for (size_t i = 0; i < residual.size(); ++i)
    if (!residual[i].defined() || residual[i].sizes() != solution[i].sizes())
      throw InvalidArgument(text("the optimality function, for tensor ", i, " of the solution: expected shape ",
                                 solution[i].sizes(), ", got ",
                                 residual[i].defined() ? text(residual[i].sizes()) : "none"));
  return residual;
}

// gradient(sum of of * times) by `by`, with zeros for what does not depend on it.
Tensors pulled(const Tensors& of, const Tensors& by, const Tensors& times, bool create_graph) {
  Tensors outputs, weights;
  for (size_t i = 0; i < of.size(); ++i) {
    if (!of[i].requires_grad()) continue;
    outputs.push_back(of[i]);
    weights.push_back(times[i]);
  }
  Tensors gradients(by.size());
  if (!outputs.empty()) gradients = torch::autograd::grad(outputs, by, weights, true, create_graph, true);
  for (size_t i = 0; i < by.size(); ++i)
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(by[i]);
  return gradients;
}

class ImplicitGradient : public torch::autograd::Function<ImplicitGradient> {
 public:
  struct Given {
    Tensors solution;
    Root root;
  };
  static variable_list forward(AutogradContext* context, at::TensorList arguments, Given given) {
    variable_list solution = std::move(given.solution);
    for (Tensor& one : solution) one = one.detach();
    variable_list saved = solution;
    saved.insert(saved.end(), arguments.begin(), arguments.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["solutions"] = static_cast<int64_t>(solution.size());
    keep(context, std::move(given.root));
    return solution;
  }

  static variable_list backward(AutogradContext* context, const variable_list& to) {
    const bool create_graph = at::GradMode::is_enabled();
    const Root& root = kept<Root>(context);
    const auto saved = context->get_saved_variables();
    const auto border = saved.begin() + context->saved_data["solutions"].toInt();
    Tensors right;  // A^T u = -gradient
    for (const Tensor& one : to) right.push_back(one.neg());

    const at::AutoGradMode record(true);
    Tensors solution, arguments, by;
    for (auto one = saved.begin(); one != border; ++one) solution.push_back(apart(*one, create_graph));
    for (auto one = border; one != saved.end(); ++one) arguments.push_back(apart(*one, create_graph));
    const Tensors residual = checked(root.residual(solution, arguments), solution);

    Tensors u = solved(root, residual, solution, right);
    if (create_graph) u = as_function(root, u, solution, arguments, right);

    variable_list results(arguments.size() + 1);  // the last: what was Given has no gradient
    for (const Tensor& one : arguments)
      if (one.defined() && one.requires_grad()) by.push_back(one);
    Tensors gradients;
    if (!by.empty()) gradients = pulled(residual, by, u, create_graph);
    for (size_t i = 0, next = 0; i < arguments.size(); ++i)
      if (arguments[i].defined() && arguments[i].requires_grad()) results[i] = gradients[next++];
    return results;
  }

 private:
  // u, as numbers.
  static Tensors solved(const Root& root, const Tensors& residual, const Tensors& solution, const Tensors& right) {
    // A^T as a function of a vector that autograd knows, so that its own gradient is A.
    Tensors vector;
    for (const Tensor& one : solution) vector.push_back(at::zeros_like(one).set_requires_grad(true));
    Tensors image;  // made when first needed
    const auto detached = [](Tensors all) {
      for (Tensor& one : all) one = one.detach();
      return all;
    };
    LinearOperator transposed_jacobian{
        .apply = [&](const Tensors& x) { return detached(pulled(residual, solution, x, false)); },
        .transposed =
            [&](const Tensors& x) {
              if (image.empty()) image = pulled(residual, solution, vector, true);
              return detached(pulled(image, vector, x, false));
            }};
    return detached(root.solve(transposed_jacobian, detached(right)));
  }

  // u as a function of all that it depends on: the root of A(solution, arguments)^T u - right.
  static Tensors as_function(const Root& root, const Tensors& u, const Tensors& solution, const Tensors& arguments,
                             const Tensors& right) {
    Tensors all = solution;
    all.insert(all.end(), arguments.begin(), arguments.end());
    all.insert(all.end(), right.begin(), right.end());
    const size_t n = solution.size(), m = arguments.size();
    return detail::implicit(
        [residual = root.residual, n, m](const Tensors& at, const Tensors& given) {
          const auto first = given.begin();
          const Tensors x(first, first + static_cast<ptrdiff_t>(n));
          const Tensors its(first + static_cast<ptrdiff_t>(n), first + static_cast<ptrdiff_t>(n + m));
          Tensors left = pulled(checked(residual(x, its), x), x, at, true);
          for (size_t i = 0; i < n; ++i) left[i] = left[i] - given[n + m + i];
          return left;
        },
        u, all, root.solve);
  }
};

}  // namespace

Tensors detail::implicit(Residual residual, const Tensors& solution, const Tensors& arguments,
                         const LinearSolver& solve) {
  for (const Tensor& one : solution)
    if (!one.defined() || !one.is_floating_point())
      throw InvalidArgument(text("a tensor of the solution: expected floating-point numbers, got ",
                                 one.defined() ? text(one.scalar_type()) : "an undefined tensor"));
  return ImplicitGradient::apply(at::TensorList(arguments),
                                 ImplicitGradient::Given{solution, Root{std::move(residual), solve}});
}

void detail::Unchanged::note(const Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensors_.emplace_back(tensor, tensor._version());
}

void detail::Unchanged::check() const {
  for (const auto& [tensor, version] : tensors_)
    if (tensor._version() != version)
      throw InvalidArgument(text("an argument of shape ", tensor.sizes(),
                                 " was changed in place between a solution and the gradient through it"),
                            "Pass a copy of it to the solver: clone() it");
}

std::vector<detail::MetaParameters::Place> detail::MetaParameters::places() const {
  std::vector<Place> all;
  for (const auto& [name, member] : own_) all.push_back({name, {member}});
  for (const auto& [name, module] : modules_) {
    const ModuleSlots slots(*module);
    for (const auto& slot : slots.all())
      if (!slot.is_buffer) all.push_back({text(name, ".", slot.name), slot.places});
  }
  return all;
}

void detail::solve_implicitly(torch::nn::Module& module, ImplicitProblem problem) {
  std::vector<std::vector<Tensor*>> places;  // of the solution, then of the meta-parameters
  Tensors solution, arguments;
  const ModuleSlots slots(module);
  for (const auto& slot : slots.all()) {
    if (slot.is_buffer || !slot.get().requires_grad()) continue;  // what is frozen is given, not solved for
    places.push_back(slot.places);
    solution.push_back(slot.get());
  }
  for (auto& [name, members] : problem.meta->places()) {
    arguments.push_back(*members.front());
    places.push_back(std::move(members));
  }
  if (solution.empty())
    throw InvalidArgument("the module has no parameters that require grad, which would be the solution");
  if (arguments.empty())
    throw InvalidArgument("the module has no meta-parameters", "Call register_meta_parameter() in its constructor.");

  // Computes with these tensors in the module and the meta-parameters' places.
  const auto with = [places](const Tensors& now, const Tensors& given, const auto& compute) {
    Lent lent;
    for (size_t i = 0; i < places.size(); ++i) lent.put(places[i], i < now.size() ? now[i] : given[i - now.size()]);
    return compute();
  };
  const LinearSolver solve = problem.solve;
  Residual residual = [with, problem = std::move(problem)](const Tensors& now, const Tensors& given) {
    if (problem.alive.expired())  // and the places with it
      throw Aborted("the ImplicitMetaGradientModule was destroyed before the gradient of its solution was computed");
    problem.unchanged.check();
    return with(now, given, [&] {
      if (problem.optimality) return problem.optimality();
      const Tensor value = problem.objective();
      return pulled({value}, now, {at::ones_like(value)}, true);
    });
  };
  const Tensors result = implicit(std::move(residual), solution, arguments, solve);
  for (size_t i = 0; i < result.size(); ++i)
    for (Tensor* const place : places[i]) *place = result[i];
}

}  // namespace muster::optim
