// Snapshots of sharded models as files: Python reads them, and those of another model are refused.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "support/ask_python.h"
#include "support/temporary_folder.h"

namespace muster::test {
namespace {

struct Narrow : nn::Module {
  explicit Narrow(int64_t width = 24) {
    first = register_module("first", nn::Linear(12, width));
    second = register_module("second", nn::Linear(width, 20));
    third = register_module("third", nn::Linear(20, 5));
  }
  Tensor forward(const Tensor& x) { return third(torch::relu(second(torch::relu(first(x))))); }
  nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};

// Two weights of more than 64 KiB: smaller ones are all in rank 0's file.
struct Large : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(12, 2000)),
             second = register_module("second", nn::Linear(2000, 10));
  Tensor forward(const Tensor& x) { return second(torch::relu(first(x))); }
};

// One step, so that nothing is as it was made.
template <typename Model>
void take_a_step(Model& model, torch::optim::Optimizer& optimizer, const World& world) {
  model(fsdp_input(world.rank(), 0)).square().sum().backward();
  optimizer.step();
}

std::vector<double> numbers_in(const Tensor& tensor) {
  const Tensor values = tensor.detach().to(torch::kDouble).contiguous();
  return {values.data_ptr<double>(), values.data_ptr<double>() + values.numel()};
}

// With the safetensors library, if Python has it. Each rank writes what it owns into a file of its own; all files
// together have each parameter once, and what the optimizer keeps for it.
TEST(FsdpSnapshotFiles, PythonReadsTheShards) {
  const TemporaryFolder folder;
  std::vector<std::string> questions;
  std::vector<std::vector<double>> expected;
  for (const auto& [gathers, sharded] : {std::pair(false, true), {true, true}, {false, false}, {true, false}}) {
    SCOPED_TRACE(text(gathers, sharded));
    const auto own = folder / text(gathers ? "gathered" : "shared", sharded);
    std::map<std::string, std::vector<double>> all, states;
    std::mutex states_mutex;
    on_hosts(
        gathers ? HostOfRank{"a", "b"} : HostOfRank{"a", "a"}, [&, gathers = gathers, sharded = sharded](World& world) {
          const auto net = make<Large>(7, {});
          auto model = fully_shard(net, gathers ? full() : FsdpOptions{});
          torch::optim::AdamW optimizer(net->parameters(), 1e-2);
          Snapshot snapshot({.folder = own, .sharded = sharded, .default_generator = false});
          snapshot.add("model", net);
          Snapshot with_states({.folder = own / "with_states", .sharded = sharded, .default_generator = false});
          with_states.add("model", net).add("optimizer", optimizer);
          EXPECT_EQ(snapshot.restore(), 0);
          take_a_step(model, optimizer, world);
          snapshot.save(1);
          with_states.save(1);
          EXPECT_NE(model.owner(net->first->weight), model.owner(net->second->weight));
          model.gather();
          if (world.rank() == 0)
            for (const auto& item : net->named_parameters()) all["model/" + item.key()] = numbers_in(item.value());
          model.synchronize();
          const auto parameters = net->parameters();
          for (size_t i = 0; i < parameters.size(); ++i) {
            if (model.owner(parameters[i]) != world.rank()) continue;
            const auto& state =
                static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameters[i].unsafeGetTensorImpl()));
            const std::lock_guard lock(states_mutex);
            states[text("optimizer/state/", i + 1, "/exp_avg")] = numbers_in(state.exp_avg());
            states[text("optimizer/state/", i + 1, "/exp_avg_sq")] = numbers_in(state.exp_avg_sq());
          }
        });
    EXPECT_EQ(states.size(), 8u);
    questions.push_back("states " + (own / "with_states").string());
    auto& of_states = expected.emplace_back();
    for (const auto& [name, values] : states) of_states.insert(of_states.end(), values.begin(), values.end());
    questions.push_back("merge " + own.string());
    auto& numbers = expected.emplace_back(1, sharded ? 2 : 1);  // files with tensors
    for (const auto& [name, values] : all) numbers.insert(numbers.end(), values.begin(), values.end());
  }
  const auto answers = ask_python("unit/snapshot_reference.py", questions);
  ASSERT_EQ(answers.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(answers[i].size(), expected[i].size());
    EXPECT_EQ(answers[i][0], expected[i][0]) << questions[i];  // of parameters, the number of files with tensors
    EXPECT_TRUE(answers[i] == expected[i]) << "other values: " << questions[i];
  }
}

// Another shape, a parameter more, one less: a sentence that names it, and neither parameters nor states have changed.
struct Longer : Narrow {
  Longer() { fourth = register_module("fourth", nn::Linear(5, 5)); }
  nn::Linear fourth{nullptr};
};
struct Wider : Narrow {
  Wider() : Narrow(32) {}
};

template <typename Saved, typename Restored>
void expect_refusal_of_a_snapshot(bool gathers, const std::vector<std::string>& parts) {
  SCOPED_TRACE(parts[0]);
  for (const bool sharded : {false, true}) {
    const TemporaryFolder folder;
    const auto with = [&](const auto& net, const std::function<void(Snapshot&, torch::optim::AdamW&)>& use) {
      auto model = fully_shard(net, gathers ? full({.find_unused_parameters = true, .unit_cap_mb = 1})
                                            : FsdpOptions{.find_unused_parameters = true});
      torch::optim::AdamW optimizer(net->parameters(), 1e-2);
      Snapshot snapshot({.folder = folder.path(), .sharded = sharded, .default_generator = false});
      snapshot.add("model", net).add("optimizer", optimizer);
      take_a_step(model, optimizer, World::current());
      model.gather();
      const Values before = copies(net->named_parameters());
      model.synchronize();
      use(snapshot, optimizer);
      model.gather();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(torch::equal(item.value(), before[item.key()])) << item.key();
      model.synchronize();
    };
    on_hosts(gathers ? HostOfRank{"a", "b"} : HostOfRank{"a", "a"}, [&](World&) {
      with(make<Saved>(7, {}), [](Snapshot& snapshot, torch::optim::AdamW&) { snapshot.save(1); });
      with(make<Restored>(8, {}), [&](Snapshot& snapshot, torch::optim::AdamW& optimizer) {
        std::map<void*, Tensor> averages;
        for (const auto& [key, state] : optimizer.state())
          averages[key] = static_cast<torch::optim::AdamWParamState&>(*state).exp_avg().clone();
        expect_refusal(parts, [&] { snapshot.restore(); });
        EXPECT_EQ(optimizer.state().size(), averages.size());
        for (const auto& [key, state] : optimizer.state())
          EXPECT_TRUE(torch::equal(static_cast<torch::optim::AdamWParamState&>(*state).exp_avg(), averages[key]));
      });
    });
  }
}

TEST(FsdpSnapshotFiles, OfAnotherModelAreRefused) {
  for (const bool gathers : {false, true}) {
    expect_refusal_of_a_snapshot<Narrow, Wider>(
        gathers, {"'model/first.weight' in the snapshot: expected Float [32 x 12], as here, got Float [24 x 12]"});
    expect_refusal_of_a_snapshot<Narrow, Longer>(
        gathers, {"the module has a parameter 'fourth.weight' that the snapshot lacks"});
    expect_refusal_of_a_snapshot<Longer, Narrow>(
        gathers, {"the snapshot has a parameter 'model/fourth.weight' where the module has none"});
  }
}

}  // namespace
}  // namespace muster::test
