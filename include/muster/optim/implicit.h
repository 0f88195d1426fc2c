// Implicit differentiation: the gradient of a solution by what it was solved for, without going through the solver.
//
// A solver finds x with F(x, arguments) = 0: a minimum, where F is the objective's gradient; a fixed point, where F is
// f(x) - x. By the implicit function theorem, dx/da = -(dF/dx)⁻¹ dF/da. The gradient needs one linear solve, whatever
// the solver did, and no memory of its steps.
//
//   const auto ridge = optim::custom_root<1>(                                   // gradients flow to argument 1
//       [](const Tensor& w, const Tensor& l2, const Data& d) { return d.x.t().matmul(d.x.matmul(w) - d.y) + l2 * w; },
//       [](const Tensor& start, const Tensor& l2, const Data& d) { … return w; },
//       {.solve = optim::solve_cg()});
//   Tensor w = ridge(start, l2, data);      // l2 requires grad: so does w
//
//   custom_root<numbers…>(optimality, solver, options)
//     solver(start, a1, a2, …)        returns the solution, a tree of tensors (comm/tensor_tree.h), or
//                                     WithAux{solution, anything}; autograd does not record it
//     optimality(solution, a1, a2, …) returns F, a tree with the solution's shapes, by operators that autograd knows
//     numbers                         which arguments are differentiable, by their position; not 0. They are trees
//     options.solve                   how to solve the linear equation (linear_solve.h)
//
// The result is an ordinary node of autograd's graph. With create_graph its gradient is differentiable again, to any
// order: then the linear equation's solution is itself a root, of a linear F.
//
// ImplicitMetaGradientModule: a module whose parameters are the solution, and whose meta-parameters are the arguments.
//
//   struct Inner : optim::ImplicitMetaGradientModule<Inner> {
//     torch::nn::Linear fc{4, 1};
//     Tensor l2;
//     explicit Inner(Tensor meta) : l2(meta) { register_module("fc", fc); register_meta_parameter("l2", l2); }
//     Tensor objective(const Tensor& x, const Tensor& y) { return mse_loss(fc(x), y) + l2 * fc->weight.norm(); }
//     void solve(const Tensor& x, const Tensor& y) { … }      // any way to change its parameters' values
//   };
//   inner.solve_implicitly(x, y);            // now the parameters are functions of l2
//
// Instead of objective(), whose gradient by the parameters is F, a class may have optimality(), which returns F: one
// tensor per parameter that requires grad, in the order of parameters(). Frozen parameters are given, as buffers are.
// A module is solved once: for another task, make another module.
//
// F is computed again for the gradient, so it is a function of its arguments and the module's state only. Without
// random numbers, and in eval() mode if there are batch norms or dropout. A tensor among the arguments that was changed
// in place meanwhile is an InvalidArgument.
//
// Errors: InvalidArgument: F has other shapes than the solution; an argument was changed in place; a solution that is
// not of floats; those of TensorMembers (meta.h). Thread-safety: that of the functions given. Source:
// torchopt.diff.implicit; Blondel et al., "Efficient and Modular Implicit Differentiation", NeurIPS 2022; Rajeswaran
// et al., "Meta-Learning with Implicit Gradients", NeurIPS 2019.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/optim/linear_solve.h"
#include "muster/optim/meta.h"

namespace muster::optim {

struct RootOptions {
  LinearSolver solve = solve_normal_cg();
};

// What a solver returns that has more to say than its solution. No gradients flow through `aux`.
template <typename Solution, typename Aux>
struct WithAux {
  Solution solution;
  Aux aux;
};
template <typename Solution, typename Aux>
WithAux(Solution, Aux) -> WithAux<Solution, Aux>;

namespace detail {

template <typename T>
inline constexpr bool has_aux = false;
template <typename S, typename A>
inline constexpr bool has_aux<WithAux<S, A>> = true;

// F of lists: the solution's leaves and the differentiable arguments' leaves.
using Residual = std::function<Tensors(const Tensors& solution, const Tensors& arguments)>;

// The solution as a function of the arguments.
Tensors implicit(Residual residual, const Tensors& solution, const Tensors& arguments, const LinearSolver& solve);

// Tensors that are kept for a gradient, and may not change until then.
class Unchanged {
 public:
  template <typename... A>
  explicit Unchanged(const A&... arguments) {
    (add(arguments), ...);
  }
  void check() const;  // InvalidArgument if one was changed in place

 private:
  template <typename T>
  void add(const T& argument) {
    if constexpr (std::is_convertible_v<const T&, at::Tensor>) {
      note(argument);
    } else if constexpr (muster::detail::HasTensors<T>::value) {
      T copy = argument;
      muster::detail::for_each_tensor(copy, [this](at::Tensor& leaf) { note(leaf); });
    }
  }
  void note(const at::Tensor& tensor);

  std::vector<std::pair<at::Tensor, int64_t>> tensors_;  // with their versions
};

template <typename Tree>
Tree detached(Tree tree) {
  muster::detail::for_each_tensor(tree, [](at::Tensor& leaf) { leaf = leaf.detach(); });
  return tree;
}

template <typename Optimality, typename Solver, size_t... kNumbers>
class CustomRoot {
  static_assert(((kNumbers > 0) && ...), "argument 0 is where the solver begins: the solution does not depend on it");
  static_assert(sizeof...(kNumbers) > 0, "which arguments are differentiable? custom_root<1>(…), custom_root<1, 2>(…)");

 public:
  CustomRoot(Optimality optimality, Solver solver, RootOptions options)
      : optimality_(std::move(optimality)), solver_(std::move(solver)), options_(std::move(options)) {}

  template <typename Start, typename... A>
  auto operator()(const Start& start, const A&... arguments) const {
    auto result = solver_(detached(start), detached(arguments)...);
    if constexpr (has_aux<decltype(result)>) {
      result.solution = implicit_in(detached(std::move(result.solution)), arguments...);
    } else {
      result = implicit_in(detached(std::move(result)), arguments...);
    }
    return result;
  }

 private:
  template <typename Solution, typename... A>
  Solution implicit_in(Solution solution, const A&... arguments) const {
    const std::tuple<A...> all(arguments...);
    auto residual = [optimality = optimality_, solution, all, unchanged = Unchanged(arguments...)](
                        const Tensors& at, const Tensors& given) {
      unchanged.check();
      const auto here = with_leaves(solution, at);
      return leaves_of(std::apply([&](const auto&... each) { return optimality(here, each...); },
                                  with_leaves_of_numbered<kNumbers - 1 ...>(all, given)));
    };
    const Tensors leaves = leaves_of(solution), differentiable = leaves_of_numbered<kNumbers - 1 ...>(all);
    return with_leaves(std::move(solution), implicit(std::move(residual), leaves, differentiable, options_.solve));
  }

  Optimality optimality_;
  Solver solver_;
  RootOptions options_;
};

// Where an ImplicitMetaGradientModule keeps what its solution depends on.
class MetaParameters {
 public:
  struct Place {
    std::string name;
    std::vector<at::Tensor*> members;
  };
  void add(std::string name, at::Tensor& member) { own_.emplace_back(std::move(name), &member); }
  void add(std::string name, torch::nn::Module& module) { modules_.emplace_back(std::move(name), &module); }
  std::vector<Place> places() const;

 private:
  std::vector<std::pair<std::string, at::Tensor*>> own_;
  std::vector<std::pair<std::string, torch::nn::Module*>> modules_;
};

struct ImplicitProblem {
  const MetaParameters* meta;
  LinearSolver solve;
  std::weak_ptr<char> alive;            // expired: the module is gone
  Unchanged unchanged;                  // the arguments
  std::function<Tensors()> optimality;  // F, or
  std::function<at::Tensor()> objective;
};
// Gives the module the solution that it holds as a function of the meta-parameters.
void solve_implicitly(torch::nn::Module& module, ImplicitProblem problem);

}  // namespace detail

template <size_t... kNumbers, typename Optimality, typename Solver>
auto custom_root(Optimality optimality, Solver solver, RootOptions options = {}) {
  return detail::CustomRoot<Optimality, Solver, kNumbers...>(std::move(optimality), std::move(solver),
                                                             std::move(options));
}

// Self derives from it. The module must outlive the graph of its solution: a gradient that comes too late throws
// Aborted.
template <typename Self>
class ImplicitMetaGradientModule : public torch::nn::Module {
 public:
  // Calls solve(arguments…), then makes the parameters functions of the meta-parameters. The arguments are kept for the
  // gradient. Returns what solve() returns.
  template <typename... A>
  auto solve_implicitly(const A&... arguments) {
    Self& self = static_cast<Self&>(*this);
    const auto finish = [&] {
      detail::ImplicitProblem problem{
          .meta = &meta_, .solve = linear_solve_, .alive = alive_.held, .unchanged = detail::Unchanged(arguments...)};
      if constexpr (requires { self.optimality(arguments...); }) {
        problem.optimality = [&self, arguments...] { return Tensors(self.optimality(arguments...)); };
      } else {
        static_assert(
            requires { self.objective(arguments...); },
            "the class needs an objective() or an optimality() with the arguments of solve()");
        problem.objective = [&self, arguments...] { return at::Tensor(self.objective(arguments...)); };
      }
      detail::solve_implicitly(*this, std::move(problem));
    };
    if constexpr (std::is_void_v<decltype(self.solve(arguments...))>) {
      self.solve(arguments...);
      finish();
    } else {
      auto result = self.solve(arguments...);
      finish();
      return result;
    }
  }

  // What is registered below, by its names: a member's own, or the module's, a point and the parameter's.
  NamedTensors named_meta_parameters() const {
    NamedTensors all;
    for (const auto& place : meta_.places()) all.emplace_back(place.name, *place.members.front());
    return all;
  }
  Tensors meta_parameters() const {
    Tensors all;
    for (const auto& place : meta_.places()) all.push_back(*place.members.front());
    return all;
  }

 protected:
  explicit ImplicitMetaGradientModule(LinearSolver solve = solve_normal_cg()) : linear_solve_(std::move(solve)) {}

  // `member`: the member variable of this class that objective() reads.
  void register_meta_parameter(std::string name, at::Tensor& member) { meta_.add(std::move(name), member); }
  // All parameters of a module that objective() uses. The module must outlive this one.
  void register_meta_module(std::string name, torch::nn::Module& module) { meta_.add(std::move(name), module); }

 private:
  // Whether the module still exists. The graph must not hold the module, which holds the solution and so the graph.
  struct Alive {
    std::shared_ptr<char> held = std::make_shared<char>();
    Alive() = default;
    Alive(const Alive&) {}
    Alive& operator=(const Alive&) { return *this; }
  };

  detail::MetaParameters meta_;
  LinearSolver linear_solve_;
  Alive alive_;
};

}  // namespace muster::optim
