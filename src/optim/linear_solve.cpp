#include "muster/optim/linear_solve.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "muster/base/error.h"
#include "optim/options.h"

namespace muster::optim {
namespace {

using at::Tensor;
using Vector = std::vector<Tensor>;

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] * b[i]).sum().item<double>();
  return sum;
}

Vector plus(const Vector& a, const Vector& b, double times) {
  Vector sum;
  for (size_t i = 0; i < a.size(); ++i) sum.push_back(a[i].add(b[i], times));
  return sum;
}

int64_t elements(const Vector& of) {
  int64_t n = 0;
  for (const Tensor& one : of) n += one.numel();
  return n;
}

LinearOperator::Function ridged(LinearOperator::Function a, double ridge) {
  if (ridge == 0) return a;
  return [a = std::move(a), ridge](const Vector& x) { return plus(a(x), x, ridge); };
}

Vector conjugate_gradients(const LinearOperator::Function& a, const Vector& b, const CgOptions& o) {
  Vector x = o.init;
  if (x.empty())
    for (const Tensor& one : b) x.push_back(at::zeros_like(one));
  if (x.size() != b.size())
    throw InvalidArgument(text("init: expected ", b.size(), " tensors, as the right-hand side has, got ", x.size()));
  const double enough = std::max(o.rtol * o.rtol * dot(b, b), o.atol * o.atol);
  const int64_t most = o.maxiter.value_or(10 * elements(b));
  Vector residual = o.init.empty() ? b : plus(b, a(x), -1), direction = residual;
  double square = dot(residual, residual);
  for (int64_t step = 0; step < most && square > enough; ++step) {
    const Vector moved = a(direction);
    const double curvature = dot(direction, moved);
    if (curvature == 0 || !std::isfinite(curvature)) break;  // there is no way on in this direction
    const double length = square / curvature;
    x = plus(x, direction, length);
    residual = plus(residual, moved, -length);
    const double next = dot(residual, residual);
    direction = plus(residual, direction, next / square);
    square = next;
  }
  return x;
}

void check(const CgOptions& o) {
  at_least("rtol", o.rtol, 0);
  at_least("atol", o.atol, 0);
  at_least("ridge", o.ridge, 0);
  if (o.maxiter) require(*o.maxiter >= 0, "maxiter", static_cast<double>(*o.maxiter), "0 or more");
}

Tensor flat(const Vector& x) {
  Vector parts;
  for (const Tensor& one : x) parts.push_back(one.reshape({-1}));
  return at::cat(parts);
}

Vector like(const Tensor& all, const Vector& shapes) {
  Vector parts;
  int64_t from = 0;
  for (const Tensor& one : shapes) {
    parts.push_back(all.narrow(0, from, one.numel()).view(one.sizes()));
    from += one.numel();
  }
  return parts;
}

}  // namespace

LinearSolver solve_cg(CgOptions options) {
  check(options);
  return [o = std::move(options)](const LinearOperator& a, const Vector& b) {
    return conjugate_gradients(ridged(a.apply, o.ridge), b, o);
  };
}

LinearSolver solve_normal_cg(CgOptions options) {
  check(options);
  return [o = std::move(options)](const LinearOperator& a, const Vector& b) {
    if (!a.transposed) throw InvalidArgument("solve_normal_cg() needs the transposed operator");
    return conjugate_gradients(ridged([&](const Vector& x) { return a.transposed(a.apply(x)); }, o.ridge),
                               a.transposed(b), o);
  };
}

LinearSolver solve_neumann_series(NeumannOptions o) {
  require(o.maxiter >= 0, "maxiter", static_cast<double>(o.maxiter), "0 or more");
  require(std::isfinite(o.alpha) && o.alpha != 0, "alpha", o.alpha, "a finite number other than 0");
  return [o](const LinearOperator& a, const Vector& b) {
    const auto apply = ridged(a.apply, o.ridge);
    Vector sum = b, term = b;
    for (int64_t i = 0; i < o.maxiter; ++i) {
      term = plus(term, apply(term), -o.alpha);
      sum = plus(sum, term, 1);
    }
    for (Tensor& one : sum) one = one * o.alpha;
    return sum;
  };
}

LinearSolver solve_inv(InvOptions o) {
  at_least("ridge", o.ridge, 0);
  return [o](const LinearOperator& a, const Vector& b) {
    const Tensor all = flat(b);
    const auto apply = ridged(a.apply, o.ridge);
    Vector columns;
    for (const Tensor& unit : at::eye(all.numel(), all.options()).unbind())
      columns.push_back(flat(apply(like(unit, b))));
    return like(at::linalg_solve(at::stack(columns, 1), all), b);
  };
}

}  // namespace muster::optim
