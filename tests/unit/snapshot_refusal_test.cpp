// Snapshots that are damaged, do not fit, or cannot be written: what is refused, what is used instead, and what stays.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <optional>

#include "support/seccomp.h"
#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

// As long as this file exists, no folder can be synced.
std::atomic<const std::filesystem::path*> spoils_folders{nullptr};

}  // namespace
}  // namespace muster::test::snapshots

// Replaces the C library's fsync() in this program.
extern "C" int fsync(int fd) {
  const auto* const file = muster::test::snapshots::spoils_folders.load();
  struct stat about {};
  if (file && ::fstat(fd, &about) == 0 && S_ISDIR(about.st_mode) && std::filesystem::exists(*file)) {
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
  EXPECT_CONTAINS(restore_error<InvalidArgument>(1), "was written by 2 ranks, but this job has 1");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   static int64_t more = 0;
                                                   training.add_to(snapshot);
                                                   snapshot.add("more", more);
                                                 }),
                  "the snapshot has no 'more'");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(
                      2, [](Training& training, Snapshot& snapshot) { snapshot.add("model", *training.net); }),
                  "that was not added");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   training.net->c->weight.set_data(torch::zeros({3, 100}));
                                                   training.add_to(snapshot);
                                                 }),
                  "tensor 'model/c.weight' is Float [3 x 200] in the snapshot, and Float [3 x 100] here");
  EXPECT_CONTAINS(restore_error<InvalidArgument>(2,
                                                 [](Training& training, Snapshot& snapshot) {
                                                   training.optimizer = std::make_unique<torch::optim::SGD>(
                                                       training.net->parameters(), 0.1);
                                                   training.add_to(snapshot);
                                                 }),
                  "'optimizer' has 2 groups of parameters in the snapshot, and 1 here");
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
