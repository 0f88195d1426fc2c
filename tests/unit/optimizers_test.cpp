// The optimizers for training loops: as the functional ones, with groups, archives and Python's names, and with
// everything that takes a torch::optim::Optimizer.
#include "muster/optim/optimizers.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/world.h"
#include "muster/optim/grad_scaler.h"
#include "muster/parallel/state_offload.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
#include "support/ask_python.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "unit/optimizers_fixture.h"

namespace muster::test::optimizers {
namespace {

TEST(Optimizers, StepAsTheFunctionalOnes) {
  for_each_optimizer([]<typename O>(std::type_identity<O>, const std::string& name, const auto& options) {
    const Tensors ours = start(), theirs = start();
    TorchOptimizer<O> optimizer(ours, options);
    O functional(options);
    for (int step = 0; step < 20; ++step) {
      make_steps(optimizer, ours, step, step + 1);
      give_gradients(theirs, step);
      Tensors gradients;
      for (const Tensor& parameter : theirs) gradients.push_back(parameter.grad());
      functional.step(theirs, gradients);
    }
    expect_equal(ours, theirs, name);
    EXPECT_FALSE(at::equal(ours[0], start()[0])) << name;
  });
}

TEST(Optimizers, GroupsHaveOptionsOfTheirOwn) {
  const Tensors all = start(), alone = start();
  muster::AdamW optimizer(
      {muster::AdamW::group({all[0], all[2]}, {.lr = 0.1}), torch::optim::OptimizerParamGroup({all[1]})},
      {.lr = 0.01, .weight_decay = 0.3});
  muster::AdamW first({alone[0], alone[2]}, {.lr = 0.1}), second({alone[1]}, {.lr = 0.01, .weight_decay = 0.3});
  const auto step = [&](int from, int to) {
    for (int i = from; i < to; ++i) {
      give_gradients(alone, i);
      first.step();
      second.step();
    }
    make_steps(optimizer, all, from, to);
    expect_equal(all, alone);
  };
  step(0, 5);
  optimizer.options(1).betas = second.options().betas = {0.5, 0.8};
  optimizer.param_groups()[0].options().set_lr(0.05);
  first.options().lr = 0.05;
  step(5, 10);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);
  torch::optim::StepLR schedule(optimizer, 1, 0.5);  // libtorch's
  schedule.step();                                   // of epoch 0
  schedule.step();
  EXPECT_EQ(optimizer.options(0).lr, 0.025);
  EXPECT_EQ(optimizer.options(1).lr, 0.005);
}

TEST(Optimizers, ALaterGroup) {
  const Tensors all = start(), alone = start();
  muster::SGD optimizer({all[0], all[1]}, {.lr = 0.1, .momentum = 0.9}), whole(alone, {.lr = 0.1, .momentum = 0.9});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({all[2]}));
  make_steps(optimizer, all, 0, 5);
  make_steps(whole, alone, 0, 5);
  expect_equal(all, alone);
}

TEST(Optimizers, TheClosureIsCalledOnceWithGradients) {
  const Tensors all = start();
  muster::Adam adam(all, {.lr = 0.1});
  int calls = 0;
  const at::NoGradGuard no_grad;
  const Tensor loss = adam.step([&] {
    ++calls;
    adam.zero_grad();
    Tensor sum = (all[0] * all[0]).sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(loss.item<float>(), (start()[0] * start()[0]).sum().item<float>());
  EXPECT_FALSE(at::equal(all[0], start()[0]));
  EXPECT_TRUE(at::equal(all[1], start()[1]));
}

TEST(Optimizers, ArchivesAndStatesGoOnToTheBit) {
  for_each_optimizer([]<typename O>(std::type_identity<O>, const std::string& name, const auto& options) {
    const Tensors straight = start(), cut = start(), other = start(), third = start();
    TorchOptimizer<O> whole(straight, options), first(cut, options), second(other), by_names(third);
    make_steps(whole, straight, 0, 20);
    make_steps(first, cut, 0, 10);
    std::stringstream bytes;
    torch::save(first, bytes);
    torch::load(second, bytes);
    const auto state = first.state_dict();
    by_names.load_state_dict(state);
    for (size_t i = 0; i < cut.size(); ++i)
      for (const Tensors* to : {&other, &third}) (*to)[i].detach().copy_(cut[i]);
    make_steps(second, other, 10, 20);
    make_steps(by_names, third, 10, 20);
    expect_equal(straight, other, name);
    expect_equal(straight, third, name);
    make_steps(first, cut, 10, 20);  // has not reached what was saved
    const O functional;
    if (static_cast<const optim::FunctionalOptimizer&>(functional).counts_steps()) {
      EXPECT_EQ(state.at("state.1.step").template item<int64_t>(), 9);
    } else {
      EXPECT_FALSE(state.contains("state.1.step"));  // as in Python
    }
  });
}

TEST(Optimizers, StatesThatDoNotFitAreRefused) {
  const Tensors all = start();
  muster::Adam adam(all, {.lr = 0.1});
  make_steps(adam, all, 0, 2);
  const auto good = adam.state_dict();
  std::vector<std::string> names;
  for (const auto& [name, tensor] : good) names.push_back(name);
  EXPECT_EQ(names.size(), 3 * 3 + 6u);
  const auto refused = [&](const std::string& name, const Tensor& tensor, const char* what) {
    auto bad = good;
    bad["param_groups.0.lr"] = at::scalar_tensor(0.5, at::kDouble);
    bad[name] = tensor;
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { adam.load_state_dict(bad); }), what);
    EXPECT_EQ(adam.options().lr, 0.1);
  };
  refused("state.0.momentum_buffer", at::zeros({3, 4}), "no 'state.0.momentum_buffer'");
  refused("state.3.step", at::zeros({}), "no 'state.3.step'");
  refused("state.0.exp_avg", at::zeros({4, 4}), "'state.0.exp_avg': expected shape [3, 4], got [4, 4]");
  refused("param_groups.0.betas", at::zeros({3}), "expected shape [2], got [3]");
  refused("param_groups.0.decoupled_weight_decay", at::ones({}), "is that of AdamW");
  refused("param_groups.0.initial_rate", at::zeros({}), "no 'param_groups.0.initial_rate'");
  refused("param_groups.0.betas", at::ones({2}), "betas.first: expected a number of 0 or more and below 1, got 1");
  auto without_step = good;
  without_step.erase("state.2.step");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { adam.load_state_dict(without_step); }),
                  "'state.2.step' is missing");
  adam.load_state_dict({{"param_groups.0.lr", at::scalar_tensor(0.5)}});
  EXPECT_EQ(adam.options().lr, 0.5);
  EXPECT_TRUE(adam.state().empty());
  make_steps(adam, all, 0, 2);
  std::stringstream bytes;
  torch::save(adam, bytes);
  muster::SGD sgd(start());
  std::stringstream whole(bytes.str());
  EXPECT_THROW(torch::load(sgd, whole), CorruptError);
  // Of other shapes.
  Tensors others = start();
  others[1] = at::ones({7, 4}).requires_grad_();
  muster::Adam other(others);
  std::stringstream again(bytes.str());
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { torch::load(other, again); }),
                  "exp_avg in the archive: expected shape [7, 4], got [5, 4]");
  EXPECT_TRUE(other.state().empty());
  make_steps(other, others, 0, 1);
  sgd.options().momentum = -1;
  give_gradients(sgd.param_groups()[0].params(), 0);
  EXPECT_THROW(sgd.step(), InvalidArgument);
}

// An archive takes the place of all states, of any dtype, or of nothing.
TEST(Optimizers, ALoadReplacesAllOrNothing) {
  const auto archive_of = [](const muster::Adam& adam) {
    std::stringstream bytes;
    torch::save(adam, bytes);
    return bytes.str();
  };
  const auto load = [](muster::Adam& adam, const std::string& archive) {
    std::stringstream bytes(archive);
    torch::load(adam, bytes);
  };
  const Tensors all = start(), doubles = start(at::kDouble);
  muster::Adam adam(all, {.lr = 0.1});
  const std::string fresh = archive_of(adam);
  make_steps(adam, all, 0, 3);
  const std::string later = archive_of(adam);
  load(adam, fresh);
  EXPECT_TRUE(adam.state().empty());

  muster::Adam of_doubles(doubles, {.lr = 0.2});
  load(of_doubles, later);
  EXPECT_EQ(of_doubles.state_dict().at("state.0.exp_avg").scalar_type(), at::kDouble);
  make_steps(of_doubles, doubles, 3, 5);

  Tensors others = start();
  others[2] = at::ones({7, 4}).requires_grad_();
  muster::Adam other(others, {.lr = 0.3});
  make_steps(other, others, 0, 2);
  const auto before = other.state_dict();
  const double& lr = other.options().lr;
  EXPECT_THROW(load(other, later), InvalidArgument);
  const auto after = other.state_dict();
  ASSERT_EQ(after.size(), before.size());
  for (const auto& [name, tensor] : before) EXPECT_TRUE(at::equal(after.at(name), tensor)) << name;
  EXPECT_EQ(&other.options().lr, &lr);
  EXPECT_EQ(lr, 0.3);
}

// Module::parameters() has a parameter that modules share as often as it occurs.
TEST(Optimizers, ATiedParameterCountsOnce) {
  const Tensors all = start(), alone = start();
  muster::SGD tied({all[0], all[1], all[0], all[2]}, {.lr = 0.1, .momentum = 0.9});
  muster::SGD once(alone, {.lr = 0.1, .momentum = 0.9});
  make_steps(tied, all, 0, 5);
  make_steps(once, alone, 0, 5);
  expect_equal(all, alone);
  const auto state = tied.state_dict(), expected = once.state_dict();
  ASSERT_EQ(state.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(at::equal(state.at(name), tensor)) << name;
  std::stringstream bytes;
  torch::save(tied, bytes);
  muster::SGD again({all[0], all[1], all[0], all[2]});
  torch::load(again, bytes);
  make_steps(again, all, 5, 9);
  make_steps(once, alone, 5, 9);
  expect_equal(all, alone);

  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { tied.add_param_group(muster::SGD::group({all[1]}, {})); }),
                  "a parameter is in two groups");
  EXPECT_EQ(tied.param_groups().size(), 1u);
  EXPECT_EQ(tied.param_groups()[0].params().size(), 4u);  // as in libtorch's archives
}

TEST(Optimizers, OptionsOfAnotherClassAreRefused) {
  const Tensors all = start();
  const auto torchs = [&] {
    return torch::optim::OptimizerParamGroup({all[0]}, std::make_unique<torch::optim::AdamWOptions>(1e-4));
  };
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { muster::AdamW({torchs()}); }), "options of another class");
  muster::AdamW adamw({all[1]});
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { adamw.add_param_group(muster::SGD::group({all[0]}, {})); }),
                  "Make the group with group() of the optimizer's own class");
  EXPECT_EQ(adamw.param_groups().size(), 1u);
}

// Nothing has changed if one group is refused, and a second try makes one step.
TEST(Optimizers, AStepIsMadeByAllGroupsOrNone) {
  const Tensors all = start(), alone = start();
  muster::SGD sgd(
      {muster::SGD::group({all[0]}, {.lr = 0.1}), muster::SGD::group({all[1], all[2]}, {.lr = 0.1, .momentum = 0.9})});
  muster::SGD first({alone[0]}, {.lr = 0.1}), second({alone[1], alone[2]}, {.lr = 0.1, .momentum = 0.9});
  give_gradients(all, 0);
  const Tensor dense = all[2].grad();
  all[2].mutable_grad() = dense.to_sparse();
  EXPECT_THROW(sgd.step(), InvalidArgument);
  expect_equal(all, start());
  EXPECT_TRUE(sgd.state().empty());
  all[2].mutable_grad() = dense;
  sgd.step();
  give_gradients(alone, 0);
  first.step();
  second.step();
  expect_equal(all, alone);
}

// Of one group, or of two of which the second one learns slower, and uphill where the optimizer can.
template <typename O>
std::unique_ptr<TorchOptimizer<O>> make(const Tensors& all, bool grouped, const typename O::Options& options,
                                        typename O::Options other) {
  if (!grouped) return std::make_unique<TorchOptimizer<O>>(all, options);
  other.lr = 0.005;
  if constexpr (requires { other.maximize; }) other.maximize = true;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  return std::make_unique<TorchOptimizer<O>>(
      Groups{TorchOptimizer<O>::group({all[0], all[2]}, options), TorchOptimizer<O>::group({all[1]}, other)}, options);
}

// Ten steps here and ten in Python's torch.optim, and the reverse.
TEST(Optimizers, PythonReadsAndWritesTheirStates) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch";
  const TemporaryFolder folder;
  std::vector<std::string> lines;
  const auto path = [&](const std::string& name) { return (folder / name).string(); };
  const auto with_parameters = [](const auto& optimizer, const Tensors& parameters) {
    auto all = optimizer.state_dict();
    for (size_t i = 0; i < parameters.size(); ++i) all[text("parameters.", i)] = parameters[i].detach();
    return all;
  };
  const auto difference = [](const Tensor& a, const Tensor& b) {  // relative to the largest, if that is above 1
    return (a - b).abs().max().item<double>() / std::max(1.0, a.abs().max().item<double>());
  };
  const auto each_way = [](const auto& fn) {
    for_each_optimizer([&]<typename O>(std::type_identity<O>, const std::string& name, const auto& options) {
      for (const bool grouped : {false, true}) fn(std::type_identity<O>(), text(name, grouped), grouped, options);
    });
  };
  each_way([&]<typename O>(std::type_identity<O>, const std::string& name, bool grouped, const auto& options) {
    const Tensors parameters = start(at::kDouble);
    const auto optimizer = make<O>(parameters, grouped, options, options);
    make_steps(*optimizer, parameters, 0, 10);
    save_safetensors(path(name), with_parameters(*optimizer, parameters));
    lines.push_back(text(name.substr(0, name.size() - 1), "|", path(name), "|", path(name + ".python"), "|", grouped));
  });
  ask_python("unit/optimizers_reference.py", lines);  // goes on for 10 steps, and writes what it has then
  each_way([&]<typename O>(std::type_identity<O>, const std::string& name, bool grouped, const auto& options) {
    const Tensors straight = start(at::kDouble), parameters = start(at::kDouble);
    const auto whole = make<O>(straight, grouped, options, options),
               optimizer = make<O>(parameters, grouped, typename O::Options(), typename O::Options());
    make_steps(*whole, straight, 0, 20);
    const SafetensorsFile file(path(name + ".python"));
    std::map<std::string, Tensor> state;
    for (const std::string& key : file.names()) state[key] = file.tensor(key);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor python = state.extract(text("parameters.", i)).mapped();
      EXPECT_LE(difference(straight[i], python), 1e-12) << name;
      parameters[i].detach().copy_(python);
    }
    optimizer->load_state_dict(state);
    make_steps(*whole, straight, 20, 30);
    make_steps(*optimizer, parameters, 20, 30);
    for (size_t i = 0; i < parameters.size(); ++i) EXPECT_LE(difference(straight[i], parameters[i]), 1e-12) << name;
  });
}

TEST(Optimizers, DividedAmongRanks) {
  for_each_optimizer([]<typename O>(std::type_identity<O>, const std::string& name, const auto& options) {
    const Tensors alone = start();
    TorchOptimizer<O> whole(alone, options);
    make_steps(whole, alone, 0, 6);
    run_threads(2, [&](World& world) {
      const Tensors all = start();
      ZeroRedundancyOptimizer<TorchOptimizer<O>> divided(all, options);
      make_steps(divided, all, 0, 6);
      expect_equal(all, alone, name);
      EXPECT_LT(divided.state().size(), all.size());
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { divided.state_dict(); }), "consolidate()");
      divided.consolidate(1);
      if (world.rank() == 1) {
        EXPECT_EQ(divided.state().size(), all.size());
        const auto expected = whole.state_dict(), got = divided.state_dict();
        for (const auto& [key, tensor] : expected) EXPECT_TRUE(at::equal(got.at(key), tensor)) << name << " " << key;
      }
    });
  });
}

TEST(Optimizers, InSnapshots) {
  const TemporaryFolder folders;
  for_each_optimizer([&]<typename O>(std::type_identity<O>, const std::string& name, const auto& options) {
    const auto folder = folders / name;
    const Tensors straight = start();
    TorchOptimizer<O> whole(straight, options);
    make_steps(whole, straight, 0, 12);
    run_threads(2, [&](World&) {
      Tensors all = start();
      ZeroRedundancyOptimizer<TorchOptimizer<O>> optimizer(all, options);
      Snapshot snapshot({.folder = folder, .on_sigterm = false, .default_generator = false});
      snapshot.add("optimizer", optimizer);
      EXPECT_EQ(snapshot.restore(), 0);
      make_steps(optimizer, all, 0, 6);
      snapshot.save(6);
    });
    run_threads(1, [&](World&) {
      Tensors all = start();
      TorchOptimizer<O> first(all, options);
      make_steps(first, all, 0, 6);
      TorchOptimizer<O> optimizer(all);
      Snapshot snapshot({.folder = folder, .on_sigterm = false, .default_generator = false});
      snapshot.add("optimizer", optimizer);
      EXPECT_EQ(snapshot.restore(), 6);
      make_steps(optimizer, all, 6, 12);
      expect_equal(all, straight, name);
    });
  });
}

TEST(Optimizers, WithStatesInFiles) {
  const Tensors all = start(), alone = start();
  muster::AdamW optimizer(all, {.lr = 0.1}), whole(alone, {.lr = 0.1});
  StateOffload offload(optimizer, {.folder = std::filesystem::temp_directory_path(), .min_bytes = 1});
  EXPECT_EQ(offload.bytes(), 2 * (3 + 5 + 2) * 4 * sizeof(float));  // from the beginning
  for (int step = 0; step < 5; ++step) {
    give_gradients(all, step);
    offload.step();
  }
  make_steps(whole, alone, 0, 5);
  expect_equal(all, alone);
}

}  // namespace
}  // namespace muster::test::optimizers
