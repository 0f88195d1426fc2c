// Parameters that are spread over several hosts, and come to each host, unit by unit, while they are needed.
//
// Each parameter is at home on one host, in memory of the rank that owns it. On every other host it has a place of the
// same size, in memory of the rank at the owner's place among its host's ranks. That place has no memory of its own
// most of the time, and must not be touched. So a parameter never changes its address: to gather a unit is to receive
// its values there, once per host; to free it is to give the pages back to the kernel.
//
//   memory of place 0 on host A  | unit 0: a.weight    : b.weight [–] | unit 1: c.weight    : d.weight [–] |
//   memory of place 0 on host B  | unit 0: a.weight [–]: b.weight     | unit 1: c.weight [–]: d.weight     | [–] gone
//
// The ranks at one place on all hosts are a *column*. Each sends what is at home with it to its column. So all ranks of
// a host receive, each another part, and each byte crosses the network once per host.
//
//   begin()     all ranks have come: updates are over. Parameters may be read from now on.
//   before_use  an operator is about to read a parameter (watched.h). If its unit is not here, it is gathered; that is
//               collective. `most` units may be here; the least recently used one goes, but none that the same operator
//               uses.
//   end()       all ranks have come: reads are over. Nothing but what is at home stays. A backward() that begins later
//               gathers again.
//
// The ranks use units in the same order, because they compute the same module. So each knows by itself which units are
// here on all. When a unit was waited for, the ranks of the host meet: after it, all parts are here, and nobody reads a
// unit that has been left since. So what goes now can be freed, and its room is taken by the units that were used next
// the last time (after the same two units): they are received while the ranks compute.
//
// Ranks that use units in another order get a Mismatch: those of one host when they meet, because they compare what
// they have; those of several hosts when they have received, because each piece carries the number of its unit. If
// hosts wait for units that different columns have, they get a TimeoutError.
//
// Errors: InvalidArgument of before_use() between end() and begin(), if the parameter is not at home on this host;
// Mismatch; those of the collectives; if a rank is lost, a rank that has only given up because of that is not blamed. A
// rank that throws between begin() and end() leaves the others waiting. Thread-safety: one thread, as an nn::Module.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "muster/comm/group.h"
#include "muster/comm/work.h"
#include "parallel/fsdp/use_order.h"
#include "shm/mapping.h"

namespace muster::fsdp {

class Gatherer {
 public:
  // Part of a unit, in the memory of this rank's place: what is at home on one host. Whole pages; the last bytes are
  // the piece's label.
  struct Piece {
    int host = 0;
    size_t offset = 0, bytes = 0;
  };
  static constexpr size_t kLabelBytes = sizeof(uint64_t);

  struct Setup {
    std::vector<std::vector<Piece>> pieces;  // by unit; those without parameters are left out
    std::vector<std::vector<std::span<std::byte>>>
        elsewhere;                         // by unit: in memory of all ranks of this host, what is not
                                           // at home
    int memory = -1;                       // of this rank; stays open as long as the Gatherer
    std::shared_ptr<shm::Mapping> mapped;  // the same
    int host = 0;                          // this rank's
    Group group;
    Group ranks_of_host, column;  // number the ranks as `group` in errors; `column`: by host, of ranks that have pieces
    size_t most = 3;              // units that are here, with those that are being received; at least 2
  };
  explicit Gatherer(Setup setup);
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;
  // Waits for what is on its way: another rank may need it.
  ~Gatherer();

  void begin();
  // `operation` is the same for all parameters of an operator; `writes`: it changes this one.
  void before_use(size_t unit, bool is_at_home, const std::string& parameter, uint64_t operation, bool writes);
  void end();
  // Collective, between end() and begin(): everything is here until the next begin() or end(). Unavailable, on every
  // rank, if a host has too little memory.
  void gather_all();
  bool has_all() const { return all_here_; }
  std::vector<size_t> units_here() const;  // with those that are being received; in order

 private:
  struct Here {
    size_t unit = 0;
    Work receiving;
    bool arrived = false;
    uint64_t operation = 0;  // the last that used it
  };
  using Units = std::vector<Here>;

  template <typename Fn>
  void share_loss(Fn&& fn);
  void use(size_t unit, uint64_t operation);
  void meet();
  Here start(size_t unit) const;
  void finish(Here& here);
  void finish_all();
  void free(Units::iterator here);
  void prefetch(uint64_t operation, bool have_met);
  void check_labels(size_t unit) const;

  const Setup setup_;
  bool reading_ = false, all_here_ = false;
  Units here_;  // the last used one first
  UseOrder order_;
};

}  // namespace muster::fsdp
