#include "support/forked.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "base/file_text.h"
#include "base/text.h"
#include "comm/world/world_starter.h"
#include "muster/base/error.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

void write_all(int fd, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(fd, text.data() + at, text.size() - at);
    if (written <= 0) return;
    at += static_cast<size_t>(written);
  }
}

// Whether another thread of this process does not sleep. One that sleeps holds no lock of the memory allocator; a child
// that is forked while another holds it would wait for it forever. (glibc's allocator takes care of that, and
// AddressSanitizer's does not.)
bool another_thread_is_awake() {
  const std::string own = text(::gettid());
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    if (task.path().filename() == own) continue;
    const std::string stat = text_of_file(task.path() / "stat");
    const size_t name_end = stat.rfind(')');  // "123 (a name) S …"
    if (name_end != std::string::npos && stat.compare(name_end, 3, ") S") != 0) return true;
  }
  return false;
}

void wait_until_other_threads_sleep() {
  constexpr int kMost = 100'000;  // one may run for good
  for (int i = 0; i < kMost && another_thread_is_awake(); ++i) ::sched_yield();
}

[[noreturn]] void run_child(int rank, const std::function<std::string(int)>& body, int out) {
  std::string said;
  int status = 0;
  try {
    throwing_failed_checks([&] { said = body(rank); });
  } catch (const std::exception& error) {
    said = error.what();
    status = 1;
  }
  write_all(out, said);
  ::_exit(status);
}

}  // namespace

ForkedRanks::ForkedRanks(int n, const std::function<std::string(int)>& body) : children_(static_cast<size_t>(n)) {
  const auto make_pipe = [](UniqueFd& out) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
    out.reset(ends[0]);
    return UniqueFd(ends[1]);
  };
  // No child begins before all are there: it would wake the thread that serves the store.
  UniqueFd started;
  UniqueFd starts = make_pipe(started);
  for (int rank = 0; rank < n; ++rank) {
    Child& child = children_[static_cast<size_t>(rank)];
    const UniqueFd in = make_pipe(child.out);
    wait_until_other_threads_sleep();
    child.pid = ::fork();
    if (child.pid < 0) throw_errno("fork");
    if (child.pid != 0) continue;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    starts.reset();
    char none;
    while (::read(started.get(), &none, 1) < 0 && errno == EINTR) continue;
    started.reset();
    run_child(rank, body, in.get());
  }
}

ForkedRanks::~ForkedRanks() {
  for (auto& child : children_) {
    if (child.reaped || child.pid < 0) continue;
    ::kill(child.pid, SIGKILL);
    ::waitpid(child.pid, nullptr, 0);
  }
}

void ForkedRanks::signal(int rank, int number) const { ::kill(pid(rank), number); }

ForkedRanks::End ForkedRanks::wait(int rank, Deadline deadline) {
  Child& child = children_[static_cast<size_t>(rank)];
  while (child.out) {  // until it ends, or says more than a pipe holds
    pollfd item{child.out.get(), POLLIN, 0};
    if (::poll(&item, 1, deadline.poll_ms()) <= 0) return child.end;
    char buffer[4096];
    const ssize_t got = ::read(child.out.get(), buffer, sizeof buffer);
    if (got > 0)
      child.end.said.append(buffer, static_cast<size_t>(got));
    else
      child.out.reset();
  }
  if (!child.reaped) {
    int status = 0;
    ::waitpid(child.pid, &status, 0);  // it has closed its pipe: it is ending
    child.reaped = true;
    child.end.exited = WIFEXITED(status);
    if (child.end.exited)
      child.end.status = WEXITSTATUS(status);
    else
      child.end.signal = WTERMSIG(status);
  }
  return child.end;
}

std::vector<ForkedRanks::End> ForkedRanks::wait_all(Deadline deadline) {
  std::vector<End> ends;
  for (int rank = 0; rank < static_cast<int>(children_.size()); ++rank) ends.push_back(wait(rank, deadline));
  return ends;
}

World ForkedJob::join(int rank, int n, const WorldOptions& options, const std::vector<std::string>& hosts) const {
  return comm::WorldStarter(hosts).join({.rank = rank, .world_size = n, .local_rank = rank, .local_world_size = n},
                                        connect_store(address(), patience()), options);
}

SharedNumbers::SharedNumbers(size_t count) : bytes_(count * sizeof(std::atomic<int64_t>)) {
  void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap");
  numbers_ = static_cast<std::atomic<int64_t>*>(memory);  // zero bytes are zeros
}
SharedNumbers::~SharedNumbers() { ::munmap(numbers_, bytes_); }

namespace {

// TMPDIR of this process and its children.
class OwnTemporaryFolder {
 public:
  OwnTemporaryFolder() : path_(testing::TempDir() + "muster-test-XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) throw_errno("mkdtemp");
    ::setenv("TMPDIR", path_.c_str(), 1);
  }
  OwnTemporaryFolder(const OwnTemporaryFolder&) = delete;
  OwnTemporaryFolder& operator=(const OwnTemporaryFolder&) = delete;
  ~OwnTemporaryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

std::vector<std::string> leftovers() {
  static const OwnTemporaryFolder folder;
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) found.push_back(entry.path());
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error);
    if (!error) found.push_back(text("descriptor of ", target.string()));
  }
  std::ifstream children(text("/proc/", ::getpid(), "/task/", ::getpid(), "/children"));
  for (std::string pid; children >> pid;) found.push_back("child " + pid);
  std::sort(found.begin(), found.end());
  return found;
}

namespace {

rlim_t private_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmData:")) return static_cast<rlim_t>(std::stoll(line.substr(7))) << 10;
  throw std::runtime_error("the size of private memory is not known");
}

}  // namespace

NoMoreThreads::NoMoreThreads() {
  EXPECT_EQ(::getrlimit(RLIMIT_DATA, &before_), 0);
  parked_.reserve(1000);
  rlimit limit = before_;
  limit.rlim_cur = private_memory() + (rlim_t{64} << 10);
  EXPECT_EQ(::setrlimit(RLIMIT_DATA, &limit), 0);
  try {
    while (parked_.size() < 1000) parked_.emplace_back([this] { over_.wait(false); });
    ADD_FAILURE() << "threads still start";
  } catch (const std::system_error&) {
  }
}

NoMoreThreads::~NoMoreThreads() {
  EXPECT_EQ(::setrlimit(RLIMIT_DATA, &before_), 0);
  over_ = true;
  over_.notify_all();
  for (auto& thread : parked_) thread.join();
}

void limit_private_memory(size_t more) {
  pthread_attr_t small;  // the stacks of threads count, too
  EXPECT_EQ(::pthread_attr_init(&small) | ::pthread_attr_setstacksize(&small, 1 << 20), 0);
  EXPECT_EQ(::pthread_setattr_default_np(&small) | ::pthread_attr_destroy(&small), 0);
  rlimit limit{};
  EXPECT_EQ(::getrlimit(RLIMIT_DATA, &limit), 0);
  limit.rlim_cur = private_memory() + more;
  EXPECT_EQ(::setrlimit(RLIMIT_DATA, &limit), 0);
}

}  // namespace muster::test
