// Remote calls with tensors on a CUDA device, and gradients through them.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

#include "multiprocess/cuda_fixture.h"
#include "muster/autograd/context.h"
#include "muster/comm/world.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"

namespace muster::test::cuda {
namespace {

using CudaRpc = Cuda;

Tensor twice(const Tensor& x) { return x * 2; }
std::string device_of(const Tensor& x) { return x.device().str(); }
struct Layer {
  explicit Layer(Tensor start) : weight(start.detach().clone().requires_grad_()) {}
  Tensor forward(const Tensor& x) { return torch::tanh(x.matmul(weight)); }
  Tensor grad() { return weight.grad(); }
  Tensor weight;
};

void on_workers(const std::function<void()>& trainer) {
  on_ranks(2,
           [&](World& world) {
             rpc::Options options;
             if (world.rank() == 0) options.device_maps = {{"worker1", {{.here = kCuda, .there = kCuda}}}};
             rpc::init(options);
             if (world.rank() == 0) trainer();
             rpc::shutdown();
           },
           {.backend = "shm"});
}

TEST_F(CudaRpc, TensorsGoThereAndBack) {
  on_workers([] {
    for (const int64_t n : {0, 1, 1000, 3'000'000}) {
      const Tensor x = torch::rand({n}, kCuda);
      EXPECT_EQ(rpc::sync<&device_of>(1, x), "cuda:0");
      const Tensor y = rpc::sync<&twice>(1, x);
      EXPECT_EQ(y.device(), kCuda);
      EXPECT_TRUE(torch::equal(y, x * 2));
    }
    // What a kernel is still writing when the call begins.
    Tensor x = torch::ones({2000, 2000}, kCuda);
    for (int i = 0; i < 20; ++i) x = x.matmul(x).div(2000);
    EXPECT_TRUE(torch::allclose(rpc::sync<&twice>(1, x), x * 2));
    std::vector<rpc::Future<Tensor>> futures;
    for (int i = 0; i < 50; ++i) futures.push_back(rpc::async<&twice>(1, torch::full({10'000}, i, kCuda)));
    for (int i = 0; i < 50; ++i) EXPECT_EQ(futures[static_cast<size_t>(i)].get()[17].item<float>(), 2.0f * i);
  });
}

TEST_F(CudaRpc, GradientsOfTwoOrders) {
  on_workers([] {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    const Tensor start = (torch::arange(12) * 0.3).sin().reshape({4, 3}).to(kCuda);
    const auto layer = rpc::remote<Layer>(1, start);
    Layer local(start);
    const Tensor x = (torch::arange(8) * 0.7).cos().reshape({2, 4}).to(kCuda).requires_grad_(),
                 same = x.detach().clone().requires_grad_();
    const auto penalized = [](const Tensor& y, const Tensor& of) {
      return y.square().sum() + torch::autograd::grad({y.sum()}, {of}, {}, true, true)[0].square().sum();
    };
    penalized(layer.sync<&Layer::forward>(x), x).backward();
    penalized(local.forward(same), same).backward();
    expect_near(x.grad(), same.grad(), 1e-9);
    expect_near(layer.sync<&Layer::grad>(), local.grad(), 1e-9);
    EXPECT_EQ(x.grad().device(), kCuda);
  });
}

}  // namespace
}  // namespace muster::test::cuda
