// FullyShardedDataParallel with parameters in the host's memory and operators on a CUDA device.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "multiprocess/cuda_fixture.h"
#include "muster/optim/grad_scaler.h"
#include "muster/parallel/activation_checkpoint.h"
#include "muster/parallel/fsdp.h"

namespace muster::test::cuda {
namespace {

using CudaFsdp = Cuda;

// Convolutions in TF32 would be less exact than what is compared.
void compute_exactly() {
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
}

FsdpOptions on_cuda(FsdpOptions options = {.unit_cap_mb = 1}) {
  options.compute_device = torch::Device(torch::kCUDA);
  return options;
}

// Steps on the device, and in one process on the CPU with the batches of all ranks.
template <typename Net>
void expect_steps_as_on_the_cpu(int n, const FsdpOptions& options, double tolerance) {
  on_ranks(n,
           [&](World& world) {
             compute_exactly();
             const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), {}), other = make<Net>(7, {}),
                        first = make<Net>(7, {});
             auto model = fully_shard(net, on_cuda(options));
             torch::optim::AdamW optimizer(net->parameters(), 1e-3), of_other(other->parameters(), 1e-3);
             for (int step = 0; step < 4; ++step) {
               batches_on = kCuda;
               optimizer.zero_grad();
               const Tensor loss = model.forward(world.rank(), step);
               EXPECT_TRUE(loss.is_cuda());
               loss.backward();
               EXPECT_TRUE(model.units_here().empty());
               for (const Tensor& parameter : model.owned_parameters()) EXPECT_TRUE(parameter.grad().is_cpu());
               model.clip_grad_norm_(1e3);
               optimizer.step();
               batches_on = torch::kCPU;
               of_other.zero_grad();
               for (int rank = 0; rank < n; ++rank) (other->forward(rank, step) / n).backward();
               of_other.step();
             }
             model.synchronize();
             const auto begin = first->named_parameters(), expected = other->named_parameters();
             for (const auto& item : net->named_parameters()) {
               const Tensor moved = item.value() - begin[item.key()], should = expected[item.key()] - begin[item.key()];
               EXPECT_LE((moved - should).norm().item<double>(), tolerance * should.norm().item<double>())
                   << item.key();
             }
             model.synchronize();
           },
           {});
}

TEST_F(CudaFsdp, TransformerStepsAsOnTheCpu) { expect_steps_as_on_the_cpu<Transformer>(1, {.unit_cap_mb = 0.5}, 0.02); }
TEST_F(CudaFsdp, ResNetStepsAsOnTheCpu) { expect_steps_as_on_the_cpu<ResNet18>(1, {.unit_cap_mb = 4}, 0.2); }
TEST_F(CudaFsdp, LstmStepsAsOnTheCpu) { expect_steps_as_on_the_cpu<Recurrent>(1, {.unit_cap_mb = 1}, 0.02); }
TEST_F(CudaFsdp, TwoRanksOnOneDevice) {
  expect_steps_as_on_the_cpu<Transformer>(2, {.unit_cap_mb = 0.5, .max_gathered_units = 2}, 0.02);
}

// A chain of layers, each of 64 MiB.
struct Wide : nn::Module {
  static constexpr int kLayers = 12;
  static constexpr int64_t kWidth = 4096;
  nn::ModuleList layers{nn::ModuleList()};
  bool checkpoints = false;
  Wide() {
    for (int i = 0; i < kLayers; ++i) layers->push_back(nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
    register_module("layers", layers);
  }
  Tensor forward(Tensor x) {
    for (const auto& layer : *layers) {
      const auto run = [&](const Tensor& y) { return torch::tanh(layer->as<nn::Linear>()->forward(y) * 2); };
      x = checkpoints ? activation_checkpoint(run, x) : run(x);
    }
    return x;
  }
};

// Kernels read units that come and go: many steps, and work on the device that is far behind the host's. Each gradient
// is that of the same module as a whole on the device, to the bit.
TEST_F(CudaFsdp, UnitsComeAndGoUnderTheKernels) {
  on_ranks(1,
           [](World&) {
             compute_exactly();
             const auto net = make<Wide>(7, {}), whole = make<Wide>(7, {});
             whole->to(kCuda);
             auto model = fully_shard(net, on_cuda({.unit_cap_mb = 1}));
             auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(torch::kCUDA));
             for (int step = 0; step < 6; ++step) {
               net->checkpoints = step == 4;
               const Tensor x = drawn(0, step, {2048, Wide::kWidth});
               net->zero_grad();
               whole->zero_grad();
               whole->forward(x).square().mean().backward();
               const auto before = allocator->getDeviceStats(0).allocated_bytes[0].current;
               allocator->resetPeakStats(0);
               model(x).square().mean().backward();
               const auto most = allocator->getDeviceStats(0).allocated_bytes[0].peak - before;
               const int64_t unit = Wide::kWidth * Wide::kWidth * 4, activation = 2048 * Wide::kWidth * 4;
               EXPECT_LT(most, 7 * unit + (2 * Wide::kLayers + 8) * activation) << step;  // 12 units are the model
               const auto expected = whole->named_parameters();
               for (const auto& item : net->named_parameters())
                 EXPECT_TRUE(torch::equal(item.value().grad(), expected[item.key()].grad().cpu()))
                     << step << " " << item.key();
             }
             // On a stream of the user's.
             const c10::impl::VirtualGuardImpl guard(torch::kCUDA);
             const Tensor x = drawn(0, 9, {2048, Wide::kWidth});
             net->zero_grad();
             whole->zero_grad();
             whole->forward(x).square().mean().backward();
             guard.synchronizeDevice(0);
             {
               const c10::StreamGuard other(guard.getStreamFromGlobalPool(kCuda));
               model(x).square().mean().backward();
             }
             for (const auto& item : net->named_parameters())
               EXPECT_TRUE(torch::equal(item.value().grad(), whole->named_parameters()[item.key()].grad().cpu()))
                   << item.key();
             model.synchronize();
           },
           {});
}

TEST_F(CudaFsdp, SecondDerivativesMixedPrecisionAndScaledLosses) {
  on_ranks(1,
           [](World&) {
             compute_exactly();
             const auto net = make<Perceptron>(7, {}), other = make<Perceptron>(7, {});
             const Tensor x = drawn(0, 0, {5, 8});
             const auto penalty = [](const Tensor& y, const Tensor& of) {
               return torch::autograd::grad({y.square().sum()}, {of}, {}, true, true)[0].square().sum() + y.sum();
             };
             {
               auto model = fully_shard(net, on_cuda());
               const Tensor of = x.detach().requires_grad_(), same = x.cpu().requires_grad_();
               penalty(model(of), of).backward();
               penalty(other->forward(same), same).backward();
               for (const auto& item : net->named_parameters())
                 expect_near(item.value().grad(), other->named_parameters()[item.key()].grad(), 1e-4, item.key());
               model.synchronize();
             }
             FsdpOptions options = on_cuda();
             options.mixed_precision = {.param_dtype = torch::kHalf, .output_dtype = torch::kFloat};
             auto model = fully_shard(make<Perceptron>(7, {}), options);
             torch::optim::AdamW optimizer(model.module()->parameters(), 1e-2);
             GradScaler scaler;
             double first = 0, last = 0;
             for (int step = 0; step < 30; ++step) {
               optimizer.zero_grad();
               const Tensor loss = (model(x) - 1).square().mean();
               scaler.scale(loss).backward();
               scaler.step(optimizer);
               scaler.update();
               last = loss.item<double>();
               if (step == 0) first = last;
             }
             EXPECT_LT(last, first / 2);
             model.synchronize();
           },
           {});
}

}  // namespace
}  // namespace muster::test::cuda
