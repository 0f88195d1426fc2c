#include "launch/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <ctime>

#include "muster/base/error.h"

namespace muster::launch {
namespace {

constexpr int kOfWrites[] = {SIGPIPE, SIGXFSZ};

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

Signals::Signals(bool forward) {
  sigset_t blocked;
  ::sigemptyset(&blocked);
  if (forward) {
    ::signal(SIGCHLD,
             SIG_DFL);  // a shell may have us started with it ignored, and then there would be no exit statuses
    for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD})
      ::sigaddset(&blocked, signal);
    if (!is_ignored(SIGHUP)) ::sigaddset(&blocked, SIGHUP);
    fd_.reset(::signalfd(-1, &blocked, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) throw_errno("signalfd");
  }
  for (const int signal : kOfWrites) ::sigaddset(&blocked, signal);
  ::pthread_sigmask(SIG_BLOCK, &blocked, &original_mask_);
}

Signals::~Signals() {
  for (const int signal : kOfWrites) {
    if (::sigismember(&original_mask_, signal)) continue;  // one of our own writes' must not strike the caller now
    sigset_t that;
    ::sigemptyset(&that);
    ::sigaddset(&that, signal);
    const timespec now{};
    while (::sigtimedwait(&that, nullptr, &now) > 0) {
    }
  }
  ::pthread_sigmask(SIG_SETMASK, &original_mask_, nullptr);
}

std::vector<int> Signals::take() {
  std::vector<int> taken;
  signalfd_siginfo info;
  while (fd_ && ::read(fd_.get(), &info, sizeof info) == sizeof info) taken.push_back(static_cast<int>(info.ssi_signo));
  return taken;
}

}  // namespace muster::launch
