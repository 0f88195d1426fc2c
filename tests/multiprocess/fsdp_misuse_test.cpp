// FullyShardedDataParallel: what is wrong in the training around it gets one sentence.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "comm/world/world_starter.h"
#include "multiprocess/fsdp_support.h"

namespace muster::test {
namespace {

constexpr char kNothing[] = "nothing was thrown";

// The call of forward() that one rank does not make.
enum class Misses { kTheFirstForward, kAnEvaluation };

// What the ranks but `missing` get when that one does not call forward(). Their timeout is short; one that is too short
// for this machine ends the preparation, or other ranks come too late as well, and then a longer one is tried. The rank
// that is missing waits until the others have ended, so that it is there all the time.
std::vector<std::string> what_others_get(const HostOfRank& hosts, const FsdpOptions& options, int missing,
                                         Misses misses, const std::vector<size_t>& who_name_it) {
  for (std::chrono::milliseconds timeout{300};; timeout *= 4) {
    std::vector<std::string> got(hosts.size());
    std::atomic<bool> too_short = false;
    std::latch others(static_cast<std::ptrdiff_t>(hosts.size()) - 1);
    const auto rank = [&](World& world) {
      at::set_num_threads(1);
      std::string& mine = got[static_cast<size_t>(world.rank())];
      std::optional<FullyShardedDataParallel<FsdpNet>> model;
      try {
        const auto net = make<FsdpNet>(7, {});
        model.emplace(net, options);
        if (misses == Misses::kAnEvaluation) {
          (*model)(fsdp_input(world.rank(), 0)).sum().backward();
          net->eval();
          (*model)(fsdp_input(world.rank(), 1));
        }
        barrier();
      } catch (const std::exception&) {
        too_short = true;
      }
      if (!too_short && world.rank() != missing) try {
          (*model)(fsdp_input(world.rank(), 2));
          mine = kNothing;
        } catch (const std::exception& error) {
          mine = error.what();
        }
      if (world.rank() != missing)
        others.count_down();
      else
        others.wait();
    };
    comm::WorldStarter(hosts).run_threads(static_cast<int>(hosts.size()), rank, {.timeout = timeout});
    const bool is_alone = std::all_of(who_name_it.begin(), who_name_it.end(), [&](size_t rank) {
      return contains(got[rank], text("waiting for rank ", missing, " "));
    });
    if ((!too_short && is_alone) || timeout > std::chrono::seconds(60)) return got;
  }
}

// The messages also say in what the others wait. In an evaluation with kFullShard it is a gather: then the ranks beside
// the missing one name it, and the others name those.
TEST(FsdpMisuse, ForwardOnSomeRanksOnlyNamesTheRankThatIsMissing) {
  struct Case {
    HostOfRank hosts;
    FsdpOptions options;
    Misses misses;
    std::string operation, group;
    std::vector<size_t> who_name_it;
  };
  const std::string world = "group 'world'";
  const std::vector<Case> cases = {
      {{"a", "a", "a"}, {}, Misses::kTheFirstForward, "all_reduce", world, {0, 2}},
      {{"a", "a", "b", "b"}, {}, Misses::kTheFirstForward, "all_reduce", world, {0, 2, 3}},
      {{"a", "a", "b", "b"}, full(), Misses::kTheFirstForward, "all_reduce", world, {0, 2, 3}},
      {{"a", "b"}, full(), Misses::kAnEvaluation, "all_to_all", "group 'parameters between hosts'", {0}},
      {{"a", "a", "b", "b"}, full(), Misses::kAnEvaluation, "all_reduce", "group 'parameters on one host'", {0}}};
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const auto got = what_others_get(cases[i].hosts, cases[i].options, 1, cases[i].misses, cases[i].who_name_it);
    for (const size_t rank : cases[i].who_name_it) {
      EXPECT_CONTAINS(got[rank], "waiting for rank 1 ");
      EXPECT_CONTAINS(got[rank], cases[i].operation + " of ");
      EXPECT_CONTAINS(got[rank], cases[i].group);
    }
    for (size_t rank = 0; rank < got.size(); ++rank) EXPECT_NE(got[rank], kNothing) << "rank " << rank;
  }
}

// --- optimizers ---

// Parameters keep their shapes, so an optimizer made before sharding fits. States of another model do not: step()
// throws, on each rank for what it owns.
TEST(FsdpMisuse, StatesOfTheWrongSizeAreRefusedByStep) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    torch::optim::AdamW optimizer(net->parameters());
    for (auto& parameter : net->parameters()) {
      auto state = std::make_unique<torch::optim::AdamWParamState>();
      state->step(1);
      state->exp_avg(torch::zeros({3, 7}));
      state->exp_avg_sq(torch::zeros({3, 7}));
      optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
    auto model = fully_shard(net);
    model(fsdp_input(world.rank(), 0)).sum().backward();
    try {
      optimizer.step();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_CONTAINS(error.what(), "The size of tensor a (7) must match the size of tensor b");
    }
    barrier();
  });
}

// Adagrad makes its states when it is constructed: of a module without memory, they have none.
TEST(FsdpMisuse, AdagradOfAModuleWithoutMemory) {
  on_ranks(2, [](World& world) {
    const auto net = on_meta([] { return std::make_shared<FsdpNet>(); });
    torch::optim::Adagrad optimizer(net->parameters());
    auto model = fully_shard(net, {.init = [](const std::string&, Tensor values, at::Generator random) {
                               const torch::NoGradGuard no_grad;
                               values.normal_(0, 0.1, random);
                             }});
    model(fsdp_input(world.rank(), 0)).sum().backward();
    try {
      optimizer.step();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_CONTAINS(error.what(), "meta");
    }
    barrier();
  });
}

}  // namespace
}  // namespace muster::test
