#include "muster/launch/launcher.h"

#include <signal.h>

#include <filesystem>
#include <iostream>

#include "base/text.h"
#include "launch/program.h"
#include "launch/rendezvous.h"
#include "launch/supervisor.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

void check(const HostOptions& hosts) {
  if (hosts.least < 1 || hosts.most < hosts.least)
    throw InvalidArgument(text("from ", hosts.least, " to ", hosts.most, " hosts make no job"),
                          "Use 1 or more, and not more for the least than for the most");
  if (hosts.rendezvous.empty())
    throw InvalidArgument("several hosts have no place to meet", "Name a store (rendezvous, --rdzv)");
  if (hosts.patience < 2 * kBeat)
    throw InvalidArgument(text("a host gives a sign of life every ", kBeat.count(), " ms, which a patience of ",
                               hosts.patience.count(), " ms may miss"),
                          "Use 1s or more");
  if (hosts.node >= hosts.most)
    throw InvalidArgument(text("node ", hosts.node, " is outside a job of ", hosts.most, " hosts"),
                          text("Use 0 to ", hosts.most - 1));
}

void check(const LaunchOptions& options) {
  if (options.ranks < 1) throw InvalidArgument(text(options.ranks, " ranks make no job"), "Use 1 or more");
  if (options.ranks > kMaxRanks)
    throw InvalidArgument(text(options.ranks, " ranks are more than one host can run"),
                          text("Use at most ", kMaxRanks));
  if (options.settle.count() < 0 || options.grace.count() < 0 || options.stop_grace.count() < 0)
    throw InvalidArgument("a grace time is negative", "Use 0 or more milliseconds");
  for (const auto& [name, value] : options.env)
    if (name.empty() || name.find_first_of(std::string_view("=\0", 2)) != std::string::npos ||
        value.find('\0') != std::string::npos)
      throw InvalidArgument(text("'", name, "' with this value cannot be an environment variable"),
                            "Choose another name or value");
  if (options.max_restarts < 0) throw InvalidArgument("max_restarts is negative", "Use 0 or more");
  if (options.hosts) check(*options.hosts);
  std::error_code error;
  const auto folder = std::filesystem::path(options.black_box_file).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder, error))
    throw InvalidArgument(text("there is no folder '", folder.string(), "' for the black boxes"), "Make it first");
  struct sigaction action {};
  if (!options.own_process && ::sigaction(SIGCHLD, nullptr, &action) == 0 &&
      (action.sa_handler == SIG_IGN || (action.sa_flags & SA_NOCLDWAIT) != 0))
    throw InvalidArgument("SIGCHLD is ignored in this process, so how a rank ended could not be known",
                          "Set it to its default before launching");
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
    throw InvalidArgument("a function runs once, on one host", "Start a program to have restarts or several hosts");
  if (!body) throw InvalidArgument("there is no function to run", "Give one");
  // Or each rank would print again what is still in our buffers.
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  return Supervisor(options, body).run();
}

}  // namespace muster::launch
