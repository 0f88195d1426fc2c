// What agents write into the job's store about themselves and about an epoch's end, and how a plan orders them.
//
// Thread-safety: pure functions.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "launch/rendezvous/rendezvous.h"
#include "muster/base/error.h"

namespace muster::launch {

using Json = nlohmann::json;

inline constexpr std::chrono::milliseconds kLook{50};  // between two looks at the agents that have come
// The time in which an agent that leaves gives back its seat or says why.
inline constexpr std::chrono::milliseconds kGoing{1000};

// The key of what the agents of an epoch say.
inline std::string key(int epoch, const std::string& name) { return text("agents/", epoch, '/', name); }

Json to_json(const Agent& agent);
Agent agent_of(const Json& json);
std::vector<Agent> agents_of(const Json& json);  // of a plan
EpochEnd end_in(const Json& json);
std::string to_string(const EpochEnd& end);

inline constexpr char kSameJob[] = "Run the same version of Muster on all hosts, and one job per store and --job-id";

// Reads what another agent wrote. Throws CorruptError if no agent can have written it.
template <typename Read>
auto parse(const std::string& name, const std::string& value, Read read) {
  try {
    return read(Json::parse(value));
  } catch (const Json::exception& error) {
    throw CorruptError(text("the job's store has a value at '", name, "' that no agent wrote: ", error.what()),
                       kSameJob);
  }
}

// Runs a wait; nullopt if it ends with TimeoutError.
template <typename Wait>
auto unless_late(Wait wait) -> std::optional<decltype(wait())> {
  try {
    return wait();
  } catch (const TimeoutError&) {
    return std::nullopt;
  }
}

// Sorts the agents by node number. If any agent asks for a number, these wishes decide. Otherwise each agent keeps its
// number if there still is one like it, and the others take the free numbers. InvalidArgument: two ask for the same.
void put_in_order(std::vector<Agent>& agents);

}  // namespace muster::launch
