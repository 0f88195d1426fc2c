// How Worlds begin: init(), run_threads() and spawn(), and the same for ranks that are placed on hosts by hand.
//
//   comm::WorldStarter({"a", "a", "b"}).run_threads(3, [](World& world) { … });
//
// Ranks that are placed on different hosts do not share memory: so tests have several hosts on one machine.
//
// Thread-safety: immutable; as the functions of world.h and spawn.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/comm/world.h"
#include "muster/store/store.h"

namespace muster::comm {

class WorldStarter {
 public:
  WorldStarter() = default;  // each rank finds out on which host it is
  // By rank: ranks with the same string share a host. Empty: as above.
  explicit WorldStarter(std::vector<std::string> hosts) : hosts_(std::move(hosts)) {}

  World join(Placement placement, std::shared_ptr<Store> store, const WorldOptions& options = {}) const;
  World init(const WorldOptions& options = {}) const;
  void run_threads(int n, const std::function<void(World&)>& fn, const WorldOptions& options = {}) const;
  void spawn(int n, const std::function<void(World&)>& fn, const WorldOptions& options = {}) const;

 private:
  World make(const Placement& placement, std::shared_ptr<Store> store, const WorldOptions& options,
             bool ranks_are_threads) const;

  std::vector<std::string> hosts_;
};

}  // namespace muster::comm
