// Snapshots of ranks that are threads: what is stored, and what is restored.
#include <cmath>
#include <iterator>
#include <thread>

#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

INSTANTIATE_TEST_SUITE_P(Files, SnapshotTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Sharded" : "One"; });

TEST_P(SnapshotTest, GoesOnToTheBitWithEveryOptimizer) {
  for (const auto& [name, make] : optimizers())
    for (const int n : {1, 3}) {
      SCOPED_TRACE(text(name, " on ", n));
      fs::remove_all(folder_);
      run_threads(n, [&, &make = make](World& world) {
        Training whole(world, 1, make);
        {
          Snapshot snapshot(options());
          whole.add_to(snapshot);
          EXPECT_EQ(snapshot.restore(), 0);
          for (int step = 0; step < 5; ++step) whole.step();
          snapshot.save(5);
        }
        whole.seen.clear();
        for (int step = 0; step < 10; ++step) whole.step();

        Training rest(world, 99, make);
        rest.step();  // makes its own state, which restoring must discard
        rest.counters["other"] = 5;
        rest.seen.clear();
        Snapshot snapshot(options());
        rest.add_to(snapshot);
        EXPECT_EQ(snapshot.restore(), 5);
        for (int step = 0; step < 10; ++step) rest.step();
        EXPECT_EQ(rest.seen, whole.seen);
        EXPECT_EQ(rest.total, 15);
        EXPECT_TRUE(rest.state() == whole.state());
      });
    }
}

// A convolution in channels-last, tied and half parameters, a large buffer, and tensors without elements or dimensions.
struct ManyLayouts : torch::nn::Module {
  explicit ManyLayouts(double value) {
    const torch::NoGradGuard no_grad;
    conv->bias.zero_();  // it is random, and the ranks' models are to be equal
    conv->weight.set_data(torch::full({64, 64, 5, 5}, value).contiguous(torch::MemoryFormat::ChannelsLast));
    for (auto& tensor : parameters()) tensor.add_(torch::arange(tensor.numel(), tensor.options()).view_as(tensor));
    wide.fill_(value);
  }
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(64, 64, 5));
  torch::Tensor large = register_parameter("large", torch::zeros({400, 400}));
  torch::Tensor tied = register_parameter("tied", large);
  torch::Tensor half = register_parameter("half", torch::zeros({300'000}, torch::kBFloat16));
  torch::Tensor none = register_parameter("none", torch::zeros({0, 5}));
  torch::Tensor scalar = register_parameter("scalar", torch::zeros({}));
  torch::Tensor wide = register_buffer("wide", torch::zeros({100'000}, torch::kDouble));
};

// Large tensors come straight into the memory where they stay, others through memory that is used again.
TEST_P(SnapshotTest, TensorsOfEveryLayoutComeBack) {
  for (const bool own_folders : {false, true})  // as if each rank were on a host with its own disk
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(text(ranks, own_folders ? " ranks with folders of their own" : " ranks"));
      fs::remove_all(folder_);
      run_threads(ranks, [&](World& world) {
        SnapshotOptions with = options();
        if (own_folders) with.folder = folder_ / text("rank-", world.rank());
        const auto step = [](ManyLayouts& net, torch::optim::Adam& adam) {
          for (auto& parameter : net.parameters())
            parameter.mutable_grad() = torch::arange(parameter.numel(), parameter.options()).view_as(parameter) + 1;
          adam.step();
        };
        const auto net = std::make_shared<ManyLayouts>(3.0);
        torch::optim::Adam adam(net->parameters());
        step(*net, adam);
        {
          Snapshot snapshot(with);
          snapshot.add("model", net).add("adam", adam);
          EXPECT_EQ(snapshot.restore(), 0);
          snapshot.save(1);
        }
        for (const bool has_states : {false, true}) {
          const auto other = std::make_shared<ManyLayouts>(7.0);
          torch::optim::Adam others_adam(other->parameters());
          if (has_states) step(*other, others_adam);
          const void* const memory = other->large.data_ptr();
          const auto version = other->large._version();
          Snapshot snapshot(with);
          snapshot.add("model", other).add("adam", others_adam);
          EXPECT_EQ(snapshot.restore(), 1);
          EXPECT_EQ(other->large.data_ptr(), memory);
          EXPECT_GT(other->large._version(), version);
          EXPECT_TRUE(other->conv->weight.is_contiguous(torch::MemoryFormat::ChannelsLast));
          for (const auto& named : net->named_parameters()) {
            const torch::Tensor here = other->named_parameters()[named.key()];
            EXPECT_TRUE(torch::equal(here, named.value())) << named.key();
            using State = torch::optim::AdamParamState;
            const auto& ours = static_cast<State&>(*adam.state().at(named.value().unsafeGetTensorImpl()));
            const auto& theirs = static_cast<State&>(*others_adam.state().at(here.unsafeGetTensorImpl()));
            EXPECT_EQ(theirs.step(), ours.step());
            EXPECT_TRUE(torch::equal(theirs.exp_avg(), ours.exp_avg())) << named.key();
            EXPECT_TRUE(torch::equal(theirs.exp_avg_sq(), ours.exp_avg_sq())) << named.key();
            if (has_states) {
              EXPECT_EQ(theirs.exp_avg().strides(), ours.exp_avg().strides()) << named.key();
            }
          }
          EXPECT_TRUE(torch::equal(other->wide, net->wide));
        }
      });
    }
}

TEST_P(SnapshotTest, KeepsTheNewestTwo) {
  save_steps(2, {3, 10, 9, 40});
  std::set<std::string> snapshots;
  size_t shards = 0;
  for (const auto& name : files())
    if (name.find("shard") == std::string::npos) {
      snapshots.insert(name);
    } else {
      ++shards;
    }
  EXPECT_EQ(snapshots, (std::set<std::string>{"step-10.snapshot.safetensors", "step-40.snapshot.safetensors"}));
  EXPECT_EQ(shards, sharded() ? 4u : 0u);
  EXPECT_EQ(restored(2), 40);
}

TEST_P(SnapshotTest, AStepCanBeSavedAgain) {
  save_steps(2, {3, 10, 10, 10});
  EXPECT_EQ(files().size(), sharded() ? 6u : 2u);
  EXPECT_EQ(restored(2), 10);
}

TEST_P(SnapshotTest, LeavesAloneWhatIsNotItsOwnAndRemovesWhatTheDeadLeft) {
  const std::set<std::string> others{"notes.txt", "step-x.snapshot.safetensors", "step-03.snapshot.safetensors",
                                     "step-5.snapshot.safetensors.bak", "step-5.snapshot.safetensors.xyz.tmp"};
  const std::set<std::string> dead{"step-5.snapshot.safetensors.0a1b2c3d.tmp",
                                   "step-5.shard-0-of-2.ab12.snapshot.safetensors.0a1b2c3d.tmp",
                                   "step-5.shard-1-of-2.ab12.snapshot.safetensors.0a1b2c3d.tmp",
                                   "step-5.shard-7-of-8.ab12.snapshot.safetensors.0a1b2c3d.tmp"};
  for (const auto& names : {others, dead})
    for (const auto& name : names) std::ofstream(folder_ / name) << "x";
  const std::string orphan = "step-5.shard-1-of-2.ab12.snapshot.safetensors";
  std::ofstream(folder_ / orphan) << "x";
  EXPECT_EQ(restored(2), 0);
  auto left = others;
  left.insert(orphan);  // nobody knows yet whether it is needed
  EXPECT_EQ(files(), left);
  save_steps(2, {9});
  EXPECT_FALSE(files().contains(orphan));
  for (const auto& name : others) EXPECT_TRUE(files().contains(name)) << name;
}

// A rank that was started again, among others that have trained.
TEST_P(SnapshotTest, RanksMayHaveDifferentStatesBeforeTheyRestore) {
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    snapshot.restore();
    training.step();
    snapshot.save(1);
    const std::string state = training.state();
    Training again(world, 2, sgd());
    Snapshot of_again(options());
    again.add_to(of_again);
    if (world.rank() == 0) {
      for (auto& parameter : again.net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
      again.optimizer->step();
    }
    EXPECT_EQ(of_again.restore(), 1);
    EXPECT_TRUE(again.state() == state);
    EXPECT_EQ(again.optimizer->state().size(), training.optimizer->state().size());
  });
}

TEST_P(SnapshotTest, OtherRanksGoOnWithoutTheDefaultGenerator) {
  const auto with = [&](bool default_generator) {
    SnapshotOptions with = options();
    with.default_generator = default_generator;
    return with;
  };
  run_threads(2, [&](World&) {
    const auto net = make_net(1);
    Snapshot snapshot(with(true));
    snapshot.add("model", *net).restore();
    snapshot.save(10);
  });
  for (const int ranks : {1, 2, 3, 5})
    for (const bool default_generator : {true, false}) {
      SCOPED_TRACE(text(ranks, " ranks, ", default_generator));
      testing::internal::CaptureStderr();
      run_threads(ranks, [&](World&) {
        const auto net = make_net(2), saved = make_net(1);
        Snapshot snapshot(with(default_generator));
        EXPECT_EQ(snapshot.add("model", *net).restore(), 10);
        EXPECT_TRUE(bits(*net) == bits(*saved));
      });
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_EQ(said.find("keeps the state of its own default generator") != std::string::npos,
                ranks != 2 && default_generator)
          << said;
    }
}

TEST_P(SnapshotTest, KeepsTheBestToo) {
  auto with = options();
  with.keep = 1;
  with.keep_best = 2;
  const std::vector<double> scores{0.5, -1, 0.7, 0.1, 0.6, 0.2};
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    for (int64_t step = 1; step <= std::ssize(scores); ++step) {
      training.total = step;
      snapshot.score(scores[static_cast<size_t>(step - 1)]);
      snapshot.save(step);
    }
    training.total = 7;
    snapshot.save(7);  // without one
    barrier();
    EXPECT_EQ(snapshot.best(), (std::vector<int64_t>{3, 5}));
    for (const double bad : {NAN, INFINITY}) EXPECT_THROW(snapshot.score(bad), InvalidArgument);
  });
  std::set<std::string> snapshots;
  for (const auto& name : files())
    if (name.find("shard") == std::string::npos) snapshots.insert(name);
  EXPECT_EQ(snapshots, (std::set<std::string>{"step-3.snapshot.safetensors", "step-5.snapshot.safetensors",
                                              "step-7.snapshot.safetensors"}));
  EXPECT_EQ(files().size(), sharded() ? 9u : 3u);
  EXPECT_EQ(restored(2), 7);
  // The next job knows their scores from the files.
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 7);
    for (const int64_t step : {8, 9}) {
      training.total = step;
      snapshot.save(step);
    }
    barrier();
    EXPECT_EQ(snapshot.best(), (std::vector<int64_t>{3, 5}));
  });
  EXPECT_TRUE(files().contains("step-3.snapshot.safetensors"));
  EXPECT_TRUE(files().contains("step-5.snapshot.safetensors"));
  EXPECT_EQ(restored(2), 9);
}

TEST_P(SnapshotTest, SharesWhatIsSharedAndKeepsApartWhatIsNot) {
  run_threads(2, [&](World& world) {
    const auto rank = static_cast<double>(world.rank());
    auto shared = torch::full({300, 300}, 7.0), apart = torch::full({3}, rank);
    Snapshot snapshot(options());
    snapshot.add("shared", shared, {.per_rank = false}).add("apart", apart);
    snapshot.save(1);
    shared.zero_();
    apart.zero_();
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_TRUE(torch::equal(shared, torch::full({300, 300}, 7.0)));
    EXPECT_TRUE(torch::equal(apart, torch::full({3}, rank)));
  });
  size_t bytes = 0;
  for (const auto& name : files()) bytes += fs::file_size(folder_ / name);
  EXPECT_LT(bytes, 2 * 300 * 300 * 4u);  // once
}

TEST_P(SnapshotTest, AModuleWithoutTensorsIsOneOfThem) {
  run_threads(2, [&](World&) {
    torch::nn::Sequential empty(torch::nn::ReLU{});
    int64_t number = 7;
    Snapshot snapshot(options());
    snapshot.add("empty", *empty).add("number", number);
    snapshot.save(1);
    number = 0;
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_EQ(number, 7);
  });
}

struct Everything {  // everything that an archive of a user's class may hold
  int64_t number = 0;
  std::string words;
  std::vector<torch::Tensor> list;

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("number", c10::IValue(number));
    archive.write("a/b:c%d", c10::IValue(words));
    archive.write("list", c10::IValue(list));
    archive.write("none", c10::IValue());
    archive.write("yes", c10::IValue(true));
    archive.write("ints", c10::IValue(std::vector<int64_t>{1, 2, 3}));
    archive.write("doubles", c10::IValue(std::vector<double>{0.1, -1}));
    archive.write("pair", c10::IValue(std::tuple<double, int64_t>(0.5, 7)));
    torch::serialize::OutputArchive nested(archive.compilation_unit()), empty(archive.compilation_unit());
    nested.write("empty", empty);
    nested.write("tensor", torch::ones({2}, torch::kBFloat16));
    archive.write("nested", nested);
  }
  void load(torch::serialize::InputArchive& archive) {
    const auto read = [&](const char* key) {
      c10::IValue value;
      archive.read(key, value);
      return value;
    };
    number = read("number").toInt();
    words = read("a/b:c%d").toStringRef();
    list = read("list").toTensorVector();
    EXPECT_TRUE(read("none").isNone());
    EXPECT_TRUE(read("yes").toBool());
    EXPECT_EQ(read("ints").toIntVector(), (std::vector<int64_t>{1, 2, 3}));
    EXPECT_EQ(read("doubles").toDoubleVector(), (std::vector<double>{0.1, -1}));
    EXPECT_EQ((read("pair").to<std::tuple<double, int64_t>>()), (std::tuple<double, int64_t>(0.5, 7)));
    torch::serialize::InputArchive nested, empty;
    archive.read("nested", nested);
    nested.read("empty", empty);
    EXPECT_TRUE(empty.keys().empty());
    torch::Tensor tensor;
    nested.read("tensor", tensor);
    EXPECT_TRUE(torch::equal(tensor, torch::ones({2}, torch::kBFloat16)));
  }
};

struct Unstorable {
  void save(torch::serialize::OutputArchive& archive) const {
    c10::Dict<std::string, int64_t> dictionary;
    archive.write("dictionary", c10::IValue(dictionary));
  }
  void load(torch::serialize::InputArchive&) {}
};

TEST_P(SnapshotTest, AUsersClassKeepsAllThatItWrites) {
  run_threads(2, [&](World& world) {
    Everything thing;
    thing.number = 100 + world.rank();
    thing.words = std::string("zero \0 and more", 15);
    thing.list = {torch::arange(3), torch::zeros({0})};
    Snapshot snapshot(options());
    snapshot.add("thing", thing);
    snapshot.save(1);
    thing = {};
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_EQ(thing.number, 100 + world.rank());
    EXPECT_EQ(thing.words, std::string("zero \0 and more", 15));
    ASSERT_EQ(thing.list.size(), 2u);
    EXPECT_TRUE(torch::equal(thing.list[0], torch::arange(3)));
  });
}

TEST_P(SnapshotTest, WhatCannotBeStoredIsSaidByName) {
  run_threads(2, [&](World&) {
    Unstorable thing;
    Snapshot snapshot(options(1));
    snapshot.add("thing", thing);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { (void)snapshot.step(1); }),
                    "'dictionary' is of type Dict(str, int), which a snapshot cannot hold");
  });
}

TEST_P(SnapshotTest, ChecksItsArguments) {
  run_threads(1, [&](World&) {
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { Snapshot({}); }), "needs a folder");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { Snapshot({.folder = folder_, .every = -1}); }),
                    ".every: expected 0 or more, got -1");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { Snapshot({.folder = folder_, .keep = 0}); }),
                    ".keep: expected 1 or more, got 0");
    EXPECT_CONTAINS(message_of<Unavailable>([] { Snapshot({.folder = "/proc/none/here"}); }), "cannot make the folder");
    Snapshot snapshot({.folder = folder_ / "a" / "b"});
    EXPECT_TRUE(fs::is_directory(folder_ / "a" / "b"));
    int64_t number = 0;
    snapshot.add("number", number);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.add("number", number); }), "has a 'number' already");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.add("default generator", number); }), "already");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.add("a/b", number); }), "without a slash");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.save(0); }), "Count from 1");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { (void)snapshot.step(0); }), "Count from 1");
  });
}

}  // namespace
}  // namespace muster::test::snapshots
