// What transports that connect their workers through a directory have in common: the choice of peers, their names, and
// the wait until each has left its address.
//
// Thread-safety: functions without state.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "transport/directory.h"

namespace muster::transport {

// What a worker is called in messages: its name if it has one, otherwise "worker <rank>".
std::string worker_name(const std::vector<std::string>& names, int rank);

// The workers with which worker `rank` of `size` connects: `peers`, sorted, or all others if it is empty. Throws
// InvalidArgument for invalid ranks, and for heartbeats below 20 ms or above a day.
std::vector<int> checked_peers(int rank, int size, std::vector<int> peers, std::chrono::milliseconds heartbeat);

// Waits for what each of `peers` leaves under key_of(rank), in their order, and passes it to take(). If some do not
// come by the deadline, the others are still read, and TimeoutError names the missing ones.
void read_entries(const Directory& directory, const std::vector<int>& peers, const std::vector<std::string>& names,
                  const std::function<std::string(int rank)>& key_of,
                  const std::function<void(int rank, const std::string& entry)>& take, Deadline deadline);

}  // namespace muster::transport
