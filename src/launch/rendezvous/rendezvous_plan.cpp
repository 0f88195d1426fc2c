#include "launch/rendezvous/rendezvous_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

namespace muster::launch {
namespace {

constexpr int64_t kMostRanks = int64_t{1} << 14;  // of one agent

int64_t number_in(const Json& json, const char* name, int64_t least, int64_t most = INT32_MAX) {
  const Json& value = json.at(name);
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= INT64_MAX : value.is_number_integer();
  const int64_t number = fits ? value.get<int64_t>() : 0;
  if (!fits || number < least || number > most)
    throw CorruptError(text("the job's store has a '", name,
                            "' that no agent wrote: ", value.dump(-1, ' ', false, Json::error_handler_t::replace)),
                       kSameJob);
  return number;
}
int int_in(const Json& json, const char* name, int64_t least, int64_t most = INT32_MAX) {
  return static_cast<int>(number_in(json, name, least, most));
}

}  // namespace

Json to_json(const Agent& agent) {
  return {{"host", agent.host},         {"ranks", agent.ranks},
          {"wish", agent.wish},         {"was", agent.was},
          {"port", agent.master_port},  {"identity", agent.identity},
          {"restarts", agent.restarts}, {"max_restarts", agent.max_restarts},
          {"line", agent.line},         {"seat", agent.seat},
          {"done", agent.done}};
}

Agent agent_of(const Json& json) {
  return {.host = json.at("host"),
          .ranks = int_in(json, "ranks", 1, kMostRanks),
          .wish = int_in(json, "wish", -1),
          .was = int_in(json, "was", -1),
          .master_port = int_in(json, "port", 0, UINT16_MAX),
          .restarts = int_in(json, "restarts", 0),
          .max_restarts = int_in(json, "max_restarts", 0),
          .line = int_in(json, "line", -1),
          .done = json.at("done"),
          .seat = number_in(json, "seat", 0, INT64_MAX),
          .identity = json.at("identity")};
}

std::vector<Agent> agents_of(const Json& json) {
  std::vector<Agent> agents;
  for (const auto& agent : json) agents.push_back(agent_of(agent));
  return agents;
}

EpochEnd end_in(const Json& json) {
  return {.kind = static_cast<EpochEnd::Kind>(number_in(json, "kind", 0, static_cast<int>(EpochEnd::Kind::kStopped))),
          .node = int_in(json, "node", -1),
          .status = int_in(json, "status", INT32_MIN),
          .cause = json.at("cause"),
          .rank = json.at("rank"),
          .last = json.at("last")};
}

std::string to_string(const EpochEnd& end) {
  const Json json = {{"kind", end.kind},   {"node", end.node}, {"status", end.status},
                     {"cause", end.cause}, {"rank", end.rank}, {"last", end.last}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void put_in_order(std::vector<Agent>& agents) {
  const bool wishes = std::any_of(agents.begin(), agents.end(), [](const Agent& agent) { return agent.wish >= 0; });
  const auto place = [&](const Agent& agent) {
    const int number = wishes ? agent.wish : agent.was;
    return number < 0 ? std::numeric_limits<int>::max() : number;
  };
  std::stable_sort(agents.begin(), agents.end(), [&](const Agent& a, const Agent& b) { return place(a) < place(b); });
  for (size_t i = 0; wishes && i + 1 < agents.size(); ++i)
    if (agents[i].wish >= 0 && agents[i].wish == agents[i + 1].wish)
      throw InvalidArgument(text("the agents on '", agents[i].host, "' and '", agents[i + 1].host,
                                 "' both want to be node ", agents[i].wish),
                            "Give each host its own --node-rank, or none any");
  if (wishes) return;
  std::vector<std::optional<Agent>> places(agents.size());
  std::vector<Agent> others;
  for (auto& agent : agents) {
    const auto was = static_cast<size_t>(place(agent));
    if (was < places.size() && !places[was])
      places[was] = std::move(agent);
    else
      others.push_back(std::move(agent));
  }
  auto next = others.begin();
  for (size_t i = 0; i < places.size(); ++i) agents[i] = places[i] ? *std::move(places[i]) : std::move(*next++);
}

int Plan::first_rank() const {
  int first = 0;
  for (int i = 0; i < node; ++i) first += agents[static_cast<size_t>(i)].ranks;
  return first;
}

int Plan::world_size() const {
  int size = 0;
  for (const auto& agent : agents) size += agent.ranks;
  return size;
}

int Plan::restarts() const {
  int restarts = 0;
  for (const auto& agent : agents) restarts = std::max(restarts, agent.restarts);
  return restarts;
}

int Plan::max_restarts() const {
  int most = std::numeric_limits<int>::max();
  for (const auto& agent : agents) most = std::min(most, agent.max_restarts);
  return most;
}

int Plan::line() const {
  int newest = -1;
  for (const auto& agent : agents) newest = std::max(newest, agent.line);
  return newest < 0 ? epoch : newest;
}

}  // namespace muster::launch
