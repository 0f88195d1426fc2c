// Parameters that are spread over several hosts, and come to each host, unit by unit, while they are needed.
//
// Each parameter is at home on one host, in memory of the rank that owns it. On every other host it has a place of the
// same size, in memory of the rank at the owner's place among its host's ranks. That place has no memory of its own most
// of the time. So a parameter never changes its address: to gather a unit is to receive its values there, once per host;
// to free it is to give the pages back to the kernel.
//
//   memory of place 0 on host A  | unit 0: a.weight    : b.weight [–] | unit 1: c.weight    : d.weight [–] |
//   memory of place 0 on host B  | unit 0: a.weight [–]: b.weight     | unit 1: c.weight [–]: d.weight     |   [–] not here
//
// The ranks at one place on all hosts are a *column*. Each sends what is at home with it to its column. So all ranks of a
// host receive, each another part, and each byte crosses the network once per host.
//
//   begin()    all ranks have come: updates are over. Parameters may be read from now on.
//   use(unit)  an operator is about to use one of the unit's parameters (watched.h). If the unit is not here, it is
//              gathered; that is collective. Of the units that are here, `most` stay; the least recently used one goes,
//              but none that the same operator uses.
//   end()      all ranks have come: reads are over. Nothing but what is at home stays.
//
// The ranks use units in the same order, because they compute the same module. So each knows by itself which units are
// here on all. When a unit is waited for, the ranks of the host meet in a barrier: after it, all parts are here, and
// nobody reads a unit that has been left since. So what goes now can be freed, and its room is taken by the unit that
// followed last time (after the same two units): it is received while the ranks compute.
//
// Errors: InvalidArgument of use() between end() and begin(), if the parameter is not at home on this host; those of the
// collectives. A rank that uses units in another order, or throws between begin() and end(), leaves the others waiting:
// they get a Mismatch or TimeoutError. Thread-safety: one thread, as an nn::Module.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "muster/comm/group.h"
#include "muster/comm/work.h"
#include "shm/mapping.h"

namespace muster::fsdp {

class Gatherer {
 public:
  // Part of a unit, in the memory of this rank's place: what is at home on one host. Whole pages.
  struct Piece {
    int host = 0;
    size_t offset = 0, bytes = 0;
  };
  struct Setup {
    std::vector<std::vector<Piece>> pieces;  // by unit; those without bytes are left out
    UniqueFd memory;                         // of this rank
    std::shared_ptr<shm::Mapping> mapped;    // the same
    int host = 0;                            // this rank's
    Group column;                            // by host; this rank is a member if it has pieces
    Group ranks_of_host;
    size_t most = 3;  // units that are here, with the one that is being received; at least 2
  };
  explicit Gatherer(Setup setup) : setup_(std::move(setup)) {}

  void begin();
  void before_use(size_t unit, bool is_at_home, const std::string& parameter, uint64_t operation);
  void end();
  // Collective, between end() and begin(): everything is here until the next begin() or end().
  void gather_all();

  // In this rank's memory, as the kernel counts.
  size_t bytes_here() const { return shm::committed(setup_.memory.get()); }

 private:
  struct Here {
    size_t unit = 0;
    Work receiving;
    bool arrived = false;
    uint64_t operation = 0;  // the last that used it
  };
  static constexpr size_t kNone = ~size_t{0};

  void use(size_t unit, uint64_t operation);
  void meet();
  bool make_room(uint64_t operation);
  Here start(size_t unit) const;
  void free(Here& here) const;
  void prefetch(uint64_t operation);

  const Setup setup_;
  bool reading_ = false, all_here_ = false;
  std::vector<Here> here_;                                   // the last used one first
  std::pair<size_t, size_t> last_{kNone, kNone};             // the last two units that were waited for
  std::map<std::pair<size_t, size_t>, size_t> followed_by_;  // what was waited for after such two
};

}  // namespace muster::fsdp
