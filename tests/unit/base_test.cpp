#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <locale>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/byte_stream.h"
#include "base/copy.h"
#include "base/cores.h"
#include "base/cycles.h"
#include "base/env.h"
#include "base/fd.h"
#include "base/file_text.h"
#include "base/fork_count.h"
#include "base/log.h"
#include "base/process.h"
#include "base/random.h"
#include "base/text.h"
#include "launch/jobs/ledger_line.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"
#include "support/patience.h"
#include "support/temporary_folder.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

TEST(Error, SaysWhatAndWhatToDo) {
  const InvalidArgument error("the world has no rank 7", "Pass a rank below 4");
  EXPECT_STREQ(error.what(), "the world has no rank 7. Pass a rank below 4");
  EXPECT_EQ(error.message(), "the world has no rank 7");
  EXPECT_EQ(error.advice(), "Pass a rank below 4");
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_STREQ(CorruptError("short").what(), "short");
}

TEST(Error, KindsKnowWhoIsConcerned) {
  const PeerLost lost(3, 1234, "rank 3 died");
  EXPECT_EQ(lost.rank(), 3);
  EXPECT_EQ(lost.pid(), 1234);
  EXPECT_EQ(TimeoutError("late", {1, 2}).missing(), (std::vector<int>{1, 2}));
  EXPECT_THROW(throw TimeoutError("late"), Error);
}

TEST(Error, EveryCodeHasItsName) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(ErrorCode::kRemote); ++code)
    names.insert(to_string(static_cast<ErrorCode>(code)));
  EXPECT_EQ(names.size(), 9u);
  EXPECT_EQ(names.count("Error"), 0u);
  EXPECT_EQ(to_string(ErrorCode::kPeerLost), "PeerLost");
}

TEST(Error, ErrnoBecomesText) {
  try {
    throw_errno(ENOENT, "open", "Create it");
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_STREQ(error.what(), "open: No such file or directory. Create it");
  }
}

TEST(Env, ParsesOrSaysWhichVariable) {
  ::setenv("MUSTER_TEST_NUMBER", "-42", 1);
  EXPECT_EQ(env_int("MUSTER_TEST_NUMBER"), -42);
  EXPECT_EQ(require_env_int("MUSTER_TEST_NUMBER"), -42);
  for (const char* bad : {"4x", "x", " 4", "4 ", "1.5", "99999999999999999999", "+4"}) {
    ::setenv("MUSTER_TEST_NUMBER", bad, 1);
    try {
      env_int("MUSTER_TEST_NUMBER");
      FAIL() << bad;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("MUSTER_TEST_NUMBER"), std::string::npos);
    }
  }
  ::setenv("MUSTER_TEST_NUMBER", "", 1);
  EXPECT_EQ(env_int("MUSTER_TEST_NUMBER"), std::nullopt);
  ::unsetenv("MUSTER_TEST_NUMBER");
  EXPECT_EQ(env_string("MUSTER_TEST_NUMBER"), std::nullopt);
  EXPECT_THROW(require_env_int("MUSTER_TEST_NUMBER"), InvalidArgument);
}

TEST(Deadline, CountsDownToZero) {
  const auto hour = Deadline::after(std::chrono::hours(1));
  EXPECT_FALSE(hour.passed());
  EXPECT_LE(hour.left(), std::chrono::hours(1));
  EXPECT_GT(hour.left(), std::chrono::minutes(59));
  EXPECT_EQ(hour.poll_ms(milliseconds(100)), 100);
  const auto past = Deadline::after(milliseconds(-1));
  EXPECT_TRUE(past.passed());
  EXPECT_EQ(past.left(), nanoseconds::zero());
  EXPECT_EQ(past.poll_ms(), 0);
  EXPECT_TRUE(Deadline::after(nanoseconds::zero()).passed());
  // Rounded up: a poll with 0 would spin until the deadline.
  const auto short_one = Deadline::after(milliseconds(200));
  EXPECT_GE(milliseconds(short_one.poll_ms()), short_one.left());
}

TEST(Deadline, Later) {
  const auto now = Clock::now();
  const auto soon = Deadline::after(std::chrono::hours(1), now);
  EXPECT_EQ(soon.later(std::chrono::hours(2)).when(), now + std::chrono::hours(3));
  EXPECT_TRUE(soon.later(milliseconds::max()).is_never());
  EXPECT_TRUE(Deadline::never().later(milliseconds(1)).is_never());
  // From now on, if it has passed.
  EXPECT_GE(Deadline::after(-std::chrono::hours(1), now).later(std::chrono::hours(2)).when(),
            now + std::chrono::hours(2));
}

TEST(Deadline, NeverNeverPasses) {
  EXPECT_TRUE(Deadline::never().is_never());
  EXPECT_FALSE(Deadline::never().passed());
  EXPECT_EQ(Deadline::never().left(), nanoseconds::max());
  EXPECT_EQ(Deadline::never().poll_ms(milliseconds(7)), 7);
  EXPECT_TRUE(Deadline::after(nanoseconds::max()).is_never());
  EXPECT_FALSE(Deadline::after(std::chrono::hours(24 * 365 * 100)).passed());
  EXPECT_TRUE(Deadline::after(nanoseconds::min() / 2).passed());
}

// has_passed() agrees with the clock itself, although it rarely reads it.
TEST(Deadline, HasPassed) {
  EXPECT_FALSE(has_passed(Deadline::never()));
  EXPECT_FALSE(has_passed(test::patience()));
  EXPECT_TRUE(has_passed(Deadline::after(std::chrono::seconds(-1))));
  for (int i = 0; i < 20; ++i) {
    const auto soon = Deadline::after(std::chrono::microseconds(100 * i));
    while (!has_passed(soon)) {
    }
    EXPECT_GE(Clock::now(), soon.when());
  }
}

TEST(Wire, WhatIsPutIsGot) {
  WireWriter out;
  out.put(uint8_t{7}).put(int64_t{-1}).put(std::string_view("a\0b", 3)).put(std::string_view()).put(ErrorCode::kRemote);
  WireReader in(out.bytes());
  EXPECT_EQ(in.get<uint8_t>(), 7);
  EXPECT_EQ(in.get<int64_t>(), -1);
  EXPECT_EQ(in.get_string(), std::string_view("a\0b", 3));
  EXPECT_EQ(in.get_string(), "");
  EXPECT_FALSE(in.done());
  EXPECT_THROW(in.expect_done(), CorruptError);
  EXPECT_EQ(in.get<ErrorCode>(), ErrorCode::kRemote);
  EXPECT_TRUE(in.done());
  in.expect_done();
}

TEST(Wire, EveryShortMessageIsCorrupt) {
  WireWriter out;
  out.put(uint32_t{1}).put(std::string_view("value")).put(uint16_t{2});
  const std::string whole = out.take();
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    WireReader in(std::string_view(whole).substr(0, cut));
    EXPECT_THROW(
        {
          in.get<uint32_t>();
          in.get_string();
          in.get<uint16_t>();
        },
        CorruptError)
        << cut;
  }
}

TEST(Wire, ALengthBeyondTheEndIsCorrupt) {
  for (const uint32_t length : {6u, 0x7fffffffu, 0xffffffffu}) {
    WireWriter out;
    out.put(length).put(uint8_t{0}).put(uint32_t{0});
    WireReader in(out.bytes());
    EXPECT_THROW(in.get_string(), CorruptError) << length;
  }
}

TEST(RandomHex, HasItsLengthAndDiffers) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const std::string hex = random_hex(16);
    EXPECT_EQ(hex.size(), 32u);
    EXPECT_EQ(hex.find_first_not_of("0123456789abcdef"), std::string::npos);
    seen.insert(hex);
  }
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_EQ(random_hex(0), "");
}

TEST(UniqueFd, ClosesOnce) {
  const auto is_open = [](int fd) { return ::fcntl(fd, F_GETFD) != -1; };
  UniqueFd one(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(one);
  const int raw = one.get();
  UniqueFd two(std::move(one));
  EXPECT_FALSE(one);  // NOLINT(bugprone-use-after-move): empty is what it must be
  EXPECT_EQ(two.get(), raw);
  two = UniqueFd();
  EXPECT_FALSE(is_open(raw));
  UniqueFd three(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int released = three.release();
  three.reset();
  EXPECT_TRUE(is_open(released));
  ::close(released);
}

// In a child, since it is for the whole process.
TEST(Log, ALineThatWouldWaitForItsReaderIsLeftOut) {
  int error[2], word[2], go[2];
  for (int* const ends : {error, word, go}) ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ::fcntl(error[1], F_SETFL, O_NONBLOCK);
  const std::string page(4096, '.');
  while (::write(error[1], page.data(), page.size()) > 0) {
  }
  ::fcntl(error[1], F_SETFL, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(error[1], STDERR_FILENO);
    leave_out_lines_that_would_wait();
    MUSTER_LOG(kError) << "one";
    MUSTER_LOG(kError) << "two";
    char byte = 'x';
    if (::write(word[1], &byte, 1) != 1 || ::read(go[0], &byte, 1) != 1) ::_exit(1);
    MUSTER_LOG(kError) << "three";
    MUSTER_LOG(kError) << page << page;  // longer than what a pipe that can be written has room for
    ::_exit(0);
  }
  pollfd ready{word[0], POLLIN, 0};
  EXPECT_EQ(::poll(&ready, 1, test::patience().poll_ms()), 1) << "it waits for its reader";
  std::string read(1 << 20, '\0');
  ASSERT_GT(::read(error[0], read.data(), read.size()), 0);  // all of it
  ASSERT_EQ(::write(go[1], "x", 1), 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  read.resize(static_cast<size_t>(std::max<ssize_t>(::read(error[0], read.data(), read.size()), 0)));
  EXPECT_TRUE(read.starts_with("muster warning: 2 lines are lost, since nobody read them\nmuster error: three\n"));
  EXPECT_TRUE(read.ends_with("...\n"));
  EXPECT_EQ(read.find("one"), std::string::npos);
  for (int* const ends : {error, word, go})
    for (const int end : {0, 1}) ::close(ends[end]);
}

// Nothing in this process has called fork_count() when it forks: a suite has its own process.
TEST(ForkCount, CountsAForkBeforeTheFirstCall) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(fork_count());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_EQ(fork_count(), 0);
}

TEST(Text, WritesAnything) {
  EXPECT_EQ(text("rank ", 3, " of ", 4u, ": ", 0.5), "rank 3 of 4: 0.5");
  EXPECT_EQ(join(std::vector<int>{1, 2, 3}), "1, 2, 3");
  EXPECT_EQ(join(std::vector<int>{}), "");
}

// What a program's locale does to numbers does not reach names of files, nor what processes tell each other.
TEST(Text, DoesNotDependOnTheProgramsLocale) {
  struct Grouping : std::numpunct<char> {
    char do_thousands_sep() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
    char do_decimal_point() const override { return ';'; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouping));
  std::ostringstream grouped;
  grouped << 1234567;
  EXPECT_EQ(grouped.str(), "1,234,567");
  EXPECT_EQ(text("step-", 1234567, ' ', 0.5), "step-1234567 0.5");
  EXPECT_EQ(join(std::vector<int>{1000, 2000}), "1000, 2000");
  int64_t first = 0, second = 0;
  PlainInput("1000 2,000") >> first >> second;
  EXPECT_EQ(first, 1000);
  EXPECT_EQ(second, 2);
  EXPECT_GT(start_time_of(::getpid()), 0U);
  const launch::LedgerLine line{.kind = launch::LedgerLine::Kind::kStep, .step = 12345, .samples = {1000, 2000}};
  const std::string written = to_string(line);
  EXPECT_TRUE(launch::parse_ledger_line(std::string_view(written).substr(1, written.size() - 2)));
  std::locale::global(before);
}

// --- cores ---

CpuSet cpus(std::initializer_list<size_t> numbers) {
  CpuSet set;
  for (const size_t number : numbers) set[number] = true;
  return set;
}

// Of each size on both sides of the borders, at each offset at which memcpy may be slow, and some others.
TEST(Text, OfAFileThatMayNotBeReadable) {
  const test::TemporaryFolder folder;
  const std::string path = folder.path() / "file", bytes("a\0\nb", 4);
  std::ofstream(path, std::ios::binary) << bytes;
  EXPECT_EQ(text_of_file(path), bytes);
  EXPECT_EQ(text_of_file(path + "s"), "");
  EXPECT_EQ(text_of_file("/proc/self/mem"), "");  // can be opened; reading at 0 fails, as with a process that has ended
}

TEST(FileText, TheFirstBytes) {
  const test::TemporaryFolder folder;
  const std::string path = folder.path() / "file";
  std::ofstream(path, std::ios::binary) << "abc";
  std::error_code error;
  EXPECT_EQ(first_bytes(path, 2, error), "ab");
  EXPECT_EQ(first_bytes(path, 9, error), "abc");
  EXPECT_FALSE(error);
  EXPECT_EQ(first_bytes(path + "s", 9, error), "");
  EXPECT_EQ(error, std::errc::no_such_file_or_directory);
}

TEST(Copy, AnySizeAtAnyOffset) {
  constexpr size_t kPage = 4096;
  std::vector<unsigned char> from(16 * kPage), to(16 * kPage);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 251);
  for (const size_t bytes : {0, 1, 7, 8, 9, 15, 16, 17, 63, 2047, 2048, 2049, 4096, 6145, 20'000})
    for (const size_t offset : {0, 1, 8, 23, 24, 31, 32, 33, 4095}) {
      std::fill(to.begin(), to.end(), 0xaa);
      copy_bytes(to.data() + kPage + offset, from.data() + kPage, bytes);
      const auto begin = to.begin() + static_cast<ptrdiff_t>(kPage + offset),
                 end = begin + static_cast<ptrdiff_t>(bytes);
      EXPECT_TRUE(std::equal(begin, end, from.begin() + kPage)) << bytes << " bytes at " << offset;
      EXPECT_EQ(std::count(to.begin(), begin, 0xaa) + std::count(end, to.end(), 0xaa),
                static_cast<ptrdiff_t>(to.size() - bytes))
          << bytes << " bytes at " << offset;
    }
  copy_bytes(nullptr, nullptr, 0);
}

TEST(Cores, TextAndBack) {
  EXPECT_EQ(to_text(cpus({0, 1, 2, 3})), "f");
  EXPECT_EQ(to_text(cpus({0, 63})), "8000000000000001");
  EXPECT_EQ(to_text(cpus({})), "0");
  for (const auto& set : {cpus({}), cpus({0}), cpus({5, 77, 1023}), own_cpus()})
    EXPECT_EQ(cpus_from_text(to_text(set)), set);
  for (const auto& text :
       {std::string(), std::string("g"), std::string("-1"), std::string("0x1"), std::string(257, '0')})
    EXPECT_THROW(cpus_from_text(text), CorruptError) << text;
  EXPECT_EQ(cpus_from_text(std::string(256, 'f')).count(), 1024u);
}

TEST(Cores, Together) {
  const auto bounded = [](int cores) { return std::min(cores, static_cast<int>(cpu_quota() + 0.5)); };
  const auto expect = [&](const std::vector<CpuSet>& ranks, int cores) {
    EXPECT_EQ(cores_together(ranks), bounded(cores));
  };
  expect({cpus({0})}, 1);
  expect({cpus({0, 1}), cpus({0, 1})}, 2);             // no rank is bound
  expect({cpus({0}), cpus({1}), cpus({2})}, 3);        // each to its own core
  expect({cpus({0}), cpus({0})}, 1);                   // both to the same core
  expect({cpus({0}), cpus({0}), cpus({1, 2, 3})}, 2);  // two share a core, whatever the third has
  expect({cpus({0, 1}), cpus({0}), cpus({1, 2})}, 3);  // each gets one only if others move
  expect({cpus({1, 2}), cpus({0, 1}), cpus({0})}, 3);
  expect({cpus({0, 1, 2, 3}), cpus({0, 1})}, 4);
  EXPECT_GE(usable_cores(), 1);
}

// A quota of CPU time bounds the cores that may be used, in each of the cgroups around the process.
TEST(Cores, WithinAQuota) {
  const test::TemporaryFolder root;
  const auto write = [&](const std::filesystem::path& file, const std::string& content) {
    std::filesystem::create_directories((root / file).parent_path());
    std::ofstream(root / file) << content << '\n';
  };
  const int all = usable_cores(root.path());  // there is nothing that limits it
  EXPECT_EQ(all, static_cast<int>(own_cpus().count()));
  const auto expect = [&](int cores) { EXPECT_EQ(usable_cores(root.path()), std::min(all, cores)); };
  write("proc/self/cgroup", "0::/outer/inner");
  write("sys/fs/cgroup/outer/inner/cpu.max", "max 100000");
  EXPECT_EQ(usable_cores(root.path()), all);
  write("sys/fs/cgroup/outer/inner/cpu.max", "150000 100000");
  EXPECT_EQ(cpu_quota(root.path()), 1.5);
  expect(2);
  write("sys/fs/cgroup/outer/cpu.max", "50000 50000");
  expect(1);
  write("sys/fs/cgroup/outer/inner/cpu.max", "20000 100000");  // a fifth of a core is still one
  expect(1);
  write("proc/self/cgroup", "4:cpu,cpuacct:/job");
  EXPECT_EQ(usable_cores(root.path()), all);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(usable_cores(root.path()), all);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "80000");
  EXPECT_EQ(cpu_quota(root.path()), 0.8);
  expect(1);
}

}  // namespace
}  // namespace muster
