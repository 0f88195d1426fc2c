#include "comm/world/meeting.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/env.h"
#include "base/process.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "shm/exchange.h"

namespace muster::comm {

std::string host_identity() {
  if (const auto given = env_string("MUSTER_HOST")) return *given;
  std::array<char, 64> space{};
  const auto length = ::readlink("/proc/self/ns/net", space.data(), space.size());
  return text(shm::boot_id(), '/', std::string(space.data(), static_cast<size_t>(std::max<ssize_t>(length, 0))));
}

namespace {

std::string key_of(const std::string& prefix, int rank) { return text(prefix, "/member/", rank); }
std::string key_of_all(const std::string& prefix) { return prefix + "/members"; }

// What rank 0 posts: a list of the ranks' hosts, pids and cores, or the reason why there is none.
constexpr std::string_view kComplete = "all", kMissing = "missing", kMismatch = "mismatch";

std::string list_of_members(Store& store, const std::vector<std::string>& keys, int size, Deadline deadline) {
  std::vector<std::string> hosts;
  PlainOutput list;
  list << kComplete << ' ' << size;
  for (size_t r = 0; r < keys.size(); ++r) {
    PlainInput said;
    try {
      said.str(store.get(keys[r], deadline));
    } catch (const TimeoutError&) {
      PlainOutput missing;
      missing << kMissing;
      for (size_t other = r; other < keys.size(); ++other)
        if (!store.try_get(keys[other])) missing << ' ' << other;
      return missing.str();
    }
    int their_size = 0;
    pid_t pid = 0;
    uint64_t start = 0;
    std::string host, cpus;
    said >> their_size >> pid >> start >> cpus >> std::ws;
    std::getline(said, host);  // it may have spaces
    if (their_size != size)
      return text(kMismatch, " rank ", r, " expects a group of ", their_size, " ranks, rank 0 one of ", size);
    auto at = std::find(hosts.begin(), hosts.end(), host);
    if (at == hosts.end()) at = hosts.insert(hosts.end(), host);
    list << ' ' << at - hosts.begin() << ' ' << pid << ' ' << start << ' ' << cpus;
  }
  return list.str();
}

}  // namespace

// Rank 0 collects the ranks' entries and posts one list, so that N ranks make 3N requests, not N².
std::vector<Member> meet_members(Store& store, const std::string& prefix, int rank, int size, const std::string& host,
                                 Deadline deadline) {
  const uint64_t started = start_time_of(::getpid());
  if (size == 1) return {{.host = 0, .pid = ::getpid(), .start = started, .cpus = own_cpus()}};
  const std::string all_key = key_of_all(prefix);
  store.set(key_of(prefix, rank), text(size, ' ', ::getpid(), ' ', started, ' ', to_text(own_cpus()), ' ', host));
  if (rank == 0) {
    std::vector<std::string> keys;
    for (int r = 0; r < size; ++r) keys.push_back(key_of(prefix, r));
    store.set(all_key, list_of_members(store, keys, size, deadline));
  }
  std::string said;
  try {
    // Waits a little longer than rank 0 waits for the others, so that rank 0 can say which ranks did not come.
    said = store.get(all_key, deadline.later(std::chrono::seconds(1)));
  } catch (const TimeoutError&) {
    throw TimeoutError("the group did not come together: rank 0 did not come", {0}, "Look whether it started");
  }
  return read_members(said, rank, size);
}

void forget_members(Store& store, const std::string& prefix, int size) {
  try {
    for (int r = 0; r < size; ++r) store.erase(key_of(prefix, r));
    store.erase(key_of_all(prefix));
  } catch (const Error&) {  // these keys harm nobody
  }
}

std::vector<Member> read_members(const std::string& said, int rank, int size) {
  const char* const advice = "Start every rank with the same world size and its own rank";
  PlainInput list(said);
  std::string kind;
  list >> kind;
  if (kind == kMissing) {
    std::vector<int> missing;
    for (int r = 0; list >> r && r >= 0 && r < size;) missing.push_back(r);
    throw TimeoutError(text("the group did not come together: rank(s) ", join(missing), " of ", size, " did not come"),
                       missing, "Look whether they started");
  }
  if (kind == kMismatch) throw Mismatch(said.substr(std::min(said.size(), kind.size() + 1)), advice);
  if (kind != kComplete) throw CorruptError("rank 0's list of the group's ranks cannot be read");
  int their_size = 0;
  list >> their_size;
  if (their_size != size)
    throw Mismatch(text("rank ", rank, " expects a group of ", size, " ranks, rank 0 one of ", their_size), advice);
  std::vector<Member> members(static_cast<size_t>(size));
  for (auto& member : members) {
    std::string cpus;
    list >> member.host >> member.pid >> member.start >> cpus;
    if (!list || member.host < 0 || member.host >= size || member.pid < 0)
      throw CorruptError("rank 0's list of the group's ranks cannot be read");
    member.cpus = cpus_from_text(cpus);
  }
  return members;
}

}  // namespace muster::comm
