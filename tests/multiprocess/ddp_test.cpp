// DistributedDataParallel on ranks that are threads: what it promises in its header, point by point.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "muster/data/idx.h"
#include "muster/muster.h"
#include "support/patience.h"
#include "support/sanitized.h"

namespace muster {
namespace {

constexpr double kByte = 1.0 / (1 << 20);  // in MiB

struct DdpNet : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(12, 33)),
                    b = register_module("b", torch::nn::Linear(33, 17)),
                    c = register_module("c", torch::nn::Linear(17, 5));
  torch::Tensor forward(torch::Tensor x) { return c(torch::relu(b(torch::relu(a(x))))); }
};

// Rank r's part of the batch of one step, the same whoever asks.
torch::Tensor batch(int rank, int step, int rows = 8) {
  torch::manual_seed(1000 * step + rank);
  return torch::randn({rows, 12});
}

std::vector<torch::Tensor> gradients(torch::nn::Module& module) {
  std::vector<torch::Tensor> list;
  for (const auto& parameter : module.parameters())
    list.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  return list;
}

void expect_equal_on_all_ranks(const torch::Tensor& tensor, const World& world) {
  const auto flat = tensor.contiguous().view(-1).view(torch::kByte);
  auto all = torch::zeros({world.world_size(), flat.numel()}, torch::kByte);
  all_gather_into_tensor(all, flat);
  for (int r = 0; r < world.world_size(); ++r) EXPECT_TRUE(torch::equal(all[r], flat)) << "rank " << r;
}

// One at a time makes something from a seed: libtorch's default generator is the process's.
std::mutex generator;

template <typename Module>
std::shared_ptr<Module> make(uint64_t seed) {
  const std::lock_guard lock(generator);
  torch::manual_seed(seed);
  return std::make_shared<Module>();
}
torch::Tensor part(int rank, int step, int rows = 8) {
  const std::lock_guard lock(generator);
  return batch(rank, step, rows);
}

class DdpTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

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

TEST_F(DdpTest, GradientsLiveOnTheHeapAndBucketsFollowTheOrderOfReadiness) {
  // b is registered first but used last: the first guess at the order is wrong.
  struct Crossed : torch::nn::Module {
    torch::nn::Linear last = register_module("last", torch::nn::Linear(6, 6)),
                      first = register_module("first", torch::nn::Linear(6, 6));
    torch::Tensor forward(torch::Tensor x) { return last(torch::relu(first(x))); }
  };
  run_threads(2, [](World& world) {
    auto net = make<Crossed>(1);
    DistributedDataParallel ddp(net, {.bucket_cap_mb = 64 * kByte, .first_bucket_cap_mb = 64 * kByte});
    const auto names = [&] {
      std::vector<std::string> flat;
      for (const auto& bucket : ddp.bucket_names()) flat.insert(flat.end(), bucket.begin(), bucket.end());
      return flat;
    };
    EXPECT_EQ(names().front(), "first.bias");  // the module's order, backwards
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(torch::ones({2, 6})).sum().backward();
      for (const auto& parameter : net->parameters())
        EXPECT_TRUE(world.heap().contains(parameter.grad().const_data_ptr()));
    }
    EXPECT_EQ(names().front().substr(0, 4), "last");
    EXPECT_EQ(names().back().substr(0, 5), "first");
  });
}

// Gradients of a megabyte and more: two of one shape (either may take the other's block), one in another layout, one
// that a step does not use, and a user who keeps old gradients.
TEST_F(DdpTest, LargeGradientsAreBornOnTheHeap) {
  struct Large : torch::nn::Module {
    torch::nn::Linear a = register_module("a", torch::nn::Linear(12, 600)),
                      b = register_module("b", torch::nn::Linear(600, 600)),
                      c = register_module("c", torch::nn::Linear(600, 600));
    torch::Tensor d = register_parameter("d", torch::randn({500, 600}).div_(30).t().detach());  // not contiguous
    torch::Tensor idle = register_parameter("idle", torch::zeros({1 << 18}));
    torch::Tensor forward(torch::Tensor x, bool use_idle) {
      x = torch::mm(c(torch::relu(b(torch::relu(a(x))))), d);
      return use_idle ? x + idle.mean() : x;
    }
  };
  for (const int n : {1, 2, 3}) {
    SCOPED_TRACE(n);
    run_threads(n, [n](World& world) {
      const auto net = make<Large>(7), reference = make<Large>(7);
      DistributedDataParallel ddp(net, {.find_unused_parameters = true});
      EXPECT_EQ(ddp.bucket_names().size(), 5u);
      torch::optim::SGD optimizer(net->parameters(), 0.01), reference_optimizer(reference->parameters(), 0.01);
      int born = 0;  // what autograd computes, before DDP has touched it
      const void* birthplace = nullptr;
      net->b->weight.register_hook([&](const torch::Tensor& grad) {
        if (!world.heap().contains(grad.const_data_ptr())) return;
        ++born;
        if (!net->b->weight.grad().defined()) birthplace = grad.const_data_ptr();
      });
      std::set<const void*> places;
      size_t used = 0;
      std::vector<torch::Tensor> kept, copies;
      for (int step = 0; step < 9; ++step) {
        SCOPED_TRACE(step);
        const bool use_idle = step % 3 != 1;
        birthplace = nullptr;
        optimizer.zero_grad(/*set_to_none=*/step % 4 != 3);
        if (step % 4 == 2) {  // half of the gradient comes without communication
          const auto no_sync = ddp.no_sync();
          (ddp(part(world.rank(), 100 + step), use_idle).square().mean()).backward();
        }
        ddp(part(world.rank(), step), use_idle).square().mean().backward();
        reference_optimizer.zero_grad();
        for (int r = 0; r < n; ++r) {
          if (step % 4 == 2) (reference->forward(part(r, 100 + step), use_idle).square().mean() / n).backward();
          (reference->forward(part(r, step), use_idle).square().mean() / n).backward();
        }
        for (const auto& item : net->named_parameters()) {
          const auto& expected = reference->named_parameters()[item.key()].grad();
          const auto& ours = item.value().grad();
          ASSERT_EQ(ours.defined() && ours.count_nonzero().item<int64_t>() != 0,
                    expected.defined() && expected.count_nonzero().item<int64_t>() != 0)
              << item.key();
          if (!ours.defined()) continue;
          EXPECT_TRUE(world.heap().contains(ours.const_data_ptr())) << item.key();
          EXPECT_EQ(ours.strides(), item.value().strides()) << item.key();
          expect_equal_on_all_ranks(ours, world);
          const bool same = !expected.defined() || torch::allclose(ours, expected, 1e-4, 1e-6);
          EXPECT_TRUE(same) << item.key();
        }
        if (birthplace) {
          EXPECT_EQ(net->b->weight.grad().const_data_ptr(), birthplace) << "copied";
        }
        for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(torch::equal(kept[i], copies[i])) << "an old gradient";
        places.insert(net->b->weight.grad().const_data_ptr());
        places.insert(net->c->weight.grad().const_data_ptr());
        if (step == 1) used = world.heap().used();
        if (step == 4) {
          EXPECT_EQ(places.size(), 2u) << "gradients of later steps take the blocks of earlier ones";
          EXPECT_EQ(world.heap().used(), used);
          kept = {net->b->weight.grad(), net->d.grad()};
          copies = {kept[0].clone(), kept[1].clone()};
        }
        optimizer.step();
        reference_optimizer.step();
        if (step == 4) optimizer.zero_grad();  // so that the next step's gradients are new tensors
      }
      EXPECT_GE(born, 5);
    });
  }
}

// The gradient of the sum is that of both sides: what pos is given is a view of what the first layer has yet to read.
TEST_F(DdpTest, GradientsThatBackwardHasYetToReadAreNotReducedInPlace) {
  struct Positions : torch::nn::Module {
    torch::nn::Linear first = register_module("first", torch::nn::Linear(12, 512));
    torch::Tensor pos = register_parameter("pos", torch::randn({512, 512}));  // a megabyte, and all that is one
    torch::nn::Linear second = register_module("second", torch::nn::Linear(512, 8)),
                      third = register_module("third", torch::nn::Linear(8, 4));
    std::function<void(const torch::Tensor&)> before_first = [](const torch::Tensor&) {};
    torch::Tensor forward(torch::Tensor x) {
      const auto h = first(x);
      h.register_hook([this](const torch::Tensor& grad) { before_first(grad); });
      return third(torch::relu(second(h + pos.unsqueeze(0))));
    }
  };
  run_threads(2, [](World& world) {
    const auto net = make<Positions>(7), reference = make<Positions>(7);
    DistributedDataParallel ddp(net);
    EXPECT_EQ(ddp.bucket_names().front(), std::vector<std::string>{"pos"});
    const auto input = [](int rank, int step) { return part(rank, step, 512).unsqueeze(0); };
    const void* given = nullptr;
    net->pos.register_hook([&](const torch::Tensor& grad) { given = grad.const_data_ptr(); });
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      net->zero_grad();
      reference->zero_grad();
      bool shared = false;
      const auto before = world.group().stats().operations;
      // Backward stands between the two that the gradient is for, until the average is there.
      net->before_first = [&](const torch::Tensor& grad) {
        shared = grad.const_data_ptr() == given;
        const auto deadline = test::patience();
        while (world.group().stats().operations == before && !deadline.passed()) std::this_thread::yield();
      };
      ddp(input(world.rank(), step)).square().mean().backward();
      EXPECT_TRUE(shared) << "this test is for another libtorch";
      EXPECT_TRUE(world.heap().contains(given));
      EXPECT_NE(net->pos.grad().const_data_ptr(), given);
      for (int r = 0; r < 2; ++r) (reference->forward(input(r, step)).square().mean() / 2).backward();
      const auto ours = gradients(*net), expected = gradients(*reference);
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(torch::allclose(ours[i], expected[i], 1e-4, 1e-6)) << i;
        expect_equal_on_all_ranks(ours[i], world);
      }
    }
  });
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

// A backward() that throws in the first layer, when the gradients of the others are there.
struct Failing : DdpNet {
  bool fails = false;
  Failing() {
    a->weight.register_hook([this](const torch::Tensor&) {
      if (fails) throw std::runtime_error("in a hook");
    });
  }
  void backward_fails(const torch::Tensor& loss) {
    fails = true;
    EXPECT_THROW(loss.backward(), std::runtime_error);
    fails = false;
  }
};

// Of two ranks, with several buckets, of which some are under way when backward() throws. Where one waits for nothing,
// not for the usual five minutes.
void run_failing(const std::function<void(World&, Failing&, DistributedDataParallel<Failing>&, DdpNet&)>& body) {
  run_threads(2,
              [&](World& world) {
                const auto net = make<Failing>(3);
                const auto alone = make<DdpNet>(3);
                DistributedDataParallel ddp(net, {.bucket_cap_mb = 64 * kByte, .first_bucket_cap_mb = 64 * kByte});
                body(world, *net, ddp, *alone);
              },
              {.timeout = test::kPatience});
}

void expect_right_average(DistributedDataParallel<Failing>& ddp, DdpNet& alone, const World& world, int step) {
  ddp->zero_grad();
  alone.zero_grad();
  ddp(part(world.rank(), step)).sum().backward();
  for (int r = 0; r < 2; ++r) (alone.forward(part(r, step)).sum() / 2).backward();
  const auto ours = gradients(*ddp.module()), expected = gradients(alone);
  for (size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(ours[i].defined() && torch::allclose(ours[i], expected[i], 1e-4, 1e-5)) << i;
}

TEST_F(DdpTest, ABackwardThatThrewInNoSyncOwesNothing) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      if (world.rank() == 0) {
        const auto guard = ddp.no_sync();
        net.backward_fails(ddp(part(0, 10 + step)).sum());
      }
      expect_right_average(ddp, alone, world, step);
    }
  });
}

TEST_F(DdpTest, ABackwardThatThrewIsMadeUpForInNoSyncToo) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      if (step > 0) {
        const auto guard = ddp.no_sync();
        ddp(part(world.rank(), 20 + step)).sum().backward();
      }
      const auto loss = ddp(part(world.rank(), 10 + step)).sum();
      if (world.rank() == 0) {
        net.backward_fails(loss);
        const auto guard = ddp.no_sync();
        ddp(part(0, 30 + step));  // the other rank waits until then
      } else {
        EXPECT_THROW(loss.backward(), InvalidArgument);  // not all gradients are there
      }
      expect_right_average(ddp, alone, world, step);
    }
  });
}

// The gradient of the input comes after those of all parameters. So the other rank's step is right, and it is the first
// after which the ranks agree on the order of the buckets.
TEST_F(DdpTest, ABackwardThatThrewBehindAllParametersIsAStepOfTheOthers) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    torch::Tensor x = part(world.rank(), 10).set_requires_grad(true);
    if (world.rank() == 0)
      x.register_hook([](const torch::Tensor&) -> void { throw std::runtime_error("in a hook of the input"); });
    const auto loss = ddp(x * 1).sum();  // backward comes to the product last
    if (world.rank() == 0) {
      EXPECT_THROW(loss.backward(), std::runtime_error);
    } else {
      loss.backward();
      for (int r = 0; r < 2; ++r) (alone.forward(part(r, 10)).sum() / 2).backward();
      EXPECT_TRUE(torch::allclose(net.a->weight.grad(), alone.a->weight.grad(), 1e-4, 1e-5));
    }
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      expect_right_average(ddp, alone, world, step);
    }
  });
}

// What one backward() owes is made up for when the next one begins, if no forward() comes between them.
TEST_F(DdpTest, ABackwardThatThrewIsMadeUpForByTheNextOne) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      const auto first = ddp(part(world.rank(), 10 + step)).sum(), second = ddp(part(world.rank(), step)).sum();
      net.zero_grad();
      if (world.rank() == 0)
        net.backward_fails(first);
      else
        EXPECT_THROW(first.backward(), InvalidArgument);  // not all gradients are there
      net.zero_grad();
      alone.zero_grad();
      second.backward();
      for (int r = 0; r < 2; ++r) (alone.forward(part(r, step)).sum() / 2).backward();
      const auto ours = gradients(net), expected = gradients(alone);
      for (size_t i = 0; i < ours.size(); ++i)
        EXPECT_TRUE(ours[i].defined() && torch::allclose(ours[i], expected[i], 1e-4, 1e-5)) << i;
    }
  });
}

// The gradient with which the next backward() begins is one that the failed one did not come to.
TEST_F(DdpTest, TheNextBackwardMayBeginWithAnotherParameter) {
  struct Two : torch::nn::Module {
    torch::Tensor left = register_parameter("left", torch::ones({12})),
                  right = register_parameter("right", torch::ones({12}));
    // Backward comes to the factor of the later term first.
    torch::Tensor forward(const torch::Tensor& x, bool left_first) {
      const auto earlier = (x * (left_first ? right : left)).sum();
      return earlier + (x * (left_first ? left : right)).sum();
    }
  };
  run_threads(2,
              [](World& world) {
                const auto net = make<Two>(3);
                DistributedDataParallel ddp(net, {.bucket_cap_mb = 4 * kByte, .first_bucket_cap_mb = 4 * kByte});
                bool fails = false;
                net->left.register_hook([&](const torch::Tensor&) {
                  if (fails) throw std::runtime_error("in a hook");
                });
                for (int step = 0; step < 3; ++step) {
                  SCOPED_TRACE(step);
                  const auto first = ddp(part(world.rank(), 10 + step), false),
                             second = ddp(part(world.rank(), step), true);
                  fails = world.rank() == 0;
                  EXPECT_THROW(first.backward(), std::exception);
                  fails = false;
                  net->zero_grad();
                  second.backward();
                  const auto expected = (part(0, step) + part(1, step)).sum(0) / 2;
                  EXPECT_TRUE(torch::allclose(net->left.grad(), expected, 1e-4, 1e-5));
                  EXPECT_TRUE(torch::allclose(net->right.grad(), expected, 1e-4, 1e-5));
                  net->zero_grad();
                }
              },
              {.timeout = test::kPatience});
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

struct Large : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(600, 600)),
                    second = register_module("second", torch::nn::Linear(600, 2));
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))); }
};

// Three steps. Returns how many gradients autograd computed where they are reduced.
int train_large(World& world, DdpOptions options) {
  const auto net = make<Large>(7), alone = make<Large>(7);
  DistributedDataParallel ddp(net, options);
  int born = 0;
  net->first->weight.register_hook(
      [&](const torch::Tensor& grad) { born += world.heap().contains(grad.const_data_ptr()); });
  const auto input = [](int rank, int step) { return part(rank, step, 50).flatten().view({1, 600}); };
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    alone->zero_grad();
    ddp(input(world.rank(), step)).square().sum().backward();
    for (int r = 0; r < 2; ++r) (alone->forward(input(r, step)).square().sum() / 2).backward();
    EXPECT_TRUE(world.heap().contains(net->first->weight.grad().const_data_ptr()));
    EXPECT_TRUE(torch::allclose(net->first->weight.grad(), alone->first->weight.grad(), 1e-4, 1e-5)) << step;
  }
  return born;
}

// ctest runs each in a process of its own (EACH), because nothing takes away the allocator that DDP has installed.
TEST(DdpAllocator, IsReplacedOnlyOnRequest) {
  at::set_num_threads(1);
  c10::Allocator* const before = c10::GetCPUAllocator();
  if (before != c10::GetDefaultCPUAllocator()) GTEST_SKIP() << "an earlier test of this process has had it replaced";
  for (const bool replace : {false, true}) {
    SCOPED_TRACE(replace);
    run_threads(
        2, [replace](World& world) { EXPECT_EQ(train_large(world, {.replace_allocator = replace}) > 0, replace); });
    EXPECT_EQ(c10::GetCPUAllocator() != before, replace);
  }
}

// One that counts. It asks the one before it, or knows none.
class Others final : public c10::Allocator {
 public:
  explicit Others(c10::Allocator* before) : before_(before) {}
  c10::DataPtr allocate(size_t bytes) override {
    ++allocations;
    if (before_) return before_->allocate(bytes);
    void* const data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_ ? before_->raw_deleter() : &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  std::atomic<int> allocations{0};

 private:
  c10::Allocator* const before_;
};

// Somebody replaces DDP's allocator, while tensors of both are there.
TEST(DdpAllocator, IsReplacedByAnotherLater) {
  at::set_num_threads(1);
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) GTEST_SKIP() << "an earlier test has had it replaced";
  run_threads(2, [](World& world) { EXPECT_GT(train_large(world, {}), 0); });
  c10::Allocator* const ours = c10::GetCPUAllocator();
  for (c10::Allocator* const asked : {ours, static_cast<c10::Allocator*>(nullptr)}) {
    SCOPED_TRACE(asked ? "it asks DDP's" : "it knows no other");
    const torch::Tensor old = torch::ones({1000, 1000});
    static std::vector<std::unique_ptr<Others>> all;  // tensors may outlive the test
    Others& others = *all.emplace_back(std::make_unique<Others>(asked));
    c10::SetCPUAllocator(&others);
    run_threads(2, [&](World& world) {
      const int born = train_large(world, {});
      if (asked) {
        EXPECT_GT(born, 0);
      } else {
        EXPECT_EQ(born, 0);  // gradients are copied to where they are reduced
      }
    });
    EXPECT_GT(others.allocations, 0);
    EXPECT_EQ(old.sum().item<float>(), 1e6f);
    c10::SetCPUAllocator(ours);
  }
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
}  // namespace muster
