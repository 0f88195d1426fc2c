// DistributedDataParallel on ranks that are threads: what it promises in its header, point by point. Where gradients
// live is in ddp_memory_test.cpp, and steps that fail are in ddp_failure_test.cpp.
#include <torch/optim/sgd.h>

#include <thread>

#include "multiprocess/ddp_fixture.h"
#include "muster/data/idx.h"
#include "support/patience.h"
#include "support/sanitized.h"

namespace muster::test::ddp_replicas {
namespace {

TEST_F(DdpTest, StartsFromRankZeroAndAveragesToTheBit) {
  for (const int n : {1, 2, 3, 4}) {
    SCOPED_TRACE(n);
    run_threads(n, [n](World& world) {
      auto net = make<DdpNet>(7 + world.rank());  // different on each rank
      const auto reference = make<DdpNet>(7);     // what rank 0 started with
      DistributedDataParallel ddp(net, {.bucket_cap_mb = 2048 * kByte, .first_bucket_cap_mb = 512 * kByte});
      torch::optim::SGD optimizer(net->parameters(), 0.1), reference_optimizer(reference->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
        ddp(part(world.rank(), step)).square().mean().backward();
        // One process with everybody's rows.
        reference_optimizer.zero_grad();
        std::vector<torch::Tensor> everybody;
        for (int r = 0; r < n; ++r) everybody.push_back(part(r, step));
        reference->forward(torch::cat(everybody)).square().mean().backward();
        const auto ours = gradients(*net), expected = gradients(*reference);
        for (size_t i = 0; i < ours.size(); ++i) {
          expect_equal_on_all_ranks(ours[i], world);
          EXPECT_TRUE(torch::allclose(ours[i], expected[i], 1e-4, 1e-6)) << "step " << step << ", parameter " << i;
        }
        optimizer.step();
        reference_optimizer.step();
      }
      for (const auto& parameter : net->parameters()) expect_equal_on_all_ranks(parameter.detach(), world);
    });
  }
}

TEST_F(DdpTest, ReducesWhileBackwardIsStillRunning) {
  run_threads(2, [](World& world) {
    auto net = make<DdpNet>(3);
    DistributedDataParallel ddp(net, {.bucket_cap_mb = 64 * kByte, .first_bucket_cap_mb = 64 * kByte});
    ddp(part(world.rank(), 0)).sum().backward();
    const auto before = world.group().stats().operations;
    bool overlapped = false;
    // Runs when backward comes to the first layer; the last layer's bucket must be reduced by then or while we wait
    // here.
    net->a->weight.register_hook([&](const torch::Tensor&) {
      const auto deadline = test::patience();
      while (world.group().stats().operations == before && !deadline.passed()) std::this_thread::yield();
      overlapped = world.group().stats().operations > before;
    });
    ddp(part(world.rank(), 1)).sum().backward();
    EXPECT_TRUE(overlapped);
  });
}

TEST_F(DdpTest, NoSyncAccumulates) {
  run_threads(2, [](World& world) {
    auto net = make<DdpNet>(3), alone = make<DdpNet>(3);
    DistributedDataParallel ddp(net);
    for (int round = 0; round < 2; ++round) {
      net->zero_grad();
      alone->zero_grad();
      const auto operations = world.group().stats().operations;
      {
        const auto guard = ddp.no_sync();
        ddp(part(world.rank(), 0)).sum().backward();
        ddp(part(world.rank(), 1)).sum().backward();
      }
      EXPECT_EQ(world.group().stats().operations, operations) << "no_sync() communicated";
      ddp(part(world.rank(), 2)).sum().backward();
      for (int r = 0; r < 2; ++r)
        for (int step = 0; step < 3; ++step) (alone->forward(part(r, step)).sum() / 2).backward();
      const auto ours = gradients(*net), expected = gradients(*alone);
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(torch::allclose(ours[i], expected[i], 1e-4, 1e-5)) << i;
        expect_equal_on_all_ranks(ours[i], world);
      }
    }
  });
}

struct Branches : torch::nn::Module {
  torch::nn::Linear left = register_module("left", torch::nn::Linear(12, 1)),
                    right = register_module("right", torch::nn::Linear(12, 1)),
                    nobody = register_module("nobody", torch::nn::Linear(12, 1));
  torch::Tensor forward(torch::Tensor x, bool use_right) { return use_right ? right(x) : left(x); }
};

TEST_F(DdpTest, UnusedParametersAreNamedOnEveryRank) {
  run_threads(2, [](World& world) {
    auto net = make<Branches>(3);
    DistributedDataParallel ddp(net);
    const auto loss = ddp(part(world.rank(), 0), world.rank() == 1).sum();
    try {
      loss.backward();
      ADD_FAILURE() << "backward() did not complain";
    } catch (const InvalidArgument& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("on all ranks: nobody."), what.npos) << what;
      EXPECT_NE(what.find("on some ranks: "), what.npos) << what;
      EXPECT_NE(what.find("left.weight"), what.npos) << what;
      EXPECT_NE(what.find("right.weight"), what.npos) << what;
    }
    barrier();  // the group has not suffered
  });
}

TEST_F(DdpTest, UnusedParametersCountAsZeroWhereAllowed) {
  run_threads(2, [](World& world) {
    auto net = make<Branches>(3);
    DistributedDataParallel ddp(net, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = part(world.rank(), step);
      ddp(x, world.rank() == 1).sum().backward();
      EXPECT_FALSE(net->nobody->weight.grad().defined());
      // d sum(W x) / dW is the sum of the rows; the other rank contributes zero.
      EXPECT_TRUE(torch::allclose(net->left->weight.grad(), part(0, step).sum(0, true) / 2, 1e-5, 1e-6));
      EXPECT_TRUE(torch::allclose(net->right->weight.grad(), part(1, step).sum(0, true) / 2, 1e-5, 1e-6));
    }
  });
}

// All parameters are used, but the first backward() that reduces comes only to some of them.
TEST_F(DdpTest, TheOrderOfReadinessIsThatOfAllParameters) {
  struct Sides : torch::nn::Module {
    torch::nn::Linear left = register_module("left", torch::nn::Linear(12, 1)),
                      right = register_module("right", torch::nn::Linear(12, 1));
    torch::Tensor forward(torch::Tensor x, bool use_right) { return use_right ? right(x) : left(x); }
  };
  run_threads(2, [](World& world) {
    auto net = make<Sides>(3);
    DistributedDataParallel ddp(net, {.bucket_cap_mb = 64 * kByte, .first_bucket_cap_mb = 64 * kByte});
    const auto rows = [](int step) { return (part(0, step).sum(0, true) + part(1, step).sum(0, true)) / 2; };
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      net->zero_grad();
      const bool right_last = (step + world.rank()) % 2 == 0;
      {
        const auto guard = ddp.no_sync();
        ddp(part(world.rank(), step), !right_last).sum().backward();
      }
      ddp(part(world.rank(), step), right_last).sum().backward();
      EXPECT_TRUE(torch::allclose(net->left->weight.grad(), rows(step), 1e-5, 1e-5));
      EXPECT_TRUE(torch::allclose(net->right->weight.grad(), rows(step), 1e-5, 1e-5));
      size_t parameters = 0;
      for (const auto& bucket : ddp.bucket_names()) parameters += bucket.size();
      EXPECT_EQ(parameters, 4u);
    }
  });
}

TEST_F(DdpTest, WhatNoSyncAloneUsedIsAveraged) {
  run_threads(2, [](World& world) {
    auto net = make<Branches>(3);
    DistributedDataParallel ddp(net, {.find_unused_parameters = true});
    const auto close = [](const torch::Tensor& ours, const torch::Tensor& expected) {
      return ours.defined() && torch::allclose(ours, expected, 1e-5, 1e-5);
    };
    const auto rows = [](int rank, int step) { return part(rank, step).sum(0, true); };
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      net->zero_grad();
      {
        const auto guard = ddp.no_sync();  // left on rank 0, right on rank 1
        ddp(part(world.rank(), 10 + step), world.rank() == 1).sum().backward();
      }
      ddp(part(world.rank(), step), true).sum().backward();
      EXPECT_TRUE(close(net->left->weight.grad(), rows(0, 10 + step) / 2));
      EXPECT_TRUE(close(net->right->weight.grad(), (rows(1, 10 + step) + rows(0, step) + rows(1, step)) / 2));
      EXPECT_FALSE(net->nobody->weight.grad().defined());
      // What the user throws away counts no more.
      {
        const auto guard = ddp.no_sync();
        ddp(part(world.rank(), step), false).sum().backward();
      }
      net->zero_grad();
      ddp(part(world.rank(), step), true).sum().backward();
      EXPECT_FALSE(net->left->weight.grad().defined());
    }
  });
}

TEST_F(DdpTest, BuffersFollowRankZero) {
  struct WithBuffers : torch::nn::Module {
    torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(12));
    torch::Tensor forward(torch::Tensor x) { return norm(x); }
  };
  run_threads(2, [](World& world) {
    auto net = make<WithBuffers>(1);
    net->norm->running_mean.fill_(world.rank() + 1);
    DistributedDataParallel ddp(net);
    EXPECT_TRUE(net->norm->running_mean.eq(1).all().item<bool>());
    for (int step = 0; step < 2; ++step) ddp(part(world.rank(), step)).sum().backward();
    net->norm->running_var.fill_(world.rank());
    const auto calls = world.group().stats().operations;
    ddp(part(world.rank(), 9));  // takes rank 0's before it adds this batch's
    EXPECT_EQ(world.group().stats().operations, calls + 1) << "the three buffers travel together";
    const auto before_batch = (net->norm->running_var - 0.1 * part(world.rank(), 9).var(0)) / 0.9;
    EXPECT_TRUE(torch::allclose(before_batch, torch::zeros({12}), 1e-4, 1e-5));
  });
}

TEST_F(DdpTest, DifferentModulesAreAMismatch) {
  struct Sized : torch::nn::Module {
    explicit Sized(int width) : layer(register_module("layer", torch::nn::Linear(4, width))) {}
    torch::nn::Linear layer;
    torch::Tensor forward(torch::Tensor x) { return layer(x); }
  };
  run_threads(3, [](World& world) {
    try {
      DistributedDataParallel ddp(std::make_shared<Sized>(world.rank() == 2 ? 6 : 5));
      ADD_FAILURE() << "no Mismatch on rank " << world.rank();
    } catch (const Mismatch& error) {
      if (world.rank() != 2) return;
      const std::string what = error.what();
      EXPECT_NE(what.find("layer.weight Float [6, 4] where rank 0 has layer.weight Float [5, 4]"), what.npos) << what;
    }
  });
}

TEST_F(DdpTest, ModulesItCannotTrain) {
  run_threads(1, [](World&) {
    EXPECT_THROW(DistributedDataParallel<DdpNet> ddp(std::shared_ptr<DdpNet>{}), InvalidArgument);
    auto frozen = make<DdpNet>(1);
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    for (const double size : {0.0, -1.0, std::nan("")})
      EXPECT_THROW(DistributedDataParallel<DdpNet> ddp(std::make_shared<DdpNet>(), {.bucket_cap_mb = size}),
                   InvalidArgument);
    EXPECT_THROW(DistributedDataParallel ddp(frozen), InvalidArgument);
  });
}

TEST_F(DdpTest, GradientsOutliveItAndItsHooksGoWithIt) {
  run_threads(2, [](World& world) {
    auto net = make<DdpNet>(1);
    {
      DistributedDataParallel ddp(net);
      ddp(part(world.rank(), 0)).sum().backward();
    }
    const auto averaged = gradients(*net);
    net->forward(part(world.rank(), 1)).sum().backward();  // plain again: accumulates, without communication
    EXPECT_FALSE(torch::equal(gradients(*net)[0], averaged[0]));
  });
}

// On real data: two ranks with 64 samples each are one process with 128. In float64 the curves are equal in all that
// matters; in float32 rounding differs (sums are taken in another order) and training amplifies it, so only the first
// steps can be compared closely.
TEST_F(DdpTest, TwoRanksEqualOneProcessOnFashionMnist) {
  struct Small : torch::nn::Module {
    torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(1, 10, 5)),
                      conv2 = register_module("conv2", torch::nn::Conv2d(10, 20, 5));
    torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(320, 50)),
                      fc2 = register_module("fc2", torch::nn::Linear(50, 10));
    torch::Tensor forward(torch::Tensor x) {
      x = torch::relu(torch::max_pool2d(conv1(x), 2));
      x = torch::relu(torch::max_pool2d(conv2(x), 2)).flatten(1);
      return fc2(torch::relu(fc1(x)));
    }
  };
  constexpr int64_t kBatch = 128, kTest = 2000;
  constexpr int kSteps = test::kSanitized ? 10 : 25;
  const auto train = load_fashion_mnist("/usr/share/datasets/fashion-mnist", FashionMnistPart::kTrain);
  const auto test = load_fashion_mnist("/usr/share/datasets/fashion-mnist", FashionMnistPart::kTest);
  const auto pixels = [](const torch::Tensor& images) { return images.unsqueeze(1).to(torch::kFloat) / 255; };
  const auto x = pixels(train.images.narrow(0, 0, kSteps * kBatch)), y = train.labels.narrow(0, 0, kSteps * kBatch);
  const auto test_x = pixels(test.images.narrow(0, 0, kTest)), test_y = test.labels.narrow(0, 0, kTest);

  // Losses of each step (over the whole batch), then the test accuracy.
  const auto run = [&](World& world, torch::Dtype dtype) {
    const int64_t rows = kBatch / world.world_size();
    auto net = make<Small>(5);
    net->to(dtype);
    DistributedDataParallel ddp(net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.5));
    std::vector<double> curve;
    for (int step = 0; step < kSteps; ++step) {
      const int64_t begin = step * kBatch + world.rank() * rows;
      optimizer.zero_grad();
      auto loss =
          torch::nn::functional::cross_entropy(ddp(x.narrow(0, begin, rows).to(dtype)), y.narrow(0, begin, rows));
      loss.backward();
      optimizer.step();
      auto mean = loss.detach().clone();
      all_reduce(mean, {.op = ReduceOp::AVG});
      curve.push_back(mean.item<double>());
    }
    const torch::NoGradGuard no_grad;
    const int64_t share = kTest / world.world_size(), begin = world.rank() * share;
    auto correct =
        net->forward(test_x.narrow(0, begin, share).to(dtype)).argmax(1).eq(test_y.narrow(0, begin, share)).sum();
    all_reduce(correct);
    curve.push_back(correct.item<double>() / kTest);
    return curve;
  };
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    SCOPED_TRACE(dtype);
    std::vector<double> one, two;
    run_threads(1, [&](World& world) { one = run(world, dtype); });
    run_threads(2, [&](World& world) {
      auto curve = run(world, dtype);
      if (world.rank() == 0) two = std::move(curve);
    });
    ASSERT_EQ(one.size(), two.size());
    const bool exact = dtype == torch::kDouble;
    for (size_t i = 0; i + 1 < one.size(); ++i)
      EXPECT_NEAR(one[i], two[i], exact ? 1e-9 : i < 10 ? 1e-5 : 0.05) << "loss of step " << i;
    EXPECT_NEAR(one.back(), two.back(), exact ? 0 : 0.02) << "test accuracy";
    EXPECT_LT(two[two.size() - 2], two.front()) << "it learnt nothing";
  }
}

}  // namespace
}  // namespace muster::test::ddp_replicas
