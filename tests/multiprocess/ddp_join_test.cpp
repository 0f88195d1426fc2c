// join() of DistributedDataParallel: ranks with different numbers of batches.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "multiprocess/fsdp_support.h"

namespace muster::test {
namespace {

struct JoinNet : nn::Module {
  nn::Embedding table = register_module("table", nn::Embedding(nn::EmbeddingOptions(9, 6).sparse(true)));
  nn::Linear a = register_module("a", nn::Linear(6, 300)), b = register_module("b", nn::Linear(300, 2));
  Tensor forward(const Tensor& x) { return b(torch::tanh(a(table(x).mean(1)))); }
};

std::shared_ptr<JoinNet> make_net() {
  auto net = std::make_shared<JoinNet>();
  net->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : net->parameters())
    parameter.copy_(torch::cos(torch::arange(parameter.numel(), torch::kDouble) * 1.7).view(parameter.sizes()) * 0.3);
  return net;
}
Tensor batch(int rank, int step) { return (torch::arange(8) * 5 + rank * 3 + step).remainder(9).view({4, 2}); }

// How many batches each rank has.
using Batches = std::vector<int>;

// What all ranks must have in the end: gradients of the ranks with data, divided by the number of these or of all.
template <typename Optimizer, typename Options>
std::shared_ptr<JoinNet> expected_after(const Batches& batches, bool over_all, const Options& options, int epochs = 1) {
  auto net = make_net();
  Optimizer optimizer(net->parameters(), options);
  for (int epoch = 0; epoch < epochs; ++epoch)
    for (int step = 0; step < *std::max_element(batches.begin(), batches.end()); ++step) {
      optimizer.zero_grad();
      const auto active = std::count_if(batches.begin(), batches.end(), [&](int of) { return of > step; });
      for (size_t rank = 0; rank < batches.size(); ++rank)
        if (batches[rank] > step) {
          const double n = over_all ? static_cast<double>(batches.size()) : static_cast<double>(active);
          (net->forward(batch(static_cast<int>(rank), step)).square().mean() / n).backward();
        }
      optimizer.step();
    }
  return net;
}

void expect_close(const nn::Module& got, const nn::Module& expected) {
  for (const auto& item : got.named_parameters())
    EXPECT_TRUE(torch::allclose(item.value(), expected.named_parameters()[item.key()], 1e-10, 1e-12)) << item.key();
}
void expect_equal_bits(const nn::Module& net) {
  for (const Tensor& tensor : net.parameters()) {
    Tensor first = tensor.detach().clone();
    broadcast(first, 0);
    EXPECT_TRUE(torch::equal(first, tensor));
  }
}

struct Case {
  Batches batches;
  HostOfRank hosts;
  JoinOptions options = {};
  DdpOptions ddp = {};
  CommHook hook = nullptr;
};
void expect_steps(const Case& c) {
  on_hosts(c.hosts, [&](World& world) {
    const auto net = make_net();
    DistributedDataParallel<JoinNet> ddp(net, c.ddp);
    if (c.hook) ddp.register_comm_hook(c.hook);
    torch::optim::SGD optimizer(net->parameters(), 0.3);
    const int mine = c.batches[static_cast<size_t>(world.rank())];
    int steps = 0;
    ddp.join(
        [&] {
          for (; steps < mine; ++steps) {
            optimizer.zero_grad();
            ddp.forward(batch(world.rank(), steps)).square().mean().backward();
            optimizer.step();
          }
        },
        c.options);
    EXPECT_EQ(steps, mine);
    expect_equal_bits(*net);
    expect_close(*net, *expected_after<torch::optim::SGD>(c.batches, c.options.divide_by_initial_world_size,
                                                          torch::optim::SGDOptions(0.3)));
    // A step outside of join() is as always.
    optimizer.zero_grad();
    ddp.forward(batch(0, 1)).square().mean().backward();
    const Tensor before = net->b->bias.grad().clone();
    net->zero_grad();
    net->forward(batch(0, 1)).square().mean().backward();
    EXPECT_TRUE(torch::allclose(net->b->bias.grad(), before, 1e-12, 1e-14));
  });
}

TEST(DdpJoin, StepsAreThoseOfTheRanksWithData) {
  constexpr double kBytes = 1.0 / (1 << 20);
  const DdpOptions small = {.bucket_cap_mb = 100 * kBytes, .first_bucket_cap_mb = 100 * kBytes};
  expect_steps({.batches = {4, 1}, .hosts = {"a", "a"}});
  expect_steps({.batches = {1, 4, 6}, .hosts = {"a", "a", "a"}, .ddp = small});
  expect_steps({.batches = {5, 2, 3}, .hosts = {"a", "b", "b"}, .options = {.divide_by_initial_world_size = false}});
  expect_steps(
      {.batches = {2, 5}, .hosts = {"a", "b"}, .options = {.divide_by_initial_world_size = false}, .ddp = small});
  expect_steps({.batches = {0, 3}, .hosts = {"a", "a"}});
  expect_steps({.batches = {0, 0}, .hosts = {"a", "a"}});
  expect_steps({.batches = {3, 3}, .hosts = {"a", "a"}, .options = {.throw_on_early_termination = true}});
  expect_steps({.batches = {3}, .hosts = {"a"}});
  expect_steps({.batches = {1, 3}, .hosts = {"a", "a"}, .hook = comm_hooks::all_reduce});
}

// So the second epoch goes on with the same states on all ranks.
TEST(DdpJoin, OptimizerStatesOfRanksWithoutData) {
  on_ranks(3, [](World& world) {
    const Batches batches = {1, 3, 2};
    const auto net = make_net();
    for (Tensor& parameter : net->table->parameters())
      parameter.set_requires_grad(false);  // Adam takes no sparse gradient
    DistributedDataParallel<JoinNet> ddp(net, {.check_divergence_every = 1});
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    for (int epoch = 0; epoch < 3; ++epoch)
      ddp.join(
          [&] {
            for (int step = 0; step < batches[static_cast<size_t>(world.rank())]; ++step) {
              optimizer.zero_grad();
              ddp.forward(batch(world.rank(), step)).square().mean().backward();
              optimizer.step();
            }
          },
          {.after_backward = [&] { optimizer.step(); }});
    for (const Tensor& parameter : net->parameters()) {
      if (!parameter.requires_grad()) continue;
      const auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
      const auto& of = static_cast<const torch::optim::AdamParamState&>(state);
      EXPECT_EQ(of.step(), 9);
      Tensor first = of.exp_avg().clone();
      broadcast(first, 0);
      EXPECT_TRUE(torch::equal(first, of.exp_avg()));
    }
    expect_equal_bits(*net);
  });
}

TEST(DdpJoin, BuffersAccumulationAndUnusedParameters) {
  on_ranks(2, [](World& world) {
    struct Norm : nn::Module {
      nn::Linear a = register_module("a", nn::Linear(3, 4)), unused = register_module("unused", nn::Linear(2, 2));
      nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(4));
      Tensor forward(const Tensor& x) { return norm(a(x)); }
    };
    const auto net = std::make_shared<Norm>();
    DistributedDataParallel<Norm> ddp(net, {.find_unused_parameters = true});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    ddp.join([&] {
      for (int step = 0; step < 2 + 3 * world.rank(); ++step) {
        const Tensor x = torch::sin(torch::arange(15.) * (step + 1) + world.rank()).view({5, 3});
        optimizer.zero_grad();
        {
          const auto guard = ddp.no_sync();
          ddp.forward(x).square().sum().backward();
        }
        ddp.forward(x * 2).pow(3).sum().backward();
        optimizer.step();
        net->eval();
        ddp.forward(x);
        net->train();
      }
    });
    for (const auto& list : {net->parameters(), net->buffers()})
      for (const Tensor& tensor : list) {
        Tensor first = tensor.detach().clone();
        broadcast(first, 0);
        EXPECT_TRUE(torch::equal(first, tensor));
      }
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 10);  // of rank 1
    EXPECT_FALSE(net->unused->weight.grad().defined());
  });
}

// A hook that averages among some ranks, or none.
TEST(DdpJoin, HooksThatAverageAmongFewerRanks) {
  on_ranks(4, [](World& world) {
    const Group pair = world.group().split(world.rank() / 2);
    const comm_hooks::PostLocalSgd of_pair({.start_local_sgd_iter = 0, .subgroup = pair});
    for (const CommHook& hook : {CommHook(of_pair), CommHook(comm_hooks::noop)}) {
      const auto net = make_net();
      for (Tensor& parameter : net->table->parameters()) parameter.set_requires_grad(false);
      DistributedDataParallel<JoinNet> ddp(net);
      ddp.register_comm_hook(hook);
      int steps = 0;
      ddp.join(
          [&] {
            for (; steps < (world.rank() == 3 ? 1 : 3); ++steps) {
              net->zero_grad();
              ddp.forward(batch(world.rank(), steps)).square().mean().backward();
              EXPECT_GT(net->a->weight.grad().abs().max().item<double>(), 0);
              EXPECT_TRUE(net->a->weight.grad().isfinite().all().item<bool>());
            }
          },
          {.divide_by_initial_world_size = false});
      EXPECT_EQ(steps, world.rank() == 3 ? 1 : 3);
      expect_equal_bits(*net);
    }
  });
}

// A GAN: each step has a backward() that averages in the critic, one that does so in the maker, and one that does so in
// both, with optimizers that step after it.
struct Gan {
  nn::Linear maker{3, 5}, critic{5, 1};
  torch::optim::Adam of_maker{prepared(maker), 0.05}, of_critic{prepared(critic), 0.02};
  static std::vector<Tensor> prepared(nn::Linear& layer) {
    layer->to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : layer->parameters())
      parameter.copy_(torch::sin(torch::arange(parameter.numel(), torch::kDouble) * 2.3).view(parameter.sizes()) * 0.4);
    return layer->parameters();
  }
  void zero_grad() {
    of_maker.zero_grad();
    of_critic.zero_grad();
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> all = maker->parameters();
    for (const Tensor& parameter : critic->parameters()) all.push_back(parameter);
    return all;
  }
};
Tensor noise(int rank, int step) {
  return torch::cos(torch::arange(12., torch::kDouble) * (1 + rank) + step).view({4, 3});
}

TEST(DdpJoin, SeveralJoinTogether) {
  const Batches batches = {1, 4, 2};
  Gan alone;
  for (int step = 0; step < 4; ++step)
    for (int phase = 0; phase < 3; ++phase) {
      alone.zero_grad();
      for (int rank = 0; rank < 3; ++rank) {
        if (batches[static_cast<size_t>(rank)] <= step) continue;
        const Tensor made = alone.maker(noise(rank, step));
        (alone.critic(phase == 0 ? made.detach() : made).square().mean() / 3).backward();
      }
      if (phase != 1) alone.of_critic.step();
      if (phase != 0) alone.of_maker.step();
    }
  for (const HostOfRank& hosts : {HostOfRank{"a", "a", "a"}, HostOfRank{"a", "b", "b"}})
    on_hosts(hosts, [&](World& world) {
      Gan gan;
      DistributedDataParallel<nn::LinearImpl> maker(gan.maker, {.bucket_cap_mb = 1e-5, .first_bucket_cap_mb = 1e-5});
      DistributedDataParallel<nn::LinearImpl> critic(gan.critic);
      const auto train = [&] {
        for (int step = 0; step < batches[static_cast<size_t>(world.rank())]; ++step)
          for (int phase = 0; phase < 3; ++phase) {
            gan.zero_grad();
            const Tensor made = maker.forward(noise(world.rank(), step));
            if (phase == 1) {
              const auto guard = critic.no_sync();
              critic.forward(made).square().mean().backward();
            } else {
              critic.forward(phase == 0 ? made.detach() : made).square().mean().backward();
            }
            if (phase != 1) gan.of_critic.step();
            if (phase != 0) gan.of_maker.step();
          }
      };
      maker.join(train,
                 {.after_backward = [&] { gan.of_maker.step(); }, .with = {{critic, [&] { gan.of_critic.step(); }}}});
      const auto expected = alone.parameters();
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(torch::allclose(gan.parameters()[i], expected[i], 1e-9, 1e-11)) << i;
        const auto& state = *gan.of_critic.state().begin()->second;
        EXPECT_EQ(static_cast<const torch::optim::AdamParamState&>(state).step(), 8);  // on all ranks
      }
      expect_equal_bits(*gan.maker);
      expect_equal_bits(*gan.critic);
      critic.forward(maker.forward(noise(0, 0))).sum().backward();  // outside of join() as always
      expect_refusal({"a DistributedDataParallel twice"}, [&] { maker.join([] {}, {.with = {critic, critic}}); });
      DistributedDataParallel<nn::LinearImpl> other(nn::Linear(2, 2), {.group = world.new_group({0, 1, 2})});
      expect_refusal({"of different groups"}, [&] { maker.join([] {}, {.with = {other}}); });
    });
}

// Rank 1 takes the networks in another order.
TEST(DdpJoin, SeveralThatDoNotGoAlike) {
  on_ranks(2, [](World& world) {
    DistributedDataParallel<nn::LinearImpl> a(nn::Linear(2, 2)), b(nn::Linear(2, 2));
    const auto message = message_of<Mismatch>([&] {
      a.join(
          [&] {
            auto& first = world.rank() == 0 ? a : b;
            first.forward(torch::ones({1, 2})).sum().backward();
          },
          {.with = {b}});
    });
    EXPECT_CONTAINS(message, "rank 1 is in backward() of number 1 of JoinOptions::with where rank 0 is in backward()");
    for (auto* const each : {&a, &b}) each->forward(torch::ones({1, 2})).sum().backward();  // go on
  });
}

// A gradient that no rank computes any more stays what it was.
TEST(DdpJoin, AnUnusedGradientStays) {
  on_ranks(2, [](World& world) {
    struct Two : nn::Module {
      nn::Linear a = register_module("a", nn::Linear(2, 2)), b = register_module("b", nn::Linear(2, 2));
      Tensor forward(bool both) {
        const Tensor x = torch::ones({1, 2});
        return both ? a(x) + b(x) : a(x);
      }
    };
    const auto net = std::make_shared<Two>();
    DistributedDataParallel<Two> ddp(net, {.find_unused_parameters = true});
    ddp.forward(true).sum().backward();
    const Tensor before = net->b->weight.grad().clone();
    ddp.join([&] {
      for (int step = 0; step < 3 * world.rank(); ++step) {
        net->a->weight.mutable_grad() = Tensor();
        net->a->bias.mutable_grad() = Tensor();
        ddp.forward(false).sum().backward();
      }
    });
    if (world.rank() == 1) {
      EXPECT_TRUE(torch::allclose(net->b->weight.grad(), before));
    }
  });
}

TEST(DdpJoin, OneRankHasOtherOptionsOrMakesAGraph) {
  on_ranks(2, [](World& world) {
    const auto net = make_net();
    for (Tensor& parameter : net->table->parameters()) parameter.set_requires_grad(false);
    DistributedDataParallel<JoinNet> ddp(net);
    EXPECT_CONTAINS(message_of<Mismatch>([&] { ddp.join([] {}, {.divide_by_initial_world_size = world.rank() == 0}); }),
                    "has other JoinOptions");
    expect_refusal({"1 of 2 ranks have no more data, and backward() with create_graph"}, [&] {
      ddp.join([&] {
        for (int step = 0; step < 1 + world.rank(); ++step) {
          net->zero_grad();
          ddp.forward(batch(0, step)).square().mean().backward({}, true, /*create_graph=*/true);
        }
      });
    });
    struct Norm : nn::Module {
      nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(2));
      Tensor forward(const Tensor& x) { return norm(x); }
    };
    const auto norm = std::make_shared<Norm>();
    convert_sync_batchnorm(norm);
    DistributedDataParallel<Norm> synchronized(norm);
    expect_refusal({"has a synchronized batch norm", "join()"}, [&] { synchronized.join([] {}); });
    expect_refusal({"join() is called within join()"}, [&] { ddp.join([&] { synchronized.join([] {}); }); });
  });
}

// The others do not wait for it, wherever they are.
TEST(DdpJoin, ARankThatFailsIsNamedOnTheOthers) {
  struct Norm : nn::Module {
    nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(2));
    Tensor forward(const Tensor& x) { return norm(x); }
  };
  on_ranks(3, [](World& world) {
    DistributedDataParallel<JoinNet> in_backward(make_net());            // meets in backward()
    DistributedDataParallel<Norm> in_forward(std::make_shared<Norm>());  // and in forward(), because it has buffers
    const auto expect_failure = [&](auto& ddp, auto input, int batches, bool after_forward) {
      const auto joined = [&] {
        ddp.join([&] {
          for (int step = 0; step < batches; ++step) {
            const bool fails = world.rank() == 1 && step == 1;
            if (fails && !after_forward) throw std::runtime_error("a loader that fails");
            const Tensor loss = ddp.forward(input(step)).square().mean();
            if (fails) throw std::runtime_error("a loss that is not a number");
            loss.backward();
          }
        });
      };
      if (world.rank() == 1)
        EXPECT_THROW(joined(), std::runtime_error);
      else
        EXPECT_CONTAINS(message_of<Aborted>(joined), "rank 1 left join() with an error");
      ddp.module()->zero_grad();
      ddp.forward(input(0)).square().mean().backward();  // goes on
    };
    const auto words = [&](int step) { return batch(world.rank(), step); };
    const auto numbers = [](int) { return torch::arange(6.).view({3, 2}); };
    for (const int batches : {2, 2 + world.rank(), 4 - world.rank(), 4})
      for (const bool after_forward : {false, true}) {
        expect_failure(in_backward, words, batches, after_forward);
        expect_failure(in_forward, numbers, batches, after_forward);
      }
    // A body that goes on after the error gets it again.
    {
      DistributedDataParallel<JoinNet> again(make_net());
      int errors = 0;
      const auto joined = [&] {
        again.join([&] {
          for (int step = 0; step < 4; ++step) {
            if (world.rank() == 1 && step == 1) throw std::runtime_error("a loader that fails");
            try {
              again.forward(batch(world.rank(), step)).square().mean().backward();
            } catch (const Aborted&) {
              ++errors;
            }
          }
        });
      };
      if (world.rank() == 1) {
        EXPECT_THROW(joined(), std::runtime_error);
      } else {
        EXPECT_THROW(joined(), Aborted);
        EXPECT_EQ(errors, 3);
      }
    }
    // What ranks without data do may fail, too.
    DistributedDataParallel<JoinNet> ddp(make_net());
    const auto joined = [&] {
      ddp.join(
          [&] {
            for (int step = 0; step < (world.rank() == 1 ? 0 : 4); ++step)
              ddp.forward(batch(0, step)).square().mean().backward();
          },
          {.after_backward = [] { throw std::runtime_error("a step that fails"); }});
    };
    if (world.rank() == 1)
      EXPECT_THROW(joined(), std::runtime_error);
    else
      EXPECT_CONTAINS(message_of<Aborted>(joined), "rank 1 left join() with an error");
  });
}

TEST(DdpJoin, BadUseIsOneSentence) {
  on_ranks(2, [](World& world) {
    const auto net = make_net();
    DistributedDataParallel<JoinNet> ddp(net);
    const auto steps = [&](int count) {
      for (int step = 0; step < count; ++step) ddp.forward(batch(world.rank(), step)).square().mean().backward();
    };
    expect_refusal({"1 of 2 ranks have no more data"},
                   [&] { ddp.join([&] { steps(1 + world.rank()); }, {.throw_on_early_termination = true}); });
    expect_refusal({"join() is called within join()"}, [&] { ddp.join([&] { ddp.join([] {}); }); });
    EXPECT_THROW(ddp.join([&] { throw std::runtime_error("a loop that fails"); }), std::runtime_error);
    // One rank is in forward() (it has buffers to agree on), the other in backward().
    struct Norm : nn::Module {
      nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(2));
      Tensor forward(const Tensor& x) { return norm(x); }
    };
    DistributedDataParallel<Norm> other(std::make_shared<Norm>());
    const Tensor x = torch::arange(6.).view({3, 2});
    EXPECT_CONTAINS(message_of<Mismatch>([&] {
                      other.join([&] {
                        other.forward(x).square().sum().backward();
                        if (world.rank() == 0)
                          other.forward(x);
                        else
                          other.module()->forward(x).square().sum().backward();
                      });
                    }),
                    "rank 1 is in backward() where rank 0 is in forward()");
    steps(1);
  });
}

}  // namespace
}  // namespace muster::test
