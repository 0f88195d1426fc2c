// DistributedDataParallel when backward() runs inside of backward(): reentrant checkpoints, and training inside of a
// node of another graph. What it computes is what one process computes with all ranks' data.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "muster/parallel/activation_checkpoint.h"
#include "muster/parallel/comm_hooks.h"

namespace muster::test {
namespace {

const ActivationCheckpointOptions kReentrant{.preserve_rng_state = false, .reentrant = true};
constexpr double kBytes = 1.0 / (1 << 20);
constexpr int64_t kWidth = 16, kRows = 3;
// Buckets of one parameter each, of a few, and one of all.
const std::vector<double> kBucketSizes = {16 * kBytes, 2000 * kBytes, 25};

// The middle layer runs twice, in two checkpoints.
struct Twice : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(kWidth, kWidth)),
             middle = register_module("middle", nn::Linear(kWidth, kWidth)),
             last = register_module("last", nn::Linear(kWidth, 2)),
             sometimes = register_module("sometimes", nn::Linear(kWidth, kWidth));
  struct How {
    bool checkpointed = true;
    bool last_too = false;  // so that the first gradients of all come in a backward() inside of the other
    int sometimes = 1;      // how often that layer runs
    int throws_in = -1;     // the block that throws in backward()
  };
  Tensor forward(Tensor x, const How& how) {
    x = torch::tanh(first(x));
    std::vector<nn::Linear> layers{middle, middle};
    layers.insert(layers.end(), static_cast<size_t>(how.sometimes), sometimes);
    layers.push_back(last);
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto block = [layer = layers[i].ptr(), throws = how.throws_in == static_cast<int>(i)](const Tensor& y) {
        if (throws && torch::GradMode::is_enabled()) throw std::runtime_error("in a block");
        return torch::tanh(layer->forward(y));
      };
      const bool in_checkpoint = how.checkpointed && (i + 1 < layers.size() || how.last_too);
      x = in_checkpoint ? activation_checkpoint(kReentrant, block, x) : block(x);
    }
    return x;
  }
};
const Twice::How kPlain{.checkpointed = false};
constexpr bool kWhetherLastToo[] = {false, true};

std::shared_ptr<Twice> make_net() {
  return make<Twice>(5, [](nn::Module& net) { net.to(torch::kDouble); });
}
Tensor rows(int rank, int step) { return drawn(rank, step, {kRows, kWidth}).to(torch::kDouble); }

const DdpOptions kEachApart{.bucket_cap_mb = 16 * kBytes, .first_bucket_cap_mb = 16 * kBytes};

// Adds to the gradients what all ranks' losses give on average.
void backward_alone(int ranks, const std::function<Tensor(int rank)>& loss) {
  for (int rank = 0; rank < ranks; ++rank) (loss(rank) / ranks).backward();
}
void expect_gradients_of(const Twice& alone, const Twice& net, const std::string& when) {
  for (const auto& item : net.named_parameters()) {
    const Tensor expected = alone.named_parameters()[item.key()].grad(), &got = item.value().grad();
    ASSERT_EQ(got.defined(), expected.defined()) << item.key() << ", " << when;
    if (!got.defined()) continue;
    EXPECT_LE(largest(got - expected), 1e-12) << item.key() << ", " << when;
  }
}

TEST(DdpReentrant, AParameterOfTwoCheckpoints) {
  for (const bool last_too : kWhetherLastToo)
    for (const double cap : kBucketSizes)
      for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, HostOfRank{"a", "a", "b"}})
        on_hosts(hosts, [&](World& world) {
          const auto alone = make_net(), net = make_net();
          DistributedDataParallel<Twice> ddp(net, {.bucket_cap_mb = cap, .first_bucket_cap_mb = cap});
          torch::optim::SGD of_all(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
          for (int step = 0; step < 4; ++step) {
            of_all.zero_grad();
            optimizer.zero_grad();
            if (step == 2) {  // gradients of no_sync() are added
              const auto guard = ddp.no_sync();
              ddp(rows(world.rank(), 10), Twice::How{.last_too = last_too}).square().sum().backward();
            }
            ddp(rows(world.rank(), step), Twice::How{.last_too = last_too}).square().sum().backward();
            backward_alone(world.world_size(), [&](int rank) {
              Tensor loss = alone->forward(rows(rank, step), kPlain).square().sum();
              if (step == 2) loss = loss + alone->forward(rows(rank, 10), kPlain).square().sum();
              return loss;
            });
            expect_gradients_of(*alone, *net, text("step ", step));
            of_all.step();
            optimizer.step();
          }
        });
}

// From the second backward() on, when it is known how many gradients come, buckets are averaged while it goes on.
TEST(DdpReentrant, BucketsAreAveragedMeanwhile) {
  on_ranks(2, [](World& world) {
    const auto net = make_net();
    DistributedDataParallel<Twice> ddp(net, kEachApart);
    std::vector<uint64_t> meanwhile;
    const auto operations = [&] { return world.group().stats().operations; };
    uint64_t before = 0;
    net->first->weight.register_hook([&](const Tensor&) {
      if (!meanwhile.empty()) {
        const auto deadline = patience();
        while (operations() == before && !deadline.passed()) std::this_thread::yield();
      }
      meanwhile.push_back(operations() - before);
    });
    for (int step = 0; step < 3; ++step) {
      before = operations();
      ddp(rows(world.rank(), step), Twice::How{.last_too = true}).sum().backward();
    }
    ASSERT_EQ(meanwhile.size(), 3u);
    EXPECT_EQ(meanwhile[0], 0u);
    EXPECT_GT(meanwhile[1], 0u);
    EXPECT_GT(meanwhile[2], 0u);
  });
}

// A layer that runs in other numbers of checkpoints in each step, and on each rank.
TEST(DdpReentrant, UnusedParameters) {
  on_ranks(2, [](World& world) {
    const std::vector<int> runs[] = {{0, 0}, {2, 0}, {1, 2}, {0, 1}, {2, 2}};
    for (const bool last_too : kWhetherLastToo)
      for (const bool find : {false, true}) {
        const auto alone = make_net(), net = make_net();
        DdpOptions options = kEachApart;
        options.find_unused_parameters = find;
        DistributedDataParallel<Twice> ddp(net, options);
        for (size_t step = 0; step < std::size(runs); ++step) {
          alone->zero_grad();
          net->zero_grad();
          const auto how = [&](int rank) {
            return Twice::How{.last_too = last_too, .sometimes = runs[step][static_cast<size_t>(rank)]};
          };
          const auto data = [&](int rank) { return rows(rank, static_cast<int>(step)); };
          const auto backward = [&] { ddp(data(world.rank()), how(world.rank())).sum().backward(); };
          if (!find && (how(0).sometimes == 0 || how(1).sometimes == 0)) {
            expect_refusal({"sometimes.weight"}, backward);
            continue;
          }
          backward();
          backward_alone(2, [&](int rank) {
            return alone->forward(data(rank), {.checkpointed = false, .sometimes = how(rank).sometimes}).sum();
          });
          expect_gradients_of(*alone, *net, text("step ", step));
        }
      }
  });
}

// How many gradients come is learned from the backward() calls before, also from one that was refused.
TEST(DdpReentrant, MoreGradientsThanBefore) {
  on_ranks(2, [](World& world) {
    for (const bool last_too : kWhetherLastToo) {
      const auto alone = make_net(), net = make_net();
      DistributedDataParallel<Twice> ddp(net, kEachApart);
      const auto backward = [&](int step, int runs) {
        alone->zero_grad();
        net->zero_grad();
        const Tensor loss = ddp(rows(world.rank(), step), Twice::How{.last_too = last_too, .sometimes = runs}).sum();
        backward_alone(2, [&](int rank) {
          return alone->forward(rows(rank, step), {.checkpointed = false, .sometimes = runs}).sum();
        });
        loss.backward();
        expect_gradients_of(*alone, *net, text(runs, " runs in step ", step));
      };
      backward(0, 2);
      expect_refusal({"got another gradient in one backward(), when those before had been averaged"},
                     [&] { backward(1, 3); });
      backward(2, 3);
      backward(3, 2);
      backward(4, 3);
    }
  });
}

// On one rank a function throws in its second call, when others have given gradients.
TEST(DdpReentrant, ASecondCallThatThrows) {
  on_ranks(2, [](World& world) {
    for (const bool last_too : kWhetherLastToo)
      for (int block = 0; block < 3; ++block) {
        const auto alone = make_net(), net = make_net();
        DistributedDataParallel<Twice> ddp(net, kEachApart);
        for (int step = 0; step < 4; ++step) {
          alone->zero_grad();
          net->zero_grad();
          const bool fails = step % 2 == 0;
          const Tensor loss =
              ddp(rows(world.rank(), step),
                  Twice::How{.last_too = last_too, .throws_in = fails && world.rank() == 1 ? block : -1})
                  .sum();
          if (!fails) {
            loss.backward();
            backward_alone(2, [&](int rank) { return alone->forward(rows(rank, step), kPlain).sum(); });
            expect_gradients_of(*alone, *net, text("step ", step));
          } else if (world.rank() == 1) {
            EXPECT_THROW(loss.backward(), std::runtime_error);
          } else {
            expect_refusal({"on some ranks", "first.weight"}, [&] { loss.backward(); });
          }
        }
      }
  });
}

TEST(DdpReentrant, WithinJoinAndWithAHook) {
  on_ranks(2, [](World& world) {
    for (const bool with_hook : {false, true}) {
      const auto alone = make_net(), net = make_net();
      DistributedDataParallel<Twice> ddp(net, kEachApart);
      if (with_hook) ddp.register_comm_hook(comm_hooks::all_reduce);
      ddp.join([&] {
        for (int step = 0; step < 3 - world.rank(); ++step) {
          alone->zero_grad();
          net->zero_grad();
          ddp(rows(world.rank(), step), Twice::How{.last_too = true}).sum().backward();
          backward_alone(2, [&](int rank) {
            const Tensor loss = alone->forward(rows(rank, step), kPlain).sum();
            return step < 3 - rank ? loss : 0 * loss;
          });
          expect_gradients_of(*alone, *net, text("step ", step));
        }
      });
    }
  });
}

// A checkpoint in a checkpoint.
TEST(DdpReentrant, TwoLevels) {
  on_ranks(2, [](World& world) {
    struct Nested : Twice {
      Tensor forward(Tensor x, bool checkpointed) {
        const auto call = [checkpointed](const auto& fn, const Tensor& y) {
          return checkpointed ? activation_checkpoint(kReentrant, fn, y) : fn(y);
        };
        const auto inner = [this](const Tensor& y) { return torch::tanh(middle(y)); };
        const auto outer = [inner, call](const Tensor& y) { return call(inner, call(inner, y)); };
        x = sometimes(call(outer, first(x)));
        return call([this, outer, call](const Tensor& y) { return last(call(outer, y)); }, x);
      }
    };
    const auto in_doubles = [](nn::Module& net) { net.to(torch::kDouble); };
    const auto alone = make<Nested>(5, in_doubles), net = make<Nested>(5, in_doubles);
    DistributedDataParallel<Nested> ddp(net, kEachApart);
    for (int step = 0; step < 3; ++step) {
      alone->zero_grad();
      net->zero_grad();
      ddp(rows(world.rank(), step), true).sum().backward();
      backward_alone(2, [&](int rank) { return alone->forward(rows(rank, step), false).sum(); });
      expect_gradients_of(*alone, *net, text("step ", step));
    }
  });
}

TEST(DdpReentrant, TheWholeForwardInACheckpoint) {
  on_ranks(2, [](World& world) {
    const auto alone = make_net(), net = make_net();
    DistributedDataParallel<Twice> ddp(net, kEachApart);
    for (int step = 0; step < 3; ++step) {
      alone->zero_grad();
      net->zero_grad();
      const Tensor x = rows(world.rank(), step).set_requires_grad(true);
      activation_checkpoint(
          kReentrant,
          [&](const Tensor& y) { return ddp(y, Twice::How{.checkpointed = step != 1, .last_too = step == 2}); }, x)
          .sum()
          .backward();
      backward_alone(2, [&](int rank) { return alone->forward(rows(rank, step), kPlain).sum(); });
      expect_gradients_of(*alone, *net, text("step ", step));
      EXPECT_TRUE(x.grad().defined());
    }
  });
}

// A node whose backward() calls what it was given.
struct Calls : torch::autograd::Function<Calls> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, std::function<void()>* fn) {
    context->saved_data["function"] = reinterpret_cast<int64_t>(fn);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const torch::AutoGradMode with_grad(true);
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["function"].toInt()))();
    return {gradients[0], Tensor()};
  }
};

// Each backward() averages when it ends, because its forward() was called in the same node.
TEST(DdpReentrant, TrainingInsideOfAnotherBackward) {
  on_ranks(2, [](World& world) {
    const auto alone = make_net(), net = make_net();
    DistributedDataParallel<Twice> ddp(net, kEachApart);
    torch::optim::SGD of_all(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    std::function<void()> train = [&] {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        of_all.zero_grad();
        ddp(rows(world.rank(), step), Twice::How{.checkpointed = step != 1, .last_too = step == 2}).sum().backward();
        backward_alone(2, [&](int rank) { return alone->forward(rows(rank, step), kPlain).sum(); });
        expect_gradients_of(*alone, *net, text("step ", step));
        optimizer.step();
        of_all.step();
      }
    };
    const Tensor x = torch::ones({2}).set_requires_grad(true);
    Calls::apply(x, &train).sum().backward();
    EXPECT_TRUE(x.grad().defined());
    optimizer.zero_grad();
    of_all.zero_grad();
    ddp(rows(world.rank(), 7), Twice::How{}).sum().backward();
    backward_alone(2, [&](int rank) { return alone->forward(rows(rank, 7), kPlain).sum(); });
    expect_gradients_of(*alone, *net, "afterwards");
  });
}

TEST(DdpReentrant, AGradientThatNoBackwardHadBeforeIsRefused) {
  on_ranks(2, [](World& world) {
    const auto alone = make_net(), net = make_net();
    DistributedDataParallel<Twice> ddp(net, kEachApart);
    const auto loss = [&](int step) { return ddp(rows(world.rank(), step), kPlain).sum(); };
    loss(0).backward();
    std::function<void()> another = [&] { net->last->weight.sum().backward(); };
    const Tensor x = rows(world.rank(), 1).set_requires_grad(true);
    const Tensor refused = ddp(Calls::apply(x, &another), kPlain).sum();  // when those of all layers have come
    expect_refusal({"parameter last.weight got a second gradient in one backward()"}, [&] { refused.backward(); });
    net->zero_grad();
    loss(2).backward();
    backward_alone(2, [&](int rank) { return alone->forward(rows(rank, 2), kPlain).sum(); });
    expect_gradients_of(*alone, *net, "afterwards");
  });
}

// Where each parameter is in one checkpoint.
template <template <typename> typename Parallel>
void expect_sharded_steps(const HostOfRank& hosts) {
  struct Net : FsdpNet {
    Tensor forward(Tensor x, bool checkpointed) {
      x = torch::relu(a(x));
      for (const nn::Linear& each : {b, c, d}) {
        const auto block = [layer = each.ptr()](const Tensor& y) { return torch::tanh(layer->forward(y)); };
        x = checkpointed ? activation_checkpoint(kReentrant, block, x) : block(x);
      }
      return x;
    }
  };
  on_hosts(hosts, [&](World& world) {
    const auto trained = [&](bool checkpointed) {
      const auto net = make<Net>(7, {});
      Parallel<Net> model(net, {.bucket_cap_mb = 1e-3, .first_bucket_cap_mb = 1e-3});
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        model(fsdp_input(world.rank(), step), checkpointed).square().sum().backward();
        optimizer.step();
      }
      model.gather();
      const auto values = copies(net->named_parameters());
      barrier();  // all have read them
      return values;
    };
    const auto plain = trained(false), checkpointed = trained(true);
    for (const auto& item : plain)
      EXPECT_TRUE(torch::allclose(item.value(), checkpointed[item.key()], 1e-5, 1e-7)) << item.key();
  });
}
TEST(DdpReentrant, FullySharded) { expect_sharded_steps<FullyShardedDataParallel>({"a", "a"}); }
TEST(DdpReentrant, FullyShardedOverHosts) { expect_sharded_steps<FullyGathered>({"a", "b"}); }

}  // namespace
}  // namespace muster::test
