// Snapshots that are restored in part, or that are not the newest.
#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

// SnapshotNet with another head, and without its normalisation.
struct NetWithHead : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(6, 200)),
                    b = register_module("b", torch::nn::Linear(200, 200)),
                    head = register_module("head", torch::nn::Linear(200, 10));
};

const SnapshotRestoreOptions kInPart{.strict = false};

// A new training begins with another's layers, on another number of ranks, and without what each rank has stored.
TEST_P(SnapshotTest, AModuleTakesTheLayersThatItHas) {
  save_steps(2, {10});
  const auto saved = make_net(1);
  testing::internal::CaptureStderr();
  run_threads(3, [&](World&) {
    auto net = std::make_shared<NetWithHead>();
    const std::string head = bits(*net->head);
    Snapshot snapshot(options());
    snapshot.add("model", net);
    EXPECT_EQ(snapshot.restore(kInPart), 10);
    EXPECT_TRUE(bits(*net->a) == bits(*saved->a));
    EXPECT_TRUE(bits(*net->b) == bits(*saved->b));
    EXPECT_TRUE(bits(*net->head) == head);
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(said, "only the program has, and keeps as it is, model/head.bias, model/head.weight; ");
  EXPECT_CONTAINS(said, "only the snapshot has 'best', ");
  EXPECT_CONTAINS(said, "model/c.bias, model/c.weight, model/norm.bias, ");
  EXPECT_EQ(said.find("restored in part"), said.rfind("restored in part")) << said;  // one rank says it
}

TEST_P(SnapshotTest, AnItemMayBeNew) {
  save_steps(2, {10});
  testing::internal::CaptureStderr();
  for (const bool again : {false, true})
    run_threads(2, [&](World& world) {
      Training training(world, 2, sgd());
      int64_t more = 7;
      Snapshot snapshot(options());
      training.add_to(snapshot);
      snapshot.add("more", more, {.per_rank = false});
      EXPECT_EQ(snapshot.restore({.strict = again}), again ? 11 : 10);
      EXPECT_EQ(more, again ? 8 : 7);
      EXPECT_EQ(training.total, again ? 11 : 10);
      if (again) return;
      training.total = 11;
      more = 8;
      snapshot.save(11);
    });
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "only the program has, and keeps as it is, 'more'\n");
}

TEST_P(SnapshotTest, InPartTooWhatIsThereHasToFit) {
  save_steps(2, {10});
  EXPECT_CONTAINS(restore_error<InvalidArgument>(
                      2,
                      [](Training& training, Snapshot& snapshot) {
                        training.net->c->weight.set_data(torch::zeros({3, 100}));
                        snapshot.add("model", *training.net);
                      },
                      kInPart),
                  "tensor 'model/c.weight' in the snapshot: expected Float [3 x 100], as here, got Float [3 x 200]");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(
                      2,
                      [](Training& training, Snapshot& snapshot) {
                        training.optimizer = std::make_unique<torch::optim::SGD>(training.net->parameters(), 0.1);
                        snapshot.add("model", *training.net).add("optimizer", *training.optimizer);
                      },
                      kInPart),
                  "'optimizer' in the snapshot: expected 1 groups of parameters, as here, got 2");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(
                      2, [](Training& training, Snapshot& snapshot) { snapshot.add("net", *training.net); }, kInPart),
                  "the snapshot has nothing of what was added, but 'best', ");
}

TEST_P(SnapshotTest, AnOlderOneIsRestoredByItsNumber) {
  save_steps(2, {10, 20});
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.restore({.steps = 15}); }),
                    ", which has those of 10, 20");
    EXPECT_CONTAINS(message_of<Mismatch>([&] { snapshot.restore({.steps = 10 * (1 + world.rank())}); }),
                    "different options");
    EXPECT_EQ(snapshot.restore({.steps = 10}), 10);
    EXPECT_EQ(training.total, 10);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.save(11); }),
                    "there are newer snapshots than the one that was restored");
    EXPECT_EQ(snapshot.restore({.steps = 20}), 20);
    training.total = 21;
    snapshot.save(21);
  });
  EXPECT_EQ(restored(2), 21);
}

TEST_P(SnapshotTest, IfTheOneThatWasNamedIsDamagedNoOtherIsTaken) {
  save_steps(2, {10, 20});
  flip(data_file(20), -1);
  testing::internal::CaptureStderr();
  EXPECT_CONTAINS(restore_error<CorruptError>(
                      2, [](Training& training, Snapshot& snapshot) { training.add_to(snapshot); }, {.steps = 20}),
                  "the snapshot of step 20 is not intact: ");
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "the snapshot of step 20 is refused");
}

TEST_P(SnapshotTest, TheBestOneIsRestoredIfAsked) {
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    auto with = options();
    with.keep_best = 1;
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.restore({.best = true}); }), "has a score");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.restore({.steps = 1, .best = true}); }), "not both");
    snapshot.restore();
    for (const int64_t step : {10, 20, 30, 40}) {
      training.total = step;
      snapshot.score(step == 20 ? 0.9 : 0.5);
      snapshot.save(step);
    }
    EXPECT_EQ(snapshot.restore({.best = true}), 20);
    EXPECT_EQ(training.total, 20);
  });
}

// Each rank may have another module by the same name, as the stages of a pipeline.
TEST_P(SnapshotTest, InPartOfModulesThatDifferByRank) {
  struct Stage : torch::nn::Module {
    Stage(int rank, bool grown)
        : layer(register_module(text("layer", rank), torch::nn::Linear(6, 6))),
          more(grown ? register_module(text("more", rank), torch::nn::Linear(6, 6)) : nullptr) {}
    torch::nn::Linear layer, more;
  };
  const auto make = [](int rank, bool grown, double value) {
    auto stage = std::make_shared<Stage>(rank, grown);
    const torch::NoGradGuard no_grad;
    for (auto& each : stage->parameters()) each.fill_(value + rank);
    return stage;
  };
  testing::internal::CaptureStderr();
  for (const bool again : {false, true})
    run_threads(2, [&](World& world) {
      auto stage = make(world.rank(), again, again ? 100 : 10);
      Snapshot snapshot(options());
      snapshot.add("stage", stage, {.per_rank = true});
      EXPECT_EQ(snapshot.restore({.strict = !again}), again ? 1 : 0);
      if (!again) return snapshot.save(1);
      EXPECT_EQ(stage->layer->weight[0][0].item<double>(), 10 + world.rank());
      EXPECT_EQ(stage->more->weight[0][0].item<double>(), 100 + world.rank());
    });
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(),
                  "only the program has, and keeps as it is, stage/more0.bias, stage/more0.weight\n");
}

TEST_P(SnapshotTest, AModuleOfWhichTheSnapshotHasNothingIsRefused) {
  save_steps(2, {10});
  run_threads(2, [&](World&) {
    torch::nn::Sequential net(torch::nn::Linear(6, 200));
    const std::string before = bits(*net);
    std::map<std::string, int64_t> counters;
    Snapshot snapshot(options());
    snapshot.add("counters", counters).add("model", net);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.restore(kInPart); }),
                    "'model' has nothing of what is in the snapshot by that name");
    EXPECT_TRUE(bits(*net) == before);
    EXPECT_TRUE(counters.empty());
  });
}

}  // namespace
}  // namespace muster::test::snapshots
