// What transports that connect their workers through a directory have in common: who connects with whom, what they are
// called, and the wait until each has left its address.
//
// Thread-safety: functions without state.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "transport/directory.h"

namespace muster::transport {

// What a worker is called in messages: its name, where there is one.
std::string worker_name(const std::vector<std::string>& names, int rank);

// With whom worker `rank` of `size` connects: `peers` in order, all others where it is empty. InvalidArgument for ranks
// that are none, and for heartbeats below 20 ms or above a day.
std::vector<int> checked_peers(int rank, int size, std::vector<int> peers, std::chrono::milliseconds heartbeat);

// Reads what each of `peers` has left under key_of(rank), in their order, waiting for it, and hands it to take(). When
// some have not come by the deadline, the others are still read, and Timeout names those.
void read_entries(const Directory& directory, const std::vector<int>& peers, const std::vector<std::string>& names,
                  const std::function<std::string(int rank)>& key_of,
                  const std::function<void(int rank, const std::string& entry)>& take, Deadline deadline);

}  // namespace muster::transport
