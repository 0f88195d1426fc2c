// Optimizers whose states are divided among the ranks. Snapshots of them are in zero_redundancy_snapshot_test.cpp.
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>

#include <memory>

#include "base/text.h"
#include "multiprocess/zero_redundancy_fixture.h"
#include "muster/optim/grad_scaler.h"
#include "muster/optim/lbfgs.h"

namespace muster::test::divided_states {
namespace {

const std::vector<HostOfRank> kGroups = {{"a"}, {"a", "a"}, {"a", "b", "a"}};

template <typename Inner, typename Options>
void expect_steps_of_the_class(const HostOfRank& hosts, const Options& options, bool in_backward) {
  SCOPED_TRACE(text(typeid(Inner).name(), " on ", hosts.size(), " ranks", in_backward ? " in backward()" : ""));
  on_hosts(hosts, [&](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    const DdpOptions buckets{.bucket_cap_mb = 0.1, .first_bucket_cap_mb = 0.01};
    Ddp<FsdpNet> ddp(net, buckets), of_other(other, buckets);
    Zero<Inner> zero(net->parameters(), options);
    Inner whole(other->parameters(), options);
    if (in_backward) ddp.register_comm_hook(zero.step_in_backward());
    for (int step = 0; step < 3; ++step) {
      zero.zero_grad();
      whole.zero_grad();
      backward(ddp, world, step);
      backward(of_other, world, step);
      if (in_backward) {
        EXPECT_FALSE(torch::equal(net->a->weight, other->a->weight));
      }
      for (const auto& item : net->named_parameters())  // both have the averages
        EXPECT_TRUE(torch::equal(item.value().grad(), other->named_parameters()[item.key()].grad())) << item.key();
      zero.step();
      whole.step();
      expect_equal(*net, *other);
    }
    expect_states_once(zero, world, whole.state().size());
  });
}

TEST(ZeroRedundancy, StepsAreThoseOfTheClassToTheBit) {
  for (const HostOfRank& hosts : kGroups)
    for (const bool in_backward : {false, true}) {
      expect_steps_of_the_class<topt::SGD>(hosts, SGDOptions(1e-2).momentum(0.9).weight_decay(0.1), in_backward);
      expect_steps_of_the_class<topt::AdamW>(hosts, AdamWOptions(1e-2), in_backward);
    }
  const HostOfRank hosts = {"a", "a", "b"};
  expect_steps_of_the_class<topt::SGD>(hosts, SGDOptions(1e-2), false);  // without states
  expect_steps_of_the_class<topt::Adam>(hosts, topt::AdamOptions(1e-2).amsgrad(true), false);
  expect_steps_of_the_class<topt::RMSprop>(hosts, topt::RMSpropOptions(1e-3).momentum(0.9).centered(true), false);
  expect_steps_of_the_class<topt::Adagrad>(hosts, topt::AdagradOptions(1e-2), true);
}

template <typename Net>
void expect_steps_on_a_model(bool in_backward) {
  on_ranks(2, [&](World& world) {
    const auto net = make<Net>(7, {}), other = make<Net>(7, {});
    Ddp<Net> ddp(net), of_other(other);
    const AdamWOptions options = AdamWOptions(1e-3);
    Zero<topt::AdamW> zero(net->parameters(), options);
    topt::AdamW whole(other->parameters(), options);
    if (in_backward) ddp.register_comm_hook(zero.step_in_backward());
    for (int step = 0; step < 2; ++step) {
      zero.zero_grad();
      whole.zero_grad();
      ddp(world.rank(), step).backward();
      of_other(world.rank(), step).backward();
      zero.step();
      whole.step();
    }
    expect_equal(*net, *other);
  });
}

TEST(ZeroRedundancy, Models) {
  expect_steps_on_a_model<Transformer>(false);
  expect_steps_on_a_model<Transformer>(true);  // with a parameter that is used twice
  expect_steps_on_a_model<Recurrent>(true);
  expect_steps_on_a_model<ResNet18>(true);
  expect_steps_on_a_model<WideConvolutions>(false);
}

// Options by group, a schedule, groups that come later, frozen parameters and some without a gradient.
TEST(ZeroRedundancy, GroupsAndSchedules) {
  on_ranks(3, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    for (auto* const of : {&net, &other}) {
      (*of)->a->bias.set_requires_grad(false);
      const torch::NoGradGuard no_grad;
      for (Tensor& parameter : (*of)->register_module("extra", nn::LayerNorm(nn::LayerNormOptions({3})))->parameters())
        parameter.fill_(0.1);
    }
    const DdpOptions with_unused{.find_unused_parameters = true};
    Ddp<FsdpNet> ddp(net, with_unused), of_other(other, with_unused);
    const auto first = net->named_parameters()["extra.weight"].clone(), frozen = net->a->bias.clone();
    const auto groups_of = [](FsdpNet& of) {
      std::vector<topt::OptimizerParamGroup> groups;
      groups.emplace_back(of.a->parameters());
      groups.emplace_back(of.b->parameters(), std::make_unique<SGDOptions>(SGDOptions(2e-3).weight_decay(0.1)));
      groups.emplace_back(of.named_children()["extra"]->parameters());
      return groups;
    };
    const SGDOptions options = SGDOptions(1e-2).momentum(0.9).weight_decay(0.01);
    Zero<topt::SGD> zero(groups_of(*net), options);
    topt::SGD whole(groups_of(*other), options);
    topt::StepLR schedule(zero, 2, 0.5), of_whole(whole, 2, 0.5);
    for (int step = 0; step < 5; ++step) {
      if (step == 2) {
        zero.add_param_group({net->c->parameters()});
        whole.add_param_group({other->c->parameters()});
      }
      zero.zero_grad();
      whole.zero_grad();
      backward(ddp, world, step);
      backward(of_other, world, step);
      zero.step();
      whole.step();
      schedule.step();
      of_whole.step();
      expect_equal(*net, *other);
    }
    EXPECT_TRUE(torch::equal(net->named_parameters()["extra.weight"], first));
    EXPECT_TRUE(torch::equal(net->a->bias, frozen));
    EXPECT_NO_THROW(zero.owner(net->c->weight));
    expect_refusal({"not a parameter of this"}, [&] { zero.owner(net->d->weight); });
  });
}

// Ranks with different numbers of batches: those without data own parameters as well.
TEST(ZeroRedundancy, Join) {
  on_ranks(3, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net), of_other(other);
    Zero<topt::AdamW> zero(net->parameters(), AdamWOptions(1e-3));
    topt::AdamW whole(other->parameters(), AdamWOptions(1e-3));
    const auto train = [&](Ddp<FsdpNet>& model, topt::Optimizer& optimizer, bool of_all) {
      model.join(
          [&] {
            for (int step = 0; step < 2 + world.rank(); ++step) {
              optimizer.zero_grad();
              backward(model, world, step);
              optimizer.step();
            }
          },
          {.divide_by_initial_world_size = of_all, .after_backward = [&] { optimizer.step(); }});
    };
    for (const bool of_all : {true, false}) {
      train(ddp, zero, of_all);
      train(of_other, whole, of_all);
      expect_equal(*net, *other);
      if (of_all) ddp.register_comm_hook(zero.step_in_backward());
    }
  });
}

TEST(ZeroRedundancy, AStepWithInfiniteGradientsIsNotMade) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net);
    Zero<topt::AdamW> zero(net->parameters(), AdamWOptions(1e-3));
    GradScaler scaler({.init_scale = 4});
    const auto before = copies(net->named_parameters());
    for (const bool is_infinite : {true, false}) {
      zero.zero_grad();
      const Tensor loss = ddp(fsdp_input(world.rank(), 0)).square().sum();
      scaler.scale(is_infinite && world.rank() == 1 ? loss * HUGE_VAL : loss).backward();
      EXPECT_EQ(scaler.step(zero), !is_infinite);
      scaler.update();
      for (const auto& item : net->named_parameters())
        EXPECT_EQ(torch::equal(item.value(), before[item.key()]), is_infinite) << item.key();
    }
  });
}

TEST(ZeroRedundancy, AStepThatThrowsLeavesTheOtherRanksInOrder) {
  on_ranks(2, [](World& world) {
    for (const bool in_backward : {false, true}) {
      const auto net = make<FsdpNet>(7, {});
      Ddp<FsdpNet> ddp(net);
      Zero<Failing> zero(net->parameters(), SGDOptions(1e-3));
      if (in_backward) ddp.register_comm_hook(zero.step_in_backward());
      const auto train = [&] {
        zero.zero_grad();
        backward(ddp, world, 0);
        zero.step();
      };
      zero.fails = world.rank() == 1;
      if (zero.fails) {
        EXPECT_THROW(train(), std::runtime_error);
      } else {
        train();
      }
      zero.fails = false;
      train();
      for (const Tensor& parameter : net->parameters()) {
        const Tensor of_first = parameter.detach().clone();
        broadcast(of_first);
        EXPECT_TRUE(torch::equal(of_first, parameter));
      }
    }
  });
}

TEST(ZeroRedundancy, AClosureIsCalledOnce) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net);
    Zero<topt::SGD> zero(net->parameters(), SGDOptions(1e-3));
    int calls = 0;
    const Tensor before = net->d->bias.detach().clone();
    const torch::NoGradGuard no_grad;
    const Tensor loss = zero.step([&] {
      ++calls;
      zero.zero_grad();
      const Tensor value = ddp(fsdp_input(world.rank(), 0)).square().sum();
      value.backward();
      return value;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_GT(loss.item<double>(), 0);
    EXPECT_FALSE(torch::equal(before, net->d->bias));
  });
}

// A backward() through a graph of before the step, on all ranks.
template <typename Inner>
void expect_no_new_values_in_an_old_graph(const auto& options) {
  on_ranks(2, [&](World& world) {
    const auto net = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net);
    Zero<Inner> zero(net->parameters(), options);
    const Tensor loss = ddp(fsdp_input(world.rank(), 0)).sum();
    loss.backward({}, /*retain_graph=*/true);
    zero.step();
    EXPECT_CONTAINS(message_of<c10::Error>([&] { loss.backward(); }), "modified by an inplace operation");
  });
}
TEST(ZeroRedundancy, AnOldGraphDoesNotUseNewValues) {
  expect_no_new_values_in_an_old_graph<topt::AdamW>(AdamWOptions(1e-3));
  expect_no_new_values_in_an_old_graph<topt::SGD>(SGDOptions(1e-3));
}

TEST(ZeroRedundancy, BadUseIsRefused) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    expect_refusal({"LBFGS cannot be"}, [&] { Zero<topt::LBFGS>(net->parameters(), topt::LBFGSOptions(1)); });
    expect_refusal({"LBFGS cannot be"}, [&] { Zero<muster::LBFGS>(net->parameters(), optim::LBFGSOptions()); });
    EXPECT_CONTAINS(message_of<Mismatch>([&] {
                      Zero<topt::SGD>({torch::ones({2 + world.rank()}), torch::ones({1})}, SGDOptions(1));
                    }),
                    "parameter 0 of group 0");
    const auto sharded = make<FsdpNet>(7, {});
    const auto model = fully_shard(sharded);
    expect_refusal({"belongs to a FullyShardedDataParallel"},
                   [&] { Zero<topt::SGD>(sharded->parameters(), SGDOptions(1)); });
    Zero<Failing> own(net->parameters(), SGDOptions(1));
    expect_refusal({"states of this optimizer's class are not known"}, [&] { own.consolidate(); });
    Zero<topt::SGD> zero(net->parameters(), SGDOptions(1));
    expect_refusal({"hook that averages is empty"}, [&] { zero.step_in_backward(nullptr); });
    Ddp<FsdpNet> ddp(net);
    ddp.register_comm_hook(Zero<topt::SGD>(net->parameters(), SGDOptions(1)).step_in_backward());
    expect_refusal({"step_in_backward() is the communication hook has ended"}, [&] { backward(ddp, world, 0); });
    const Group first = world.new_group({0});
    if (world.rank() == 1)
      expect_refusal({"not a member"}, [&] { Zero<topt::SGD>(net->parameters(), SGDOptions(1), {.group = first}); });
    barrier();
  });
}

// A gradient that is only this rank's changes nothing, if the parameter does not require one.
TEST(ZeroRedundancy, FrozenParametersWithGradients) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    Ddp<FsdpNet> ddp(net);
    Zero<topt::AdamW> zero(net->parameters(), AdamWOptions(1e-2));
    backward(ddp, world, 0);
    const auto before = copies(net->named_parameters());
    for (const Tensor& parameter : net->parameters()) parameter.set_requires_grad(parameter.dim() == 1);
    zero.step();
    for (const auto& item : net->named_parameters())
      EXPECT_EQ(torch::equal(item.value(), before[item.key()]), item.value().dim() != 1) << item.key();
  });
}

}  // namespace
}  // namespace muster::test::divided_states
