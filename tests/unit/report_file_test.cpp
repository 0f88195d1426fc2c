// The files of a failing job's reports: what may be removed, and launchers that share one.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "launch/kit/report_file.h"
#include "muster/base/error.h"
#include "support/temporary_folder.h"

namespace muster::launch {
namespace {

std::string refusal(const ReportFile& file) {
  try {
    check_report(file);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(ReportFileTest, LaunchersThatShareOneDoNotStopEachOther) {
  const test::TemporaryFolder folder;
  const ReportFile file{folder.path() / "error.json", "{", "the job's error"};
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over.load()) {
      std::ofstream(file.path) << "{}";
      remove_report(file);
    }
  });
  std::string why;
  for (int i = 0; i < 20'000 && why.empty(); ++i) why = refusal(file);
  over = true;
  other.join();
  EXPECT_EQ(why, "");
}

TEST(ReportFileTest, OnlyReportsAreRemoved) {
  const test::TemporaryFolder folder;
  const auto kept = [&](const std::string& content) {
    const ReportFile file{folder.path() / "file", "{", "the job's error"};
    std::ofstream(file.path) << content;
    const bool is_refused = !refusal(file).empty();
    remove_report(file);
    EXPECT_EQ(is_refused, std::filesystem::exists(file.path)) << content;
    return is_refused;
  };
  for (const char* report : {"", "{}", "\n\t {", " \r\n"}) EXPECT_FALSE(kept(report)) << report;
  EXPECT_TRUE(kept("[1]"));
  EXPECT_TRUE(kept("\n x{"));
  EXPECT_TRUE(kept(std::string(4096, ' ') + "x"));
}

// In a child, because a process cannot become root again.
TEST(ReportFileProcess, AFileThatCannotBeReadIsNamedSo) {
  const test::TemporaryFolder folder;
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);
  const ReportFile file{folder.path() / "error.json", "{", "the job's error"};
  std::ofstream(file.path) << "{}";
  std::filesystem::permissions(file.path, std::filesystem::perms::none);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(2);
    ::_exit(refusal(file).find("cannot be read: Permission denied") == std::string::npos ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace muster::launch
