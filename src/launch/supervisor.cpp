#include "launch/supervisor.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "base/env.h"
#include "base/text.h"
#include "launch/black_box_report.h"
#include "launch/program.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/black_box.h"

namespace muster::launch {
namespace {

constexpr std::chrono::seconds kReapInterval{1};  // adopted processes that ended cost a process id each until then
constexpr size_t kReadAtOnce = 64 * 1024;         // from one pipe, before the others have their turn
constexpr size_t kLastOperations = 3;             // of the failing rank, in the report
constexpr size_t kReadAtEnd = 1024 * 1024;        // of a rank that ended: what a pipe may hold
constexpr rlim_t kDescriptorsPerRank = 4, kOtherDescriptors = 64;

// Raises the soft limit of open files where `ranks` need it. The limit before, for the ranks.
std::optional<rlimit> raise_open_files(int ranks) {
  rlimit before{};
  const rlim_t needed = kDescriptorsPerRank * static_cast<rlim_t>(ranks) + kOtherDescriptors;
  if (::getrlimit(RLIMIT_NOFILE, &before) != 0 || before.rlim_cur >= needed) return std::nullopt;
  rlimit raised = before;
  raised.rlim_cur = std::min(needed, before.rlim_max);
  if (raised.rlim_cur < needed || ::setrlimit(RLIMIT_NOFILE, &raised) != 0)
    throw Unavailable(text(ranks, " ranks need ", needed, " open files, and the limit is ", before.rlim_max),
                      "Use fewer ranks, or raise the limit (ulimit -Hn)");
  return before;
}

}  // namespace

Supervisor::Supervisor(const LaunchOptions& options, std::string path)
    : Supervisor(options, std::move(path), nullptr) {}
Supervisor::Supervisor(const LaunchOptions& options, const std::function<int()>& body)
    : Supervisor(options, {}, &body) {}

Supervisor::Supervisor(const LaunchOptions& options, std::string path, const std::function<int()>* body)
    : options_(options),
      path_(std::move(path)),
      body_(body),
      job_(make_job(options)),
      signals_(options.own_process),
      earlier_children_(options.own_process ? AdoptedProcesses({}).list() : std::vector<pid_t>()),
      open_files_(options.own_process ? raise_open_files(options.ranks) : std::nullopt),
      guardian_(options.own_process ? Guardian::start(job_.id) : Guardian()) {}

Outcome Supervisor::run() {
  if (options_.own_process) ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  open_outputs();
  start_ranks();
  const auto store = serve_store(std::string_view(job_.store_address).substr(std::string_view("unix:").size()));
  watch();
  guardian_.say_goodbye();
  ranks_.reap();
  if (exec_error_) throw_exec_error(path_, exec_error_->error);
  return outcome();
}

void Supervisor::open_outputs() {
  sinks_.push_back(std::make_unique<Sink>(STDOUT_FILENO));
  if (!Sink::same_stream(STDOUT_FILENO, STDERR_FILENO)) sinks_.push_back(std::make_unique<Sink>(STDERR_FILENO));
  for (const auto& sink : sinks_) printers_.push_back(std::make_unique<Printer>(*sink));
}

void Supervisor::start_ranks() {
  if (!body_) exec_errors_ = make_pipe();
  const UniqueFd null = open_null(O_RDONLY);
  auto environment = job_environment(job_, options_);
  std::vector<char*> arguments;
  for (const auto& argument : options_.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  for (int number = 0; number < options_.ranks; ++number) {
    start_rank(number, environment, arguments, null);
  }
  exec_errors_.write.reset();
}

void Supervisor::start_rank(int number, Environment& environment, const std::vector<char*>& arguments,
                            const UniqueFd& null) {
  auto rank = std::make_unique<Rank>();
  rank->number = number;
  rank->black_box = above_standard(shm::create_black_box(number, options_.ranks, job_.id));
  set_rank(environment, job_, number, rank->black_box.get());

  UniqueFd writers[2];
  const auto no_colour = env_string("NO_COLOR");
  const auto connect = [&](RankStream& stream, UniqueFd& writer, Printer& printer, LastLines* last_lines) {
    const char* type = std::getenv("TERM");
    const bool terminal = printer.sink().is_terminal() && !(type && std::string_view(type) == "dumb");
    const bool prefixed = options_.output == RankOutput::kPrefixed;
    Pipe pipe = make_pipe();
    writer = std::move(pipe.write);
    stream = RankStream(std::move(pipe.read), printer,
                        terminal   ? Style::kTerminal
                        : prefixed ? Style::kLog
                                   : Style::kUnchanged,
                        prefixed ? prefix_of(number, terminal && !no_colour) : std::string(), last_lines);
  };
  if (options_.output != RankOutput::kInherit) connect(rank->out, writers[0], *printers_.front(), nullptr);
  connect(rank->err, writers[1], *printers_.back(), &rank->last_lines);

  ChildPlan plan;
  plan.rank = number;
  plan.environment = environment.block();
  plan.path = path_.c_str();
  plan.arguments = const_cast<char**>(arguments.data());
  plan.body = body_;
  plan.standard[0] = number == 0 && !::isatty(STDIN_FILENO) ? -1 : null.get();
  plan.standard[1] = writers[0].get();
  plan.standard[2] = writers[1].get();
  plan.black_box = rank->black_box.get();
  plan.error_pipe = exec_errors_.write.get();
  plan.guardian_socket = guardian_.socket();
  plan.mask = signals_.original_mask();
  if (options_.own_process) {
    ::sigemptyset(&plan.mask);
    plan.default_signals = true;
  }
  plan.open_files = open_files_;
  if (body_) {
    plan.to_close = {null.get(),    writers[0].get(), writers[1].get(), guardian_.socket(),
                     signals_.fd(), rank->out.fd(),   rank->err.fd()};
    for (const auto& sink : sinks_)
      if (sink->own_fd() >= 0) plan.to_close.push_back(sink->own_fd());
    for (const auto& other : ranks_.all())
      for (const int fd : {other->pidfd.get(), other->out.fd(), other->err.fd(), other->black_box.get()})
        plan.to_close.push_back(fd);
    std::erase(plan.to_close, -1);
  }
  rank->pid = launch::start_rank(plan);
  ranks_.add(std::move(rank));
}

void Supervisor::watch() {
  for (;;) {
    if (ranks_.all_ended() && !finished_) finish();
    flush_outputs();
    if (abandoned_) return;
    if (finished_ && std::all_of(sinks_.begin(), sinks_.end(), [](const auto& sink) { return sink->empty(); })) return;
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
  if (exec_errors_.read) add(exec_errors_.read.get(), POLLIN, Watched::kExecErrors);
  for (const auto& rank : ranks_.all()) {
    // Output before ends, so that what a rank printed is printed before what we say about it.
    const auto add_stream = [&](const RankStream& stream, decltype(Watched::kind) kind) {
      if (stream.open() && !stream.printer().sink().full()) add(stream.fd(), POLLIN, kind, rank.get());
    };
    add_stream(rank->out, Watched::kOut);
    add_stream(rank->err, Watched::kErr);
    if (!rank->ended) add(rank->pidfd.get(), POLLIN, Watched::kEnd, rank.get());
  }
  for (const auto& sink : sinks_)
    if (!sink->empty()) add(sink->poll_fd(), POLLOUT, Watched::kSink);

  const Deadline* next = &settle_at_;
  for (const Deadline* other : {&kill_at_, &abandon_at_, &reap_at_})
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
      case Watched::kEnd:
        handle_end(*rank);
        break;
      case Watched::kOut:
        rank->out.read(kReadAtOnce);
        break;
      case Watched::kErr:
        rank->err.read(kReadAtOnce);
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
        ranks_.signal_leaders(signal);
        break;
      case SIGTSTP:
        ranks_.signal_groups(SIGTSTP);
        ::raise(SIGSTOP);  // returns when the shell continues us
        ranks_.signal_groups(SIGCONT);
        break;
      default:
        if (finished_) {
          abandoned_ = true;  // only a slow reader of our output is left, and the user does not want to wait for it
        } else if (stop_signal_ != 0) {
          kill_all();
        } else {
          stop_signal_ = signal;
          ranks_.signal_groups(signal);
          if (!terminated_) kill_at_ = Deadline::after(options_.stop_grace);
        }
    }
  }
}

void Supervisor::handle_deadlines() {
  if (settle_at_.passed()) terminate();
  if (kill_at_.passed()) kill_all();
  if (abandon_at_.passed()) abandoned_ = true;
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
  const bool by_us = (terminated_ && failure.signal == SIGTERM) || (killed_ && failure.signal == SIGKILL);
  if (!failed || by_us || stop_signal_ != 0) return;
  failures_.push_back(failure);
  if (terminated_) return;
  if (!failure.is_consequence()) {
    terminate();
  } else if (settle_at_.is_never()) {
    settle_at_ = Deadline::after(options_.settle);
  }
}

void Supervisor::handle_exec_errors() {
  if (!exec_errors_.read) return;
  pollfd ready{exec_errors_.read.get(), POLLIN, 0};
  if (::poll(&ready, 1, 0) <= 0) return;
  ExecError error{};
  if (::read(exec_errors_.read.get(), &error, sizeof error) == sizeof error) {
    exec_error_ = error;
    kill_all();
  }
  exec_errors_.read.reset();  // all have started their program, or the first that did not has told
}

void Supervisor::flush_outputs() {
  for (const auto& printer : printers_) {
    printer->settle();
    printer->sink().flush();
    if (printer->sink().error() != EPIPE) continue;
    // Whoever read our output went away (muster run … | head): the ranks learn of it as if they wrote there themselves.
    for (const auto& rank : ranks_.all())
      for (RankStream* stream : {&rank->out, &rank->err})
        if (stream->open() && &stream->printer() == printer.get()) stream->close();
  }
}

void Supervisor::terminate() {
  settle_at_ = Deadline::never();
  terminated_ = true;
  ranks_.signal_groups(SIGTERM);
  if (stop_signal_ == 0) kill_at_ = Deadline::after(options_.grace);
}

void Supervisor::kill_all() {
  settle_at_ = kill_at_ = Deadline::never();
  if (!killed_) abandon_at_ = Deadline::after(kDeathTakes);
  killed_ = true;
  ranks_.signal_groups(SIGKILL);
}

AdoptedProcesses Supervisor::adopted() const {
  auto others = earlier_children_;
  others.push_back(guardian_.pid());
  for (const auto& rank : ranks_.all()) others.push_back(rank->pid);
  return AdoptedProcesses(std::move(others));
}

void Supervisor::finish() {
  finished_ = true;
  settle_at_ = kill_at_ = abandon_at_ = Deadline::never();
  ranks_.signal_groups(SIGKILL);  // what the ranks left running in them
  if (options_.own_process) adopted().kill(Deadline::after(kDeathTakes));
  for (const auto& rank : ranks_.all())
    for (RankStream* stream : {&rank->out, &rank->err}) stream->drain();
}

// The last operations of a failing rank, as of its end; none where it had no World.
std::vector<std::string> Supervisor::operations_of(const Failure& failure) const {
  const auto& rank = *ranks_.all()[static_cast<size_t>(failure.rank)];
  const auto when = static_cast<uint64_t>(failure.when.time_since_epoch() / std::chrono::nanoseconds(1));
  try {
    return last_operations(shm::read_black_box(rank.black_box.get()), when, kLastOperations);
  } catch (const Error& error) {  // what the rank did to its own memory is no reason not to report its end
    return {error.message()};
  }
}

// Where the user asked for it. What is to be said about it.
std::string Supervisor::save_black_boxes() const {
  if (options_.black_box_file.empty()) return {};
  std::vector<SavedBox> boxes;
  for (const auto& rank : ranks_.all())
    boxes.push_back({rank->black_box.get(), rank->end.empty() ? "does not end" : rank->end});
  try {
    write_black_boxes(options_.black_box_file, boxes);
    return text("what the ranks did last: muster blackbox ", options_.black_box_file);
  } catch (const Error& error) {
    return error.message();
  }
}

Outcome Supervisor::outcome() const {
  Outcome outcome;
  if (!failures_.empty()) {
    const Failure& cause = choose_cause(failures_, options_.settle);
    outcome = describe(cause, operations_of(cause));
  } else if (stop_signal_ != 0) {
    outcome = describe_stop(stop_signal_);
  }
  const auto add = [&](const std::string& line) {
    outcome.cause += line + '\n';
    if (outcome.status == 0) outcome.status = 1;
  };
  for (const auto& rank : ranks_.all())
    if (!rank->ended)
      add(text("rank ", rank->number, " (pid ", rank->pid,
               ") does not end, not even by SIGKILL: it hangs in the kernel"));
  for (const auto& sink : sinks_)
    if (sink->error() != 0 && sink->error() != EPIPE)
      add(text("some output is lost, since it cannot be written: ", std::generic_category().message(sink->error())));
  if (outcome.status != 0)
    if (const auto words = save_black_boxes(); !words.empty()) add(words);
  return outcome;
}

}  // namespace muster::launch
