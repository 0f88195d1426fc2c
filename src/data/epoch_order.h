// EpochOrder: the state of a sampler: the order of the current epoch, this rank's share of it, and the position in it.
//
// Thread-safety: all functions. `draw` runs under the lock, so it must not call the order.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/data/epoch_position.h"
#include "muster/data/share.h"

namespace muster::data {

class EpochOrder {
 public:
  struct Settings {
    const char* type;     // "DistributedSampler", for errors
    const char* archive;  // "distributed_sampler", the key of its version in an archive
    const char* item;     // "sample" or "batch"
    size_t dataset_size = 0;
    uint64_t seed = 0;
    Share share = {};
    Identity options = {};  // those that change the order, beside size, seed and share
    // The number of items in an epoch: fixed, or the dataset's size.
    std::optional<size_t> items = {};
    // The items of an epoch: int64, as many as there are items. Undefined: 0, 1, 2, …
    std::function<at::Tensor(uint64_t epoch, size_t dataset_size)> draw = {};
    // Whether the order is the same for every number of ranks, so that others can go on with it.
    bool any_replicas = true;
  };
  explicit EpochOrder(Settings settings) : settings_(std::move(settings)) {}

  void set_epoch(uint64_t epoch);
  uint64_t epoch() const;
  void seek(uint64_t epoch, size_t index);
  size_t size() const;
  size_t index() const;
  const Share& share() const { return settings_.share; }

  void reset(std::optional<size_t> new_size);
  // The next `count` items of this rank, fewer at the end, then nullopt. `convert`, if given, runs under the lock and
  // makes of them what the sampler returns.
  using Convert = std::function<std::vector<size_t>(const std::vector<size_t>& items)>;
  std::optional<std::vector<size_t>> next(size_t count, const Convert& convert = {});

  void save(torch::serialize::OutputArchive& archive) const;
  void save_at(torch::serialize::OutputArchive& archive, uint64_t epoch, size_t index) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  size_t items() const { return settings_.items.value_or(settings_.dataset_size); }
  Identity identity(size_t replicas) const;
  size_t saved_replicas(torch::serialize::InputArchive& archive) const;
  void begin(size_t dataset_size);

  mutable std::mutex mutex_;
  Settings settings_;
  EpochPosition position_;
  at::Tensor order_;
};

}  // namespace muster::data
