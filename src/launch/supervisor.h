// The watch over a job: one thread, one poll(2) on the ranks' ends (pidfds), their output, our output and our signals.
//
//   running ──a rank fails──▶ SIGTERM to all groups ──grace──▶ SIGKILL to all groups ──▶ finished
//      │                         ▲
//      ├──with PeerLost──settle: the rank that it is about may show why it went
//      ├──the user's SIGINT, SIGTERM …, forwarded──▶ waiting ──stop_grace, or a second one──▶ SIGKILL ──▶ finished
//      └──all ranks end well──▶ finished
//
//   finished: SIGKILL to what is left in the groups, the rest of the pipes read and written, the cause chosen
//
// The store is served from after the last fork(2) to the end: no rank holds its socket, no copy of its thread's locks.
//
// Thread-safety: none; one thread runs it.
#pragma once

#include <poll.h>
#include <sys/resource.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/child.h"
#include "launch/environment.h"
#include "launch/guardian.h"
#include "launch/outcome.h"
#include "launch/rank_processes.h"
#include "launch/signals.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

class Supervisor {
 public:
  // Either a program, found by find_program(), or a function.
  Supervisor(const LaunchOptions& options, std::string path);
  Supervisor(const LaunchOptions& options, const std::function<int()>& body);

  // Starts the ranks and returns when all have ended. Once only.
  Outcome run();

 private:
  Supervisor(const LaunchOptions& options, std::string path, const std::function<int()>* body);

  void open_outputs();
  void start_ranks();
  void start_rank(int number, Environment& environment, const std::vector<char*>& arguments, const UniqueFd& null);
  void watch();
  void wait_for_events();
  void handle_events();
  void handle_signals();
  void handle_deadlines();
  void handle_end(Rank& rank);
  void handle_exec_errors();
  void flush_outputs();
  void terminate();
  void kill_all();
  void finish();
  AdoptedProcesses adopted() const;
  std::vector<std::string> operations_of(const Failure& failure) const;
  std::string save_black_boxes() const;
  Outcome outcome() const;

  const LaunchOptions& options_;
  const std::string path_;
  const std::function<int()>* const body_;
  const Job job_;
  Signals signals_;                            // before all that may raise SIGPIPE
  const std::vector<pid_t> earlier_children_;  // of a shell that started jobs and then exec'ed us: none of our business
  const std::optional<rlimit> open_files_;     // the limit before we raised it, for the ranks
  Guardian guardian_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // one, or two: standard output and error
  std::vector<std::unique_ptr<Printer>> printers_;
  Pipe exec_errors_;
  RankProcesses ranks_;  // after the guardian, so that it is still there when the last rank ends

  struct Watched {
    enum { kSignals, kExecErrors, kEnd, kOut, kErr, kSink } kind;
    Rank* rank;
  };
  std::vector<pollfd> polled_;
  std::vector<Watched> watched_;

  std::vector<Failure> failures_;  // by themselves, not by us
  std::optional<ExecError> exec_error_;
  int stop_signal_ = 0;  // the first by which the user ended the job
  bool terminated_ = false, killed_ = false, finished_ = false, abandoned_ = false;
  Deadline settle_at_ = Deadline::never();   // then terminate()
  Deadline kill_at_ = Deadline::never();     // then kill_all()
  Deadline abandon_at_ = Deadline::never();  // then those that SIGKILL did not end are left alone
  Deadline reap_at_ = Deadline::never();     // then adopted processes that ended are reaped
};

}  // namespace muster::launch
