// DdpOptions::reproducible with synchronized batch norms: a step is that of one process with the global batch, and the
// same to the bit on every number of ranks.
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "multiprocess/reproducible_fixture.h"
#include "multiprocess/reproducible_layers.h"
#include "multiprocess/sync_batch_norm_fixture.h"
#include "muster/optim/autocast.h"

namespace muster::test::batch_norms {
namespace {

Tensor label_of_shard(int shard, int step) { return words(shard, step, {3}, 4); }

// Ordinary batch norms among synchronized ones, dropout, a block that is computed again, a weight that is used twice,
// and hooks that read parameters.
struct Images : nn::Module {
  nn::Conv2d first = register_module("first", nn::Conv2d(nn::Conv2dOptions(2, 8, 3).padding(1))),
             second = register_module("second", nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1)));
  SyncBatchNorm whole{nullptr}, last{nullptr};
  nn::BatchNorm2d shards_own = register_module("shards_own", nn::BatchNorm2d(8)),
                  converted =
                      register_module("converted", nn::BatchNorm2d(nn::BatchNormOptions(8).track_running_stats(false)));
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.3));
  nn::Linear out = register_module("out", nn::Linear(8, 5));
  at::ScalarType dtype;
  bool autocast;
  Images(const MixedPrecision& precision, bool uses_autocast)
      : dtype(precision.param_dtype.value_or(at::kFloat)), autocast(uses_autocast) {
    whole = register_module("whole", SyncBatchNorm(nn::BatchNormOptions(8)));
    last = register_module("last", SyncBatchNorm(nn::BatchNormOptions(8).track_running_stats(false)));
    for (const Tensor& weight : {first->weight, second->weight, out->weight})
      weight.register_hook(
          [weight](const Tensor& gradient) { return gradient + (0.01 * weight).to(gradient.scalar_type()); });
  }
  Tensor forward(const Tensor& sample) {
    std::optional<Autocast> fewer_bits;
    if (autocast) fewer_bits.emplace(at::kBFloat16);
    const Tensor x =
        torch::sin(torch::arange(2 * 8 * 8, torch::kFloat).view({1, 2, 8, 8}) * 0.1 * (sample.view({-1, 1, 1, 1}) + 1));
    const auto block = [this](const Tensor& y) { return dropout(shards_own(second(whole(y)).relu())); };
    const Tensor y = activation_checkpoint(block, first(x.to(dtype)));
    const Tensor z = second(last(converted(second(y).relu()) + second(-y)));  // under Autocast, before and after a norm
    return torch::cross_entropy_loss(out(z.mean({2, 3})).to(torch::kFloat), sample % 5);
  }
};

// Trains, and returns the hash of parameters and buffers, and the losses.
std::string trained(World& world, int steps, const MixedPrecision& precision, bool autocast) {
  torch::manual_seed(5 + world.rank());  // rank 0's parameters count; the rest is not to depend on it
  at::set_num_threads(1 + world.world_size() % 2);
  std::thread([&] { at::set_num_threads(1 + world.world_size()); }).join();  // a loader's, for example
  const auto net = std::make_shared<Images>(precision, autocast);
  EXPECT_EQ(convert_sync_batchnorm(*net->converted), 1U);
  DistributedDataParallel<Images> ddp(
      net, {.reproducible = {.shards = kReproducibleShards, .seed = 3}, .mixed_precision = precision});
  torch::optim::Adam optimizer(net->parameters(), 0.01);
  std::string losses;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    losses += text(
        " ", ddp.backward_by_shards(
                    static_cast<uint64_t>(step),
                    [&](int shard) { return ddp->forward((torch::arange(kRowsOfShard) * (shard + 1) + step) % 40); })
                 .item<double>());
    optimizer.step();
  }
  EXPECT_FALSE(torch::equal(net->shards_own->running_mean, torch::zeros({8})));
  return hash_of(*net) + losses;
}

std::string in_ranks(const HostOfRank& hosts, int steps, const MixedPrecision& precision = {}, bool autocast = false) {
  return same_words(in_processes(hosts, [&](World& world) { return trained(world, steps, precision, autocast); }));
}

TEST(ReproducibleProcess, SynchronizedBatchNorms) {
  const int steps = full_run() ? 200 : 4;
  const std::string alone = in_ranks({"a"}, steps);
  for (const size_t n : {2, 4, 8}) EXPECT_EQ(in_ranks(HostOfRank(n, "a"), steps), alone) << n;
  EXPECT_EQ(in_ranks({"a", "b", "a", "b"}, steps), alone);
  const MixedPrecision half{.param_dtype = at::kBFloat16};
  EXPECT_EQ(in_ranks(HostOfRank(8, "a"), 2, half), in_ranks({"a"}, 2, half));
  EXPECT_EQ(in_ranks(HostOfRank(8, "a"), 2, {}, true), in_ranks({"a"}, 2, {}, true));
}

const Prepare kDoubles = [](nn::Module& net) { net.to(torch::kDouble); };

// As one process with all shards as one batch: parameters, running statistics, loss.
void expect_steps_of_the_whole_batch(const HostOfRank& hosts,
                                     const std::optional<ActivationCheckpointOptions>& checkpoint) {
  SCOPED_TRACE(testing::PrintToString(hosts));
  at::set_num_threads(1);
  const auto before = copies(make<SmallResNet>(7, kDoubles)->named_parameters());
  const auto alone = make<SmallResNet>(7, kDoubles);
  torch::optim::SGD sgd_alone(alone->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> images, labels;
    for (int shard = 0; shard < kShards; ++shard) {
      images.push_back(image_of(shard, step));
      labels.push_back(label_of_shard(shard, step));
    }
    sgd_alone.zero_grad();
    const Tensor loss = torch::cross_entropy_loss(alone->forward(torch::cat(images)), torch::cat(labels));
    loss.backward();
    losses.push_back(loss.item<double>());
    sgd_alone.step();
  }
  on_hosts(hosts, [&](World& world) {
    const auto net = make<SmallResNet>(7 + static_cast<uint64_t>(world.rank()), kDoubles);
    net->checkpoint = checkpoint;
    DistributedDataParallel<SmallResNet> ddp(net, by_shards());
    EXPECT_EQ(convert_sync_batchnorm(net), kNorms);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      const Tensor loss = ddp.backward_by_shards(static_cast<uint64_t>(step), [&](int shard) {
        return torch::cross_entropy_loss(ddp->forward(image_of(shard, step)), label_of_shard(shard, step));
      });
      EXPECT_NEAR(loss.item<double>(), losses[static_cast<size_t>(step)], 1e-10);
      sgd.step();
    }
    test::expect_close(*net, *alone, before, {.apart = 1e-9});
    if (checkpoint) return;  // updates running statistics twice
    const auto buffers = alone->named_buffers();
    for (const auto& item : net->named_buffers())
      expect_close(item.value().to(torch::kDouble), buffers[item.key()].to(torch::kDouble), 1e-11, item.key().c_str());
  });
}

TEST(Reproducible, SynchronizedBatchNormsSeeTheGlobalBatch) {
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a"}, HostOfRank{"a", "b", "b", "a"}})
    expect_steps_of_the_whole_batch(hosts, std::nullopt);
  expect_steps_of_the_whole_batch({"a", "a"}, kNoRandomNumbers);
}

TEST(Reproducible, AShardThatFailsWhereOthersWaitInABatchNorm) {
  enum class Where { kBefore, kBetween, kInBackward, kAfter };
  for (const int ranks : {1, 2, 4})
    for (const Where where : {Where::kBefore, Where::kBetween, Where::kInBackward, Where::kAfter})
      on_ranks(ranks, [&](World& world) {
        SCOPED_TRACE(text(ranks, " ranks, ", static_cast<int>(where)));
        DistributedDataParallel<Layers> ddp(make_layers(), by_shards());
        const int failing = 2 * ranks / kShards;  // the rank of shard 2
        const auto step = [&] {
          ddp.backward_by_shards(0, [&](int shard) {
            const auto fail_at = [shard, where](Where here) {
              if (shard == 2 && here == where) throw std::out_of_range("shard 2 has no data");
            };
            fail_at(Where::kBefore);
            Tensor y = ddp->narrow(ddp->a(Layers::input(shard)));
            fail_at(Where::kBetween);
            y.register_hook([fail_at](const Tensor& gradient) {
              fail_at(Where::kInBackward);
              return gradient;
            });
            const Tensor loss = y.pow(3).sum() + ddp->wide(ddp->b(Layers::input(shard))).pow(3).sum();
            fail_at(Where::kAfter);
            return loss + ddp->again->weight.sum();
          });
        };
        if (world.rank() == failing)
          EXPECT_THROW(step(), std::out_of_range);
        else
          expect_refusal({text("rank ", failing, " could not run the function of backward_by_shards()")}, step);
        expect_usual_step(ddp);
      });
}

TEST(Reproducible, AShardThatFailsAmongBatchNormsInMixedPrecision) {
  on_ranks(2, [](World&) {
    DdpOptions options = by_shards();
    options.mixed_precision.param_dtype = torch::kBFloat16;
    DistributedDataParallel<Layers> ddp(make_layers(), options);
    const auto dtype = [&] { return (ddp->a->weight + 0).scalar_type(); };
    const auto step = [&](int failing) {
      ddp.backward_by_shards(0, [&](int shard) {
        const Tensor x = Layers::input(shard).to(torch::kBFloat16);
        EXPECT_EQ(dtype(), torch::kBFloat16);
        const Tensor y = ddp->narrow(ddp->a(x)) + ddp->again(x.slice(1, 1));
        EXPECT_EQ(dtype(), torch::kBFloat16);
        if (shard == failing) throw InvalidArgument("no loss");
        const Tensor z = ddp->wide(ddp->b(x));
        // In backward(), while other shards of the rank are in forward().
        z.register_hook([dtype](const Tensor&) { EXPECT_EQ(dtype(), torch::kFloat); });
        return y.to(torch::kFloat).pow(3).sum() + z.to(torch::kFloat).pow(3).sum();
      });
      EXPECT_EQ(dtype(), torch::kFloat);
    };
    for (const int failing : {0, 1}) {  // shards of one rank
      EXPECT_THROW(step(failing), InvalidArgument);
      EXPECT_EQ(dtype(), torch::kFloat);
    }
    step(-1);
    step(-1);
  });
}

// A function that catches what ends it keeps nobody waiting.
TEST(Reproducible, AFunctionThatGoesOnWhenAnotherShardHasFailed) {
  on_ranks(1, [](World&) {
    DistributedDataParallel<Layers> ddp(make_layers(), by_shards(2));
    int aborted = 0;
    EXPECT_THROW(ddp.backward_by_shards(0,
                                        [&](int shard) {
                                          if (shard == 1) throw std::out_of_range("no data");
                                          for (int i = 0; i < 3; ++i) try {
                                              ddp->forward(shard);
                                            } catch (const Aborted&) {
                                              ++aborted;
                                            }
                                          return torch::ones({}, torch::requires_grad());
                                        }),
                 std::out_of_range);
    EXPECT_EQ(aborted, 3);
    expect_usual_step(ddp);
  });
}

TEST(Reproducible, ShardsThatDifferInTheirBatchNorms) {
  for (const int ranks : {1, 2, 4})
    on_ranks(ranks, [](World&) {
      DistributedDataParallel<Layers> ddp(make_layers(), by_shards());
      const auto step = [&](const std::function<Tensor(int shard, const Tensor& x)>& loss) {
        return [&ddp, loss] { ddp.backward_by_shards(0, [&](int s) { return loss(s, Layers::input(s)).sum(); }); };
      };
      expect_refusal(
          {"waits in the batch norm of wide.", " with 13 values", "waits in the batch norm of narrow.",
           " with 7 values", "the same synchronized batch norms"},
          step([&](int shard, const Tensor& x) { return shard == 3 ? ddp->wide(ddp->b(x)) : ddp->narrow(ddp->a(x)); }));
      expect_refusal({"waits in the batch norm of narrow.", "waits in the batch norm of again."},
                     step([&](int shard, const Tensor& x) {
                       return shard == 2 ? ddp->again(ddp->a(x)) : ddp->narrow(ddp->a(x));
                     }));
      expect_refusal({"waits in the batch norm of narrow.", " with 7 values, while another has computed everything"},
                     step([&](int shard, const Tensor& x) { return shard == 1 ? ddp->a(x) : ddp->narrow(ddp->a(x)); }));
      expect_refusal({" with 6 values, while another has computed everything"},  // in backward()
                     step([&](int shard, const Tensor& x) {
                       const Tensor y = ddp->narrow(ddp->a(x));
                       return (shard == 0 ? y.detach() : y) + ddp->a->bias;
                     }));
      expect_usual_step(ddp);
    });
}

TEST(Reproducible, BadUseOfBatchNormsIsOneSentence) {
  on_ranks(2, [](World& world) {
    {
      const Group other = world.new_group({0, 1});
      DistributedDataParallel<Layers> ddp(make_layers(other), by_shards());
      expect_refusal({"is not that of its DistributedDataParallel"},
                     [&] { ddp.backward_by_shards(0, [&](int shard) { return ddp->forward(shard); }); });
    }
    struct Ordinary : nn::Module {
      nn::Linear a = register_module("a", nn::Linear(4, 3));
    };
    DistributedDataParallel<Layers> ddp(make_layers(), by_shards());
    DistributedDataParallel<Ordinary> ordinary(std::make_shared<Ordinary>(), by_shards());
    const auto another = make_layers();
    expect_refusal({"a synchronized batch norm of another module"}, [&] {
      ordinary.backward_by_shards(0,
                                  [&](int shard) { return another->narrow(ordinary->a(Layers::input(shard))).sum(); });
    });
    expect_refusal({"a synchronized batch norm of another module"}, [&] {
      ddp.backward_by_shards(0, [&](int shard) { return ddp->forward(shard) + another->forward(shard); });
    });
    expect_refusal({"has no create_graph for a synchronized batch norm"}, [&] {
      ddp.backward_by_shards(0, [&](int shard) {
        const Tensor x = Layers::input(shard).set_requires_grad(true), y = ddp->narrow(ddp->a(x)).pow(3).sum();
        return torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true)[0].square().sum();
      });
    });
    Tensor of_first;
    expect_refusal({"computed for another shard"}, [&] {
      ddp.backward_by_shards(0, [&](int shard) {
        const Tensor y = ddp->narrow(ddp->a(Layers::input(shard)));
        if (shard % 2 == 1) of_first.backward();
        of_first = y.pow(3).sum();
        return of_first + ddp->forward(shard);
      });
    });
    expect_usual_step(ddp);
    Tensor kept;
    ddp.backward_by_shards(0, [&](int shard) {
      kept = ddp->forward(shard);
      return ddp->forward(shard);
    });
    expect_refusal({"comes after that of backward_by_shards()"}, [&] { kept.backward(); });
  });
}

// Norms that have nothing but weights, which operators read as copies.
TEST(Reproducible, BatchNormsWithoutStatisticsInFewerBits) {
  struct Net : nn::Module {
    nn::Linear a = register_module("a", nn::Linear(4, 3));
    nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(nn::BatchNormOptions(3).track_running_stats(false)));
  };
  std::vector<Tensor> gradients;
  for (const int ranks : {1, 2, 4})
    on_ranks(ranks, [&](World& world) {
      const auto net = std::make_shared<Net>();
      net->to(torch::kDouble);
      const torch::NoGradGuard values_only;
      for (Tensor& parameter : net->parameters())
        parameter.copy_(torch::cos(torch::arange(1., parameter.numel() + 1)).view(parameter.sizes()));
      DdpOptions options = by_shards();
      options.mixed_precision.param_dtype = torch::kFloat;
      DistributedDataParallel<Net> ddp(net, options);
      EXPECT_EQ(convert_sync_batchnorm(*net), 1U);
      const torch::AutoGradMode with_gradients(true);
      ddp.backward_by_shards(
          0, [&](int shard) { return net->norm(net->a(Layers::input(shard).to(torch::kFloat))).pow(3).sum(); });
      if (world.rank() == 0) gradients.push_back(net->a->weight.grad().clone());
    });
  for (const Tensor& gradient : gradients) {
    EXPECT_EQ(gradient.scalar_type(), torch::kDouble);
    EXPECT_TRUE(torch::equal(gradient, gradients[0]));
    EXPECT_GT(gradient.abs().max().item<double>(), 0);
  }
}

}  // namespace
}  // namespace muster::test::batch_norms
