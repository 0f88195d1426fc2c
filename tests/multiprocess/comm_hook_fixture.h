// What the tests of communication hooks have in common: a net whose gradients are what the test says.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "support/ask_python.h"

namespace muster::test::hook_tests {

namespace hooks = comm_hooks;
using Shape = std::vector<int64_t>;

inline const std::vector<Shape> kShapes = {{12, 20}, {7}, {9, 4, 3}, {16, 8}};

// The same numbers as gradient() of comm_hooks_peer.py.
inline Tensor numbers_of(size_t parameter, int step, const Shape& shape, at::ScalarType dtype) {
  const auto p = static_cast<double>(parameter);
  const Tensor i = torch::arange(c10::multiply_integers(shape), torch::kFloat64);
  return (torch::sin(i * (0.37 + 0.11 * p) + step) + 0.25 * torch::cos(i * i * 0.013 + p)).view(shape).to(dtype);
}

// Its gradients are what the test says.
struct HookNet : nn::Module {
  std::vector<Tensor> p;
  at::ScalarType dtype;
  bool in_order = true;  // false: gradients become ready in another order than the reverse of the parameters'
  explicit HookNet(const std::vector<Shape>& shapes = kShapes, at::ScalarType type = torch::kFloat) : dtype(type) {
    for (size_t i = 0; i < shapes.size(); ++i)
      p.push_back(register_parameter(text("p", i), torch::zeros(shapes[i], type)));
  }
  // On rank `rank` of `size`, a part of the same sum that differs from rank to rank.
  Tensor wanted(size_t i, int step, int rank, int size) const {
    const Tensor mean = numbers_of(i, step, p[i].sizes().vec(), dtype);
    return mean * (1 + 0.5 * (2 * rank - size + 1));
  }
  Tensor forward(int step, int rank = 0, int size = 1) {
    Tensor sum = torch::zeros({}, dtype);
    for (size_t n = 0; n < p.size(); ++n) {
      const size_t i = in_order ? n : (3 * n + 1) % p.size();
      sum = sum + (p[i] * wanted(i, step, rank, size)).sum();
    }
    return sum;
  }
};

// Gradients after a step with this hook.
inline std::vector<Tensor> step_of(DistributedDataParallel<HookNet>& ddp, int step, const World& world) {
  for (const Tensor& parameter : ddp->p) parameter.mutable_grad() = Tensor();
  ddp.forward(step, world.rank(), world.world_size()).backward();
  std::vector<Tensor> all;
  for (const Tensor& parameter : ddp->p) all.push_back(parameter.grad().clone());
  return all;
}

struct HookDdp : DistributedDataParallel<HookNet> {
  HookDdp(const std::shared_ptr<HookNet>& net, const CommHook& hook, DdpOptions options = {})
      : DistributedDataParallel<HookNet>(net, std::move(options)) {
    if (hook) register_comm_hook(hook);
  }
};
inline HookDdp ddp_with(const CommHook& hook, at::ScalarType dtype = torch::kFloat, const DdpOptions& options = {}) {
  return {std::make_shared<HookNet>(kShapes, dtype), hook, options};
}

inline std::vector<double> flat_numbers(const std::vector<Tensor>& tensors) {
  std::vector<double> all;
  for (const Tensor& tensor : tensors) {
    const Tensor flat = tensor.to(torch::kFloat64).reshape({-1}).contiguous();
    all.insert(all.end(), flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel());
  }
  return all;
}

inline void expect_same(const std::vector<Tensor>& got, const std::vector<Tensor>& expected,
                        const std::string& what = "") {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], expected[i])) << what << " parameter " << i;
}

inline void expect_close(const std::vector<Tensor>& got, const std::vector<Tensor>& expected, double tolerance) {
  EXPECT_LE(farthest(flat_numbers(got), flat_numbers(expected)), tolerance);
}

}  // namespace muster::test::hook_tests
