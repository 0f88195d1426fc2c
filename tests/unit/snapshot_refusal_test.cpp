// Snapshots that are damaged, do not fit, or cannot be written: what is refused, what is used instead, and what stays.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <iterator>
#include <optional>
#include <random>

#include "checkpoint/container.h"
#include "support/seccomp.h"
#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

// As long as this file exists, no folder can be synced.
std::atomic<const std::filesystem::path*> spoils_folders{nullptr};
std::atomic<bool> spoils_files{false};  // no file can be

}  // namespace
}  // namespace muster::test::snapshots

// Replaces the C library's fsync() in this program.
extern "C" int fsync(int fd) {
  const auto* const file = muster::test::snapshots::spoils_folders.load();
  struct stat about {};
  const bool is_known = ::fstat(fd, &about) == 0;
  const bool spoils = is_known && S_ISDIR(about.st_mode) ? file && std::filesystem::exists(*file)
                                                         : is_known && muster::test::snapshots::spoils_files;
  if (spoils) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace muster::test::snapshots {
namespace {

// Objects that read themselves come first. This one damages the file, which has been verified and is read again after
// that.
struct Saboteur {
  std::function<void()> when_loaded = [] {};
  void save(torch::serialize::OutputArchive& archive) const { archive.write("nothing", torch::zeros({1})); }
  void load(torch::serialize::InputArchive&) const { when_loaded(); }
};

TEST_P(SnapshotTest, AFileThatChangesWhileItIsReadIsRefusedByAll) {
  for (const bool own_folders : {false, true}) {
    SCOPED_TRACE(own_folders);
    fs::remove_all(folder_);
    run_threads(2, [&](World& world) {
      SnapshotOptions with = options();
      if (own_folders) with.folder = folder_ / text("rank-", world.rank());
      torch::nn::Linear net(300, 300);
      Saboteur saboteur;
      Snapshot snapshot(with);
      snapshot.add("saboteur", saboteur).add("model", net);
      EXPECT_EQ(snapshot.restore(), 0);
      snapshot.save(1);
      barrier();
      saboteur.when_loaded = [&] {
        barrier();
        if (world.rank() == 0)
          for (const auto& entry : fs::recursive_directory_iterator(folder_))
            if (entry.is_regular_file() && entry.file_size() > 300'000) flip(entry.path(), -100'000);
        barrier();
      };
      const auto message = message_of<CorruptError>([&] { snapshot.restore(); });
      EXPECT_CONTAINS(message, "tensor 'model/weight' is not as it was written");
      barrier();  // all ranks have taken part in everything
    });
  }
}

TEST_P(SnapshotTest, TheOneBeforeIsUsedByAllWhereOneRankFindsADamage) {
  for (const std::string damage : {"tensor", "header", "torn", "empty", "another", "gone"}) {
    SCOPED_TRACE(damage);
    fs::remove_all(folder_);
    save_steps(2, {10, 20});
    const auto path = data_file(20);
    if (damage == "tensor") flip(path, -100);
    if (damage == "header") flip(path, 80);
    if (damage == "torn") fs::resize_file(path, fs::file_size(path) - 1000);
    if (damage == "empty") fs::resize_file(path, 0);
    if (damage == "another") fs::copy_file(data_file(10), path, fs::copy_options::overwrite_existing);
    if (damage == "gone" && !sharded()) continue;  // then there is no such snapshot
    if (damage == "gone") fs::remove(path);
    testing::internal::CaptureStderr();
    const auto steps = restored(2);
    const auto said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(steps, 10);
    EXPECT_CONTAINS(said, "the snapshot of step 20 is refused: ");
    EXPECT_CONTAINS(said, path.string());
    if (damage == "tensor") {
      EXPECT_CONTAINS(said, ": tensor '");
      EXPECT_CONTAINS(said, ", byte ");
    }
  }
}

// Whichever byte of whichever file is damaged, nothing of the snapshot is loaded, on any rank.
TEST_P(SnapshotTest, NothingOfADamagedSnapshotIsLoaded) {
  save_steps(2, {10});
  const auto good = contents();
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    auto damaged = good;
    auto each = std::next(damaged.begin(), static_cast<std::ptrdiff_t>(random() % damaged.size()));
    std::string& bytes = each->second;
    const size_t at = random() % bytes.size();
    const bool is_cut = i % 4 == 3;
    if (is_cut) {
      bytes.resize(at);
    } else {
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
    }
    SCOPED_TRACE(text(each->first, is_cut ? ", cut at " : ", byte ", at));
    std::ofstream(folder_ / each->first, std::ios::binary) << bytes;
    EXPECT_CONTAINS(restore_error<CorruptError>(2), each->first);
    std::ofstream(folder_ / each->first, std::ios::binary) << good.at(each->first);
  }
  EXPECT_EQ(restored(2), 10);
}

// A manifest with a right checksum that names a file elsewhere.
TEST_P(SnapshotTest, AShardOutsideOfTheFolderIsRefused) {
  if (!sharded()) GTEST_SKIP() << "one file names no others";
  save_steps(2, {10, 20});
  const auto manifest = folder_ / "step-20.snapshot.safetensors";
  std::string head = contents().at(manifest.filename());
  const size_t at = head.find("step-20.shard-1");
  ASSERT_NE(at, std::string::npos);
  head.replace(at, 3, "../");
  checkpoint::set_checksum(head);
  std::ofstream(manifest, std::ios::binary) << head;
  testing::internal::CaptureStderr();
  EXPECT_EQ(restored(2), 10);
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "is not the name of a shard in this folder");
}

TEST_P(SnapshotTest, ADamagedHeaderIsRefusedThatOfAManifestToo) {
  save_steps(2, {10, 20});
  flip(folder_ / "step-20.snapshot.safetensors", 70);
  testing::internal::CaptureStderr();
  EXPECT_EQ(restored(2), 10);
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "step-20.snapshot.safetensors, byte 0: the header");
}

TEST_P(SnapshotTest, WhereAllAreDamagedNothingIsRestoredAndNothingBeginsAnew) {
  save_steps(2, {10, 20});
  for (const int64_t step : {10, 20}) flip(data_file(step), -1);
  testing::internal::CaptureStderr();
  const auto message = restore_error<CorruptError>(2);
  testing::internal::GetCapturedStderr();
  for (const int64_t step : {10, 20}) EXPECT_CONTAINS(message, data_file(step).string() + ", byte ");
  EXPECT_CONTAINS(message, "name another folder to begin anew");
}

TEST_P(SnapshotTest, ARefusedOneDoesNotDisplaceGoodOnes) {
  save_steps(2, {10, 20, 30});
  flip(data_file(30), -1);
  testing::internal::CaptureStderr();
  save_steps(2, {25});  // restores 20
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(restored(2), 25);
  flip(data_file(25), -1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(restored(2), 20);
  testing::internal::GetCapturedStderr();
}

TEST_P(SnapshotTest, WhatDoesNotFitIsRefusedBeforeAnythingChanges) {
  save_steps(2, {10});
  const auto before = contents();
  EXPECT_CONTAINS(restore_error<InvalidArgument>(1), "was written by 2 ranks, but this job has 1");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   static int64_t more = 0;
                                                   training.add_to(snapshot);
                                                   snapshot.add("more", more);
                                                 }),
                  "the snapshot has no 'more'");
  const auto differences = restore_error<InvalidArgument>(2, [](Training& training, Snapshot& snapshot) {
    static int64_t more = 0, even_more = 0;
    snapshot.add("model", *training.net).add("more", more).add("even more", even_more);
  });
  EXPECT_CONTAINS(differences, "the snapshot has no 'even more', 'more'; it has 'best', 'counters', 'last', 'means'");
  EXPECT_CONTAINS(differences, "'optimizer', 'sampler', 'total', which the program did not add");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(
                      2, [](Training& training, Snapshot& snapshot) { snapshot.add("model", *training.net); }),
                  "which the program did not add");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   training.net->c->weight.set_data(torch::zeros({3, 100}));
                                                   training.add_to(snapshot);
                                                 }),
                  "tensor 'model/c.weight' in the snapshot: expected Float [3 x 100], as here, got Float [3 x 200]");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   training.optimizer = std::make_unique<torch::optim::SGD>(
                                                       training.net->parameters(), 0.1);
                                                   training.add_to(snapshot);
                                                 }),
                  "'optimizer' in the snapshot: expected 1 groups of parameters, as here, got 2");
  EXPECT_EQ(contents(), before);
}

// The name of a training. Without one on either side, the items decide.
TEST_P(SnapshotTest, AnotherTrainingsIsRefused) {
  const auto train = [&](const std::string& name, int64_t restored_step, int64_t step) {
    run_threads(2, [&](World& world) {
      Training training(world, 1, sgd());
      SnapshotOptions with = options();
      with.training = name;
      Snapshot snapshot(with);
      training.add_to(snapshot);
      EXPECT_EQ(snapshot.restore(), restored_step);
      training.total = step;
      snapshot.save(step);
    });
  };
  train("", 0, 10);
  train("red", 10, 20);
  const auto before = contents();
  std::vector<std::string> messages(2);
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    SnapshotOptions with = options();
    with.training = "blue";
    Snapshot snapshot(with);
    training.add_to(snapshot);
    const auto state = training.state();
    messages.at(static_cast<size_t>(world.rank())) = message_of<InvalidArgument>([&] { snapshot.restore(); });
    EXPECT_TRUE(training.state() == state);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.save(30); }), "restore()");
  });
  for (const auto& message : messages)
    EXPECT_CONTAINS(message, "of step 20 in " + folder_.string() + " is of the training 'red', and this is 'blue'");
  EXPECT_EQ(contents(), before);
  EXPECT_EQ(restored(2), 20);
  train("red", 20, 30);
}

TEST_P(SnapshotTest, AFolderWithSnapshotsIsNotOverwrittenUnasked) {
  save_steps(2, {10});
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.save(1); }), "has a snapshot of step 10");
    EXPECT_EQ(snapshot.restore(), 10);
    training.total = 11;
    snapshot.save(11);
  });
  EXPECT_EQ(restored(2), 11);
}

TEST_P(SnapshotTest, RanksThatDisagreeAreTold) {
  run_threads(3, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options(5));
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    EXPECT_CONTAINS(message_of<Mismatch>([&] { (void)snapshot.step(world.rank() == 1 ? 4 : 3); }),
                    "the ranks are at different steps, from 3 to 4");
    int64_t odd = 1;
    if (world.rank() == 2) snapshot.add("odd", odd);
    EXPECT_CONTAINS(message_of<Mismatch>([&] { snapshot.save(5); }), "rank 2 and rank 0 have added different things");
  });
  EXPECT_TRUE(files().empty());
}

TEST_P(SnapshotTest, AFullDiskCostsNeitherTheTrainingNorTheOldSnapshot) {
  testing::internal::CaptureStderr();
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options(2));
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    training.total = 2;
    EXPECT_FALSE(snapshot.step(2));
    const auto before = files();
    barrier();
    {
      std::optional<FullDisk> full;
      if (world.rank() == 0) full.emplace(40'000);
      barrier();
      EXPECT_FALSE(snapshot.step(4));
      EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.save(5); }), "File too large");
      barrier();
      EXPECT_EQ(files(), before);
      snapshot.request_stop();
      EXPECT_CONTAINS(message_of<Unavailable>([&] { (void)snapshot.step(5); }), "File too large");
      barrier();
    }
    barrier();
    training.total = 6;
    EXPECT_TRUE(snapshot.step(6));
  });
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(said, "no snapshot of step 4: ");
  EXPECT_CONTAINS(said, "The training goes on; the newest snapshot is that of step 2");
  EXPECT_EQ(restored(2), 6);
}

TEST_P(SnapshotTest, AFileThatCannotBeSyncedIsNoSnapshot) {
  save_steps(2, {10});
  const auto before = contents();
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 10);
    barrier();
    spoils_files = true;
    EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.save(20); }), "step-20");
    barrier();
    spoils_files = false;
    barrier();
  });
  EXPECT_EQ(contents(), before);
  EXPECT_EQ(restored(2), 10);
}

// When the last sync fails, everything is already written and renamed: the snapshot may exist after all.
TEST_P(SnapshotTest, AFolderThatCannotBeSyncedTakesNothingFromTheSnapshotInIt) {
  const auto file = folder_ / "step-10.snapshot.safetensors";
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    if (world.rank() == 0) spoils_folders = &file;
    barrier();
    training.total = 10;
    EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.save(10); }), "cannot sync the folder");
    barrier();
    if (world.rank() == 0) spoils_folders = nullptr;
    barrier();
    training.total = 20;
    snapshot.save(20);
  });
  EXPECT_EQ(files().size(), sharded() ? 6u : 2u);
  EXPECT_EQ(restored(2), 20);
  fs::remove(folder_ / "step-20.snapshot.safetensors");
  EXPECT_EQ(restored(2), 10);
}

// From now on the calling thread cannot list folders; returns false if it still can.
bool lists_no_folders() {
  sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getdents64, 0, 1),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EIO),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  return test::filter_calls(code);
}

TEST_P(SnapshotTest, WhereItIsNotKnownWhatIsNeededEverythingStays) {
  bool could_not_list = false;
  testing::internal::CaptureStderr();
  run_threads(3, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(options());
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    training.total = 10;
    snapshot.save(10);
    if (world.rank() == 0) could_not_list = lists_no_folders();
    training.total = 20;
    snapshot.save(20);
  });
  const auto said = testing::internal::GetCapturedStderr();
  if (!could_not_list) GTEST_SKIP() << "no filter of system calls here";
  EXPECT_CONTAINS(said, "older snapshots stay in ");
  EXPECT_EQ(restored(3), 20);
}

}  // namespace
}  // namespace muster::test::snapshots
