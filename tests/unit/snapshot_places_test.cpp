// Places where no snapshot can be written or read, and snapshots of another version: one sentence says so, and what is
// there stays as it was.
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/file_text.h"
#include "checkpoint/container.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/temporary_folder.h"
#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

using Contents = std::map<std::string, std::string>;  // by name

Contents contents_of(const fs::path& folder) {
  Contents all;
  for (const auto& entry : fs::directory_iterator(folder)) all[entry.path().filename()] = text_of_file(entry.path());
  return all;
}

// Runs it in a process of its own, alone in a World. Returns what fn returned.
std::string in_a_process(
    const std::function<std::string(const std::function<void(const std::function<void()>&)>&)>& fn) {
  ForkedRanks child(
      1, [&](int) { return fn([](const std::function<void()>& alone) { run_threads(1, [&](World&) { alone(); }); }); });
  const auto end = child.wait(0, patience());
  EXPECT_TRUE(end.exited);
  EXPECT_EQ(end.status, 0) << end.said;
  return end.said;
}

// Root may write everywhere.
void become_nobody() {
  constexpr unsigned kNobody = 65534;
  if (::geteuid() != 0) return;
  if (::setegid(kNobody) != 0 || ::seteuid(kNobody) != 0) throw std::runtime_error("cannot become another user");
}

SnapshotOptions in(const fs::path& folder, bool sharded) {
  return {.folder = folder, .every = 2, .sharded = sharded, .default_generator = false};
}

TEST_P(SnapshotTest, AFolderWithoutPermissionKeepsWhatItHas) {
  save_steps(1, {10});
  const Contents before = contents_of(folder_);
  const auto locked = folder_ / "locked";
  fs::create_directory(locked);
  fs::permissions(locked, fs::perms::none);
  fs::permissions(folder_, fs::perms(0555));
  for (const auto& file : before) fs::permissions(folder_ / file.first, fs::perms(0444));
  in_a_process([&](const auto& alone) {
    become_nobody();
    alone([&] {
      Training training(World::current(), 2, sgd());
      Snapshot snapshot(in(folder_, sharded()));
      training.add_to(snapshot);
      EXPECT_EQ(snapshot.restore(), 10);
      EXPECT_EQ(training.total, 10);
      const std::string what = message_of<Unavailable>([&] { snapshot.save(11); });
      EXPECT_CONTAINS(what, "Permission denied");
      EXPECT_CONTAINS(what, folder_.string());
      EXPECT_FALSE(snapshot.step(12));  // one on the way costs a line, and not the training
    });
    alone([&] {
      const std::string what = message_of<Unavailable>([&] { Snapshot(in(folder_ / "new", sharded())); });
      EXPECT_CONTAINS(what, "Permission denied");
      EXPECT_CONTAINS(what, (folder_ / "new").string());
    });
    alone([&] {
      Training training(World::current(), 2, sgd());
      Snapshot snapshot(in(locked, sharded()));
      training.add_to(snapshot);
      const std::string what = message_of<Unavailable>([&] { snapshot.restore(); });
      EXPECT_CONTAINS(what, "Permission denied");
      EXPECT_CONTAINS(what, locked.string());
      EXPECT_EQ(training.total, 0);
    });
    return std::string();
  });
  fs::permissions(folder_, fs::perms::owner_all);
  fs::remove(locked);
  EXPECT_TRUE(contents_of(folder_) == before);
  EXPECT_EQ(restored(1), 10);
}

TEST_P(SnapshotTest, AFileSystemWithoutSpaceKeepsWhatItHas) {
  const std::string said = in_a_process([&](const auto& alone) -> std::string {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=1m") != 0)
      return text("cannot mount a file system of 1 MiB: ", std::strerror(errno));
    alone([&] {
      Training training(World::current(), 1, sgd());
      Snapshot snapshot(in(folder_, sharded()));
      training.add_to(snapshot);
      EXPECT_EQ(snapshot.restore(), 0);
      training.total = 10;
      snapshot.save(10);
    });
    const Contents before = contents_of(folder_);
    EXPECT_FALSE(before.empty());
    alone([&] {
      Training training(World::current(), 1, sgd());
      Snapshot snapshot(in(folder_, sharded()));
      training.add_to(snapshot);
      EXPECT_EQ(snapshot.restore(), 10);
      std::ofstream(folder_ / "other", std::ios::binary) << std::string(1 << 20, 'x');  // takes what there is
      const std::string what = message_of<Unavailable>([&] { snapshot.save(11); });
      EXPECT_CONTAINS(what, "No space left on device");
      EXPECT_CONTAINS(what, folder_.string());
      fs::remove(folder_ / "other");
      EXPECT_TRUE(contents_of(folder_) == before);
      training.total = 12;
      EXPECT_FALSE(snapshot.step(12));  // there is space again
    });
    alone([&] {
      Training training(World::current(), 2, sgd());
      Snapshot snapshot(in(folder_, sharded()));
      training.add_to(snapshot);
      EXPECT_EQ(snapshot.restore(), 12);
    });
    return {};
  });
  if (!said.empty()) GTEST_SKIP() << said;
}

TEST_P(SnapshotTest, AnotherFormatIsRefusedAndTheOneBeforeIsUsed) {
  save_steps(2, {10, 20});
  const auto newest = folder_ / "step-20.snapshot.safetensors";
  std::string bytes = text_of_file(newest);
  const std::string version = text("version\\\":", checkpoint::kFormatVersion);
  const size_t at = bytes.find(version);
  ASSERT_NE(at, std::string::npos);
  bytes[at + version.size() - 1] += 1;
  uint64_t length = 0;  // of the header, which follows it
  std::memcpy(&length, bytes.data(), sizeof length);
  std::string head = bytes.substr(0, sizeof length + length);
  checkpoint::set_checksum(head);
  std::ofstream(newest, std::ios::binary) << head + bytes.substr(head.size());
  const Contents before = contents_of(folder_);
  testing::internal::CaptureStderr();
  EXPECT_EQ(restored(2), 10);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(said, "the snapshot of step 20 is refused: " + newest.string());
  EXPECT_CONTAINS(said, text("its format is version ", checkpoint::kFormatVersion + 1, ", and this Muster reads"));
  EXPECT_TRUE(contents_of(folder_) == before);
  go_on_from(10, {30, 40, 50});
  EXPECT_TRUE(text_of_file(newest) == before.at(newest.filename()));
  EXPECT_FALSE(fs::exists(folder_ / "step-10.snapshot.safetensors"));
}

TEST_P(SnapshotTest, ASnapshotThatCannotBeReadNowIsNotRemoved) {
  save_steps(2, {10, 20});
  const auto away = folder_ / "away";
  std::vector<fs::path> hidden;  // as a disk that does not answer
  for (const auto& [name, bytes] : contents_of(folder_))
    if (name.starts_with(sharded() ? "step-20.shard-1" : "step-20.")) hidden.push_back(folder_ / name);
  ASSERT_EQ(hidden.size(), 1);
  fs::rename(hidden[0], away);
  fs::create_directory(hidden[0]);
  go_on_from(10, {30, 40, 50});
  EXPECT_TRUE(fs::is_directory(hidden[0]));
  fs::remove(hidden[0]);
  fs::rename(away, hidden[0]);
  for (const int step : {40, 50}) fs::remove(folder_ / text("step-", step, ".snapshot.safetensors"));
  EXPECT_EQ(restored(2), 20);
}

TEST_P(SnapshotTest, ADamagedSnapshotIsRemovedByTheNextSave) {
  save_steps(2, {10, 20});
  const auto newest = folder_ / "step-20.snapshot.safetensors";
  std::string bytes = text_of_file(newest);
  bytes[20] ^= 1;
  std::ofstream(newest, std::ios::binary) << bytes;
  go_on_from(10, {30});
  EXPECT_FALSE(fs::exists(newest));
  EXPECT_EQ(restored(2), 30);
}

}  // namespace
}  // namespace muster::test::snapshots
