// Supervises a job: one thread, one poll(2) on the ranks' ends (pidfds), their output, this process's output and its
// signals.
//
//   running ──a rank fails──▶ SIGTERM to all groups ──grace──▶ SIGKILL to all groups ──▶ finished
//      │                         ▲
//      ├──with PeerLost──settle: the lost rank may end, which shows the cause
//      ├──the user's SIGINT, SIGTERM …, forwarded──▶ waiting ──stop_grace, or a second one──▶ SIGKILL ──▶ finished
//      └──all ranks succeed──▶ finished
//
//   finished: SIGKILL to the processes that are left in the groups, the rest of the pipes read and written, the cause
//             chosen
//
// That is one attempt. A job has several attempts if it may start again after a failure. If launchers of several hosts
// run it together, each attempt is an epoch of their rendezvous: it begins with the epoch's plan, and what ends it on
// one host ends it on all.
//
// Ranks in muster::elastic::run() say so (elastic_words.h), and stay. On one host, only a rank that failed is started
// again, within the attempt. Over several hosts an attempt then ends without the end of its ranks: while the launchers
// meet, the ranks wait (`kept_`); the next attempt starts the missing ranks, and tells each its place.
//
// The store of a job of functions is served from the last fork(2) to the end, so no rank holds its socket or a copy of
// its thread's locks. Programs may be started while the store is served, because between fork and exec no lock is
// taken.
//
// Thread-safety: none; one thread runs it.
#pragma once

#include <poll.h>
#include <sys/resource.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/output/rank_logs.h"
#include "launch/ranks/child.h"
#include "launch/ranks/environment.h"
#include "launch/ranks/guardian.h"
#include "launch/ranks/oom_watch.h"
#include "launch/ranks/outcome.h"
#include "launch/ranks/placement.h"
#include "launch/ranks/rank_processes.h"
#include "launch/rendezvous/rendezvous.h"
#include "launch/supervisor/signals.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

class Supervisor {
 public:
  // Either a program, found by find_program(), or a function.
  Supervisor(const LaunchOptions& options, std::string path);
  Supervisor(const LaunchOptions& options, const std::function<int()>& body);

  // Starts the ranks, again after failures if options allow it, and returns when all have ended. Call it once.
  Outcome run();

 private:
  Supervisor(const LaunchOptions& options, std::string path, const std::function<int()>* body);

  void open_outputs();
  bool join_hosts();
  void say_silence(const std::string& why);
  bool meet();
  void run_attempt();
  void give_up_attempt() noexcept;
  bool goes_on();
  void start_ranks();
  std::unique_ptr<Rank> start_rank(int local, Environment& environment, const UniqueFd& null);
  void connect_streams(Rank& rank, UniqueFd (&writers)[2]);
  std::vector<int> launchers_descriptors(const Rank& rank, const UniqueFd& null, const UniqueFd (&writers)[2]) const;
  std::optional<std::string> mark_of(size_t local) const;
  bool others_stay(const Rank* rank) const;
  bool call(size_t local);
  bool replace(const Rank& rank, const Failure& failure);
  void fill_place(int local, Environment& environment, const UniqueFd& null);
  void give_words();
  void give_stop();
  bool is_on_its_way(const Rank& rank) const;
  bool keep();
  void give_up_kept();
  void start_missing();
  void renumber(Rank& rank, int number);
  void end_kept();
  std::string new_error_path(int number);
  std::string prefix_for(const Printer& printer, int number) const;
  Environment rank_environment() const;
  void say_placement(const Environment& environment);
  void watch();
  void wait_for_events();
  void handle_events();
  void handle_signals();
  void handle_user_signal(int signal);
  void handle_deadlines();
  void handle_end(Rank& rank);
  void handle_exec_errors();
  std::chrono::nanoseconds echo() const;
  void handle_hosts();
  void handle_stop(int signal);
  void tell_hosts();
  bool over() const;
  void print(const std::string& lines);
  void flush_outputs();
  void terminate();
  void kill_all();
  void finish();
  AdoptedProcesses adopted() const;
  std::vector<std::string> operations_of(const Failure& failure) const;
  std::string save_black_boxes() const;
  Outcome cause() const;
  Outcome cause_elsewhere() const;
  bool all_well() const;
  std::string why_apart() const;
  std::string names_of_running() const;
  Outcome described(Failure failure) const;
  std::string save_error(const Outcome& outcome) const;
  Outcome outcome() const;

  const LaunchOptions& options_;
  const std::string path_;
  const std::function<int()>* const body_;
  Job job_;
  OomWatch oom_;                               // since this attempt began
  Signals signals_;                            // before all that may raise SIGPIPE
  const std::vector<pid_t> earlier_children_;  // of a shell that exec'ed this process; left alone
  const std::optional<rlimit> open_files_;     // the limit before this process raised it; for the ranks
  const CorePlacement placement_;
  Guardian guardian_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // one, or two: standard output and error
  std::vector<std::unique_ptr<Printer>> printers_;
  RankLogs logs_;
  std::unique_ptr<StoreServer> hosts_server_;  // if this launcher serves the others
  std::unique_ptr<Rendezvous> hosts_;          // if there are several
  std::unique_ptr<StoreServer> store_;         // of this launcher alone
  Pipe exec_errors_;
  std::unique_ptr<RankProcesses> ranks_ =
      std::make_unique<RankProcesses>();  // after the guardian, so that it is still there when the last rank ends

  struct Watched {
    enum { kSignals, kExecErrors, kEnd, kOut, kErr, kSink, kHosts } kind;
    Rank* rank;
  };
  std::vector<pollfd> polled_;
  std::vector<Watched> watched_;

  // Of this attempt.
  struct Attempt {
    std::vector<Failure> failures;  // not those that this process ended
    std::optional<ExecError> exec_error;
    std::optional<EpochEnd> end;     // of all hosts
    std::exception_ptr hosts_error;  // why the hosts cannot go on together
    bool terminated = false, killed = false, finished = false, abandoned = false;
    bool too_late = false;                    // terminated when all had already ended
    bool told = false;                        // the other hosts know how the attempt ended here
    std::string late;                         // the ranks that had not ended by the user's deadline, in words
    Deadline settle_at = Deadline::never();   // then terminate()
    Deadline kill_at = Deadline::never();     // then kill_all()
    Deadline abandon_at = Deadline::never();  // then ranks that SIGKILL did not end are abandoned
  };
  Attempt now_;
  bool store_comes_again_ = false;  // the store of the hosts was unreachable, and may come back
  bool first_attempt_ = true;       // of this launcher
  bool meeting_ = false;            // with the other hosts, before an attempt
  bool kept_ = false;               // the ranks of the attempt before live on in the next one
  bool done_ = false;               // all ranks here had succeeded when the attempt before made room for another host
  int epoch_ = 0;                   // as elastic_words.h counts them
  int line_ = -1;        // over several hosts: the epoch since which there have always been ranks that were kept
  int stop_signal_ = 0;  // the first signal by which the user ended the job
  bool was_asked_to_end_ = false;      // by a signal to this launcher, other than SIGHUP
  std::set<std::string> error_paths_;  // that ranks were given
  int max_restarts_ = options_.max_restarts;
  Deadline reap_at_ = Deadline::never();  // then adopted processes that ended are reaped
};

}  // namespace muster::launch
