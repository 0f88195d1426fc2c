#include "launch/supervisor/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include "muster/base/error.h"

namespace muster::launch {
namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

Signals::Signals(bool forward) {
  if (!forward) return;
  // A shell may start the launcher with SIGCHLD ignored. Then the kernel would not keep the ranks' exit statuses.
  ::signal(SIGCHLD, SIG_DFL);
  sigset_t forwarded;
  ::sigemptyset(&forwarded);
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD})
    ::sigaddset(&forwarded, signal);
  if (!is_ignored(SIGHUP)) ::sigaddset(&forwarded, SIGHUP);
  fd_.reset(::signalfd(-1, &forwarded, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw_errno("signalfd");
  ::pthread_sigmask(SIG_BLOCK, &forwarded, nullptr);  // of_writes_ restores the mask when it is destroyed
}

std::vector<int> Signals::take() {
  std::vector<int> taken;
  signalfd_siginfo info;
  while (fd_ && ::read(fd_.get(), &info, sizeof info) == sizeof info) taken.push_back(static_cast<int>(info.ssi_signo));
  return taken;
}

}  // namespace muster::launch
