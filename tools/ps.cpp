// muster ps: the jobs of this user on this host.
#include <sys/ioctl.h>
#include <unistd.h>

#include "command_line.h"
#include "launch/jobs/jobs.h"

namespace muster::tools {

namespace {

// Zeros if standard output is not a terminal.
winsize terminal_size() {
  winsize size{};
  return ::isatty(STDOUT_FILENO) && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size : winsize{};
}

}  // namespace

int terminal_columns() { return terminal_size().ws_col; }
int terminal_rows() { return terminal_size().ws_row; }

int ps_command(std::vector<std::string> words) {
  CLI::App app("Lists the jobs of this user that run on this host.", "muster ps");
  bool json = false;
  app.add_flag("--json", json, "for programs: an array of jobs");
  app.footer(
      "The list says which jobs hang, and which have ranks that are stopped or gone.\n"
      "\n"
      "Examples:\n"
      "  muster ps\n"
      "  muster ps --json | jq -r '.[].launcher'");
  if (!parse(app, words, "muster ps --help")) return 0;
  const auto jobs = launch::running_jobs();
  std::cout << (json ? launch::jobs_json(jobs) : launch::jobs_table(jobs, terminal_columns())) << std::flush;
  return 0;
}

}  // namespace muster::tools
