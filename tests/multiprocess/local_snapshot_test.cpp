// Snapshots in the hosts' own folders: after the loss of a host, the others have all of the newest one.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <string>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "support/full_run.h"
#include "support/kill_while_saving.h"
#include "support/temporary_folder.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;

// A model, of which each rank stores a part, and numbers that each rank has for itself. All are those of the last step.
struct Counted {
  nn::Sequential net{nn::Linear(300, 300), nn::Linear(300, 300), nn::Linear(300, 300), nn::Linear(300, 300)};
  int64_t own = 0;

  explicit Counted(const World& world) { set(world, 0); }
  void set(const World& world, int64_t step) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(static_cast<double>(step));
    own = 100 * step + world.rank();
  }
  void add_to(Snapshot& snapshot, bool with_own) {
    snapshot.add("model", net);
    if (with_own) snapshot.add("own", own);
  }
  void expect_of(const World& world, int64_t step, bool with_own) const {
    for (const auto& parameter : net->parameters())
      EXPECT_TRUE(parameter.eq(static_cast<double>(step)).all().item<bool>());
    if (with_own) {
      EXPECT_EQ(own, 100 * step + world.rank());
    }
  }
};

class LocalSnapshot : public testing::Test {
 protected:
  fs::path of(const std::string& host) const { return memory_ / ("host-" + host); }
  fs::path all() const { return folder_ / "all"; }
  SnapshotOptions options(const std::string& host) const {
    return {.folder = all(),
            .every = 10,
            .asynchronous = asynchronous_,
            .local = {.folder = of(host), .every = 2, .replicas = replicas_},
            .on_sigterm = false,
            .default_generator = false};
  }
  // The ranks restore, and go on up to `steps`. Returns which step they have restored.
  int64_t train(const HostOfRank& hosts, int64_t steps, bool with_own = true) const {
    std::atomic<int64_t> restored = -1;
    on_hosts(hosts, [&](World& world) {
      Counted numbers(world);
      Snapshot snapshot(options(hosts[static_cast<size_t>(world.rank())]));
      numbers.add_to(snapshot, with_own);
      int64_t step = snapshot.restore();
      restored = step;
      numbers.expect_of(world, step, with_own);
      while (step < steps) {
        numbers.set(world, ++step);
        EXPECT_FALSE(snapshot.step(step));
      }
      snapshot.wait();
    });
    return restored;
  }
  std::set<std::string> files(const fs::path& folder) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
    return names;
  }
  // Which ranks' shards of a step's snapshot are there.
  std::set<int> shards(const fs::path& folder, int64_t step) const {
    std::set<int> ranks;
    const std::string start = text("step-", step, ".shard-");
    for (const auto& name : files(folder))
      if (name.starts_with(start)) ranks.insert(std::stoi(name.substr(start.size())));
    return ranks;
  }

  TemporaryFolder folder_, memory_{fs::exists("/dev/shm") ? "/dev/shm" : fs::temp_directory_path()};  // of the hosts
  int replicas_ = 1;
  bool asynchronous_ = false;
};

TEST_F(LocalSnapshot, TheOthersHaveWhatALostHostHad) {
  const HostOfRank hosts{"a", "a", "b", "b", "c"};
  for (const std::string lost : {"a", "b", "c"}) {
    SCOPED_TRACE(lost);
    asynchronous_ = lost == "b";
    for (const std::string host : {"a", "b", "c", "d"}) fs::remove_all(of(host));
    EXPECT_EQ(train(hosts, 7), 0);
    // Each host has the shards of its ranks and of the ranks of the host before it; the newest snapshot only.
    EXPECT_EQ(shards(of("a"), 6), (std::set<int>{0, 1, 4}));
    EXPECT_EQ(shards(of("b"), 6), (std::set<int>{0, 1, 2, 3}));
    EXPECT_EQ(shards(of("c"), 6), (std::set<int>{2, 3, 4}));
    for (const std::string host : {"a", "b", "c"}) {
      EXPECT_TRUE(files(of(host)).contains("step-6.snapshot.safetensors"));
      EXPECT_EQ(files(of(host)).size(), shards(of(host), 6).size() + 1);
    }
    EXPECT_TRUE(files(all()).empty());
    fs::remove_all(of(lost));
    HostOfRank others = hosts;
    std::replace(others.begin(), others.end(), lost, std::string("d"));
    EXPECT_EQ(train(others, 6), 6);
    // The ranks may have moved to other hosts, too.
    EXPECT_EQ(train({others[4], others[2], others[2], others[0], others[0]}, 7), 6);
  }
}

TEST_F(LocalSnapshot, FewerRanksGoOn) {
  EXPECT_EQ(train({"a", "a", "b", "b"}, 5, false), 0);
  fs::remove_all(of("a"));
  EXPECT_EQ(train({"b", "b"}, 7, false), 4);
  EXPECT_EQ(train({"b"}, 9, false), 6);
}

TEST_F(LocalSnapshot, OneInTheFolderOfAllReplacesThem) {
  EXPECT_EQ(train({"a", "b"}, 11), 0);
  EXPECT_EQ(files(all()).size(), 1u);
  for (const std::string host : {"a", "b"}) EXPECT_TRUE(files(of(host)).empty()) << *files(of(host)).begin();
  EXPECT_EQ(train({"a", "b"}, 13), 10);
  EXPECT_EQ(train({"a", "b"}, 13), 12);
}

TEST_F(LocalSnapshot, WithoutReplicasTheFolderOfAllIsUsed) {
  replicas_ = 0;
  EXPECT_EQ(train({"a", "a", "b"}, 13), 0);
  EXPECT_EQ(shards(of("a"), 12), (std::set<int>{0, 1}));
  EXPECT_EQ(shards(of("b"), 12), (std::set<int>{2}));
  fs::remove_all(of("b"));
  EXPECT_EQ(train({"a", "a", "b"}, 12), 10);
  // The snapshot of step 12 was refused, and that of this job has taken its place.
  EXPECT_EQ(train({"a", "a", "b"}, 12), 12);
}

TEST_F(LocalSnapshot, ADamagedOneIsRefused) {
  EXPECT_EQ(train({"a", "b"}, 13), 0);
  for (const std::string host : {"a", "b"})
    for (const auto& entry : fs::directory_iterator(of(host)))
      if (entry.file_size() > 100'000) fs::resize_file(entry.path(), entry.file_size() - 8);
  EXPECT_EQ(train({"a", "b"}, 13), 10);
}

// The hosts have the newest one; the folder of all has an older one.
TEST_F(LocalSnapshot, OneThatIsNamedIsTakenFromWhereItIsOrNone) {
  const HostOfRank hosts{"a", "b"};
  replicas_ = 0;
  EXPECT_EQ(train(hosts, 12), 0);
  const auto restore = [&](World& world, int64_t step) {
    Counted numbers(world);
    Snapshot snapshot(options(hosts[static_cast<size_t>(world.rank())]));
    numbers.add_to(snapshot, true);
    EXPECT_EQ(snapshot.restore({.steps = step}), step);
    numbers.expect_of(world, step, true);
  };
  on_hosts(hosts, [&](World& world) { restore(world, 12); });
  fs::remove_all(of("b"));
  on_hosts(hosts, [&](World& world) {
    Counted numbers(world);
    Snapshot snapshot(options(hosts[static_cast<size_t>(world.rank())]));
    numbers.add_to(snapshot, true);
    EXPECT_CONTAINS(message_of<CorruptError>([&] { snapshot.restore({.steps = 12}); }),
                    "the snapshot of step 12 is not intact");
    numbers.expect_of(world, 0, true);
  });
  on_hosts(hosts, [&](World& world) { restore(world, 10); });
}

TEST_F(LocalSnapshot, OneHostNeedsNoReplicas) {
  EXPECT_EQ(train({"a", "a"}, 5), 0);
  EXPECT_EQ(shards(of("a"), 4), (std::set<int>{0, 1}));
  EXPECT_EQ(train({"a", "a"}, 5), 4);
}

TEST_F(LocalSnapshot, RanksOfAHostNeedNotFollowEachOther) {
  replicas_ = 2;
  const HostOfRank hosts{"a", "b", "a", "c", "b", "a"};
  EXPECT_EQ(train(hosts, 5), 0);
  for (const std::string host : {"a", "b", "c"}) EXPECT_EQ(shards(of(host), 4).size(), 6u);
  fs::remove_all(of("a"));
  fs::remove_all(of("b"));
  EXPECT_EQ(train({"d", "d", "c", "c", "d", "e"}, 5), 4);
}

// More is lost than the replicas make good, and nothing has been saved in the folder of all.
TEST_F(LocalSnapshot, WhatIsLostWithTheHostsIsBegunAnew) {
  EXPECT_EQ(train({"a", "b", "c"}, 5), 0);
  fs::remove_all(of("a"));
  fs::remove_all(of("b"));
  EXPECT_EQ(train({"a", "b", "c"}, 5), 0);
  EXPECT_EQ(train({"a", "b", "c"}, 5), 4);
}

// A host that was away comes back with a snapshot of the same step, which another attempt has made, and of which a part
// is lost.
TEST_F(LocalSnapshot, AManifestWithoutItsShardsHidesNoOther) {
  EXPECT_EQ(train({"a", "b", "c"}, 5), 0);
  fs::rename(of("a"), of("away"));
  fs::remove_all(of("b"));
  fs::remove_all(of("c"));
  EXPECT_EQ(train({"x", "b", "c"}, 5), 0);
  fs::rename(of("away"), of("a"));
  for (const auto& entry : fs::directory_iterator(of("a")))
    if (entry.path().filename().string().find(".shard-") != std::string::npos) fs::remove(entry.path());
  EXPECT_EQ(train({"a", "b", "c"}, 5), 4);
}

// A shard's own copy is cut, or damaged in its values: the replica serves. If that is damaged too, nothing does.
TEST_F(LocalSnapshot, AReplicaServes) {
  EXPECT_EQ(train({"a", "b"}, 5), 0);
  const auto each_copy = [&](const std::string& host, const std::function<void(const fs::path&)>& damage) {
    for (const auto& entry : fs::directory_iterator(of(host)))
      if (entry.path().filename().string().find(".shard-0-") != std::string::npos) damage(entry.path());
  };
  const auto flip_last_byte = [](const fs::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
  };
  each_copy("a", flip_last_byte);
  EXPECT_EQ(train({"a", "b"}, 5), 4);
  each_copy("a", [](const fs::path& path) { fs::resize_file(path, 100); });
  EXPECT_EQ(train({"a", "b"}, 5), 4);
  each_copy("b", flip_last_byte);
  EXPECT_EQ(train({"a", "b"}, 5), 0);
}

// The disk of one host is full. The training goes on, and what was there stays.
TEST_F(LocalSnapshot, AHostThatCannotWriteCostsTheNewOneOnly) {
  const HostOfRank hosts{"a", "b"};
  EXPECT_EQ(train(hosts, 5), 0);
  on_hosts(hosts, [&](World& world) {
    Counted numbers(world);
    Snapshot snapshot(options(hosts[static_cast<size_t>(world.rank())]));
    numbers.add_to(snapshot, true);
    EXPECT_EQ(snapshot.restore(), 4);
    barrier();
    if (world.rank() == 1) fs::rename(of("b"), of("aside"));
    barrier();
    numbers.set(world, 6);
    EXPECT_FALSE(snapshot.step(6));
    barrier();
    if (world.rank() == 1) fs::rename(of("aside"), of("b"));
    barrier();
  });
  for (const std::string host : {"a", "b"}) EXPECT_EQ(files(of(host)).size(), 3u);
  EXPECT_EQ(train(hosts, 6), 4);
}

TEST_F(LocalSnapshot, ChecksItsArguments) {
  on_hosts({"a"}, [&](World&) {
    const auto error = [&](LocalSnapshotOptions local) {
      return message_of<InvalidArgument>([&] { Snapshot({.folder = all(), .local = std::move(local)}); });
    };
    EXPECT_THAT(error({.every = 2}), ::testing::HasSubstr(".local.every needs a folder"));
    EXPECT_THAT(error({.folder = of("a")}), ::testing::HasSubstr(".local.every: expected 1 or more, got 0"));
    EXPECT_THAT(error({.folder = of("a"), .every = 2, .keep = 0}),
                ::testing::HasSubstr(".local.keep: expected 1 or more"));
    EXPECT_THAT(error({.folder = of("a"), .every = 2, .replicas = -1}),
                ::testing::HasSubstr(".local.replicas: expected 0 or more"));
    EXPECT_THAT(error({.folder = all() / ".", .every = 2}), ::testing::HasSubstr("are the same"));
    fs::create_directory_symlink(all(), of("link"));
    EXPECT_THAT(error({.folder = of("link"), .every = 2}), ::testing::HasSubstr("are the same"));
  });
}

// Two hosts of one rank, which save into their own folders after each step, and now and then into that of all. One rank
// is killed at any moment, and its host's folder may be lost with it.
TEST(LocalSnapshotProcess, AKillCostsAtMostTheSnapshotsUnderWay) {
  const TemporaryFolder folder;
  const int kills = full_run() ? 100 : 4;  // each takes the three seconds after which a rank on another host is lost
  std::mt19937 random(5);
  int64_t last = 0, more = 0;
  for (int i = 0; i < kills; ++i) {
    SCOPED_TRACE(i);
    const SharedNumbers numbers(3);
    std::atomic<int64_t>&restored = numbers[0], &saved = numbers[1], &wrong = numbers[2];
    restored = -1;
    const ForkedJob job;
    ForkedRanks ranks(2, [&](int rank) -> std::string {
      World world = job.join(rank, 2, {.timeout = kPatience}, {"a", "b"});
      const World::Scope scope(world);
      try {
        Counted all(world);
        Snapshot snapshot({.folder = folder / "all",
                           .every = 7,
                           .asynchronous = i % 3 == 0,
                           .local = {.folder = folder / text("host-", rank), .every = 1},
                           .on_sigterm = false,
                           .default_generator = false});
        all.add_to(snapshot, true);
        int64_t step = snapshot.restore();
        bool right = step == 0 || all.own == 100 * step + rank;
        for (const auto& parameter : all.net->parameters())
          right = right && parameter.eq(static_cast<double>(step)).all().item<bool>();
        if (!right) wrong = 1;
        restored = step;
        for (;;) {
          all.set(world, ++step);
          (void)snapshot.step(step);
          if (rank == 0) saved = i % 3 == 0 ? step - 1 : step;  // or the one before it is complete
        }
      } catch (const PeerLost&) {
        return "lost";
      } catch (const Aborted&) {
        return "lost";
      }
    });
    const int struck = i % 2;
    ASSERT_NO_FATAL_FAILURE(kill_while_saving(ranks, struck, restored, saved, random));
    EXPECT_EQ(wrong, 0);
    EXPECT_GE(restored, last);
    EXPECT_LE(restored, last + more);
    last = saved;
    more = i % 3 == 0 ? 2 : 1;
    if (i % 4 < 2) fs::remove_all(folder / text("host-", struck));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace muster::test
