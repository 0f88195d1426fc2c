// Device maps (worker.h, docs/rpc.md): which device of the other worker a tensor goes to.
//
// At the start, if any worker has maps, the workers that have them post them in the store. Then every worker posts the
// errors that it found in its own maps and in what the other maps say about its devices, and reads what all others
// found: init() fails on all workers or on none. From then on the two sides of a map have the same list of pairs, and a
// message names a tensor's device only by its place in that list (tensor_table.h). So no message can name a device that
// was not agreed upon.
//
// A call and its reply use the caller's map for the callee; the callee's own map for the caller is for the calls that
// the callee makes itself.
//
// Thread-safety: meet() must come first; const afterwards.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/rpc/worker.h"
#include "muster/store/store.h"

namespace muster::rpc {

class Devices {
 public:
  struct Meeting {
    Store& store;
    std::string prefix;  // of keys
    Deadline deadline;
    int self = 0;
    const std::vector<WorkerInfo>& workers;
    const std::vector<bool>& has_maps;  // by rank; the same on all
  };
  // Throws InvalidArgument, on all workers, for what worker.h lists; CorruptError for bytes that are not a map;
  // TimeoutError.
  void meet(const std::map<std::string, DeviceMap>& maps, const Meeting& meeting);

  // This worker's devices, by their place in the map, for calls that it makes to `worker`.
  std::span<const c10::Device> calls_to(int worker) const { return at(calls_to_, worker); }
  // The same for calls that `worker` makes to it.
  std::span<const c10::Device> calls_from(int worker) const { return at(calls_from_, worker); }

 private:
  using Lists = std::vector<std::vector<c10::Device>>;  // by worker; empty if no worker has maps
  static std::span<const c10::Device> at(const Lists& lists, int worker) {
    return lists.empty() ? std::span<const c10::Device>() : lists[static_cast<size_t>(worker)];
  }

  Lists calls_to_, calls_from_;
};

}  // namespace muster::rpc
