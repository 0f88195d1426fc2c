// Adafactor, Muon: optimizers that look at rows and columns. Source: torch/optim/_adafactor.py, _muon.py. The order of
// the operations is theirs.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/functional_optimizer.h"
#include "optim/options.h"

namespace muster::optim {
namespace {

using at::Tensor;

AdafactorOptions checked_adafactor(AdafactorOptions options) {
  require(options.beta2_decay <= 0, "beta2_decay", options.beta2_decay, "0 or less");
  at_least("eps.first", options.eps.first, 0);
  at_least("eps.second", options.eps.second, 0);
  require(options.d >= 1, "d", options.d, "1 or more");
  at_least("weight_decay", options.weight_decay, 0);
  return options;
}
MuonOptions checked_muon(MuonOptions options) {
  at_least("weight_decay", options.weight_decay, 0);
  at_least("momentum", options.momentum, 0);
  at_least("eps", options.eps, 0);
  require(options.ns_steps >= 0 && options.ns_steps < 100, "ns_steps", static_cast<double>(options.ns_steps),
          "0 to 99");
  return options;
}

double epsilon_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    case at::kFloat:
      return std::numeric_limits<float>::epsilon();
    default:
      return std::numeric_limits<double>::epsilon();
  }
}

double norm_of(const Tensor& tensor) { return at::linalg_vector_norm(tensor, 2).item<double>(); }

// The mean of squares along a dimension, without the squares.
Tensor mean_square(const Tensor& matrix, int64_t dim) {
  return at::linalg_vector_norm(matrix, 2, dim, /*keepdim=*/true).square_().div_(matrix.size(dim));
}

// About the nearest matrix whose rows or columns are orthogonal: singular values go towards 1 by steps of Newton and
// Schulz.
Tensor orthogonal(const MuonOptions& options, const Tensor& matrix) {
  const auto [a, b, c] = options.ns_coefficients;
  const bool is_tall = matrix.size(0) > matrix.size(1);
  Tensor x = matrix.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (is_tall) x = x.t();
  x.div_(at::linalg_vector_norm(x, 2).clamp_min(options.eps));
  for (int64_t i = 0; i < options.ns_steps; ++i) {
    const Tensor gram = at::matmul(x, x.t());
    const Tensor change = at::addmm(gram, gram, gram, b, c);
    x = at::addmm(x, change, x, a);
  }
  return is_tall ? x.t() : x;
}

}  // namespace

Adafactor::Adafactor(Options options)
    : FunctionalOptimizer(options.lr, {"row_var", "col_var", "variance"}), options_(checked_adafactor(options)) {}
void Adafactor::check(const Tensor& parameter) const {
  if (parameter.is_complex()) throw InvalidArgument("Adafactor is for real parameters", "Use AdamW for complex ones");
}
void Adafactor::update(double lr, Tensor& parameter, const Tensor& given, ParameterState& state) const {
  const Tensor gradient = options_.maximize ? -given : given;
  auto& [rows, columns, variance] = state.kept;
  for (const size_t k : {0, 1, 2})
    if (!state.kept[k].defined() && (gradient.dim() > 1) == (k < 2)) state.kept[k] = empty_kept(k, parameter).zero_();
  const auto step = static_cast<double>(state.step);
  const double eps1 = options_.eps.first > 0 ? options_.eps.first : epsilon_of(parameter.scalar_type());
  const double fresh = std::pow(step, options_.beta2_decay);  // the weight of this gradient in the averages
  const double size = std::sqrt(static_cast<double>(parameter.numel()));
  const double rate = std::max(options_.eps.second, norm_of(parameter) / size) * std::min(lr, 1 / std::sqrt(step));
  if (options_.weight_decay != 0) parameter.mul_(1 - lr * options_.weight_decay);
  Tensor estimate;
  if (gradient.dim() > 1) {
    rows.lerp_(mean_square(gradient, -1), fresh);
    columns.lerp_(mean_square(gradient, -2), fresh);
    estimate = at::matmul(rows, columns).div_(rows.mean(-2, /*keepdim=*/true).clamp_min_(eps1));
  } else {
    variance.lerp_(gradient * gradient, fresh);
    estimate = variance.clone();
  }
  const Tensor change = estimate.clamp_min_(eps1 * eps1).rsqrt_().mul_(gradient);
  parameter.add_(change, -rate / std::max(1.0, norm_of(change) / (size * options_.d)));
}
Tensor Adafactor::empty_kept(size_t index, const Tensor& parameter) const {
  std::vector<int64_t> shape = parameter.sizes().vec();
  if (index < 2 && shape.size() > 1) shape[shape.size() - (index == 0 ? 1 : 2)] = 1;
  return at::empty(shape, parameter.options());
}

Muon::Muon(Options options) : FunctionalOptimizer(options.lr, {"momentum_buffer"}), options_(checked_muon(options)) {}
void Muon::check(const Tensor& parameter) const {
  if (parameter.dim() != 2 || parameter.is_complex())
    throw InvalidArgument(text("a parameter of Muon: expected a real matrix, got shape ", parameter.sizes(),
                               " and dtype ", parameter.dtype()),
                          "Give other parameters to another optimizer, such as AdamW");
}
void Muon::update(double lr, Tensor& parameter, const Tensor& gradient, ParameterState& state) const {
  Tensor& buffer = state.kept[0];
  if (!buffer.defined()) buffer = at::zeros_like(gradient);
  buffer.lerp_(gradient, 1 - options_.momentum);
  const Tensor change = orthogonal(options_, options_.nesterov ? gradient.lerp(buffer, options_.momentum) : buffer);
  const auto rows = static_cast<double>(parameter.size(0)), columns = static_cast<double>(parameter.size(1));
  const double ratio =
      options_.match_rms_adamw ? 0.2 * std::sqrt(std::max(rows, columns)) : std::sqrt(std::max(1.0, rows / columns));
  parameter.mul_(1 - lr * options_.weight_decay);
  parameter.add_(change, -lr * ratio);
}

}  // namespace muster::optim
