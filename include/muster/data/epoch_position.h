// EpochPosition: where a sampler or a stream is in its epochs, and how this is saved. For Muster's own, and for yours.
//
//   position.set_epoch(3);    // wanted
//   position.begin();         // epoch 3 is under way, at index 0
//   position.advance(64);
//
// After resume() or load() the next begin() starts at that position, unless set_epoch() has set a different epoch.
//
// Thread-safety: a value.
#pragma once

#include <torch/data/samplers/base.h>  // declares archives

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace muster::data {

// Names and values that must be equal for a saved position to be valid: the dataset's size, the seed, options.
using Identity = std::vector<std::pair<std::string, int64_t>>;

inline constexpr const char* kNamesOfShards = "names_of_shards";  // in an Identity
// Of names in their order; at least 0, on every machine the same.
int64_t hash_of_names(const std::vector<std::string>& names);

// Names of what has the position: for errors, and the key under which an archive has its version.
struct ArchiveNames {
  const char* type;  // "DistributedSampler"
  const char* key;   // "distributed_sampler"
};

class EpochPosition {
 public:
  void set_epoch(uint64_t epoch) { wanted_ = epoch; }
  uint64_t wanted() const { return wanted_; }  // the epoch that the next begin() begins
  uint64_t epoch() const { return epoch_; }    // the epoch under way
  size_t index() const { return index_; }      // items given in it
  bool begun() const { return begun_; }        // since construction or the last resume()

  // Begins the wanted epoch: at the position of resume() if this has been called since the last begin(), if it is of
  // the wanted epoch, and if `may_go_on`.
  void begin(bool may_go_on = true);
  void advance(size_t items) { index_ += items; }
  void resume(uint64_t epoch, size_t index);

  void save(torch::serialize::OutputArchive& archive, const ArchiveNames& names, const Identity& identity) const;
  static void save_at(torch::serialize::OutputArchive& archive, const ArchiveNames& names, const Identity& identity,
                      uint64_t epoch, size_t index);
  struct Saved {
    uint64_t epoch;
    size_t index;
  };
  // What save() has written. CorruptError if the archive does not hold it, or an index above `most`; InvalidArgument if
  // it has been saved with a different identity.
  static Saved read(torch::serialize::InputArchive& archive, const ArchiveNames& names, const Identity& identity,
                    size_t most);

 private:
  uint64_t wanted_ = 0, epoch_ = 0;
  size_t index_ = 0;
  bool begun_ = false, resumed_ = false;
};

}  // namespace muster::data
