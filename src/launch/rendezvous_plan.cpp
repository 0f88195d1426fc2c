#include "launch/rendezvous_plan.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace muster::launch {

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
          .ranks = json.at("ranks"),
          .wish = json.at("wish"),
          .was = json.at("was"),
          .master_port = json.at("port"),
          .restarts = json.at("restarts"),
          .max_restarts = json.at("max_restarts"),
          .line = json.at("line"),
          .done = json.at("done"),
          .seat = json.at("seat"),
          .identity = json.at("identity")};
}

EpochEnd end_in(const Json& json) {
  return {.kind = json.at("kind").get<EpochEnd::Kind>(),
          .node = json.at("node"),
          .status = json.at("status"),
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
