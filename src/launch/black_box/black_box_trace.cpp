#include "launch/black_box/black_box_trace.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace muster::launch {
namespace {

using nlohmann::json;
using shm::BlackBoxOperation;

class Trace {
 public:
  explicit Trace(const JobBoxes& job) : until_ns_(job.taken_ns) {
    origin_ns_ = job.taken_ns;
    for (const auto& rank : job.ranks)
      for (const auto& operation : rank.box.operations) {
        origin_ns_ = std::min(origin_ns_, operation.posted_ns);
        until_ns_ = std::max(until_ns_, operation.end_ns);
      }
  }

  void add(const RankBox& rank, int process) {
    name("process_name", process, 0, text("rank ", rank.box.rank, " (pid ", rank.box.pid, ", ", rank.end, ')'));
    for (size_t group = 0; group < rank.box.groups.size(); ++group)
      name("thread_name", process, static_cast<int>(group) + 1, rank.box.groups[group].name);
    for (const auto& operation : rank.box.operations) add(operation, process);
  }
  json take() { return std::move(events_); }

 private:
  double microseconds(uint64_t ns) const { return static_cast<double>(ns - std::min(ns, origin_ns_)) / 1e3; }

  void name(const char* what, int process, int thread, const std::string& words) {
    events_.push_back({{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", words}}}});
  }

  void add(const BlackBoxOperation& operation, int process) {
    json event{{"name", operation.name}, {"cat", "muster"}, {"pid", process}, {"tid", operation.group + 1}};
    json& args = event["args"];
    args = {{"bytes", operation.bytes}, {"state", to_string(operation.state)}};
    if (operation.is_collective()) args["sequence"] = operation.sequence;
    if (operation.bytes != 0 && !operation.dtype.empty()) args["dtype"] = operation.dtype;
    if (operation.peer >= 0) args["peer"] = operation.peer;
    if (operation.tag != 0) args["tag"] = operation.tag;
    const uint64_t begin = operation.since_ns();
    const uint64_t end = operation.end_ns != 0 ? operation.end_ns : std::max(begin, until_ns_);
    if (operation.start_ns != 0)
      args["queued_us"] = static_cast<double>(operation.start_ns - operation.posted_ns) / 1e3;
    event["ts"] = microseconds(begin);
    // Complete events ("X") of a row must not overlap. Posted collectives overlap each other and the one that runs.
    if (operation.is_collective() && operation.state != shm::BlackBoxState::kPosted) {
      event["ph"] = "X";
      event["dur"] = static_cast<double>(end - begin) / 1e3;
      events_.push_back(std::move(event));
      return;
    }
    event["id"] = text(process, '/', operation.ticket);
    event["ph"] = "b";
    events_.push_back(event);
    event["ph"] = "e";
    event["ts"] = microseconds(end);
    event.erase("args");
    events_.push_back(std::move(event));
  }

  uint64_t origin_ns_, until_ns_;
  json events_ = json::array();
};

}  // namespace

std::string trace_json(const JobBoxes& job) {
  Trace trace(job);
  for (size_t i = 0; i < job.ranks.size(); ++i) trace.add(job.ranks[i], static_cast<int>(i));
  const json document{{"traceEvents", trace.take()}, {"displayTimeUnit", "ns"}, {"otherData", {{"job", job.job}}}};
  // Names are the program's bytes. Those that are not UTF-8 are replaced, so that they do not stop us.
  return document.dump(-1, ' ', false, json::error_handler_t::replace) + '\n';
}

}  // namespace muster::launch
