// ShardedSource: a source for DistributedStream of which each rank reads only some files (*shards*).
//
//   struct Reader {
//     explicit Reader(const std::string& path);
//     std::optional<Example> next();                 // nullopt: the end of the file
//     size_t size() const;                           // optional: examples that next() has not given yet
//   };
//   muster::ShardedSource source(paths, [](const std::string& path) { return Reader(path); });
//   muster::DistributedStream stream(std::move(source), {.shuffle_buffer = 10000});
//
// In each epoch all ranks shuffle the list of shards alike, from seed + epoch, and rank r reads shards r, r + replicas,
// … one after another: the split of a DistributedSampler with `.pad = false`. Nothing is repeated or left out. Ranks
// have different numbers of examples, and none if there are fewer shards than ranks. So end their loops together with
// even_batches() (even_batches.h), or run them in DistributedDataParallel::join() (ddp.h).
//
// Source: webdataset's split_by_node.
// Thread-safety: one thread at a time, as DistributedStream calls it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/data/epoch_position.h"
#include "muster/data/sampler.h"

namespace muster {

struct ShardedSourceOptions {
  std::optional<int> num_replicas;  // default: world size of the calling thread's World
  std::optional<int> rank;          // default: rank in that World; if both are given, no World is needed
  bool shuffle = true;              // the order of the shards; false: as in the list
  uint64_t seed = 0;                // must be the same on all ranks
};

template <typename Shard, typename Open>
class ShardedSource {
 public:
  using Reader = std::remove_cvref_t<std::invoke_result_t<Open&, const Shard&>>;
  using Optional = std::remove_cvref_t<decltype(std::declval<Reader&>().next())>;

  // `shards`: names of files, or whatever `open` takes; the same list on all ranks. `open` is called for each of this
  // rank's shards when the one before has ended. Errors: as DistributedSampler's.
  ShardedSource(std::vector<Shard> shards, Open open, const ShardedSourceOptions& options = {})
      : shards_(std::move(shards)),
        open_(std::move(open)),
        options_{.num_replicas = options.num_replicas,
                 .rank = options.rank,
                 .shuffle = options.shuffle,
                 .seed = options.seed,
                 .pad = false} {
    const DistributedSampler sampler(shards_.size(), options_);  // checks them, and asks the World
    options_.num_replicas = sampler.num_replicas();
    options_.rank = sampler.rank();
  }

  int rank() const { return *options_.rank; }
  int num_replicas() const { return *options_.num_replicas; }

  // What must be equal for a saved position to be valid, for the stream's load(). Of paths and URLs, the names of the
  // files in their order are, too; the folders may have moved, and what a URL has after '?' may be another.
  data::Identity identity() const {
    data::Identity all = {{"shards", static_cast<int64_t>(shards_.size())},
                          {"shuffle_shards", options_.shuffle},
                          {"seed_of_shards", static_cast<int64_t>(options_.seed)}};
    if constexpr (std::is_convertible_v<const Shard&, std::filesystem::path>) {
      std::vector<std::string> names;
      for (const Shard& shard : shards_) {
        std::string path = std::filesystem::path(shard).string();
        if (path.find("://") != std::string::npos) path.resize(std::min(path.find('?'), path.size()));
        names.push_back(std::filesystem::path(path).filename().string());
      }
      all.emplace_back(data::kNamesOfShards, data::hash_of_names(names));
    }
    return all;
  }

  void reset(uint64_t epoch) {
    reader_.reset();
    DistributedSampler sampler(shards_.size(), options_);
    sampler.set_epoch(epoch);
    own_ = sampler.next(std::max<size_t>(shards_.size(), 1)).value_or(std::vector<size_t>());
    opened_ = 0;
  }

  Optional next() {
    while (reader_ || open_next()) {
      if (auto example = reader_->next()) return example;
      reader_.reset();
    }
    return std::nullopt;
  }

  // Leaves out the next n examples, or as many as there are. A shard whose reader has size() is not read for it.
  void skip(size_t n) {
    while (n > 0 && (reader_ || open_next())) {
      if constexpr (requires { reader_->size(); }) {
        if (const size_t left = reader_->size(); left <= n) {
          n -= left;
          reader_.reset();
          continue;
        }
      }
      if (reader_->next())
        --n;
      else
        reader_.reset();
    }
  }

 private:
  bool open_next() {
    if (opened_ == own_.size()) return false;
    reader_.emplace(open_(shards_[own_[opened_++]]));
    return true;
  }

  std::vector<Shard> shards_;
  Open open_;
  DistributedSamplerOptions options_;
  std::vector<size_t> own_;  // this rank's shards, in the order of the epoch
  size_t opened_ = 0;        // of these
  std::optional<Reader> reader_;
};

}  // namespace muster
