// Solvers of A x = b, where A is known by what it does to a vector. A vector is a list of tensors.
//
//   optim::LinearSolver solve = optim::solve_cg({.rtol = 1e-8});
//   x = solve(a, b);
//
//   solve_cg()              conjugate gradients: A is symmetric and positive definite, as the Hessian at a minimum is
//   solve_normal_cg()       conjugate gradients for AᵀA x = Aᵀb: any A that can be inverted
//   solve_neumann_series()  the first terms of A⁻¹ = alpha (I + (I - alpha A) + (I - alpha A)² + …)
//   solve_inv()             writes A down, one column per element of b, and inverts it: for small ones
//
// Errors: InvalidArgument: options out of their range (when the solver is made). Thread-safety: values; several threads
// may use one. Source: torchopt.linear_solve, torchopt.linalg; Lorraine, Vicol, Duvenaud, "Optimizing Millions of
// Hyperparameters by Implicit Differentiation", AISTATS 2020 (the series). TorchOpt's solve_inv inverts only the blocks
// on the diagonal if there are several tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace muster::optim {

// transposed: x -> Aᵀx. Only solve_normal_cg() needs it.
struct LinearOperator {
  using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& x)>;
  Function apply, transposed;
};
using LinearSolver = std::function<std::vector<at::Tensor>(const LinearOperator& a, const std::vector<at::Tensor>& b)>;

// Ends when the residual's norm is at most max(rtol * the norm of b, atol), or after maxiter steps (default: 10 per
// element of b). ridge: solves with A + ridge * I (solve_normal_cg: AᵀA + ridge * I). init: where to begin, default 0.
struct CgOptions {
  double rtol = 1e-5, atol = 0;
  std::optional<int64_t> maxiter = {};
  double ridge = 0;
  std::vector<at::Tensor> init = {};
};
LinearSolver solve_cg(CgOptions options = {});
LinearSolver solve_normal_cg(CgOptions options = {});

struct NeumannOptions {
  int64_t maxiter = 10;  // terms after the first
  double alpha = 1, ridge = 0;
};
LinearSolver solve_neumann_series(NeumannOptions options = {});

struct InvOptions {
  double ridge = 0;
};
LinearSolver solve_inv(InvOptions options = {});

}  // namespace muster::optim
