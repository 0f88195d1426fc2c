#include "launch/ranks/guardian.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include "base/pidfd.h"
#include "base/text.h"
#include "launch/kit/pipe.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

constexpr pid_t kGoodbye = 0, kReady = -1, kForget = -2;
constexpr std::chrono::seconds kStartTakes{10};  // usually milliseconds; more if the machine is overloaded
constexpr std::chrono::seconds kGoodbyeTakes{2};
constexpr int kMaxRounds = 1000;  // of killing, a millisecond apart

// Whether the process started with `entry` ("NAME=value") in its environment. Returns false if we may not read it.
bool has_in_environment(const char* pid, const std::string& entry) {
  std::ifstream file(text("/proc/", pid, "/environ"), std::ios::binary);
  for (std::string variable; std::getline(file, variable, '\0');)
    if (variable == entry) return true;
  return false;
}

// Sends SIGKILL to every other process of the job, whatever group or session it moved to. Returns how many there were.
int kill_by_environment(const std::string& entry) {
  int count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), ::closedir);
  if (!folder) return 0;
  while (const dirent* process = ::readdir(folder.get())) {
    pid_t pid = 0;
    const char* end = process->d_name + std::strlen(process->d_name);
    if (std::from_chars(process->d_name, end, pid).ptr != end || pid == ::getpid()) continue;
    if (has_in_environment(process->d_name, entry) && ::kill(pid, SIGKILL) == 0) ++count;
  }
  return count;
}

// Gives up this process's session, folder and descriptors, which would otherwise stay in use as long as the job runs.
void detach(const UniqueFd& socket) {
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  ::setsid();
  ::prctl(PR_SET_NAME, "muster-guardian");
  [[maybe_unused]] const int stays = ::chdir("/");
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = 0; null >= 0 && fd <= STDERR_FILENO; ++fd) ::dup2(null, fd);
  const auto number = static_cast<unsigned>(socket.get());
  if (number > STDERR_FILENO + 1) ::close_range(STDERR_FILENO + 1, number - 1, 0);
  ::close_range(number + 1, ~0u, 0);
  // If this launcher is itself a rank of another job, the guardian's copy of the environment has that job's id, so the
  // other job would kill the guardian as one of its processes. But the guardian has to clean up first.
  if (char* id = std::getenv("MUSTER_JOB_ID")) *id = '\0';
}

void send_record(int socket, pid_t record) {
  // send(2) fails only if somebody killed the other side.
  [[maybe_unused]] const ssize_t written = ::send(socket, &record, sizeof record, MSG_NOSIGNAL);
}

// Receives a record. Returns false at the end of file.
bool receive_record(int socket, pid_t* record) {
  ssize_t size = 0;
  do size = ::recv(socket, record, sizeof *record, 0);
  while (size < 0 && errno == EINTR);
  return size == sizeof *record;
}

[[noreturn]] void guard(const UniqueFd& socket, const std::string& job_id) {
  detach(socket);
  send_record(socket.get(), kReady);
  std::vector<pid_t> groups;
  for (pid_t record = 0; receive_record(socket.get(), &record);) {
    if (record == kGoodbye) ::_exit(0);
    if (record == kForget)
      groups.clear();
    else if (record < kForget)
      std::erase(groups, -record);
    else
      groups.push_back(record);
  }
  const auto entry = "MUSTER_JOB_ID=" + job_id;
  for (const pid_t group : groups) ::kill(-group, SIGKILL);
  for (int round = 0; round < kMaxRounds && kill_by_environment(entry) > 0; ++round) ::poll(nullptr, 0, 1);
  ::_exit(0);
}

}  // namespace

Guardian Guardian::start(const std::string& job_id) {
  SocketPair sockets = make_socket_pair();
  Guardian guardian;
  guardian.pid_ = ::fork();
  if (guardian.pid_ < 0) throw_errno("cannot start a process", "Raise the limit of processes (ulimit -u)");
  if (guardian.pid_ == 0) {
    sockets.one.reset();
    guard(sockets.other, job_id);
  }
  sockets.other.reset();
  guardian.socket_ = std::move(sockets.one);
  // Wait until the guardian has left this process group: before, a signal to the group would kill the guardian too.
  pollfd ready{guardian.socket_.get(), POLLIN, 0};
  const auto deadline = Deadline::after(kStartTakes);
  while (::poll(&ready, 1, deadline.poll_ms()) < 0 && errno == EINTR) {
  }
  pid_t record = 0;
  if (ready.revents == 0 || !receive_record(guardian.socket_.get(), &record) || record != kReady)
    throw Unavailable("the process that guards the job did not start", "Try again; somebody may have killed it");
  return guardian;
}

void Guardian::announce(int socket) {
  if (socket >= 0) send_record(socket, ::getpid());
}

void Guardian::forget() {
  if (pid_ != 0)
    send_record(socket_.get(), kForget);  // the guardian reads this before it reads the end of file and kills
}

void Guardian::forget(pid_t rank) {
  if (pid_ != 0) send_record(socket_.get(), -rank);
}

void Guardian::say_goodbye() {
  if (pid_ == 0) return;
  send_record(socket_.get(), kGoodbye);
  socket_.reset();
  ::kill(pid_, SIGCONT);
  const auto pidfd = open_pidfd(pid_);
  if (pidfd) await_end(pidfd, Deadline::after(kGoodbyeTakes));
  ::waitpid(pid_, nullptr, WNOHANG);
  pid_ = 0;
}

}  // namespace muster::launch
