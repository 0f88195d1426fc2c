// What the tests of `muster run` have in common: how to start a job, and that nothing of it is left.
#pragma once

#include <gmock/gmock.h>
#include <sys/mount.h>

#include <filesystem>
#include <string>
#include <vector>

#include "multiprocess/launch_support.h"

namespace muster::test {

using Words = std::vector<std::string>;

// muster run OPTIONS… PROGRAM…
inline Words run_program(Words options, const Words& program) {
  Words command{kMusterCommand, "run"};
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), program.begin(), program.end());
  return command;
}

// The same with launch_program, which behaves as it is told.
inline Words run_of(const Words& options, Words behaviour) {
  behaviour.insert(behaviour.begin(), kLaunchProgram);
  return run_program(options, behaviour);
}

// Until each of the job's ranks has said "ready".
inline bool all_ready(Process& job, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    if (!job.read_until(text('[', rank, "] ready"))) return false;
  return true;
}

// A test whose jobs leave no process behind.
class JobTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_THAT(processes_left(patience()), ::testing::IsEmpty()) << "the job left processes behind";
  }
};

// The same with a folder for what jobs read and write.
class JobFolderTest : public JobTest {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override {
    JobTest::TearDown();
    std::filesystem::remove_all(folder_);
  }
  const std::filesystem::path& folder() const { return folder_; }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

 private:
  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / text("muster-job-", ::getpid());
};

// A file system of 256 kB at a folder that it makes, while it lives. False where that needs a right that is not there.
class SmallDisk {
 public:
  explicit SmallDisk(const std::string& folder) : folder_(folder) {
    std::filesystem::create_directory(folder);
    mounted_ = ::mount("tmpfs", folder.c_str(), "tmpfs", 0, "size=256k") == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  explicit operator bool() const { return mounted_; }

 private:
  const std::string folder_;
  bool mounted_ = false;
};

}  // namespace muster::test
