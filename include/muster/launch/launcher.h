// Starts the ranks of a job as processes of this host, watches them, prints what they print, and says why the job
// failed. `muster run` is a thin main over launch_command(); muster::spawn() is one over launch_function().
//
//   auto outcome = muster::launch::launch_command({.ranks = 4, .command = {"./train", "--lr", "0.1"}});
//   if (outcome.status != 0) std::cerr << outcome.cause;
//
// What a rank gets: MUSTER_STORE (the job's store, served here over a Unix socket; nothing listens on a network),
// MUSTER_JOB_ID, torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …), OMP_NUM_THREADS = usable cores /
// ranks unless set, thresholds by which glibc's malloc keeps what a step frees for the next one unless set (programs
// only: MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_), a process group of its own, and of this process's descriptors
// only 0, 1, 2 and the one that MUSTER_BLACK_BOX numbers: the memory in which the rank notes its last operations, which
// stays with this process when the rank dies. Rank 0 has this process's standard input unless that is a terminal, which
// a process group in the background may not read; the other ranks have /dev/null. Where standard error is a terminal,
// rank 0 also has MUSTER_TERMINAL=1 and COLUMNS. A rank that is pinned has its affinity and MUSTER_JOB_CORES, the cores
// of all ranks of this host; with `error_file`, each has TORCHELASTIC_ERROR_FILE.
//
// Again: with max_restarts, a job of which a rank failed starts anew, all ranks from the program's beginning, with a
// fresh store. TORCHELASTIC_RESTART_COUNT says how often that was, the same on all hosts.
//
// Several hosts: one launcher on each, with the same HostOptions. They meet in the store at `rendezvous`, start their
// ranks when enough have come, and end them together; the ranks use that store too. What happens on one host happens to
// the job: the first cause is told by all launchers, and all return its status.
//
// How it ends: a rank that ends with status 0 is done, and the job is done when all are. When one fails, the others get
// SIGTERM at once and SIGKILL `grace` later, with everything that they started in their process groups. When this
// process dies, even by SIGKILL, so do the ranks (PR_SET_PDEATHSIG), and with `own_process` all that they started.
//
// Errors, with nothing left running: InvalidArgument (number of ranks, a program that cannot be started), Unavailable
// (no more processes or descriptors). A rank that fails is no error here but the outcome.
//
// Thread-safety: all of it; each call is a job of its own. The thread that calls must live until it returns, which is
// when every rank has ended.
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

// Where the ranks' standard output and standard error go. They reach this process's own by whole lines, except
// kInherit's standard output, which is this process's own descriptor.
enum class RankOutput {
  kPrefixed,   // each line after its rank: "[0] …"; a progress bar in place on a terminal, else its last state alone
  kUnchanged,  // no byte added or dropped, unless on a terminal
  kInherit,    // as kUnchanged, for standard error alone
};

// Whether ranks stay on cores of their own.
enum class Pin {
  kAuto,   // where this process's cores are meant for this job: its affinity is narrower than the machine
  kNone,   // never
  kCores,  // where there is a core for each rank that no other job of Muster is pinned to
};

struct HostOptions {
  // "host:port"     served over TLS by the launcher there: the one with node 0, or, without numbers, on that host
  // "tls://…", "etcd://…", "unix:…"   a store that others serve (muster/store/store.h)
  std::string rendezvous;
  int least = 1, most = 1;  // launchers. `most` start at once; `least` when a second has passed since one came
  int node = -1;            // this launcher's number, from 0; -1: as they come
  std::string job;          // tells jobs apart that use one store; the same on all hosts
  std::string secret_file;  // for TLS; empty: MUSTER_SECRET
  std::string address;      // of this host, for the others; empty: the one by which the rendezvous is reached
  std::chrono::milliseconds timeout{300000};  // to meet
  std::chrono::milliseconds patience{5000};   // with a launcher that gives no sign of life; docs/rendezvous.md says how
                                              // long a silent store is borne for it
};

struct LaunchOptions {
  int ranks = 1;                     // on this host; 1 to kMaxRanks
  std::vector<std::string> command;  // program and arguments; for launch_command() only
  RankOutput output = RankOutput::kInherit;
  // From the end of a rank that only says that another one was lost, to SIGTERM for the others: so long may the one
  // that it is about take to show why it went. Failures this close together may be learned of in the wrong order.
  std::chrono::milliseconds settle{50};
  std::chrono::milliseconds grace{700};        // from SIGTERM to SIGKILL after a rank failed
  std::chrono::milliseconds stop_grace{5000};  // from a forwarded SIGINT, SIGTERM, SIGHUP or SIGQUIT to SIGKILL

  Pin pin = Pin::kAuto;
  bool verbose = false;  // say on standard error where each rank runs

  // For launch_command() only:
  int max_restarts = 0;              // after a rank failed
  std::optional<HostOptions> hosts;  // where there are several

  // A job that fails, or is stopped, leaves here what its ranks did last, for `muster blackbox FILE`. Empty: nowhere.
  std::string black_box_file;

  // A job that fails, or is stopped, leaves here what is known of it, as JSON (src/launch/error_file.h says how). Ranks
  // get a file of their own beside it, in TORCHELASTIC_ERROR_FILE, as torchrun's do. Empty: nowhere.
  std::string error_file;

  // What the ranks print goes into files there: rank_0.out, rank_0.err, …; made where it is missing; empty: no files. A
  // full disk loses output, which Outcome::warnings then says, and does the job no harm.
  std::string log_folder;
  bool log_files_only = false;  // and nothing of it to this process's own output

  // Variables for every rank, over those of this process and those above.
  std::vector<std::pair<std::string, std::string>> env;

  // This process is there for this job alone, as `muster run` is, and has one thread. Then it also forwards signals (a
  // second SIGINT or SIGTERM kills at once), becomes a subreaper that at the end kills whatever the ranks left running,
  // and keeps a guardian process beside them that does the same if this process is killed.
  bool own_process = false;
};

struct Outcome {
  int status = 0;  // for exit(3): 0, the first failing rank's status, or 128 + signal. 0 also where the user
                   // ended the job, and all ranks ended well upon that
  int first_failed_rank = -1;  // -1: none failed here, or the user ended the job
  int restarts = 0;            // how often the job started again
  pid_t pid = 0;               // of that rank
  int signal = 0;              // that killed that rank or by which the user ended the job; 0: none
  std::string exception_type;  // of the exception that ended that rank, where its standard error has one
  std::string exception_text;
  std::vector<std::string> stack;            // of the thread that a fault ended, e.g. "crash(int*) at train.cpp:42"
  std::vector<std::string> last_lines;       // of that rank's standard error; at most 20
  std::vector<std::string> last_operations;  // of that rank, e.g. "all_reduce #12 of group 'world', 4 KiB, running …"
  std::string cause;                         // all that in words, several lines; empty where status is 0
  std::string warnings;                      // what went wrong beside, whatever the status; a line each
};

Outcome launch_command(const LaunchOptions& options);

// As launch_command(), but the ranks are forked from this process and run `body`: no program is started, and memory is
// as it was here, in a copy. A rank ends with body's result as its status, without destructors of static objects; with
// 1 and the lines that libstdc++ prints for an uncaught exception where one escapes. As after any fork(2), only the
// calling thread goes on in the copy: locks that other threads hold now stay locked there.
Outcome launch_function(int ranks, const std::function<int()>& body, LaunchOptions options = {});

}  // namespace muster::launch
