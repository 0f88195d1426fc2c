#include "launch/supervisor/supervisor.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "base/env.h"
#include "base/log.h"
#include "base/pidfd.h"
#include "base/text.h"
#include "base/verbose.h"
#include "launch/black_box/black_box_sources.h"
#include "launch/kit/elastic_words.h"
#include "launch/ranks/error_file.h"
#include "launch/ranks/program.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/black_box.h"
#include "shm/spin.h"

namespace muster::launch {
namespace {

// Of a rank: two streams, its process, its black box, and a connection of its World to the store of this host.
constexpr rlim_t kDescriptorsPerRank = 5, kLogsPerRank = 2, kOtherDescriptors = 64;

// Raises the soft limit of open files as far as it goes: ranks of other hosts and programs within the ranks may connect
// to the stores that are served here. Returns the previous limit, for the ranks.
std::optional<rlimit> raise_open_files(int ranks, bool logs) {
  rlimit before{};
  const rlim_t each = kDescriptorsPerRank + (logs ? kLogsPerRank : 0);
  const rlim_t needed = each * static_cast<rlim_t>(ranks) + kOtherDescriptors;
  if (::getrlimit(RLIMIT_NOFILE, &before) != 0) return std::nullopt;
  rlimit raised = before;
  raised.rlim_cur = before.rlim_max;
  const bool is_raised = ::setrlimit(RLIMIT_NOFILE, &raised) == 0;
  if (std::max(before.rlim_cur, is_raised ? raised.rlim_cur : 0) < needed)
    throw Unavailable(text(ranks, " ranks need ", needed, " open files, and the limit is ", before.rlim_max),
                      "Use fewer ranks, or raise the limit (ulimit -Hn)");
  return is_raised ? std::optional(before) : std::nullopt;
}

// Whether a rank may draw in place (redraw a line) there.
bool is_terminal(const Printer& printer) {
  const char* type = std::getenv("TERM");
  return printer.sink().is_terminal() && !(type && std::string_view(type) == "dumb");
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
      open_files_(options.own_process ? raise_open_files(options.ranks, !options.log_folder.empty()) : std::nullopt),
      placement_(place(options.ranks, options.pin)),
      guardian_(options.own_process ? Guardian::start(job_.id) : Guardian()) {}

Outcome Supervisor::run() {
  if (options_.own_process) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    leave_out_lines_that_would_wait();  // the store's thread serves other hosts
  }
  open_outputs();
  if (options_.hosts && !join_hosts()) meeting_ = true;
  while (stop_signal_ == 0 && !now_.hosts_error && (!hosts_ || meet())) {
    try {
      run_attempt();
    } catch (const std::exception& error) {  // no more processes or descriptors: the other hosts need not wait
      if (hosts_)
        hosts_->end({.kind = EpochEnd::Kind::kFailed,
                     .node = job_.node,
                     .status = 1,
                     .cause = text(error.what(), '\n'),
                     .last = true});
      give_up_attempt();
      throw;
    }
    if (!goes_on()) break;
  }
  // Kept ranks learn of the end immediately, while the rendezvous may still wait for a silent store.
  auto leaving = std::move(hosts_);
  if (leaving) leaving->leave();
  end_kept();
  leaving.reset();
  hosts_server_.reset();
  guardian_.say_goodbye();
  ranks_->reap();
  if (now_.exec_error) throw_exec_error(path_, now_.exec_error->error);
  Outcome last = outcome();
  if (last.status == 0) remove_report(black_box_report(options_.black_box_file));  // of an attempt that failed
  if (const auto words = save_error(last); !words.empty()) last.cause += words + '\n';
  return last;
}

// One attempt, from the first rank's start to the last one's end.
void Supervisor::run_attempt() {
  now_.failures.clear();  // failures of kept ranks while the hosts met
  start_ranks();
  if (!store_) store_ = serve_store(std::string_view(job_.launcher_address).substr(std::string_view("unix:").size()));
  watch();
  if (!kept_) store_.reset();
}

// After an error of this launcher: ends what runs, as after a rank's failure, so that nothing is left of it and nothing
// that was printed is lost.
void Supervisor::give_up_attempt() noexcept {
  try {
    exec_errors_ = {};
    kept_ = false;
    terminate();
    watch();
  } catch (const std::exception&) {
    // The ranks are killed when ranks_ is destroyed.
  }
}

// Whether there is another attempt. If so, prepares it: forgets this attempt and reaps the ranks that are not kept.
bool Supervisor::goes_on() {
  if (stop_signal_ != 0 || now_.exec_error || now_.hosts_error || now_.abandoned) return false;
  if (now_.end && now_.end->last) return false;
  const bool counts = !now_.end || now_.end->kind == EpochEnd::Kind::kFailed ||
                      (now_.end->kind == EpochEnd::Kind::kLost && options_.hosts->least == options_.hosts->most);
  if (counts && (job_.restarts >= max_restarts_ || cause().status == 0)) return false;
  if (counts) ++job_.restarts;
  const std::string why = kept_ ? cause().cause : outcome().cause;  // outcome() also saves the black boxes
  const std::string count = counts ? text(" (", job_.restarts, " of ", max_restarts_, ")\n") : "\n";
  // Ranks that we ended are not done: they may have saved their state without having completed their work.
  done_ = !kept_ && now_.end && now_.end->kind == EpochEnd::Kind::kRoom && (!now_.terminated || now_.too_late) &&
          all_well();
  if (!done_)
    print(kept_    ? text("muster: ", why, "muster: the other ranks stay, and the hosts meet again", count)
          : counts ? text("muster: ", why, "muster: the job starts again", count)
                   : text("muster: ", why, "muster: the hosts that are left or new meet again", count));
  if (!kept_) {
    epoch_ = 0;
    guardian_.forget();
    ranks_->reap();
    ranks_ = std::make_unique<RankProcesses>();
  }
  now_ = Attempt();
  first_attempt_ = false;
  renew_master_port(job_);  // the one before may linger
  if (hosts_) hosts_->meet_again(job_.restarts, job_.master_port, kept_ ? line_ : -1, done_);
  return true;
}

// Ends the ranks that were kept for a next epoch, because there will be none.
void Supervisor::end_kept() {
  if (!std::exchange(kept_, false)) return;
  if (stop_signal_ == 0) {
    terminate();
  } else {
    give_stop();
    ranks_->signal_groups(stop_signal_);
    now_.kill_at = Deadline::after(options_.stop_grace);
  }
  watch();
}

// Prints lines of this launcher, between the lines of the ranks.
void Supervisor::print(const std::string& lines) {
  printers_.back()->line(this, {}, lines, {});
  flush_outputs();
}

// --- the ranks ---

void Supervisor::open_outputs() {
  sinks_.push_back(std::make_unique<Sink>(STDOUT_FILENO));
  if (!Sink::same_stream(STDOUT_FILENO, STDERR_FILENO)) sinks_.push_back(std::make_unique<Sink>(STDERR_FILENO));
  for (const auto& sink : sinks_) printers_.push_back(std::make_unique<Printer>(*sink));
  logs_ = RankLogs(options_.log_folder, options_.log_files_only);
  remove_report(error_report(options_.error_file));
  remove_report(black_box_report(options_.black_box_file));
}

// The environment that all ranks of this host share.
Environment Supervisor::rank_environment() const {
  auto environment = job_environment(job_, options_);
  if (options_.verbose) environment.set(kVerboseVariable, "1");
  if (!placement_.pinned()) return environment;
  const auto set_by_user = std::any_of(options_.env.begin(), options_.env.end(),
                                       [](const auto& variable) { return variable.first == "OMP_NUM_THREADS"; });
  if (!env_string("OMP_NUM_THREADS") && !set_by_user) environment.set("OMP_NUM_THREADS", text(placement_.threads));
  return environment;
}

void Supervisor::start_ranks() {
  if (!body_) exec_errors_ = make_pipe();
  const UniqueFd null = open_null(O_RDONLY);
  oom_ = OomWatch();
  // In a folder that hosts share, a rank of a later epoch may have been another host's before.
  for (int local = 0; local < options_.ranks; ++local)
    logs_.open(job_.first_rank + local, {.must = first_attempt_, .append = epoch_ > 0});
  auto environment = rank_environment();
  if (kept_) {
    start_missing();
  } else {
    // If this is not the first epoch of its line, ranks of other hosts have stayed, and new ranks need its number.
    if (epoch_ != std::max(line_, 0)) environment.set(kEpochVariable, text(epoch_));
    for (int local = 0; local < options_.ranks; ++local) ranks_->add(start_rank(local, environment, null));
  }
  exec_errors_.write.reset();
  if (options_.verbose) say_placement(environment);
}

// What stands before each line that a rank prints there.
std::string Supervisor::prefix_for(const Printer& printer, int number) const {
  if (options_.output != RankOutput::kPrefixed) return {};
  return prefix_of(prefix_host(options_), number, is_terminal(printer) && !env_string("NO_COLOR"));
}

// The rank's output comes through pipes. `writers`: its ends of them; empty: it keeps the launcher's own.
void Supervisor::connect_streams(Rank& rank, UniqueFd (&writers)[2]) {
  const auto connect = [&](RankStream& stream, UniqueFd& writer, Printer& printer, LastLines* last_lines) {
    const bool prefixed = options_.output == RankOutput::kPrefixed;
    const Style style = is_terminal(printer) ? Style::kTerminal : prefixed ? Style::kLog : Style::kUnchanged;
    Pipe pipe = make_pipe();
    writer = std::move(pipe.write);
    stream = RankStream(std::move(pipe.read), printer, style, prefix_for(printer, rank.number), last_lines);
  };
  if (options_.output != RankOutput::kInherit || logs_.out(rank.number))
    connect(rank.out, writers[0], *printers_.front(), nullptr);
  connect(rank.err, writers[1], *printers_.back(), &rank.last_lines);
  rank.out.log_to(logs_.out(rank.number), logs_.files_only());
  rank.err.log_to(logs_.err(rank.number), logs_.files_only());
}

// What a forked rank that runs a function has open of the launcher's.
std::vector<int> Supervisor::launchers_descriptors(const Rank& rank, const UniqueFd& null,
                                                   const UniqueFd (&writers)[2]) const {
  std::vector<int> open{null.get(),    writers[0].get(), writers[1].get(), guardian_.socket(),
                        signals_.fd(), rank.out.fd(),    rank.err.fd(),    job_.master_socket.get()};
  for (const auto& sink : sinks_)
    if (sink->own_fd() >= 0) open.push_back(sink->own_fd());
  for (const auto& other : ranks_->all())
    for (const int fd : {other->pidfd.get(), other->out.fd(), other->err.fd(), other->black_box.get()})
      open.push_back(fd);
  for (const int fd : logs_.descriptors()) open.push_back(fd);
  for (const auto& name : placement_.names) open.push_back(name.get());
  std::erase(open, -1);
  return open;
}

std::unique_ptr<Rank> Supervisor::start_rank(int local, Environment& environment, const UniqueFd& null) {
  auto rank = std::make_unique<Rank>();
  const int number = rank->number = job_.first_rank + local;
  rank->black_box = above_standard(shm::create_black_box(number, job_.world_size, job_.id));
  set_rank(environment, job_, local, rank->black_box.get());
  if (!options_.error_file.empty()) {
    rank->error_path = new_error_path(number);
    environment.set(kRankErrorVariable, rank->error_path);
  }
  UniqueFd writers[2];
  connect_streams(*rank, writers);

  std::vector<char*> arguments;
  for (const auto& argument : options_.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  std::vector<unsigned long> affinity;
  ChildPlan plan;
  plan.rank = number;
  plan.environment = environment.block();
  plan.path = path_.c_str();
  plan.arguments = arguments.data();
  plan.body = body_;
  plan.standard[0] = number == 0 && !::isatty(STDIN_FILENO) ? -1 : null.get();
  plan.standard[1] = writers[0].get();
  plan.standard[2] = writers[1].get();
  plan.black_box = rank->black_box.get();
  if (placement_.pinned()) {
    affinity = mask_of(placement_.ranks[static_cast<size_t>(local)].processors);
    plan.affinity = &affinity;
  }
  plan.error_pipe = exec_errors_.write.get();
  plan.guardian_socket = guardian_.socket();
  plan.mask = signals_.original_mask();
  if (options_.own_process) {
    ::sigemptyset(&plan.mask);
    plan.default_signals = true;
  }
  plan.open_files = open_files_;
  if (body_) plan.to_close = launchers_descriptors(*rank, null, writers);
  rank->pid = fork_rank(plan);
  return rank;
}

void Supervisor::say_placement(const Environment& environment) {
  const auto threads = environment.get("OMP_NUM_THREADS");
  auto& printer = *printers_.back();
  if (!placement_.pinned()) printer.line(this, "muster: ", text("ranks are not pinned: ", placement_.why));
  for (size_t local = 0; local < ranks_->all().size(); ++local) {
    const auto& rank = ranks_->all()[local];
    const auto where =
        placement_.pinned() ? text("processors ", name_of(placement_.ranks[local].processors)) : "any processor";
    printer.line(
        this, "muster: ", text("rank ", rank->number, ": pid ", rank->pid, ", ", where, ", ", threads, " OMP threads"));
  }
}

void Supervisor::terminate() {
  now_.settle_at = Deadline::never();
  const auto& all = ranks_->all();
  if (!now_.terminated)
    now_.too_late = std::all_of(all.begin(), all.end(), [](const auto& rank) {
      return rank->ended || await_end(rank->pidfd, Deadline::after(std::chrono::seconds(0)));
    });
  now_.terminated = true;
  give_stop();
  ranks_->signal_groups(SIGTERM);
  tell_hosts();
  if (stop_signal_ == 0) now_.kill_at = Deadline::after(options_.grace);
}

void Supervisor::kill_all() {
  now_.settle_at = now_.kill_at = Deadline::never();
  if (!now_.killed) now_.abandon_at = Deadline::after(kDeathTakes);
  now_.killed = true;
  ranks_->signal_groups(SIGKILL);
}

AdoptedProcesses Supervisor::adopted() const {
  auto others = earlier_children_;
  others.push_back(guardian_.pid());
  for (const auto& rank : ranks_->all()) others.push_back(rank->pid);
  return AdoptedProcesses(std::move(others));
}

void Supervisor::finish() {
  now_.finished = true;
  now_.settle_at = now_.kill_at = now_.abandon_at = Deadline::never();
  ranks_->signal_groups(SIGKILL);  // what the ranks left running in them
  if (options_.own_process) adopted().kill(Deadline::after(kDeathTakes));
  for (const auto& rank : ranks_->all())
    for (RankStream* stream : {&rank->out, &rank->err}) stream->drain();
}

}  // namespace muster::launch
