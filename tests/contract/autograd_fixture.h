// What the tests of gradients through remote calls have in common.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "muster/autograd/context.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "support/nothing_left.h"
#include "support/ranks.h"

namespace muster::test::gradients {

using namespace std::chrono_literals;
using at::Tensor;
using rpc::RRef;
using Tensors = std::vector<Tensor>;

class Autograd : public CommContract {
 protected:
  // Runs the body in worker 0 while the others serve. Checks that nothing is left on any worker.
  void trainer(int n, const std::function<void()>& body, const rpc::Options& options = {}) const {
    run(n, [&](World& world) {
      rpc::init(options);
      if (world.rank() == 0) {
        body();
        expect_nothing_left();
      }
      rpc::shutdown();
    });
  }
};

inline Tensor leaf(std::vector<double> values) { return at::tensor(values, at::kDouble).set_requires_grad(true); }
inline Tensor random_leaf(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator, at::kDouble).set_requires_grad(true);
}
inline void expect_close(const Tensor& a, const Tensor& b, double within = 1e-12) {
  ASSERT_TRUE(a.defined() && b.defined());
  EXPECT_TRUE(at::allclose(a, b, 0, within)) << "differ by " << (a - b).abs().max().item<double>();
}

inline Tensor triple(const Tensor& x) { return x * x * x; }

struct Linear {
  explicit Linear(uint64_t seed) : weight(random_leaf({3, 3}, seed)) {}
  Tensor forward(const Tensor& x) { return x.matmul(weight).tanh(); }
  Tensor grad() { return weight.grad(); }
  Tensor value() { return weight.detach(); }
  Tensor context_grad() { return autograd::gradient(weight); }
  Tensor weight;
};

}  // namespace muster::test::gradients
