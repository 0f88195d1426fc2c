// Data parallelism on a CUDA device: every model trains as in one process.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/text.h"
#include "multiprocess/cuda_fixture.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/comm_hooks.h"
#include "muster/parallel/ddp.h"
#include "muster/parallel/fsdp.h"
#include "muster/parallel/hogwild.h"
#include "muster/parallel/sync_batch_norm.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
#include "support/models.h"
#include "support/ranks.h"

namespace muster::test::cuda {
namespace {

using CudaDdp = Cuda;

// Trains on two ranks, and on this one alone with the parts of both.
template <typename Net, typename Setup>
void expect_as_alone(World& world, const DdpOptions& options, const Setup& setup, double tolerance = 1e-9) {
  torch::manual_seed(7);
  const auto net = std::make_shared<Net>(), copy = std::make_shared<Net>();
  {
    const torch::NoGradGuard no_grad;
    const auto from = net->named_parameters();
    for (auto& item : copy->named_parameters()) item.value().copy_(from[item.key()]);
  }
  net->to(kCuda);
  copy->to(kCuda);
  DistributedDataParallel ddp(net, options);
  setup(ddp);
  muster::SGD ours(net->parameters(), {.lr = 0.05, .momentum = 0.9}),
      theirs(copy->parameters(), {.lr = 0.05, .momentum = 0.9});
  for (int step = 0; step < 3; ++step) {
    ours.zero_grad();
    theirs.zero_grad();
    ddp.forward(world.rank(), step).backward();
    for (int r = 0; r < world.world_size(); ++r) (copy->forward(r, step) / world.world_size()).backward();
    ours.step();
    theirs.step();
  }
  const auto wanted = copy->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_EQ(item.value().device(), kCuda);
    expect_near(item.value(), wanted[item.key()], tolerance, item.key());
    const Tensor of_rank_0 = item.value().detach().clone();
    broadcast(of_rank_0, 0);
    EXPECT_TRUE(torch::equal(of_rank_0, item.value())) << item.key();
  }
}
template <typename Net>
void expect_as_alone(World& world, const DdpOptions& options = {}, double tolerance = 1e-9) {
  expect_as_alone<Net>(
      world, options, [](auto&) {}, tolerance);
}

TEST_F(CudaDdp, RealModelsTrainAsInOneProcess) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    expect_as_alone<ResNet18>(world);
    expect_as_alone<WideConvolutions>(world);
    expect_as_alone<Transformer>(world);
    expect_as_alone<Recurrent>(world);
    expect_as_alone<Mixed>(world, {.find_unused_parameters = true});
    expect_as_alone<Transformer>(world, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.001});
    expect_as_alone<Transformer>(world, {.check_divergence_every = 1});
  });
}

TEST_F(CudaDdp, CommunicationHooks) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    const auto with = [&](auto hook, double tolerance) {
      expect_as_alone<Transformer>(
          world, {}, [&](auto& ddp) { ddp.register_comm_hook(hook); }, tolerance);
    };
    with(comm_hooks::all_reduce, 1e-9);
    with(comm_hooks::bf16_compress, 2e-2);
    with(comm_hooks::fp16_compress, 2e-2);
    with(comm_hooks::PowerSgd({.matrix_approximation_rank = 4, .start_iter = 2}), 0.2);
    with(comm_hooks::TopK({.ratio = 0.5}), 0.2);
  });
}

TEST_F(CudaDdp, NoSyncGradientPenaltiesAndUnusedParameters) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    torch::manual_seed(1);
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    const auto copy = std::make_shared<Perceptron>();
    copy->to(kCuda);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i) copy->parameters()[i].copy_(net->parameters()[i]);
    }
    DistributedDataParallel ddp(net);
    const auto x = [&](int rank, int step) { return drawn(rank, step, {16, 8}).to(kCuda).requires_grad_(); };
    const auto penalty = [](auto& model, const Tensor& input) {
      const Tensor y = model.forward(input).square().sum();
      return torch::autograd::grad({y}, {input}, {}, true, true)[0].square().mean();
    };
    const auto expect_equal_gradients = [&] {
      for (size_t i = 0; i < net->parameters().size(); ++i)
        expect_near(net->parameters()[i].grad(), copy->parameters()[i].grad(), 1e-9, text(i));
      net->zero_grad();
      copy->zero_grad();
    };
    for (int step = 0; step < 2; ++step) {
      {
        const auto guard = ddp.no_sync();
        ddp.forward(x(world.rank(), step)).square().mean().backward();
      }
      ddp.forward(x(world.rank(), step + 10)).square().mean().backward();
      for (int r = 0; r < 2; ++r)
        for (const int of : {step, step + 10}) (copy->forward(x(r, of)).square().mean() / 2).backward();
      expect_equal_gradients();
    }
    penalty(ddp, x(world.rank(), 3)).backward();
    for (int r = 0; r < 2; ++r) (penalty(*copy, x(r, 3)) / 2).backward();
    expect_equal_gradients();
    // create_graph: the gradients are functions of the parameters, and so are their averages.
    ddp.forward(x(world.rank(), 4)).square().mean().backward({}, std::nullopt, /*create_graph=*/true);
    Tensor norm = torch::zeros({}, kCuda);
    for (const Tensor& parameter : net->parameters()) norm = norm + parameter.grad().square().sum();
    const Tensors second = torch::autograd::grad({norm}, net->parameters());
    Tensor loss;
    for (int r = 0; r < 2; ++r) {
      const Tensor one = copy->forward(x(r, 4)).square().mean() / 2;
      loss = loss.defined() ? loss + one : one;
    }
    const Tensors first = torch::autograd::grad({loss}, copy->parameters(), {}, true, true);
    Tensor theirs = torch::zeros({}, kCuda);
    for (const Tensor& gradient : first) theirs = theirs + gradient.square().sum();
    const Tensors wanted = torch::autograd::grad({theirs}, copy->parameters());
    for (size_t i = 0; i < second.size(); ++i) {
      Tensor mine = second[i].clone();
      all_reduce(mine, {.op = ReduceOp::AVG});
      expect_near(mine, wanted[i], 1e-9, text("second ", i));
    }
    net->zero_grad();
    // A parameter without a gradient is named.
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { net->a->weight.square().sum().backward(); }), "b.weight");
  });
}

TEST_F(CudaDdp, WhatTakesModulesOnTheCpuSaysSo) {
  on_ranks(2, [](World& world) {
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    const auto expect_refused = [&](const std::function<void()>& make, const std::string& word) {
      const std::string said = message_of<InvalidArgument>(make);
      EXPECT_CONTAINS(said, "CPU");
      EXPECT_CONTAINS(said, word);
    };
    expect_refused([&] { DistributedDataParallel(net, {.reproducible = {.shards = 2}}); }, "a.weight");
    expect_refused([&] { DistributedDataParallel(net, {.mixed_precision = {.param_dtype = torch::kBFloat16}}); },
                   "a.weight");
    expect_refused([&] { DistributedDataParallel(net, {.mixed_precision = {.reduce_dtype = torch::kHalf}}); },
                   "mixed_precision");
    expect_refused([&] { fully_shard(net); }, "a.weight");
    expect_refused([&] { Hogwild hogwild(net); }, "a.weight");
    const auto divided = std::make_shared<Perceptron>();
    divided->b->to(kCuda);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { DistributedDataParallel{divided}; }),
                    "a.weight is on cpu, and b.weight on cuda:0");
    const auto forgotten = std::make_shared<Perceptron>();
    if (world.rank() == 0) forgotten->to(kCuda);
    EXPECT_THROW(DistributedDataParallel{forgotten}, Mismatch);
    const Group cpu = world.new_group({0, 1}, {.backend = "shm"});
    expect_refused([&] { DistributedDataParallel(net, {.group = cpu}); }, "shm");
  });
}

TEST_F(CudaDdp, SyncBatchNormIsThatOfTheWholeBatch) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    torch::manual_seed(3);
    nn::Sequential net(nn::Conv2d(3, 6, 3), nn::BatchNorm2d(6), nn::ReLU());
    const Tensor whole = torch::randn({5, 3, 9, 9});
    net->to(kCuda);
    const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
    convert_sync_batchnorm(*net);
    const Tensor x = (world.rank() == 0 ? whole.slice(0, 0, 2) : whole.slice(0, 2)).to(kCuda).requires_grad_(),
                 all = whole.to(kCuda).requires_grad_();
    const Tensor y = net->forward(x), of_all = copy->forward(all);
    expect_near(y, world.rank() == 0 ? of_all.slice(0, 0, 2) : of_all.slice(0, 2), 1e-9);
    y.square().sum().backward();
    of_all.square().sum().backward();
    expect_near(x.grad(), world.rank() == 0 ? all.grad().slice(0, 0, 2) : all.grad().slice(0, 2), 1e-9);
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      const Tensor gradient = net->parameters()[i].grad().clone();
      all_reduce(gradient);
      expect_near(gradient, copy->parameters()[i].grad(), 1e-9, text(i));
    }
    for (size_t i = 0; i < net->buffers().size(); ++i) expect_near(net->buffers()[i], copy->buffers()[i], 1e-9);
  });
}

TEST_F(CudaDdp, DividedOptimizerStates) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    torch::manual_seed(5);
    const auto net = std::make_shared<Transformer>(), copy = std::make_shared<Transformer>();
    {
      const torch::NoGradGuard no_grad;
      const auto from = net->named_parameters();
      for (auto& item : copy->named_parameters()) item.value().copy_(from[item.key()]);
    }
    net->to(kCuda);
    copy->to(kCuda);
    DistributedDataParallel ddp(net), theirs(copy);
    ZeroRedundancyOptimizer<muster::AdamW> divided(net->parameters(), muster::AdamW::Options{.lr = 1e-2});
    muster::AdamW whole(copy->parameters(), {.lr = 1e-2});
    for (int step = 0; step < 3; ++step) {
      divided.zero_grad();
      whole.zero_grad();
      ddp.forward(world.rank(), step).backward();
      theirs.forward(world.rank(), step).backward();
      divided.step();
      whole.step();
    }
    const auto wanted = copy->named_parameters();
    for (const auto& item : net->named_parameters()) expect_near(item.value(), wanted[item.key()], 1e-9, item.key());
  });
}

}  // namespace
}  // namespace muster::test::cuda
