// Device maps (worker.h, docs/rpc.md): which device of the other worker a tensor goes to.
//
// At the start, if any worker has maps, those who do post them in the store; then everybody posts what is wrong with
// its own and with what others' maps say of its devices, and reads what everybody found: init() fails on all or none.
// From then on the two sides of a map have the same list of pairs, and a message says of a tensor only at which place
// in that list its device is (tensor_table.h). So no message can name a device that was not agreed upon.
//
// A call goes by the caller's map for the callee, there and back; the callee's own map for the caller is for the calls
// that it makes itself.
//
// Thread-safety: meet() before all else; const afterwards.
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
  // InvalidArgument, on all workers, for what worker.h says; Corrupt for what is no map; Timeout.
  void meet(const std::map<std::string, DeviceMap>& maps, const Meeting& meeting);

  // This worker's devices, by their place in the map, of calls that it makes to that worker …
  std::span<const c10::Device> calls_to(int worker) const { return at(calls_to_, worker); }
  // … and of calls that that worker makes to it.
  std::span<const c10::Device> calls_from(int worker) const { return at(calls_from_, worker); }

 private:
  using Lists = std::vector<std::vector<c10::Device>>;  // by worker; empty where nobody has maps
  static std::span<const c10::Device> at(const Lists& lists, int worker) {
    return lists.empty() ? std::span<const c10::Device>() : lists[static_cast<size_t>(worker)];
  }

  Lists calls_to_, calls_from_;
};

}  // namespace muster::rpc
