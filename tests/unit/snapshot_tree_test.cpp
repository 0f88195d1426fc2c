// Trees of state in a snapshot.
#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

struct Player {
  std::shared_ptr<SnapshotNet> net;
  std::unique_ptr<torch::optim::Adam> adam;
  float temperature = 0;
  auto tree() { return std::tie(net, adam, temperature); }
};

// Has members that could be a tree's, but saves itself.
struct Tally {
  int64_t wins = 0, losses = 0;
  auto tree() { return std::tie(wins); }
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("wins", wins);
    archive.write("losses", losses);
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue value;
    archive.read("wins", value);
    wins = value.toInt();
    archive.read("losses", value);
    losses = value.toInt();
  }
};

struct State {
  explicit State(uint64_t seed) {
    for (uint64_t i = 0; i < 2; ++i) {
      players.push_back({.net = make_net(seed + i), .adam = nullptr, .temperature = 0.5F * static_cast<float>(seed)});
      players[i].adam = std::make_unique<torch::optim::Adam>(players[i].net->parameters(), 1e-3);
    }
    averages["slow"] = {torch::full({3}, static_cast<double>(seed)), torch::full({2, 2}, 0.5)};
    averages["fast"] = {};
    name = "run " + std::to_string(seed);
    numbers = {seed > 1, static_cast<int>(seed),         'a', static_cast<uint16_t>(seed),
               ~seed,    0.1 * static_cast<double>(seed)};
    seen["wins"] = static_cast<int64_t>(seed);
    best = std::make_shared<torch::Tensor>(torch::full({4}, -static_cast<double>(seed)));
    epoch = static_cast<uint8_t>(seed);
    tally = {.wins = static_cast<int64_t>(seed), .losses = -static_cast<int64_t>(seed)};
  }
  auto tree() { return std::tie(players, averages, name, numbers, seen, best, epoch, tally); }
  void train() {
    for (auto& player : players) {
      player.adam->zero_grad();
      player.net->forward(torch::ones({4, 6})).square().mean().backward();
      player.adam->step();
    }
  }
  std::string all() {
    std::string bytes = text(name, int{epoch}, tally.wins, tally.losses, seen["wins"], bits(*best));
    std::apply([&](auto... each) { bytes += text(each..., '|'); }, numbers);
    for (auto& player : players) bytes += text(player.temperature, bits(*player.net));
    for (auto& [key, list] : averages)
      for (auto& each : list) bytes += key + bits(each);
    return bytes;
  }

  std::vector<Player> players;
  std::map<std::string, std::vector<torch::Tensor>> averages;
  std::string name;
  std::tuple<bool, int, char, uint16_t, uint64_t, double> numbers;
  std::map<std::string, int64_t> seen;
  std::shared_ptr<torch::Tensor> best;
  uint8_t epoch = 0;
  Tally tally;
};

TEST_P(SnapshotTest, ATreeComesBack) {
  std::string after, later;
  run_threads(2, [&](World& world) {
    State state(7);
    state.train();
    {
      Snapshot snapshot(options());
      snapshot.add("state", state);
      EXPECT_EQ(snapshot.restore(), 0);
      snapshot.save(3);
    }
    if (world.rank() == 0) after = state.all();
    state.train();  // with the optimizers' moments
    if (world.rank() == 0) later = state.all();
  });
  run_threads(2, [&](World& world) {
    State state(1);
    Snapshot snapshot(options());
    snapshot.add("state", state);
    EXPECT_EQ(snapshot.restore(), 3);
    if (world.rank() == 0) {
      EXPECT_TRUE(state.all() == after);
    }
    state.train();
    if (world.rank() == 0) {
      EXPECT_TRUE(state.all() == later);
    }
  });
}

TEST_P(SnapshotTest, ATreeIsRefusedThatHasOtherLeaves) {
  run_threads(1, [&](World&) {
    State state(2);
    Snapshot(options()).add("state", state).save(1);
    state.players.pop_back();
    Snapshot fewer(options());
    fewer.add("state", state);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { fewer.restore(); }),
                    "'state.0.1.0', 'state.0.1.1', 'state.0.1.2', which the program did not add");

    Snapshot empty(options());
    state.best = nullptr;
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { empty.add("state", state); }), "'state.5'");
    std::optional<int64_t> number;
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { empty.add("number", number); }), "'number'");
    std::map<std::string, torch::Tensor> slash{{"a/b", torch::zeros({1})}};
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { empty.add("map", slash); }), "without a slash");
  });
}

// What a process that was killed while it saved has left goes with the next save(), and so does a checkpoint that is
// damaged, unless one that is intact is a training's.
TEST_P(SnapshotTest, ACheckpointIsReplacedWhateverIsInItsFolder) {
  const CheckpointOptions with{.sharded = sharded()};
  const auto save = [&] {
    run_threads(2, [&](World&) {
      State state(7);
      checkpoint::save(state, folder_, with);
    });
  };
  const auto damage = [&](const fs::path& file) {
    std::fstream in_place(file, std::ios::in | std::ios::out | std::ios::binary);
    in_place.seekp(20);
    in_place << "?????";
  };
  save();
  const auto one = files();
  const fs::path manifest = folder_ / "step-1.snapshot.safetensors";
  ASSERT_TRUE(fs::exists(manifest));
  std::ofstream(folder_ / "step-2.snapshot.safetensors.1f0c33aa.tmp") << "half of it";
  damage(manifest);
  run_threads(2, [&](World&) {
    State state(1);
    EXPECT_THROW(checkpoint::load(state, folder_, with), CorruptError);
  });
  save();
  EXPECT_EQ(files().size(), one.size());
  EXPECT_FALSE(fs::exists(manifest));
  run_threads(2, [&](World&) {
    State state(1);
    checkpoint::load(state, folder_, with);
    EXPECT_TRUE(state.all() == State(7).all());
  });
  fs::remove_all(folder_);
  save_steps(2, {10, 20});  // a training's
  damage(folder_ / "step-20.snapshot.safetensors");
  run_threads(2, [&](World&) {
    State state(7);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { checkpoint::save(state, folder_, with); }),
                    "has the snapshots of a training");
  });
}

// checkpoint::save() and load(): one call for a state, which replaces what was in the folder.
TEST_P(SnapshotTest, AStateIsSavedAndLoadedByOneCall) {
  const CheckpointOptions with{.sharded = sharded()};
  std::string first, second;
  run_threads(2, [&](World& world) {
    State state(7);
    int64_t epoch = 3;
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { checkpoint::load(std::tie(state, epoch), folder_, with); }),
                    "there is no checkpoint in " + folder_.string());
    checkpoint::save(std::tie(state, epoch), folder_, with);
    if (world.rank() == 0) first = state.all();
    State other(1);
    int64_t its_epoch = 0;
    checkpoint::load(std::tie(other, its_epoch), folder_, with);
    EXPECT_EQ(its_epoch, 3);
    if (world.rank() == 0) {
      EXPECT_TRUE(other.all() == first);
    }

    other.train();
    checkpoint::save(other, folder_, with);  // another state, in the same folder
    if (world.rank() == 0) second = other.all();
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { checkpoint::load(std::tie(state, epoch), folder_, with); }),
                    "which the program did not add");
    EXPECT_EQ(epoch, 3);
    checkpoint::load(state, folder_, with);
    if (world.rank() == 0) {
      EXPECT_TRUE(state.all() == second);
    }
  });
  EXPECT_EQ(files().size(), sharded() ? 3U : 1U);
  fs::remove_all(folder_);
  save_steps(2, {10});  // a training's
  const auto before = contents();
  run_threads(2, [&](World&) {
    State state(7);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { checkpoint::save(state, folder_, with); }),
                    folder_.string() + " has the snapshots of a training");
  });
  EXPECT_TRUE(contents() == before);
  fs::remove_all(folder_);

  // Equal on all ranks, and for another number of them.
  const CheckpointOptions shared{.sharded = sharded(), .per_rank = false};
  run_threads(2, [&](World&) {
    auto net = make_net(5);
    torch::Tensor means = torch::arange(5);
    checkpoint::save(std::tie(net, means), folder_, shared);
  });
  for (const int n : {1, 3})
    run_threads(n, [&](World&) {
      auto net = make_net(6);
      torch::Tensor means = torch::zeros({5}, torch::kLong);
      checkpoint::load(std::tie(net, means), folder_, shared);
      EXPECT_TRUE(bits(*net) == bits(*make_net(5)));
      EXPECT_TRUE(means.equal(torch::arange(5)));
    });
}

TEST_P(SnapshotTest, NumbersAndStringsOfAnotherTypeAreRefused) {
  run_threads(1, [&](World&) {
    int64_t wide = 3;
    int32_t narrow = 4;
    std::string word = "a";
    Snapshot(options()).add("number", wide).save(1);
    const auto refusal = [&](auto& value) {
      Snapshot other(options());
      other.add("number", value);
      return message_of<InvalidArgument>([&] { other.restore(); });
    };
    EXPECT_CONTAINS(refusal(narrow), "number' in the snapshot: expected Int [], as here, got Long []");
    EXPECT_CONTAINS(refusal(word), "number' in the snapshot: expected a string, as here, got Long []");
    EXPECT_EQ(narrow, 4);
    EXPECT_EQ(word, "a");
  });
}

}  // namespace
}  // namespace muster::test::snapshots
