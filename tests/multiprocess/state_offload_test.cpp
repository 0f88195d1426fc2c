// Optimizer states in files: the same results, without the memory.
#include "muster/parallel/state_offload.h"

#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;
namespace topt = torch::optim;

using MadeOptimizer = std::unique_ptr<topt::Optimizer>;
using Maker = std::function<MadeOptimizer(std::vector<Tensor>)>;

struct Case {
  const char* name;
  Maker make;
  int tensors;  // of each parameter
};
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"Adam", [](auto p) { return std::make_unique<topt::Adam>(p, topt::AdamOptions(1e-2).amsgrad(true)); }, 3},
      {"AdamW", [](auto p) { return std::make_unique<topt::AdamW>(p, topt::AdamWOptions(1e-2)); }, 2},
      {"RMSprop",
       [](auto p) {
         return std::make_unique<topt::RMSprop>(p, topt::RMSpropOptions(1e-3).momentum(0.9).centered(true));
       },
       3},
      {"SGD",
       [](auto p) { return std::make_unique<topt::SGD>(p, topt::SGDOptions(1e-3).momentum(0.9).dampening(0.1)); }, 1},
      {"Adagrad", [](auto p) { return std::make_unique<topt::Adagrad>(p, topt::AdagradOptions(1e-2)); }, 1},
  };
  return all;
}

class StateOffloadTest : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder); }
  void TearDown() override { fs::remove_all(folder); }
  const fs::path folder = fs::path(testing::TempDir()) / text("state-offload-", ::getpid());
};

// Sharded on two hosts, and alone.
TEST_F(StateOffloadTest, StepsAreTheSameToTheBit) {
  for (const Case& each : cases())
    for (const HostOfRank& hosts : {HostOfRank{"a"}, kTwoEach}) {
      SCOPED_TRACE(text(each.name, " on ", hosts.size()));
      on_hosts(hosts, [&](World& world) {
        const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
        auto model = fully_shard(net), expected = fully_shard(other);
        const MadeOptimizer optimizer = each.make(model.owned_parameters()),
                            plain = each.make(expected.owned_parameters());
        StateOffload offload(*optimizer, {.folder = folder});
        const auto train = [&](auto& with, topt::Optimizer& by, const std::function<void()>& step, int first) {
          for (int i = first; i < first + 3; ++i) {
            by.zero_grad();
            with.forward(fsdp_input(world.rank(), i)).square().sum().backward();
            step();
          }
          with.synchronize();
        };
        size_t large = 0;
        for (const auto& parameter : model.owned_parameters())
          if (parameter.nbytes() >= 64 << 10) large += parameter.nbytes();
        const bool at_first = each.name != std::string("SGD");
        EXPECT_EQ(offload.bytes(), at_first ? large * static_cast<size_t>(each.tensors) : 0);
        train(
            model, *optimizer, [&] { offload.step(); }, 0);
        train(
            expected, *plain, [&] { plain->step(); }, 0);
        EXPECT_EQ(offload.bytes(), large * static_cast<size_t>(each.tensors));
        expect_equal(*net, *other);
        EXPECT_TRUE(fs::is_empty(folder));  // the files have no names
        model.synchronize();

        // A snapshot restores states where they are.
        Snapshot snapshot({.folder = folder / each.name / text(hosts.size()), .default_generator = false});
        snapshot.add("optimizer", *optimizer);
        EXPECT_EQ(snapshot.restore(), 0);
        snapshot.save(3);
        const size_t before = offload.bytes();
        snapshot.restore();
        EXPECT_EQ(offload.bytes(), before);
        train(
            model, *optimizer, [&] { offload.step(); }, 3);
        train(
            expected, *plain, [&] { plain->step(); }, 3);
        EXPECT_EQ(offload.bytes(), large * static_cast<size_t>(each.tensors));
        expect_equal(*net, *other);
        model.synchronize();
      });
      fs::remove_all(folder / each.name);
    }
}

TEST_F(StateOffloadTest, AFolderThatCannotBeUsedIsNamed) {
  const Tensor parameter = torch::ones({1 << 20}, torch::requires_grad());
  topt::AdamW adam({parameter});
  EXPECT_CONTAINS(message_of<Unavailable>([&] { StateOffload(adam, {.folder = folder / "none"}); }), "does not exist");
  EXPECT_CONTAINS(message_of<Unavailable>([&] { StateOffload(adam, {.folder = "/proc"}); }), "/proc");
  EXPECT_TRUE(adam.state().empty());
  nn::Embedding table(nn::EmbeddingOptions(40'000, 2).sparse(true));
  topt::SGD of_table(table->parameters(), topt::SGDOptions(0.1).momentum(0.9));
  StateOffload sparse(of_table, {.folder = folder});
  table(torch::tensor({1, 2})).sum().backward();
  sparse.step();
  EXPECT_EQ(sparse.bytes(), 0u);
  const Tensor small = torch::ones({10}, torch::requires_grad());
  topt::AdamW of_small({small});
  StateOffload offload(of_small, {.folder = folder});
  small.sum().backward();
  offload.step();
  EXPECT_EQ(offload.bytes(), 0u);
}

// 64 MiB of parameters, and twice as much of states, where 40 MiB more may be taken.
using StateOffloadProcess = StateOffloadTest;
TEST_F(StateOffloadProcess, ALimitOfMemoryThatTheStatesDoNotFit) {
  ForkedRanks ranks(2, [&](int rank) {
    const bool offloads = rank == 0;
    at::set_num_threads(1);
    std::vector<Tensor> parameters;
    for (int i = 0; i < 16; ++i) {
      parameters.push_back(torch::ones({1 << 20}, torch::requires_grad()));
      parameters.back().mutable_grad() = torch::ones({1 << 20});
    }
    limit_private_memory(size_t{40} << 20);
    topt::AdamW adam(parameters, topt::AdamWOptions(1e-3));
    if (!offloads) {
      EXPECT_ANY_THROW(adam.step());
      return std::string("too much");
    }
    StateOffload offload(adam, {.folder = folder});
    for (int step = 0; step < 2; ++step) offload.step();
    EXPECT_EQ(offload.bytes(), size_t{128} << 20);
    EXPECT_LT(parameters[15][5].item<float>(), 1);
    return std::string("done");
  });
  const auto ends = ranks.wait_all(Deadline::after(kPatience));
  EXPECT_EQ(ends[0].said, "done");
  EXPECT_EQ(ends[1].said, "too much");
}

}  // namespace
}  // namespace muster::test
