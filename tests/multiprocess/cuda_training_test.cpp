// A training on a CUDA device besides data parallelism: optimizers, precision, activation checkpoints and snapshots.
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text.h"
#include "multiprocess/cuda_fixture.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/optim/autocast.h"
#include "muster/optim/grad_scaler.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/activation_checkpoint.h"
#include "muster/parallel/averaged_model.h"
#include "muster/parallel/ddp.h"
#include "support/models.h"
#include "support/temporary_folder.h"

namespace muster::test::cuda {
namespace {

using CudaOptim = Cuda;

TEST_F(CudaOptim, StepsAsOnTheCpu) {
  alone([] {
    const auto steps = [](auto type, torch::ScalarType dtype, const torch::Device& device) {
      using O = typename decltype(type)::type;
      typename O::Options options;
      options.lr = 0.02;
      if constexpr (requires { options.momentum; }) options.momentum = 0.9;
      if constexpr (requires { options.amsgrad; }) options.amsgrad = true;
      if constexpr (requires { options.weight_decay; }) options.weight_decay = 0.01;
      Tensors all;
      for (const auto& sizes : {std::vector<int64_t>{5, 7}, {40, 30}, {1, 1}})
        all.push_back(
            (torch::arange(sizes[0] * sizes[1], dtype) * 0.37).sin().reshape(sizes).to(device).requires_grad_());
      Tensors listed = all;
      listed.push_back(all[1]);  // steps twice
      O optimizer(listed, options);
      for (int step = 0; step < 10; ++step) {
        for (size_t i = 0; i < all.size(); ++i) {
          const Tensor g = (torch::arange(all[i].numel(), dtype) * (0.11 + 0.01 * step)).cos().reshape(all[i].sizes());
          all[i].mutable_grad() = step % 3 == 1 && i == 1 ? Tensor() : g.to(device);
        }
        optimizer.step();
      }
      return all;
    };
    int number = 0;
    AllOptimizers::for_each([&](auto type) {
      ++number;
      const bool is_muon = std::is_same_v<decltype(type), std::type_identity<muster::Muon>>;
      for (const auto& [dtype, exact] : {std::pair(torch::kDouble, 1e-9), std::pair(torch::kFloat, 2e-4)}) {
        const double tolerance = is_muon ? 1e-2 : exact;  // it computes in bfloat16
        const Tensors got = steps(type, dtype, kCuda), wanted = steps(type, dtype, torch::kCPU);
        for (size_t i = 0; i < got.size(); ++i)
          expect_near(got[i].detach(), wanted[i].detach(), tolerance, text("class ", number, " parameter ", i));
      }
    });
    // In 16 bits, as the fused kernels of CUDA do.
    const Tensor x = torch::ones({100}, torch::TensorOptions(kCuda).dtype(torch::kBFloat16)).requires_grad_();
    muster::AdamW adamw({x}, {.lr = 0.1});
    x.mutable_grad() = torch::ones_like(x);
    adamw.step();
    EXPECT_LT(x[0].item<float>(), 0.95);
  });
}

TEST_F(CudaOptim, AutocastAndGradScaler) {
  on_ranks(2, [](World& world) {
    torch::manual_seed(2);
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    DistributedDataParallel ddp(net);
    muster::AdamW adamw(net->parameters(), {.lr = 1e-2});
    GradScaler scaler({.init_scale = 1024});
    double first = 0, last = 0;
    const Tensor input = drawn(world.rank(), 1, {64, 8}).to(kCuda), target = input.slice(1, 0, 4).sin();
    for (int step = 0; step < 60; ++step) {
      adamw.zero_grad();
      Tensor loss;
      {
        const Autocast autocast(torch::kHalf, torch::kCUDA);
        const Tensor y = ddp.forward(input);
        EXPECT_EQ(y.scalar_type(), torch::kHalf);
        loss = (y.to(torch::kFloat) - target).square().mean();
      }
      scaler.scale(loss).backward();
      if (step == 5 && world.rank() == 1) net->a->bias.mutable_grad().fill_(INFINITY);
      const bool stepped = scaler.step(adamw);
      EXPECT_EQ(stepped, step != 5);
      scaler.update();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.2 * first);
    for (const Tensor& parameter : net->parameters()) {
      const Tensor other = parameter.detach().clone();
      broadcast(other, 0);
      EXPECT_TRUE(torch::equal(other, parameter));
    }
  });
}

TEST_F(CudaOptim, Averages) {
  alone([] {
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    AveragedModel average(net, {.decay = 0.9});
    muster::SGD sgd(net->parameters(), {.lr = 0.1});
    const Tensor start = net->a->weight.detach().clone();
    for (int step = 0; step < 2; ++step) {
      for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
      sgd.step();
      average.update();
    }
    const auto in_use = average.in_use();
    expect_near(net->a->weight.detach(), start - 0.1 * (0.9 * 1 + 0.1 * 2), 1e-5);
  });
}

// --- checkpoints ---

TEST_F(CudaOptim, ActivationCheckpointsDrawTheSameNumbersAgain) {
  alone([] {
    const auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(8, 64), nn::Dropout(0.5), nn::Linear(64, 1));
    net->to(kCuda);
    const Tensor x = torch::randn({32, 8}).to(kCuda).requires_grad_();
    const auto gradients = [&](bool checkpointed) {
      net->zero_grad();
      x.mutable_grad() = Tensor();
      torch::manual_seed(9);
      const Tensor y =
          checkpointed ? activation_checkpoint([&](const Tensor& in) { return net->forward(in); }, x) : net->forward(x);
      const Tensor between = torch::rand({10}, kCuda);  // draws before the second call
      (y.sum() + between.sum()).backward();
      Tensors all{x.grad().clone(), torch::rand({3}, kCuda)};
      for (const Tensor& parameter : net->parameters()) all.push_back(parameter.grad().clone());
      return all;
    };
    const Tensors wanted = gradients(false), got = gradients(true);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], wanted[i])) << i;
  });
}

TEST_F(CudaOptim, SnapshotsAndFiles) {
  alone([] {
    const TemporaryFolder folders;
    const auto train = [](Perceptron& net, muster::AdamW& adamw, int steps) {
      for (int step = 0; step < steps; ++step) {
        adamw.zero_grad();
        const Tensor x = torch::randn({16, 8}, kCuda);
        torch::dropout(net.forward(x), 0.3, true).square().mean().backward();
        adamw.step();
      }
    };
    for (const bool asynchronous : {false, true}) {
      const auto folder = folders / (asynchronous ? "asynchronous" : "synchronous");
      const auto net = std::make_shared<Perceptron>();
      net->to(kCuda);
      muster::AdamW adamw(net->parameters(), {.lr = 1e-2});
      auto generator = at::globalContext().defaultGenerator(kCuda);
      train(*net, adamw, 3);
      {
        Snapshot snapshot({.folder = folder, .asynchronous = asynchronous});
        snapshot.add("net", net).add("adamw", adamw).add("cuda", generator);
        snapshot.save(3);
        if (asynchronous) snapshot.wait();
      }
      train(*net, adamw, 3);
      const auto again = std::make_shared<Perceptron>();
      again->to(kCuda);
      muster::AdamW other(again->parameters());
      torch::rand({5}, kCuda);
      Snapshot snapshot({.folder = folder});
      snapshot.add("net", again).add("adamw", other).add("cuda", generator);
      EXPECT_EQ(snapshot.restore(), 3);
      train(*again, other, 3);
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(torch::equal(net->parameters()[i], again->parameters()[i])) << i;
    }
    const auto net = std::make_shared<Perceptron>(), again = std::make_shared<Perceptron>();
    net->to(kCuda);
    again->to(kCuda);
    const auto file = folders / "net.safetensors";
    save_safetensors(file, *net);
    SafetensorsFile(file).load_into(*again);
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(torch::equal(net->parameters()[i], again->parameters()[i])) << i;
  });
}

}  // namespace
}  // namespace muster::test::cuda
