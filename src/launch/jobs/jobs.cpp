#include "launch/jobs/jobs.h"

#include <algorithm>
#include <ctime>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/text.h"
#include "launch/kit/process_info.h"
#include "launch/kit/text_table.h"
#include "launch/output/output.h"
#include "shm/black_box.h"

namespace muster::launch {
namespace {

constexpr uint64_t kStill = 10'000'000'000;  // ns without a beginning or an end of an operation on any rank

pid_t launcher_of(const JobBoxes& job) {
  std::set<pid_t> owners;
  std::map<pid_t, size_t> boxes_of;
  for (const auto& rank : job.ranks) {
    if (rank.box.pid != 0) owners.insert(rank.box.pid);
    for (const pid_t holder : rank.holders) ++boxes_of[holder];
  }
  pid_t launcher = 0;
  size_t most = 0;
  for (const auto& [holder, boxes] : boxes_of) {
    if (boxes <= most || owners.contains(holder) || boxes_of.contains(parent_of(holder))) continue;
    launcher = holder;
    most = boxes;
  }
  return launcher;
}

JobRank rank_of(const RankBox& box, pid_t launcher) {
  JobRank rank{.rank = box.box.rank, .pid = box.box.pid, .has_world = box.box.pid != 0, .state = box.end};
  if (rank.has_world) return rank;
  for (const pid_t holder : box.holders)
    if (holder != launcher && (launcher == 0 || parent_of(holder) == launcher)) {
      rank.pid = holder;
      break;
    }
  rank.state = state_in_words(rank.pid == 0 ? '\0' : process_state(rank.pid));
  return rank;
}

// "stands still for 31 s in all_reduce #12", if operations run and none has begun or ended for long.
std::string stillness(const JobBoxes& job) {
  uint64_t last = 0;
  const shm::BlackBoxOperation* first_waiting = nullptr;
  for (const auto& rank : job.ranks)
    for (const auto& operation : rank.box.operations) {
      last = std::max({last, operation.posted_ns, operation.start_ns, operation.end_ns});
      if (operation.state == shm::BlackBoxState::kRunning && operation.is_collective() &&
          (!first_waiting || operation.start_ns < first_waiting->start_ns))
        first_waiting = &operation;
    }
  if (!first_waiting || last + kStill > job.taken_ns) return {};
  return text("stands still for ", (job.taken_ns - last) / 1'000'000'000, " s in ", first_waiting->name, " #",
              first_waiting->sequence);
}

std::string state_of(const JobSummary& summary, const JobBoxes& job) {
  std::vector<std::string> parts;
  for (const char* state : {"stopped", "gone"}) {
    std::vector<int> those;
    for (const auto& rank : summary.ranks)
      if (rank.state == state) those.push_back(rank.rank);
    if (those.size() == summary.ranks.size()) return std::string_view(state) == "gone" ? "ending" : state;
    if (!those.empty()) parts.push_back(text(those.size() == 1 ? "rank " : "ranks ", human_ranks(those), ' ', state));
  }
  if (auto still = stillness(job); !still.empty()) parts.push_back(std::move(still));
  return parts.empty() ? "running" : join(parts);
}

}  // namespace

JobSummary summarise(const JobBoxes& job) {
  JobSummary summary{.id = job.job, .launcher = launcher_of(job)};
  uint64_t created = job.taken_ns;
  for (const auto& box : job.ranks) {
    summary.ranks.push_back(rank_of(box, summary.launcher));
    summary.host = box.box.host;
    summary.world_size = std::max(summary.world_size, box.box.world_size);
    created = std::min(created, box.box.created_ns);
    summary.since = (static_cast<int64_t>(created) + box.box.realtime_ahead) / 1'000'000'000;
    if (summary.program.empty() && summary.ranks.back().pid != 0)
      summary.program = command_of(summary.ranks.back().pid);
  }
  summary.age = static_cast<double>(job.taken_ns - created) / 1e9;
  summary.state = state_of(summary, job);
  return summary;
}

std::vector<JobSummary> running_jobs() {
  std::vector<JobSummary> jobs;
  for (const auto& job : find_jobs()) jobs.push_back(summarise(job));
  std::stable_sort(jobs.begin(), jobs.end(), [](const auto& a, const auto& b) { return a.age > b.age; });
  return jobs;
}

std::string jobs_table(const std::vector<JobSummary>& jobs, int columns) {
  if (jobs.empty()) return "no job of this user runs on this host\n";
  std::vector<std::vector<std::string>> rows{{"job", "launcher", "ranks", "since", "for", "state", "program"}};
  for (const auto& job : jobs) {
    const auto since = static_cast<time_t>(job.since);
    tm local{};
    ::localtime_r(&since, &local);
    const auto here = static_cast<int>(job.ranks.size());
    rows.push_back({printable(job.id.substr(0, 12)), job.launcher == 0 ? "-" : text(job.launcher),
                    here == job.world_size ? text(here) : text(here, " of ", job.world_size),
                    text(std::put_time(&local, "%F %T")), clock_time(job.age), job.state, job.program});
  }
  std::istringstream lines(aligned(rows, {false, true, true, false, true, false, false}));
  std::string out;
  for (std::string line; std::getline(lines, line);)
    out += std::string(columns > 0 ? cut_to_columns(line, columns) : line) + '\n';
  return out;
}

std::string jobs_json(const std::vector<JobSummary>& jobs) {
  auto document = nlohmann::json::array();
  for (const auto& job : jobs) {
    auto ranks = nlohmann::json::array();
    for (const auto& rank : job.ranks)
      ranks.push_back({{"rank", rank.rank}, {"pid", rank.pid}, {"state", rank.state}, {"has_world", rank.has_world}});
    document.push_back({{"job", job.id},
                        {"host", job.host},
                        {"launcher", job.launcher},
                        {"world_size", job.world_size},
                        {"since", job.since},
                        {"seconds", job.age},
                        {"state", job.state},
                        {"program", job.program},
                        {"ranks", std::move(ranks)}});
  }
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
}

}  // namespace muster::launch
