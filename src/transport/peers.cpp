#include "transport/peers.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::transport {

using std::chrono::milliseconds;

std::string worker_name(const std::vector<std::string>& names, int rank) {
  const auto i = static_cast<size_t>(rank);
  return i < names.size() && !names[i].empty() ? names[i] : text("worker ", rank);
}

std::vector<int> checked_peers(int rank, int size, std::vector<int> peers, milliseconds heartbeat) {
  if (size < 1 || rank < 0 || rank >= size)
    throw InvalidArgument(text("worker: expected 0 to ", size - 1, " among ", size, ", got ", rank));
  if (heartbeat < milliseconds(20) || heartbeat > std::chrono::hours(24))
    throw InvalidArgument(text("heartbeat: expected 20 ms to a day, got ", heartbeat.count(), " ms"));
  if (peers.empty())
    for (int other = 0; other < size; ++other)
      if (other != rank) peers.push_back(other);
  std::sort(peers.begin(), peers.end());
  for (size_t i = 0; i < peers.size(); ++i) {
    const int peer = peers[i];
    if (peer < 0 || peer >= size || peer == rank || (i > 0 && peer == peers[i - 1]))
      throw InvalidArgument(text("worker ", peer, " cannot be a peer of worker ", rank, " among ", size));
  }
  return peers;
}

void read_entries(const Directory& directory, const std::vector<int>& peers, const std::vector<std::string>& names,
                  const std::function<std::string(int rank)>& key_of,
                  const std::function<void(int rank, const std::string& entry)>& take, Deadline deadline) {
  std::vector<int> missing;
  for (const int peer : peers) {
    std::string entry;
    try {
      // After the first worker that does not come, a look without waiting tells which of the others are missing too.
      entry = directory.read(key_of(peer), missing.empty() ? deadline : Deadline::after(milliseconds(0)));
    } catch (const TimeoutError&) {
      missing.push_back(peer);
      continue;
    }
    take(peer, entry);
  }
  if (missing.empty()) return;
  std::vector<std::string> words;
  for (const int peer : missing) words.push_back(worker_name(names, peer));
  throw TimeoutError(text("workers have not come in time: ", join(words)), missing,
                     "Check whether they have been started, and whether they have failed");
}

}  // namespace muster::transport
