#include "launch/ranks/child.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <typeinfo>

#include "base/log.h"
#include "base/text.h"
#include "launch/ranks/guardian.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

// The words that libstdc++ prints for an uncaught exception, so that the launcher needs to know only them.
void print_uncaught(const std::string& type, const char* what) {
  std::string lines = "terminate called after throwing an instance of '" + type + "'\n";
  if (what) lines.append("  what():  ").append(what).append("\n");
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, lines.data(), lines.size());
}

std::string name_of_current_exception() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (!type) return "unknown";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(type->name(), nullptr, nullptr, &status),
                                                    std::free);
  return name ? name.get() : type->name();
}

void flush_all() {
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
}

[[noreturn]] void run_body(const ChildPlan& plan) {
  int status = 1;
  try {
    environ = plan.environment;
    leave_out_lines_that_would_wait(false);  // as the launcher does
    for (const int fd : plan.to_close) ::close(fd);
    status = (*plan.body)();
  } catch (const std::exception& error) {
    flush_all();
    print_uncaught(name_of_current_exception(), error.what());
  } catch (...) {
    flush_all();
    print_uncaught(name_of_current_exception(), nullptr);
  }
  flush_all();
  ::_exit(status);
}

void use_default_signals() {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (signal == SIGHUP && ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = SIG_DFL;
    ::sigaction(signal, &action, nullptr);  // fails for SIGKILL, SIGSTOP and the C library's own: they have no handler
  }
}

[[noreturn]] void be_rank(const ChildPlan& plan, pid_t launcher) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(kNotStarted);  // the launcher died before PR_SET_PDEATHSIG was set
  Guardian::announce(plan.guardian_socket);
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (plan.standard[fd] >= 0) ::dup2(plan.standard[fd], fd);
  if (plan.affinity)  // fails if a core has gone meanwhile; then the rank runs anywhere
    ::sched_setaffinity(0, plan.affinity->size() * sizeof(unsigned long),
                        reinterpret_cast<const cpu_set_t*>(plan.affinity->data()));
  if (plan.open_files) ::setrlimit(RLIMIT_NOFILE, &*plan.open_files);
  if (plan.default_signals) use_default_signals();
  ::sigprocmask(SIG_SETMASK, &plan.mask, nullptr);
  if (plan.body) run_body(plan);
  // Closes the launcher's other descriptors, but only at the exec, because error_pipe is needed until then.
  ::close_range(STDERR_FILENO + 1, ~0u, CLOSE_RANGE_CLOEXEC);
  if (plan.black_box >= 0) ::fcntl(plan.black_box, F_SETFD, 0);
  ::execve(plan.path, plan.arguments, plan.environment);
  const ExecError failure{plan.rank, errno};
  [[maybe_unused]] const ssize_t written = ::write(plan.error_pipe, &failure, sizeof failure);
  ::_exit(kNotStarted);
}

}  // namespace

pid_t fork_rank(const ChildPlan& plan) {
  const pid_t launcher = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0)
    throw_errno(text("cannot start the process of rank ", plan.rank),
                "Use fewer ranks, or raise the limit of processes (ulimit -u)");
  if (pid == 0) be_rank(plan, launcher);
  // Both processes call setpgid(), so the group exists whichever runs first. This call fails if the rank has already
  // started its program.
  ::setpgid(pid, pid);
  return pid;
}

}  // namespace muster::launch
