#include "launch/jobs/activity.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"
#include "launch/black_box/black_box_report.h"
#include "launch/kit/text_table.h"

namespace muster::launch {
namespace {

constexpr uint64_t kSecond = 1'000'000'000, kWindow = 10 * kSecond;
constexpr uint64_t kLate = 5 * kSecond;  // if there is no report for longer, the rate falls

double seconds_between(uint64_t from, uint64_t to) { return to > from ? static_cast<double>(to - from) / 1e9 : 0; }

// The operation to show: the running collective if there is one, because it says more than a message that waits too.
std::string last_operation(const shm::BlackBoxSnapshot& box, uint64_t now_ns) {
  shm::BlackBoxSnapshot chosen{.groups = box.groups};
  for (const auto& operation : box.operations)
    if (operation.is_collective() && operation.state == shm::BlackBoxState::kRunning) chosen.operations = {operation};
  const auto last = last_operations(chosen.operations.empty() ? box : chosen, now_ns, 1);
  return last.empty() ? "" : last.front();
}

}  // namespace

std::optional<double> communication_share(const shm::BlackBoxSnapshot& box, uint64_t from_ns, uint64_t to_ns) {
  if (box.operations.empty()) return std::nullopt;
  // What happened before the oldest record is unknown.
  if (box.begun > box.operations.size()) from_ns = std::max(from_ns, box.operations.front().posted_ns);
  from_ns = std::max(from_ns, box.created_ns);
  if (to_ns <= from_ns) return std::nullopt;
  std::vector<std::pair<uint64_t, uint64_t>> busy;
  bool any = false;
  for (const auto& operation : box.operations) {
    if (!operation.is_collective() || operation.start_ns == 0) continue;
    any = true;
    const uint64_t begin = std::max(from_ns, operation.start_ns),
                   end = std::min(to_ns, operation.end_ns == 0 ? to_ns : operation.end_ns);
    if (begin < end) busy.emplace_back(begin, end);
  }
  if (!any) return std::nullopt;
  std::sort(busy.begin(), busy.end());
  uint64_t sum = 0, until = from_ns;
  for (const auto& [begin, end] : busy) {
    if (end <= until) continue;
    sum += end - std::max(begin, until);
    until = end;
  }
  return static_cast<double>(sum) / static_cast<double>(to_ns - from_ns);
}

std::optional<double> ActivityWatch::rate(const shm::BlackBoxSnapshot& box, uint64_t now, History& history) const {
  const auto& training = box.training;
  if (!training.samples || training.reported_ns == 0) return std::nullopt;
  auto& reports = history.reports;
  // If there are fewer samples than before, the program has begun to count again.
  if (!reports.empty() && *training.samples < reports.back().samples) reports.clear();
  if (reports.empty() || reports.back().when != training.reported_ns)
    reports.push_back({training.reported_ns, *training.samples});
  while (reports.size() > 2 && reports[1].when + kWindow < now) reports.erase(reports.begin());
  const bool late = training.reported_ns + kLate < now;
  const uint64_t until = late ? now : training.reported_ns;
  if (reports.size() >= 2)
    return static_cast<double>(reports.back().samples - reports.front().samples) /
           seconds_between(reports.front().when, until);
  // There is only one reading. The samples of the first report do not count: they were done before `started_ns`.
  const double took = seconds_between(training.started_ns, until);
  if (training.reports < 2 || took <= 0) return std::nullopt;
  const auto counted = static_cast<double>(training.reports - 1) / static_cast<double>(training.reports);
  return static_cast<double>(*training.samples) * counted / took;
}

JobActivity ActivityWatch::look(const JobBoxes& job) {
  JobActivity activity{.job = summarise(job)};
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    const auto& box = job.ranks[i].box;
    auto& history = ranks_[box.rank];
    if (history.box != box.created_ns) history = {.box = box.created_ns};
    RankActivity rank{.who = activity.job.ranks[i], .step = box.training.step, .samples = box.training.samples};
    rank.samples_per_second = rate(box, job.taken_ns, history);
    const uint64_t from = history.looked_ns != 0 ? history.looked_ns : job.taken_ns - std::min(job.taken_ns, kWindow);
    rank.communication = communication_share(box, from, job.taken_ns);
    history.looked_ns = job.taken_ns;
    if (rank.who.pid != 0) rank.memory = memory_of(rank.who.pid);
    rank.operation = last_operation(box, job.taken_ns);
    if (rank.samples_per_second)
      activity.samples_per_second = std::max(activity.samples_per_second.value_or(0), *rank.samples_per_second);
    activity.ranks.push_back(std::move(rank));
  }
  return activity;
}

std::string activity_table(const JobActivity& activity) {
  const auto& job = activity.job;
  std::string out = text(
      "job ", printable(job.id), " on ", job.host, ", ", job.state, ", for ", clock_time(job.age),
      activity.samples_per_second ? text(", ", with_commas(*activity.samples_per_second), " samples/s") : "", '\n');
  std::vector<std::vector<std::string>> rows{
      {"rank", "pid", "state", "step", "samples/s", "comm", "memory", "shared", "last operation"}};
  const auto number = [](const std::optional<uint64_t>& value) {
    return value ? with_commas(static_cast<double>(*value)) : "-";
  };
  for (const auto& rank : activity.ranks)
    rows.push_back({text(rank.who.rank), rank.who.pid == 0 ? "-" : text(rank.who.pid), rank.who.state,
                    number(rank.step), rank.samples_per_second ? with_commas(*rank.samples_per_second) : "-",
                    rank.communication ? text(fixed(*rank.communication * 100, 0), " %") : "-",
                    human_bytes(rank.memory.resident), human_bytes(rank.memory.shared),
                    rank.operation.empty() ? rank.who.has_world ? "-" : "no World" : rank.operation});
  return out + aligned(rows, {true, true, false, true, true, true, true, true, false});
}

std::string activity_json(const JobActivity& activity) {
  using nlohmann::json;
  const auto maybe = [](const auto& value) { return value ? json(*value) : json(nullptr); };
  auto ranks = json::array();
  for (const auto& rank : activity.ranks)
    ranks.push_back({{"rank", rank.who.rank},
                     {"pid", rank.who.pid},
                     {"state", rank.who.state},
                     {"has_world", rank.who.has_world},
                     {"step", maybe(rank.step)},
                     {"samples", maybe(rank.samples)},
                     {"samples_per_second", maybe(rank.samples_per_second)},
                     {"communication", maybe(rank.communication)},
                     {"memory", rank.memory.resident},
                     {"shared", rank.memory.shared},
                     {"operation", rank.operation}});
  const json document{{"job", activity.job.id},
                      {"host", activity.job.host},
                      {"launcher", activity.job.launcher},
                      {"state", activity.job.state},
                      {"seconds", activity.job.age},
                      {"samples_per_second", maybe(activity.samples_per_second)},
                      {"ranks", std::move(ranks)}};
  return document.dump(-1, ' ', false, json::error_handler_t::replace) + '\n';
}

}  // namespace muster::launch
