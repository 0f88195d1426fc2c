// A program run by a test: started with pipes or a terminal, fed with signals, read with deadlines.
//
// The test process is a subreaper: what a killed launcher leaves behind becomes its child. processes_left() sees it.
//
// Thread-safety: none.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "muster/base/deadline.h"
#include "support/patience.h"
#include "support/places.h"

namespace muster::test {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Waits until a signal that was sent to the process is no longer pending: the process has read it.
inline bool has_taken(pid_t pid, int signal) {
  for (const auto deadline = patience(); !deadline.passed(); ::poll(nullptr, 0, 1)) {
    std::ifstream status(text("/proc/", pid, "/status"));
    uint64_t pending = 0;
    bool any = false;
    for (std::string line; std::getline(status, line); any = true)
      if (line.starts_with("SigPnd:") || line.starts_with("ShdPnd:"))
        pending |= std::stoull(line.substr(7), nullptr, 16);
    if (!any) return false;  // the process has gone
    if ((pending >> (signal - 1) & 1) == 0) return true;
  }
  return false;
}

class Process {
 public:
  struct Options {
    std::string input;             // written to its standard input, at most what a pipe holds
    bool has_input = false;        // otherwise /dev/null
    bool terminal = false;         // all three descriptors are a terminal of 80 columns
    bool one_pipe = false;         // standard error goes where standard output goes
    std::vector<std::string> env;  // "NAME=value" besides the test's own
    std::string folder;            // to run in
    int ignore = 0;                // a signal to start it with ignored
  };

  Process(std::vector<std::string> command, const Options& options) { start(std::move(command), options); }
  explicit Process(std::vector<std::string> command) : Process(std::move(command), Options()) {}
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (pid_ > 0 && !ended_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &raw_status_, 0);
    }
  }

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }

  // Reads until standard output (with a terminal: either) has `words`; false where it ends or time runs out before.
  bool read_until(const std::string& words, Deadline deadline = patience()) {
    while (out.find(words) == std::string::npos)
      if (!read_some(deadline)) return false;
    return true;
  }

  // Reads everything and waits for its end. Exit status, or 1000 + signal; -1 where time runs out.
  int finish(Deadline deadline = patience()) {
    while (read_some(deadline)) {
    }
    return wait(deadline);
  }

  // Waits without reading.
  int wait(Deadline deadline = patience()) {
    while (!ended_) {
      const pid_t got = ::waitpid(pid_, &raw_status_, WNOHANG);
      ended_ = got == pid_;
      if (!ended_ && deadline.passed()) return -1;
      if (!ended_) ::poll(nullptr, 0, 1);
    }
    return WIFEXITED(raw_status_) ? WEXITSTATUS(raw_status_) : 1000 + WTERMSIG(raw_status_);
  }

  // Reads what comes next, of either; false where both have ended or time runs out.
  bool read_some_more(Deadline deadline = patience()) { return read_some(deadline); }

  void close_output() { out_.reset(); }

  std::string out, err;

 private:
  void start(std::vector<std::string> command, const Options& options) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    int in[2], out_ends[2], err_ends[2], master = -1, slave = -1;
    ASSERT_EQ(::pipe2(in, O_CLOEXEC), 0);
    ASSERT_EQ(::pipe2(out_ends, O_CLOEXEC), 0);
    ASSERT_EQ(::pipe2(err_ends, O_CLOEXEC), 0);
    if (options.terminal) {
      winsize size{.ws_row = 24, .ws_col = 80};
      ASSERT_EQ(::openpty(&master, &slave, nullptr, nullptr, &size), 0);
      ::fcntl(master, F_SETFD, FD_CLOEXEC);
    }
    std::vector<char*> words;
    for (auto& word : command) words.push_back(word.data());
    words.push_back(nullptr);
    pid_ = ::fork();
    ASSERT_GE(pid_, 0);
    if (pid_ == 0) {
      for (int number = 1; number < NSIG; ++number) ::signal(number, SIG_DFL);
      if (options.ignore) ::signal(options.ignore, SIG_IGN);
      sigset_t none;
      ::sigemptyset(&none);
      ::sigprocmask(SIG_SETMASK, &none, nullptr);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int null = ::open("/dev/null", O_RDONLY);
      ::dup2(options.terminal ? slave : options.has_input ? in[0] : null, 0);
      ::dup2(options.terminal ? slave : out_ends[1], 1);
      ::dup2(options.terminal ? slave : options.one_pipe ? out_ends[1] : err_ends[1], 2);
      if (slave >= 0) ::close(slave);
      ::close(null);
      if (!options.folder.empty() && ::chdir(options.folder.c_str()) != 0) ::_exit(126);
      for (const auto& variable : options.env) ::putenv(const_cast<char*>(variable.c_str()));
      ::execv(words[0], words.data());
      ::_exit(126);
    }
    const UniqueFd unused[] = {UniqueFd(in[0]), UniqueFd(out_ends[1]), UniqueFd(err_ends[1]), UniqueFd(slave)};
    UniqueFd input(in[1]), piped(out_ends[0]);
    if (options.has_input) {
      EXPECT_EQ(::write(input.get(), options.input.data(), options.input.size()),
                static_cast<ssize_t>(options.input.size()));
    }
    err_.reset(err_ends[0]);
    out_ = options.terminal ? UniqueFd(master) : std::move(piped);
  }

  // False where both have ended or time ran out.
  bool read_some(Deadline deadline) {
    pollfd both[] = {{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}};
    if ((!out_ && !err_) || ::poll(both, 2, deadline.poll_ms()) <= 0) return false;
    read_from(out_, both[0].revents, out);
    read_from(err_, both[1].revents, err);
    return true;
  }
  static void read_from(UniqueFd& fd, short events, std::string& into) {
    char buffer[65536];
    if (events == 0) return;
    const ssize_t size = ::read(fd.get(), buffer, sizeof buffer);
    if (size > 0) into.append(buffer, static_cast<size_t>(size));
    if (size <= 0) fd.reset();  // 0, or EIO from a terminal that nobody has open
  }

  pid_t pid_ = -1;
  UniqueFd out_, err_;
  bool ended_ = false;
  int raw_status_ = 0;
};

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

inline std::vector<pid_t> children_of(pid_t pid) {
  std::ifstream file(text("/proc/", pid, "/task/", pid, "/children"));
  std::vector<pid_t> children;
  for (pid_t child = 0; file >> child;) children.push_back(child);
  return children;
}

// 'R', 'S', 'Z' …; 0 where there is no such process.
inline char state_of(pid_t pid) {
  std::ifstream file(text("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  return name_end == std::string::npos ? 0 : line[name_end + 2];
}

// Reaps what ends, until this process has no child or time runs out. What is left, in words.
inline std::vector<std::string> processes_left(Deadline deadline) {
  for (;;) {
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    const auto children = children_of(::getpid());
    if (children.empty()) return {};
    if (deadline.passed()) {
      std::vector<std::string> left;
      for (const pid_t child : children) {
        std::ifstream file(text("/proc/", child, "/cmdline"));
        std::string word, words;
        while (std::getline(file, word, '\0')) words += word + ' ';
        left.push_back(text("pid ", child, ' ', state_of(child), " group ", ::getpgid(child), ": ", words));
      }
      return left;
    }
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace muster::test
