// The meeting of a group's ranks on one host: they prove who they are and send each other file descriptors.
//
// Rank 0 is the hub. It listens on a Unix socket with a random name in the abstract namespace (which the kernel
// frees; any process of the network namespace can list such names, so the name protects nothing), and puts
//     <prefix>/hub = boot id, socket name, nonce
// into the store. Each other rank reads this, connects, and sends {nonce, rank, size} with its descriptors
// (SCM_RIGHTS). When all have connected, the hub sends every rank the table of pids and all descriptors, including its
// own. Both sides check by SO_PEERCRED that the other belongs to the same user; the hub checks the nonce. The
// connections are closed afterwards.
//
// This proves that the ranks are on the same host: the boot id is equal, the socket can be reached, and a descriptor
// arrives. Ranks of another host, or of another network namespace, get Unavailable.
//
// Errors:
//   TimeoutError    names the ranks that did not come, on all ranks that did
//   PeerLost   names a rank that died: the hub, or a rank whose process id is known beforehand (a pidfd then reports
//              its death immediately)
//   Mismatch   ranks disagree about the group's size
//   others     whatever the store throws; so a rank does not wait for the World of an epoch that is over
// A meeting that fails leaves a key in the store, and nothing else.
//
// Thread-safety: exchange() may run in several threads concurrently for different (prefix, rank).
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "muster/base/deadline.h"

namespace muster::shm {

struct Participant {
  pid_t pid = 0;              // in the hub's pid namespace
  std::vector<UniqueFd> fds;  // what it gave, in the same order
};

// Where the hub leaves its invitation: the job's store. This layer knows nothing else about the store.
struct NoticeBoard {
  std::function<void(const std::string& key, const std::string& value)> post;
  std::function<std::string(const std::string& key, Deadline deadline)> read;  // waits for it; TimeoutError
  std::function<void(const std::string& key)> look = {};    // called now and then during a wait; may throw
  std::function<void(const std::string& key)> remove = {};  // when all have met; may throw
};

// What is known about the ranks beforehand.
struct KnownRanks {
  std::vector<pid_t> pids = {};  // by rank; 0 if a pid is not known; or empty
  std::vector<int> shown = {};   // their numbers in error messages, if the group is a part of a job; or empty
  int called(int rank) const {
    const auto at = static_cast<size_t>(rank);
    return at < shown.size() ? shown[at] : rank;
  }
};

// Gives `fds` and returns what each rank gave; this rank's entry holds duplicates of its own descriptors.
std::vector<Participant> exchange(const NoticeBoard& board, const std::string& prefix, int rank, int size,
                                  const std::vector<int>& fds, Deadline deadline, const KnownRanks& known = {});

// The same for anything that has the methods of a Store.
template <typename Store>
requires requires(Store& store, std::string key, Deadline deadline) { store.get(key, deadline); }
std::vector<Participant> exchange(Store& store, const std::string& prefix, int rank, int size,
                                  const std::vector<int>& fds, Deadline deadline, const KnownRanks& known = {}) {
  const NoticeBoard board{[&](const auto& key, const auto& value) { store.set(key, value); },
                          [&](const auto& key, Deadline until) { return store.get(key, until); },
                          [&](const auto& key) { store.try_get(key); }, [&](const auto& key) { store.erase(key); }};
  return exchange(board, prefix, rank, size, fds, deadline, known);
}

// The kernel's random identity of this boot: equal for processes of one host.
std::string boot_id();

}  // namespace muster::shm
