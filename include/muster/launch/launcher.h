// The launcher: starts the ranks of a job as processes of this host, watches them, forwards their output, and says why
// the job failed. `muster run` is a thin main over launch_command(); muster::spawn() is a thin layer over
// launch_function().
//
//   auto outcome = muster::launch::launch_command({.ranks = 4, .command = {"./train", "--lr", "0.1"}});
//   if (outcome.status != 0) std::cerr << outcome.cause;
//
// A rank gets:
//   - MUSTER_STORE (the job's store, served by the launcher over a Unix socket; nothing listens on a network) and
//     MUSTER_JOB_ID;
//   - torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …);
//   - unless set, OMP_NUM_THREADS = usable cores / ranks, and (programs only) MALLOC_TRIM_THRESHOLD_ and
//     MALLOC_MMAP_THRESHOLD_, so that glibc's malloc keeps the memory that a step frees for the next step;
//   - its own process group;
//   - of this process's descriptors only 0, 1, 2 and the one whose number is in MUSTER_BLACK_BOX: memory in which the
//     rank notes its last operations, and which this process keeps when the rank dies.
// Rank 0 has this process's standard input unless that is a terminal, which a process group in the background may not
// read; the other ranks have /dev/null. If standard error is a terminal, rank 0 also has MUSTER_TERMINAL=1 and COLUMNS.
// A pinned rank has its affinity. With `error_file`, each rank has TORCHELASTIC_ERROR_FILE.
//
// Restarts: with max_restarts, if a rank of a job fails, all ranks start again from the program's beginning, with a
// fresh store. TORCHELASTIC_RESTART_COUNT is the number of restarts so far, the same on all hosts.
//
// With keep_going, a rank that fails ends no other, except rank 0, which leads: for programs that go on without a
// worker (remote_call.h, max_retries). The job's status is rank 0's. On one host, and without restarts.
//
// Several hosts: one launcher on each, with the same HostOptions. They meet in the store at `rendezvous`, start their
// ranks when enough have come, and end them together; the ranks use that store too. A failure on one host fails the
// whole job: all launchers report the first cause, and all return its status.
//
// The end: a rank that ends with status 0 is done, and the job is done when all ranks are. When one fails, the others
// immediately get SIGTERM, and SIGKILL `grace` later, with everything that they started in their process groups. When
// this process dies, even by SIGKILL, the ranks die too (PR_SET_PDEATHSIG), and with `own_process` everything that they
// started.
//
// Errors, with nothing left running: InvalidArgument (number of ranks, a program that cannot be started), Unavailable
// (no more processes or descriptors). The failure of a rank is not an error of the launcher; the Outcome reports it.
//
// Thread-safety: all functions; each call starts a separate job. The thread that calls must live until the call
// returns, which is when every rank has ended.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::launch {

inline constexpr int kMaxRanks = 4096;
inline constexpr std::chrono::milliseconds kMaxTime = std::chrono::hours(24);  // where a comment says so

// Where the ranks' standard output and standard error go. This process forwards whole lines to its own output and
// error, except with kInherit, where the ranks' standard output is this process's own descriptor.
enum class RankOutput {
  kPrefixed,   // each line after its rank: "[0] …"; a progress bar stays in place on a terminal, else its last state
  kUnchanged,  // no byte added or dropped, unless on a terminal
  kInherit,    // as kUnchanged, for standard error only
};

// Whether each rank is pinned to its own cores.
enum class Pin {
  kAuto,   // if this process's cores are meant for this job: its affinity is narrower than the machine
  kNone,   // never
  kCores,  // if there is a core for each rank to which no other job of Muster is pinned
};

struct HostOptions {
  // "host:port"     served over TLS by the launcher with node 0, or, without numbers, by the launcher on that host
  // "tls://…", "etcd://…", "unix:…"   a store that another process serves (muster/store/store.h)
  std::string rendezvous;
  // Number of launchers. The job starts immediately when `most` have come; with `least` or more, when no further one
  // has come for `last_call`.
  int least = 1, most = 1;
  std::chrono::milliseconds last_call{1000};
  int node = -1;            // this launcher's number, from 0; -1: numbered in the order of arrival
  std::string job;          // distinguishes jobs that use one store; the same on all hosts
  std::string secret_file;  // for TLS; empty: MUSTER_SECRET
  std::string address;      // of this host, for the others; empty: the address from which it reaches the rendezvous
  std::chrono::milliseconds timeout{300000};  // for the launchers to meet
  // A launcher that is silent for this long is lost; docs/rendezvous.md says how long a silent store is tolerated.
  // At most kMaxTime, as last_call.
  std::chrono::milliseconds patience{5000};
};

struct LaunchOptions {
  int ranks = 1;                     // on this host; 1 to kMaxRanks
  std::vector<std::string> command;  // program and arguments; for launch_command() only
  RankOutput output = RankOutput::kInherit;
  // From the end of a rank that only reports the loss of another rank, to SIGTERM for the others. The lost rank has
  // this time to end, which shows the cause. The launcher may learn of failures this close together in the wrong order.
  // This time and the next two are at most kMaxTime.
  std::chrono::milliseconds settle{50};
  std::chrono::milliseconds grace{700};        // from SIGTERM to SIGKILL after a rank failed
  std::chrono::milliseconds stop_grace{5000};  // from a forwarded SIGINT, SIGTERM, SIGHUP or SIGQUIT to SIGKILL

  Pin pin = Pin::kAuto;
  bool verbose = false;  // print on standard error where each rank runs

  // For launch_command() only:
  int max_restarts = 0;              // after a rank failed
  bool keep_going = false;           // only rank 0's end is the job's: another rank that fails ends no other
  std::optional<HostOptions> hosts;  // where there are several

  // A job that fails, or is stopped, leaves here what its ranks did last, for `muster blackbox FILE`. Empty: nowhere.
  std::string black_box_file;

  // A job that fails, or is stopped, leaves here what is known of it, as JSON (launch/ranks/error_file.h says how).
  // Ranks get a file of their own beside it, in TORCHELASTIC_ERROR_FILE, as torchrun's do. Empty: nowhere.
  std::string error_file;

  // What the ranks print goes into files there: rank_0.out, rank_0.err, …; made where it is missing; empty: no files. A
  // full disk loses output, which Outcome::warnings then says, and does the job no harm.
  std::string log_folder;
  bool log_files_only = false;  // and nothing of it to this process's own output

  // Variables for every rank, over those of this process and those above, but for the ones that tell a rank which it is
  // (RANK, LOCAL_RANK, ROLE_RANK, MUSTER_BLACK_BOX).
  std::vector<std::pair<std::string, std::string>> env;

  // This process exists only for this job, as `muster run` does, and has one thread. Then it also forwards signals (a
  // second SIGINT, SIGTERM or SIGQUIT kills immediately), becomes a subreaper that at the end kills the processes that
  // the ranks left running, and starts a guardian process that does the same if this process is killed.
  bool own_process = false;
};

struct Outcome {
  int status = 0;              // for exit(3): 0, the first failing rank's status, or 128 + signal. 0 also if the user
                               // ended the job, and all ranks then ended with 0
  int first_failed_rank = -1;  // on any host; -1: none failed, or the user ended the job
  std::string host;            // where that rank ran
  int restarts = 0;            // how often the job started again
  pid_t pid = 0;               // of the first failed rank
  int signal = 0;              // that killed that rank, or by which the user ended the job; 0: none
  std::string exception_type;  // of the exception that ended that rank, if its standard error has one
  std::string exception_text;
  std::vector<std::string> stack;            // of the thread that a fault ended, e.g. "crash(int*) at train.cpp:42"
  std::vector<std::string> last_lines;       // of that rank's standard error; at most 20
  std::vector<std::string> last_operations;  // of that rank, e.g. "all_reduce #12 of group 'world', 4 KiB, running …"
  std::string cause;                         // all of the above in words, several lines; empty if status is 0
  std::string warnings;                      // other problems, with any status; one line each
};

Outcome launch_command(const LaunchOptions& options);

// As launch_command(), but the ranks are forked from this process and run `body`: no program is started, and a rank has
// a copy of this process's memory. A rank ends with body's result as its status, without destructors of static objects.
// If an exception leaves body, the rank ends with status 1 and the lines that libstdc++ prints for an uncaught
// exception. As after any fork(2), only the calling thread goes on in the copy: locks that other threads hold now stay
// locked there.
Outcome launch_function(int ranks, const std::function<int()>& body, LaunchOptions options = {});

}  // namespace muster::launch
