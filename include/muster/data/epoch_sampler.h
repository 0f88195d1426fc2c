// EpochSampler: what Muster's samplers have in common. Use DistributedSampler (sampler.h), DistributedWeightedSampler
// (weighted_sampler.h) or DistributedBucketSampler (bucket_sampler.h).
//
// In each epoch all ranks draw the same order of *items*, from seed + epoch, without communication. Rank r takes items
// r, r + replicas, r + 2 replicas … An item is a sample, or a whole batch of a DistributedBucketSampler.
//
// A sampler is a *handle*: copies share one state. make_data_loader() copies the sampler that it is given, and the
// user's handle still reaches the loader's sampler: set_epoch(), save(), load(). So one sampler serves one loader at a
// time.
//
// set_epoch() takes effect when the loader's next iteration begins (begin() calls reset()); the current iteration keeps
// its order. save() stores the current epoch and how many items next() has returned in it. A loader without workers
// draws a batch when the loop requests it, so this is the loop's position. A loader with workers is up to max_jobs
// batches ahead of the loop; PrefetchLoader (prefetch_loader.h) has a save() that stores the loop's position. After
// load() the next iteration starts at the saved position, unless set_epoch() has meanwhile set a different epoch; later
// iterations are whole. A sampler that was saved after its last item has nothing left in its epoch: call set_epoch() to
// go on.
//
// A loop that counts its steps can set the position itself. This is exact even if its loader draws ahead:
//
//   sampler.seek(step / steps_per_epoch, step % steps_per_epoch * batch_size);
//
// Thread-safety: all functions, but construction and destruction of a handle are its owner's. What next() returns
// depends on the order of the calls, so one thread at a time draws.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace muster {

namespace data {
class EpochOrder;
}

class EpochSampler : public torch::data::samplers::Sampler<> {
 public:
  // Takes effect at the next reset().
  void set_epoch(uint64_t epoch);
  uint64_t epoch() const;  // the one last set

  // The next iteration is of this epoch and starts at this rank's item `index`, as after load(). InvalidArgument if
  // index is above size().
  void seek(uint64_t epoch, size_t index);

  size_t size() const;   // items of this rank in an epoch
  size_t index() const;  // items that next() has returned in the current epoch
  int rank() const;      // of num_replicas() ranks
  int num_replicas() const;

  // Begins an epoch, for a dataset of `new_size` samples if given. A data loader calls it in begin(). InvalidArgument
  // if new_size is not the dataset's size; only a DistributedSampler takes others.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // The next batch_size samples' indices, fewer at the end, then nullopt. InvalidArgument if batch_size is 0.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // load() throws CorruptError if the archive holds no such sampler, and InvalidArgument if it holds one of another
  // dataset size, seed or options, and changes nothing then. The rank may differ, since ranks step together, and so may
  // the number of ranks ("Other ranks" in docs/data.md says when).
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // Writes what save() would write at this position: for a loader that has drawn more than its loop has got.
  void save_at(torch::serialize::OutputArchive& archive, uint64_t epoch, size_t index) const;

 protected:
  explicit EpochSampler(std::shared_ptr<data::EpochOrder> order);
  std::shared_ptr<data::EpochOrder> order_;
};

}  // namespace muster
