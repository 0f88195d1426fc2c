#include "launch/ranks/rank_processes.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "base/pidfd.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::launch {
void RankProcesses::watch(Rank& rank) {
  rank.pidfd = open_pidfd(rank.pid);
  if (!rank.pidfd)
    throw_errno(text("cannot watch rank ", rank.number),
                "Use fewer ranks, or raise the limit of open files (ulimit -n)");
}

Rank& RankProcesses::add(std::unique_ptr<Rank> rank) {
  ranks_.push_back(std::move(rank));
  watch(*ranks_.back());
  return *ranks_.back();
}

Rank& RankProcesses::replace(size_t index, std::unique_ptr<Rank> rank) {
  auto& place = ranks_[index];
  ::waitpid(place->pid, nullptr, WNOHANG);
  place->pidfd.reset();
  place->black_box.reset();
  replaced_.push_back(std::exchange(place, std::move(rank)));
  watch(*place);
  return *place;
}

bool RankProcesses::all_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->ended; });
}

void RankProcesses::signal_groups(int signal) const {
  if (reaped_) return;
  for (const auto& rank : ranks_)
    if (!rank->taken) ::kill(-rank->pid, signal);
}

void RankProcesses::signal_leaders(int signal) const {
  for (const auto& rank : ranks_)
    if (!rank->ended) signal_pidfd(rank->pidfd, signal);
}

void RankProcesses::reap() {
  reaped_ = true;
  for (const auto& rank : ranks_) ::waitpid(rank->pid, nullptr, WNOHANG);
}

RankProcesses::~RankProcesses() {
  if (reaped_) return;
  signal_groups(SIGKILL);
  const auto deadline = Deadline::after(kDeathTakes);
  for (const auto& rank : ranks_)
    if (rank->pidfd) await_end(rank->pidfd, deadline);
  reap();
}

AdoptedProcesses::AdoptedProcesses(std::vector<pid_t> not_these) : not_these_(std::move(not_these)) {
  std::sort(not_these_.begin(), not_these_.end());
}

std::vector<pid_t> AdoptedProcesses::list() const {
  const auto self = ::getpid();
  std::ifstream file(text("/proc/self/task/", self, "/children"));  // adopted children belong to the main thread
  std::vector<pid_t> adopted;
  for (pid_t child = 0; file >> child;)
    if (!std::binary_search(not_these_.begin(), not_these_.end(), child)) adopted.push_back(child);
  return adopted;
}

void AdoptedProcesses::reap() const {
  for (const pid_t child : list()) ::waitpid(child, nullptr, WNOHANG);
}

void AdoptedProcesses::kill(Deadline deadline) const {
  for (auto children = list(); !children.empty() && !deadline.passed(); children = list()) {
    for (const pid_t child : children) ::kill(child, SIGKILL);  // ours until we reap it
    for (const pid_t child : children) {
      const UniqueFd pidfd = open_pidfd(child);
      if (pidfd) await_end(pidfd, deadline);
      ::waitpid(child, nullptr, WNOHANG);
    }
  }
}

}  // namespace muster::launch
