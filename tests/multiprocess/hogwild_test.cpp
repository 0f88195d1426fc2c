// Ranks that train one copy of a model without waiting for each other.
#include "muster/parallel/hogwild.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "parallel/modules/same_module.h"
#include "support/resnet18.h"

namespace muster::test {
namespace {

struct Small : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(6, 4)), b = register_module("b", nn::Linear(4, 1));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(4));
  Tensor unused = register_parameter("unused", torch::zeros({0}));
  Tensor forward(const Tensor& x) { return b(norm(a(x))); }
};

void expect_all_ended_well(const std::vector<ForkedRanks::End>& ends) {
  for (const auto& end : ends) EXPECT_TRUE(end.exited && end.status == 0) << end.said;
}

// What one rank writes, all read: parameters, and buffers if they are shared.
void expect_one_copy(World& world) {
  for (const bool share_buffers : {true, false}) {
    const auto net = std::make_shared<Small>();
    {
      const torch::NoGradGuard no_grad;
      for (Tensor& parameter : net->parameters()) parameter.fill_(world.rank());
      net->a->weight.set_data(net->a->weight.t().contiguous().t());
    }
    const Tensor kept = net->a->weight;
    const Hogwild hogwild(net, {.share_buffers = share_buffers});
    EXPECT_TRUE(kept.is_same(net->a->weight));
    EXPECT_EQ(net->a->weight.strides()[0], 1);
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : net->parameters()) EXPECT_EQ(parameter.sum().item<double>(), 0);  // rank 0's
    barrier();
    if (world.rank() == 1) {
      net->a->weight[1][2] = 5;
      net->b->bias.fill_(7);
      net->norm->running_mean.fill_(3);
    }
    barrier();
    EXPECT_EQ((net->a->weight[1][2].item<double>()), 5);
    EXPECT_EQ(net->b->bias.item<double>(), 7);
    EXPECT_EQ(net->norm->running_mean.sum().item<double>(), share_buffers || world.rank() == 1 ? 12 : 0);
    barrier();
  }
}

TEST(Hogwild, ThreadsHaveOneCopy) { on_ranks(3, expect_one_copy); }
TEST(HogwildProcess, ProcessesHaveOneCopy) {
  expect_all_ended_well(in_processes({"a", "a", "a"}, [](World& world) {
    expect_one_copy(world);
    return "";
  }));
}

// Noise-free linear regression, which converges whatever the order of the steps is.
std::string learned(World& world, std::optional<int64_t> max_staleness) {
  torch::manual_seed(world.rank());
  nn::Linear line(6, 1);
  Hogwild hogwild(line, {.max_staleness = max_staleness});
  torch::optim::SGD optimizer(line->parameters(), 0.05);
  const Tensor truth = torch::arange(6.).view({1, 6}) - 2;
  const int steps = 300 + 50 * world.rank();
  for (int step = 0; step < steps; ++step) {
    const Tensor x = torch::randn({16, 6});
    optimizer.zero_grad();
    torch::mse_loss(line(x), x.matmul(truth.t()) + 1).backward();
    optimizer.step();
    hogwild.step();
  }
  EXPECT_EQ(hogwild.steps(world.rank()), steps);
  hogwild.leave();
  barrier();
  for (int rank = 0; rank < world.world_size(); ++rank) EXPECT_EQ(hogwild.steps(rank), 300 + 50 * rank);
  EXPECT_TRUE(torch::allclose(line->weight, truth, 1e-2, 1e-2)) << line->weight;
  EXPECT_TRUE(torch::allclose(line->bias, torch::ones({1}), 1e-2, 1e-2)) << line->bias;
  barrier();
  return "";
}

TEST(HogwildProcess, Learns) {
  for (const std::optional<int64_t> max_staleness : {std::optional<int64_t>(), {0}, {3}})
    expect_all_ended_well(in_processes({"a", "a", "a"}, [&](World& world) { return learned(world, max_staleness); }));
}

// A model with convolutions, batch norms and 45 MB of parameters.
TEST(HogwildProcess, AResNetLearns) {
  expect_all_ended_well(in_processes({"a", "a"}, [](World& world) {
    torch::manual_seed(1);
    nn::Sequential net = resnet18();
    Hogwild hogwild(net, {.max_staleness = 1});
    torch::optim::SGD optimizer(net->parameters(), 0.02);
    torch::manual_seed(10 + world.rank());
    const Tensor x = torch::randn({8, 3, 32, 32}), y = torch::randint(10, {8});
    double first = 0, last = 0;
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      const Tensor loss = nn::functional::cross_entropy(net->forward(x), y);
      loss.backward();
      optimizer.step();
      hogwild.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    hogwild.leave();
    barrier();
    EXPECT_LT(last, 0.8 * first);
    for (const auto& parameter : net->named_parameters()) {
      Tensor sum = parameter.value().detach().to(torch::kDouble).sum();
      const double mine = sum.item<double>();
      broadcast(sum, 0);
      EXPECT_EQ(sum.item<double>(), mine) << parameter.key();
    }
    return "";
  }));
}

// No rank is further ahead than it may be, and each may be as far ahead.
TEST(Hogwild, StalenessIsBounded) {
  constexpr int kSteps = 200;
  for (const int64_t most : {0, 1, 5})
    on_ranks(3, [&](World& world) {
      const auto net = std::make_shared<Small>();
      Hogwild hogwild(net, {.max_staleness = most});
      if (world.rank() == 0) {
        for (int64_t step = 0; step < most; ++step) hogwild.step();
        EXPECT_EQ(hogwild.steps(1) + hogwild.steps(2), 0);
      }
      barrier();
      while (hogwild.steps(world.rank()) < kSteps) {
        hogwild.step();
        const int64_t mine = hogwild.steps(world.rank());
        for (int rank = 0; rank < 3; ++rank) EXPECT_GE(hogwild.steps(rank), mine - most);
      }
      hogwild.leave();
      expect_refusal({"after leave()"}, [&] { hogwild.step(); });
      barrier();  // so that nobody has left with fewer steps than others look for
    });
}

TEST(Hogwild, ARankThatHasLeftIsNotWaitedFor) {
  on_ranks(3, [](World& world) {
    const auto net = std::make_shared<Small>();
    auto hogwild = std::make_unique<Hogwild>(net, HogwildOptions{.max_staleness = 0});
    if (world.rank() == 1) hogwild->leave();
    if (world.rank() == 2) hogwild.reset();
    if (world.rank() != 0) return;
    for (int step = 0; step < 10; ++step) hogwild->step();
    EXPECT_EQ(hogwild->steps(0), 10);
  });
}

TEST(HogwildProcess, ARankThatDiesIsNamed) {
  const auto ends = in_processes({"a", "a"}, [](World& world) -> std::string {
    const auto net = std::make_shared<Small>();
    Hogwild hogwild(net, {.max_staleness = 2});
    hogwild.step();
    barrier();
    if (world.rank() == 1) ::_exit(3);
    try {
      for (;;) hogwild.step();
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.rank(), 1);
      EXPECT_EQ(hogwild.steps(0), 4);                             // three more than rank 1
      EXPECT_TRUE(net->a->weight.isfinite().all().item<bool>());  // still there
      return lost.what();
    }
  });
  EXPECT_TRUE(ends[0].exited && ends[0].status == 0) << ends[0].said;
  EXPECT_CONTAINS(ends[0].said, "rank 1 (pid ");
  EXPECT_CONTAINS(ends[0].said, "died after 1 steps");
}

TEST(Hogwild, ARankThatDoesNotStepIsNamedInTime) {
  on_ranks(2, [](World& world) {
    const auto net = std::make_shared<Small>();
    Hogwild hogwild(net, {.max_staleness = 0, .timeout = std::chrono::milliseconds(20)});
    if (world.rank() == 0) {
      const auto message = message_of<TimeoutError>([&] { hogwild.step(); });
      EXPECT_CONTAINS(message, "rank 1 did not come to step 1 within 20 ms");
    }
    barrier();
  });
}

TEST(Hogwild, ABufferWithTwoNamesStaysOne) {
  on_ranks(2, [](World& world) {
    const auto net = std::make_shared<Small>();
    const Tensor buffer = torch::zeros({3});
    net->register_buffer("one", buffer);
    net->register_buffer("two", buffer);
    Hogwild hogwild(net);
    if (world.rank() == 0) net->named_buffers()["one"].fill_(5);
    barrier();
    EXPECT_TRUE(torch::equal(net->named_buffers()["two"], torch::full({3}, 5.0F)));
    EXPECT_TRUE(torch::equal(buffer, torch::full({3}, 5.0F)));
    barrier();
  });
}

// A lack of memory is one on all ranks.
TEST(Hogwild, AFailureOfOneRankIsTheSameKindOnAll) {
  on_ranks(3, [](World& world) {
    const auto failure = [&](int rank, const auto& error) {
      return world.rank() == rank ? std::make_exception_ptr(error) : nullptr;
    };
    const auto fail = [](const std::exception_ptr& what) {
      parallel::throw_if_any_failed(what, World::current().group(), "could not take memory");
    };
    fail(nullptr);
    const auto lack = message_of<Unavailable>([&] { fail(failure(1, Unavailable("no memory"))); });
    EXPECT_CONTAINS(lack, world.rank() == 1 ? "no memory" : "rank 1 could not take memory");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { fail(failure(2, InvalidArgument("rank 2 no"))); }), "rank 2 ");
  });
}

TEST(Hogwild, BadUseIsRefused) {
  on_hosts({"a", "b"}, [](World&) {
    expect_refusal({"expected one host, got 2", "ModelAverager"}, [] { Hogwild(std::make_shared<Small>()); });
  });
  on_ranks(2, [](World& world) {
    EXPECT_CONTAINS(message_of<Mismatch>([&] { Hogwild(nn::Linear(2, 2 + world.rank())); }), "differs from rank 0's");
    expect_refusal({"max_staleness: expected 0 or more, got -1"},
                   [] { Hogwild(std::make_shared<Small>(), {.max_staleness = -1}); });
    const auto net = make<FsdpNet>(7, {});
    const auto sharded = fully_shard(net);
    expect_refusal({"is not a dense CPU tensor of this module alone"}, [&] { Hogwild{net}; });
    const auto flat = std::make_shared<Small>();
    flat->a->bias.set_data(flat->a->weight.detach().view({-1}).narrow(0, 0, 4));
    expect_refusal({"a.weight and a.bias are two tensors in the same memory"}, [&] { Hogwild{flat}; });
    const auto tied = std::make_shared<Small>();
    tied->register_buffer("first", tied->a->weight.detach().narrow(0, 0, 1));
    expect_refusal({"a.weight and first are two tensors in the same memory"}, [&] { Hogwild{tied}; });
    Hogwild hogwild(std::make_shared<Small>());
    expect_refusal({"rank of the Hogwild: expected 0 to 1, got 2"}, [&] { hogwild.steps(2); });
  });
}

}  // namespace
}  // namespace muster::test
