#include "optim/fused_adam.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "optim/fused.h"

namespace muster::optim {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kGrain = 32768;  // elements, as libtorch's own kernels of one pass

struct Corrections {
  double mean, square;
  Corrections(const AdamNumbers& of, double count)
      : mean(1 - std::pow(of.beta1, count)), square(1 - std::pow(of.beta2, count)) {}
};

template <typename T>
void forward_kernel(const AdamNumbers& of, double count, int64_t n, const T* g, const T* mean, const T* square,
                    T* update, T* new_mean, T* new_square) {
  const Corrections by(of, count);
  const auto b1 = static_cast<T>(of.beta1), r1 = static_cast<T>(1 - of.beta1), b2 = static_cast<T>(of.beta2),
             r2 = static_cast<T>(1 - of.beta2), c1 = static_cast<T>(by.mean), c2 = static_cast<T>(by.square),
             eps = static_cast<T>(of.eps), root = static_cast<T>(of.eps_root);
  at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T m = b1 * mean[i] + r1 * g[i];
      const T v = b2 * square[i] + r2 * g[i] * g[i];
      update[i] = m / c1 / (std::sqrt(v / c2 + root) + eps);
      new_mean[i] = m;
      new_square[i] = v;
    }
  });
}

// Gradients of the loss with respect to the results, null if there are none, in; with respect to g and the old moments,
// out. `mean` and `square` are the new moments.
template <typename T>
struct Backward {
  const T *to_update, *to_mean, *to_square, *g, *mean, *square;
  T *of_g, *of_mean, *of_square;

  void run(const AdamNumbers& of, double count, int64_t n) const {
    const Corrections by(of, count);
    const auto b1 = static_cast<T>(of.beta1), r1 = static_cast<T>(1 - of.beta1), b2 = static_cast<T>(of.beta2),
               r2 = static_cast<T>(2 * (1 - of.beta2)), c1 = static_cast<T>(by.mean), c2 = static_cast<T>(by.square),
               eps = static_cast<T>(of.eps), eps_root = static_cast<T>(of.eps_root);
    at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T to_m = to_mean ? to_mean[i] : T(0), to_v = to_square ? to_square[i] : T(0);
        if (to_update) {
          const T root = std::sqrt(square[i] / c2 + eps_root);
          const T inverse = 1 / (root + eps);
          const T scaled = to_update[i] / c1 * inverse;
          to_m += scaled;
          to_v -= root > 0 ? scaled * mean[i] * inverse / (2 * root * c2) : T(0);
        }
        of_g[i] = r1 * to_m + r2 * g[i] * to_v;
        of_mean[i] = b1 * to_m;
        of_square[i] = b2 * to_v;
      }
    });
  }
};

// The same by operators that autograd records.
std::array<Tensor, 3> recorded_backward(const AdamNumbers& of, double count, const Tensor& to_update,
                                        const Tensor& to_mean, const Tensor& to_square, const Tensor& g,
                                        const Tensor& mean, const Tensor& square) {
  const Corrections by(of, count);
  Tensor to_m = to_mean, to_v = to_square;
  if (to_update.defined()) {
    const Tensor squared = square.div(by.square).add(of.eps_root);
    const Tensor at_zero = squared == 0;
    const Tensor root = squared.masked_fill(at_zero, 1).sqrt();  // 1 at zero: a finite number, which is not used
    const Tensor inverse = root.masked_fill(at_zero, 0).add(of.eps).reciprocal();
    const Tensor scaled = to_update.div(by.mean).mul(inverse);
    const Tensor through_root =
        scaled.mul(mean).mul(inverse).div(root.mul(2 * by.square)).masked_fill(at_zero, 0).neg();
    to_m = to_m.defined() ? to_m.add(scaled) : scaled;
    to_v = to_v.defined() ? to_v.add(through_root) : through_root;
  }
  std::array<Tensor, 3> results;
  const auto add = [](Tensor& to, const Tensor& more) { to = to.defined() ? to.add(more) : more; };
  if (to_m.defined()) {
    add(results[0], to_m.mul(1 - of.beta1));
    results[1] = to_m.mul(of.beta1);
  }
  if (to_v.defined()) {
    add(results[0], to_v.mul(g).mul(2 * (1 - of.beta2)));
    results[2] = to_v.mul(of.beta2);
  }
  return results;
}

template <typename T>
const T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

class FusedAdam : public torch::autograd::Function<FusedAdam> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList g, at::TensorList means, at::TensorList squares,
                               std::vector<double> counts, AdamNumbers of) {
    const size_t n = g.size();
    variable_list results(3 * n), saved(3 * n);
    for (size_t i = 0; i < n; ++i) {
      Tensor &update = results[i], &mean = results[n + i], &square = results[2 * n + i];
      update = at::empty_like(g[i]);
      mean = at::empty_like(means[i]);
      square = at::empty_like(squares[i]);
      AT_DISPATCH_FLOATING_TYPES(g[i].scalar_type(), "fused_adam", [&] {
        forward_kernel<scalar_t>(of, counts[i], g[i].numel(), g[i].const_data_ptr<scalar_t>(),
                                 means[i].const_data_ptr<scalar_t>(), squares[i].const_data_ptr<scalar_t>(),
                                 update.mutable_data_ptr<scalar_t>(), mean.mutable_data_ptr<scalar_t>(),
                                 square.mutable_data_ptr<scalar_t>());
      });
      saved[i] = g[i];
      saved[n + i] = mean;
      saved[2 * n + i] = square;
    }
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data["numbers"] = std::vector<double>{of.beta1, of.beta2, of.eps, of.eps_root};
    context->saved_data["counts"] = std::move(counts);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& to) {
    const auto saved = context->get_saved_variables();
    const auto numbers = context->saved_data["numbers"].toDoubleVector();
    const auto counts = context->saved_data["counts"].toDoubleVector();
    const AdamNumbers of{numbers[0], numbers[1], numbers[2], numbers[3]};
    const size_t n = counts.size();
    variable_list results(3 * n + 2);  // the last two: counts and numbers have no gradient
    for (size_t i = 0; i < n; ++i) {
      const Tensor &g = saved[i], &mean = saved[n + i], &square = saved[2 * n + i];
      const Tensor &to_update = to[i], &to_mean = to[n + i], &to_square = to[2 * n + i];
      if (!to_update.defined() && !to_mean.defined() && !to_square.defined()) continue;
      if (at::GradMode::is_enabled() || !kernel_takes(to_update, g) || !kernel_takes(to_mean, g) ||
          !kernel_takes(to_square, g)) {
        auto recorded = recorded_backward(of, counts[i], to_update, to_mean, to_square, g, mean, square);
        for (size_t k = 0; k < 3; ++k) results[k * n + i] = std::move(recorded[k]);
        continue;
      }
      for (size_t k = 0; k < 3; ++k) results[k * n + i] = at::empty_like(g);
      const Tensor update_ = dense(to_update), mean_ = dense(to_mean), square_ = dense(to_square);
      AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "fused_adam_backward", [&] {
        Backward<scalar_t>{data_or_null<scalar_t>(update_),
                           data_or_null<scalar_t>(mean_),
                           data_or_null<scalar_t>(square_),
                           g.const_data_ptr<scalar_t>(),
                           mean.const_data_ptr<scalar_t>(),
                           square.const_data_ptr<scalar_t>(),
                           results[i].mutable_data_ptr<scalar_t>(),
                           results[n + i].mutable_data_ptr<scalar_t>(),
                           results[2 * n + i].mutable_data_ptr<scalar_t>()}
            .run(of, counts[i], g.numel());
      });
    }
    return results;
  }

 private:
  static bool kernel_takes(const Tensor& gradient, const Tensor& like) {
    return !gradient.defined() || (gradient.layout() == at::kStrided && gradient.device().is_cpu() &&
                                   gradient.scalar_type() == like.scalar_type() && !gradient._is_zerotensor());
  }
  static Tensor dense(const Tensor& gradient) {
    return gradient.defined() ? gradient.resolve_neg().contiguous() : gradient;
  }
};

}  // namespace

Tensor sqrt_without_infinity(const Tensor& x) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return x.sqrt();
  const Tensor at_zero = x == 0;
  return x.masked_fill(at_zero, 1).sqrt().masked_fill(at_zero, 0);
}

bool AdamBatch::takes(const Tensor& g, const Tensor& mean, const Tensor& square) {
  return mean.is_cpu() && fusible(mean, square) && g.layout() == at::kStrided && g.is_cpu() &&
         g.scalar_type() == mean.scalar_type() && g.sizes() == mean.sizes() && square.sizes() == mean.sizes() &&
         !g._is_zerotensor();
}

void AdamBatch::add(const Tensor& g, const Tensor& mean, const Tensor& square, double count) {
  updates.push_back(g.resolve_neg().contiguous());
  means.push_back(mean);
  squares.push_back(square);
  counts.push_back(count);
}

void AdamBatch::run(const AdamNumbers& of, bool inplace) {
  const size_t n = updates.size();
  if (inplace) {
    for (size_t i = 0; i < n; ++i)
      AT_DISPATCH_FLOATING_TYPES(updates[i].scalar_type(), "fused_adam", [&] {
        auto* const g = updates[i].mutable_data_ptr<scalar_t>();
        auto* const mean = means[i].mutable_data_ptr<scalar_t>();
        auto* const square = squares[i].mutable_data_ptr<scalar_t>();
        forward_kernel<scalar_t>(of, counts[i], updates[i].numel(), g, mean, square, g, mean, square);
        for (const Tensor& one : {updates[i], means[i], squares[i]}) torch::autograd::impl::bump_version(one);
      });
    return;
  }
  auto results = FusedAdam::apply(at::TensorList(updates), at::TensorList(means), at::TensorList(squares), counts, of);
  std::move(results.begin(), results.begin() + static_cast<ptrdiff_t>(n), updates.begin());
  std::move(results.begin() + static_cast<ptrdiff_t>(n), results.begin() + static_cast<ptrdiff_t>(2 * n),
            means.begin());
  std::move(results.begin() + static_cast<ptrdiff_t>(2 * n), results.end(), squares.begin());
}

}  // namespace muster::optim
