#include "muster/launch/launcher.h"

#include <signal.h>

#include <filesystem>
#include <iostream>

#include "base/text.h"
#include "launch/black_box/black_box_sources.h"
#include "launch/ranks/error_file.h"
#include "launch/ranks/program.h"
#include "launch/rendezvous/rendezvous.h"
#include "launch/supervisor/supervisor.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

void check_time(std::string_view name, std::chrono::milliseconds time) {
  if (time < std::chrono::milliseconds(0) || time > kMaxTime)
    throw InvalidArgument(text(name, ": expected 0 to ", kMaxTime.count(), " ms (a day), got ", time.count(), " ms"),
                          "Use a day or less");
}

void check(const HostOptions& hosts) {
  if (hosts.least < 1 || hosts.most < hosts.least)
    throw InvalidArgument(
        text("the number of hosts: expected MIN:MAX with 1 <= MIN <= MAX, got ", hosts.least, ':', hosts.most),
        "Use for example 2:4");
  if (hosts.rendezvous.empty())
    throw InvalidArgument("a job of several hosts needs a store in which they meet, and none is named",
                          "Name one (--rdzv, HostOptions::rendezvous)");
  if (hosts.patience < 2 * kBeat)
    throw InvalidArgument(
        text("the patience: expected ", (2 * kBeat).count(), " ms or more, got ", hosts.patience.count(),
             " ms (a host gives a sign of life every ", kBeat.count(), " ms)"),
        "Use 1s or more");
  check_time("patience", hosts.patience);
  check_time("last_call", hosts.last_call);
  if (hosts.node >= hosts.most)
    throw InvalidArgument(
        text("node: expected 0 to ", hosts.most - 1, " in a job of ", hosts.most, " hosts, got ", hosts.node),
        text("Use 0 to ", hosts.most - 1));
}

void check(const LaunchOptions& options) {
  if (options.ranks < 1)
    throw InvalidArgument(text("the number of ranks: expected 1 or more, got ", options.ranks), "Use 1 or more");
  if (options.ranks > kMaxRanks)
    throw InvalidArgument(
        text("the number of ranks on one host: expected at most ", kMaxRanks, ", got ", options.ranks),
        text("Use at most ", kMaxRanks));
  check_time("settle", options.settle);
  check_time("grace", options.grace);
  check_time("stop_grace", options.stop_grace);
  for (const auto& [name, value] : options.env)
    if (name.empty() || name.find_first_of(std::string_view("=\0", 2)) != std::string::npos ||
        value.find('\0') != std::string::npos)
      throw InvalidArgument(text("'", name,
                                 "' cannot be set as an environment variable: its name is empty or has a '=', "
                                 "or its name or value has a zero byte"),
                            "Choose another name or value");
  if (options.max_restarts < 0)
    throw InvalidArgument(text("max_restarts: expected 0 or more, got ", options.max_restarts), "Use 0 or more");
  if (options.keep_going && (options.max_restarts > 0 || options.hosts))
    throw InvalidArgument("keep_going (--keep-going) is for a job without restarts on one host",
                          "Choose whether the others go on without a rank that failed, or all start again");
  if (options.hosts) check(*options.hosts);
  check_report(error_report(options.error_file));
  for (int rank = 0; rank < options.ranks && !options.error_file.empty(); ++rank)
    check_report(rank_error_report(rank_error_path(options.error_file, rank)));
  check_report(black_box_report(options.black_box_file));
  std::error_code error;
  const auto place = [&](const std::string& file) { return std::filesystem::absolute(file, error).lexically_normal(); };
  if (!options.error_file.empty() && !options.black_box_file.empty() &&
      place(options.error_file) == place(options.black_box_file))
    throw InvalidArgument(text("the job's error and the black boxes would both be in '", options.error_file, "'"),
                          "Choose another name for one of them");
  struct sigaction action {};
  if (!options.own_process && ::sigaction(SIGCHLD, nullptr, &action) == 0 &&
      (action.sa_handler == SIG_IGN || (action.sa_flags & SA_NOCLDWAIT) != 0))
    throw InvalidArgument("SIGCHLD is ignored in this process, so the launcher cannot learn how a rank ends",
                          "Set it to SIG_DFL before launching");
}

}  // namespace

Outcome launch_command(const LaunchOptions& options) {
  check(options);
  if (options.command.empty()) throw InvalidArgument("there is no program to run", "Give one");
  return Supervisor(options, find_program(options.command.front())).run();
}

Outcome launch_function(int ranks, const std::function<int()>& body, LaunchOptions options) {
  options.ranks = ranks;
  check(options);
  if (options.max_restarts > 0 || options.hosts)
    throw InvalidArgument("launch_function() supports neither restarts nor several hosts",
                          "Start a program with launch_command() to have them");
  if (!body) throw InvalidArgument("there is no function to run", "Give one");
  // Flush first: otherwise each forked rank prints our buffered output again.
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  return Supervisor(options, body).run();
}

}  // namespace muster::launch
