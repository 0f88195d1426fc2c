// Snapshots whose files are in several folders, such as one on each disk.
#include <atomic>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "base/text.h"
#include "checkpoint/inspect.h"
#include "support/temporary_folder.h"
#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

class ShardFolders : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  SnapshotOptions options() const {
    return {.folder = folder_, .sharded = true, .shard_folders = {a_, b_}, .default_generator = false};
  }
  static void save(int n, const SnapshotOptions& with, const std::vector<int64_t>& steps) {
    run_threads(n, [&](World& world) {
      Training training(world, 1, sgd());
      Snapshot snapshot(with);
      training.add_to(snapshot);
      snapshot.restore();
      for (const int64_t step : steps) {
        training.total = step;
        snapshot.save(step);
      }
      snapshot.wait();
    });
  }
  // The step that is restored, without a word about the other folders.
  int64_t restored(int n) const {
    std::atomic<int64_t> result{-1};
    run_threads(n, [&](World& world) {
      Training training(world, 2, sgd());
      Snapshot snapshot({.folder = folder_, .sharded = true, .default_generator = false});
      training.add_to(snapshot);
      const int64_t steps = snapshot.restore();
      EXPECT_EQ(training.total, steps);
      if (world.rank() == 0) result = steps;
    });
    return result;
  }
  static std::set<std::string> files(const fs::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
    return names;
  }
  static void write(const fs::path& file) { std::ofstream(file) << "bytes"; }

  const TemporaryFolder all_;
  const fs::path folder_ = all_.path() / "run", a_ = all_.path() / "disk1" / "run", b_ = all_.path() / "disk2" / "run";
};

TEST_F(ShardFolders, EachRankWritesIntoItsOwn) {
  for (const bool asynchronous : {false, true}) {
    SnapshotOptions with = options();
    with.asynchronous = asynchronous;
    save(3, with, asynchronous ? std::vector<int64_t>{40, 50} : std::vector<int64_t>{10, 20, 30});
    const std::set<std::string> in_a = files(a_), in_b = files(b_);
    EXPECT_EQ(in_a.size(), 4u);  // of ranks 0 and 2, and of the newest two snapshots
    EXPECT_EQ(in_b.size(), 2u);
    for (const std::string& name : in_b) EXPECT_NE(name.find(".shard-1-of-3."), name.npos) << name;
    EXPECT_EQ(files(folder_).size(), 8u);  // with the manifests
    for (const auto* const there : {&in_a, &in_b})
      for (const std::string& name : *there) {
        EXPECT_TRUE(fs::is_symlink(folder_ / name)) << name;
        EXPECT_TRUE(fs::equivalent(folder_ / name, (there == &in_a ? a_ : b_) / name)) << name;
      }
    const auto verified = checkpoint::verify({folder_.string()});
    EXPECT_TRUE(verified.good) << verified.words;
    EXPECT_EQ(restored(3), asynchronous ? 50 : 30);
  }
}

TEST_F(ShardFolders, OneOfThemMayBeTheFolderItself) {
  SnapshotOptions with = options();
  with.shard_folders = {folder_, b_};
  save(2, with, {10, 20, 30});
  EXPECT_EQ(files(folder_).size(), 6u);
  EXPECT_EQ(files(b_).size(), 2u);
  EXPECT_EQ(restored(2), 30);
}

TEST_F(ShardFolders, OnlyWhatIsLinkedIsRemoved) {
  fs::create_directories(a_);
  const std::string other = "step-10.shard-0-of-2.00c0ffee.snapshot.safetensors";
  for (const std::string& name : {other, other + ".1234abcd.tmp"}) write(a_ / name);
  const auto elsewhere = all_.path() / "other";  // to which a link leads that no Snapshot has made
  write(elsewhere);
  save(2, options(), {10, 20});
  fs::create_symlink(elsewhere, folder_ / "step-1.shard-1-of-2.00c0ffee.snapshot.safetensors");
  save(2, options(), {30, 40});
  EXPECT_EQ(files(a_).size(), 4u);
  EXPECT_TRUE(files(a_).contains(other) && files(a_).contains(other + ".1234abcd.tmp"));
  EXPECT_TRUE(fs::exists(elsewhere));
  EXPECT_EQ(files(folder_).size(), 6u);
}

// One process was killed when it wrote its file, and one when it had written it.
TEST_F(ShardFolders, WhatAKilledProcessLeftIsRemoved) {
  save(2, options(), {10});
  const std::string half = "step-20.shard-0-of-2.00c0ffee.snapshot.safetensors",
                    whole = "step-20.shard-1-of-2.00c0ffee.snapshot.safetensors";
  fs::create_symlink(a_ / half, folder_ / half);
  write(a_ / (half + ".1234abcd.tmp"));
  fs::create_symlink(b_ / whole, folder_ / whole);
  write(b_ / whole);
  EXPECT_EQ(restored(2), 10);
  EXPECT_EQ(files(a_).size(), 1u) << "the file that is not complete is still there";
  save(2, options(), {30});
  for (const auto& there : {folder_, a_, b_})
    for (const std::string& name : files(there)) EXPECT_EQ(name.find("00c0ffee"), name.npos) << name;
  EXPECT_EQ(files(folder_).size(), 6u);
  EXPECT_EQ(restored(2), 30);
}

TEST_F(ShardFolders, AFolderThatIsGone) {
  save(2, options(), {10});
  fs::rename(b_, all_.path() / "away");
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    const std::string what = message_of<CorruptError>([&] { snapshot.restore(); });
    EXPECT_CONTAINS(what, "step-10.shard-1-of-2.");
    EXPECT_CONTAINS(what, "No such file or directory");
    EXPECT_EQ(training.total, 0);
  });
  fs::rename(all_.path() / "away", b_);
  EXPECT_EQ(restored(2), 10);
}

TEST_F(ShardFolders, AFolderThatCannotBeMade) {
  save(2, options(), {10});
  const auto before = files(folder_);
  write(all_.path() / "file");
  SnapshotOptions with = options();
  with.shard_folders = {a_, all_.path() / "file" / "run"};
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 10);
    const std::string what = message_of<Unavailable>([&] { snapshot.save(20); });
    EXPECT_CONTAINS(what, "rank 1: cannot make the link");
    EXPECT_CONTAINS(what, "Not a directory");
  });
  EXPECT_EQ(files(folder_), before);
  EXPECT_EQ(files(a_).size(), 1u);
  EXPECT_EQ(restored(2), 10);
}

TEST_F(ShardFolders, OptionsThatDoNotFit) {
  run_threads(1, [&](World&) {
    SnapshotOptions with = options();
    with.sharded = false;
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { Snapshot snapshot(with); }), ".shard_folders");
    with = options();
    with.shard_folders.push_back("");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { Snapshot snapshot(with); }), "empty name");
  });
}

}  // namespace
}  // namespace muster::test::snapshots
