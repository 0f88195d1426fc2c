// What a supervisor does while ranks run: it waits for output, signals, deadlines and ends, and deals with them.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/pidfd.h"
#include "launch/ranks/error_file.h"
#include "launch/ranks/program.h"
#include "launch/supervisor/supervisor.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

constexpr std::chrono::seconds kReapInterval{1};    // adopted processes that ended cost a process id each until then
constexpr std::chrono::seconds kOtherHostTakes{1};  // to tell that one of its ranks failed
constexpr size_t kReadAtOnce = 64 * 1024;           // from one pipe, before the others have their turn
constexpr size_t kReadAtEnd = 1024 * 1024;          // of a rank that ended: what a pipe may hold

}  // namespace

void Supervisor::watch() {
  for (;;) {
    if (ranks_->all_ended() && !now_.finished) finish();
    flush_outputs();
    if (now_.finished) tell_hosts();
    if (kept_ || now_.abandoned || over()) return;
    wait_for_events();
    handle_events();
    handle_deadlines();
  }
}

void Supervisor::wait_for_events() {
  polled_.clear();
  watched_.clear();
  const auto add = [&](int fd, short events, decltype(Watched::kind) kind, Rank* rank = nullptr) {
    polled_.push_back({fd, events, 0});
    watched_.push_back({kind, rank});
  };
  if (signals_.fd() >= 0) add(signals_.fd(), POLLIN, Watched::kSignals);
  if (hosts_ && !now_.end && !now_.hosts_error) add(hosts_->events_fd(), POLLIN, Watched::kHosts);
  if (exec_errors_.read) add(exec_errors_.read.get(), POLLIN, Watched::kExecErrors);
  for (const auto& rank : ranks_->all()) {
    // Streams before the rank's end, so that what the rank printed is printed before our report about it.
    const auto add_stream = [&](const RankStream& stream, decltype(Watched::kind) kind) {
      if (stream.open() && !stream.printer().sink().full()) add(stream.fd(), POLLIN, kind, rank.get());
    };
    add_stream(rank->out, Watched::kOut);
    add_stream(rank->err, Watched::kErr);
    if (!rank->ended) add(rank->pidfd.get(), POLLIN, Watched::kEnd, rank.get());
  }
  for (const auto& sink : sinks_)
    if (!sink->empty()) add(sink->poll_fd(), POLLOUT, Watched::kSink);

  const Deadline* next = &now_.settle_at;
  for (const Deadline* other : {&now_.kill_at, &now_.abandon_at, &reap_at_})
    if (other->when() < next->when()) next = other;
  const int timeout = next->is_never() ? -1 : next->poll_ms();
  if (::poll(polled_.data(), polled_.size(), timeout) < 0) {
    if (errno != EINTR && errno != EAGAIN) throw_errno("poll");
    for (auto& fd : polled_) fd.revents = 0;
  }
}

void Supervisor::handle_events() {
  for (size_t index = 0; index < polled_.size(); ++index) {
    if (polled_[index].revents == 0) continue;
    const auto& [kind, rank] = watched_[index];
    switch (kind) {
      case Watched::kSignals:
        handle_signals();
        break;
      case Watched::kExecErrors:
        handle_exec_errors();
        break;
      case Watched::kHosts:
        if (!meeting_) handle_hosts();
        break;
      case Watched::kEnd:
        handle_end(*rank);
        break;
      case Watched::kOut:  // or closed, if the rank was replaced a moment ago
        if (rank->out.open()) rank->out.read(kReadAtOnce);
        break;
      case Watched::kErr:
        if (rank->err.open()) rank->err.read(kReadAtOnce);
        break;
      case Watched::kSink:
        break;  // flush_outputs() follows anyway
    }
  }
}

void Supervisor::handle_signals() {
  for (const int signal : signals_.take()) {
    switch (signal) {
      case SIGCHLD:
        if (reap_at_.is_never()) reap_at_ = Deadline::after(kReapInterval);
        break;
      case SIGUSR1:
      case SIGUSR2:
        ranks_->signal_leaders(signal);
        break;
      case SIGTSTP:
        ranks_->signal_groups(SIGTSTP);
        ::raise(SIGSTOP);  // returns when the shell continues us
        ranks_->signal_groups(SIGCONT);
        break;
      default:
        handle_user_signal(signal);
    }
  }
}

// A second request to end kills. Not the first one that comes to this host when another host's has come through the
// store: schedulers send one to each. Nor SIGHUP, which a terminal that goes sends twice, and systemd beside SIGTERM.
void Supervisor::handle_user_signal(int signal) {
  if (signal == SIGHUP && stop_signal_ != 0) return;
  const bool again = signal != SIGHUP && std::exchange(was_asked_to_end_, true);
  if (now_.finished && (!hosts_ || now_.end || again)) {
    now_.abandoned = true;  // only a slow reader of our output is left, and the user does not want to wait for it
    if (hosts_) hosts_->stop(signal);  // in the store, for the others that meet again
  } else if (again) {
    kill_all();
  } else if (stop_signal_ == 0) {
    handle_stop(signal);
    if (hosts_) hosts_->stop(signal);
  }
}

void Supervisor::handle_deadlines() {
  if (now_.settle_at.passed()) terminate();
  if (now_.kill_at.passed()) {
    if (stop_signal_ != 0) now_.late = names_of_running();
    kill_all();
  }
  if (now_.abandon_at.passed()) now_.abandoned = true;
  if (reap_at_.passed()) {
    reap_at_ = Deadline::never();
    adopted().reap();
  }
}

void Supervisor::handle_end(Rank& rank) {
  handle_exec_errors();
  siginfo_t info{};
  Failure failure{.rank = rank.number, .pid = rank.pid, .when = Clock::now(), .last_lines = &rank.last_lines};
  if (::waitid(P_PIDFD, static_cast<id_t>(rank.pidfd.get()), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    if (errno == EINTR) return;
    failure.unknown = rank.taken = true;
  } else if (info.si_pid == 0) {
    return;
  } else if (info.si_code == CLD_EXITED) {
    failure.exit_status = info.si_status;
  } else {
    failure.signal = info.si_status;
    failure.dumped_core = info.si_code == CLD_DUMPED;
  }
  rank.ended = true;
  rank.end = end_of(failure);
  for (RankStream* stream : {&rank.out, &rank.err})
    if (stream->open()) stream->read(kReadAtEnd);

  const bool failed = failure.unknown || failure.signal != 0 || failure.exit_status != 0;
  rank.well = !failed || (stop_signal_ != 0 && failure.signal == stop_signal_ && is_on_its_way(rank));
  const bool by_us = (now_.terminated && failure.signal == SIGTERM) || (now_.killed && failure.signal == SIGKILL);
  if (!failed || by_us || stop_signal_ != 0 || replace(rank, failure)) return;
  if (options_.keep_going && rank.number != 0) {
    rank.well = true;  // as far as the job is concerned
    print(text("muster: ", described(failure).cause, "muster: the others go on without rank ", rank.number, '\n'));
    return;
  }
  // After a failure that is only a consequence, the launcher waits for its cause. A cause that this thread sees late
  // still counts as in time.
  if (!now_.settle_at.is_never()) failure.when = std::min(failure.when, now_.failures.front().when + echo());
  now_.failures.push_back(failure);
  if (now_.terminated || meeting_) return;
  if (hosts_ && others_stay(&rank)) {
    tell_hosts();
  } else if (!failure.is_consequence()) {
    terminate();
  } else if (now_.settle_at.is_never()) {
    // The host of the rank that failed first will report it. If that host is lost, the others notice.
    now_.settle_at = Deadline::after(echo());
  }
}

// How long before its cause a consequence may be seen.
std::chrono::nanoseconds Supervisor::echo() const {
  if (job_.nodes == 1) return options_.settle;
  return options_.hosts->patience + kOtherHostTakes;
}

void Supervisor::handle_exec_errors() {
  if (!exec_errors_.read) return;
  pollfd ready{exec_errors_.read.get(), POLLIN, 0};
  if (::poll(&ready, 1, 0) <= 0) return;
  ExecError error{};
  // While the hosts meet, this error does not count: the next attempt starts the program again and gets it again.
  if (::read(exec_errors_.read.get(), &error, sizeof error) == sizeof error && !meeting_) {
    now_.exec_error = error;
    kill_all();
  }
  exec_errors_.read.reset();  // all ranks have started the program, or one has said why it could not
}

void Supervisor::flush_outputs() {
  for (const auto& printer : printers_) {
    printer->redraw_bar();
    printer->sink().flush();
    if (printer->sink().error() != EPIPE) continue;
    // The reader of this process's output went away (muster run … | head): the ranks get the error as if they wrote
    // there themselves. But what goes into files, too, is still wanted.
    for (const auto& rank : ranks_->all())
      for (RankStream* stream : {&rank->out, &rank->err})
        if (stream->open() && &stream->printer() == printer.get() && !stream->stop_printing()) stream->close();
  }
}

}  // namespace muster::launch
