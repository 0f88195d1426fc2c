// PostLocalSgdOptimizer.
#include <torch/serialize.h>
#include <unistd.h>

#include <memory>
#include <sstream>
#include <stdexcept>

#include "base/text.h"
#include "multiprocess/zero_redundancy_fixture.h"

namespace muster::test::divided_states {
namespace {

TEST(PostLocalSgdOptimizerTest, SnapshotsHaveEachRanksOwn) {
  const fs::path folder = fs::path(testing::TempDir()) / text("post-local-sgd-", ::getpid());
  std::vector<std::vector<Tensor>> expected(2);
  for (const bool again : {false, true})
    on_ranks(2, [&](World& world) {
      const auto net = make<FsdpNet>(7, {});
      PostLocalSgdOptimizer<topt::SGD> local(net->parameters(), SGDOptions(1e-2).momentum(0.9),
                                             ModelAveragerOptions{.periods = {{3, {}}}, .warmup_steps = 1});
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("model", net, {.per_rank = true}).add("optimizer", local);
      EXPECT_EQ(snapshot.restore(), again ? 2 : 0);
      for (int step = again ? 2 : 0; step < 5; ++step) {
        local.zero_grad();
        net->forward(fsdp_input(world.rank(), step)).square().sum().backward();
        local.step();
        if (step == 1) snapshot.save(2);
      }
      auto& own = expected[static_cast<size_t>(world.rank())];
      const auto now = net->parameters();
      for (size_t i = 0; i < now.size(); ++i) {
        if (!again) own.push_back(now[i].detach().clone());
        EXPECT_TRUE(torch::equal(now[i], own[i])) << i;
      }
    });
  fs::remove_all(folder);
}

TEST(PostLocalSgdOptimizerTest, AveragesEveryFewSteps) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    const SGDOptions options = SGDOptions(1e-2).momentum(0.9);
    auto local = std::make_unique<PostLocalSgdOptimizer<topt::SGD>>(
        net->parameters(), options, ModelAveragerOptions{.periods = {{2, {}}}, .warmup_steps = 1});
    topt::SGD own(other->parameters(), options);
    const auto train = [&](int step) {
      local->zero_grad();
      own.zero_grad();
      for (auto* const of : {&net, &other}) (*of)->forward(fsdp_input(world.rank(), step)).square().sum().backward();
      local->step();
      own.step();
      if (step > 0 && step % 2 == 0)
        for (const Tensor& parameter : other->parameters()) all_reduce(parameter.detach(), {.op = ReduceOp::AVG});
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(torch::allclose(item.value(), other->named_parameters()[item.key()], 1e-6, 1e-8)) << item.key();
    };
    for (int step = 0; step < 3; ++step) train(step);
    std::stringstream archive;
    torch::save(*local, archive);
    local = std::make_unique<PostLocalSgdOptimizer<topt::SGD>>(
        net->parameters(), SGDOptions(1), ModelAveragerOptions{.periods = {{2, {}}}, .warmup_steps = 1});
    torch::load(*local, archive);
    EXPECT_EQ(local->averager().step(), 3);
    for (int step = 3; step < 6; ++step) train(step);

    // An archive of the class alone.
    std::stringstream of_class;
    torch::save(own, of_class);
    torch::load(*local, of_class);
    EXPECT_EQ(local->averager().step(), 0);
  });
}

// The other rank does not wait for it.
TEST(PostLocalSgdOptimizerTest, AStepThatThrowsTakesPartInTheAverage) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    PostLocalSgdOptimizer<topt::SGD> local(net->parameters(), SGDOptions(1e-2),
                                           ModelAveragerOptions{.periods = {{2, {}}}});
    for (int step = 0; step < 5; ++step) {
      local.zero_grad();
      const auto loss = [&] {
        if (world.rank() == 1 && step == 2) throw std::runtime_error("a batch that fails");
        const Tensor of = net->forward(fsdp_input(world.rank(), step)).square().sum();
        of.backward();
        return of;
      };
      if (world.rank() == 1 && step == 2)
        EXPECT_THROW(local.step(loss), std::runtime_error);
      else
        local.step(loss);
      EXPECT_EQ(local.averager().step(), step + 1);
    }
    for (const Tensor& parameter : net->parameters()) {
      const Tensor first = parameter.detach().clone();
      broadcast(first, 0);
      EXPECT_TRUE(torch::equal(first, parameter));
    }
  });
}

}  // namespace
}  // namespace muster::test::divided_states
