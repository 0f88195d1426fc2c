// DistributedSampler: which samples of a dataset this rank works on.
//
//   muster::DistributedSampler sampler(dataset.size());
//   auto loader = torch::data::make_data_loader(dataset, sampler, 64);
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);                       // another order each epoch, the same on all ranks
//     for (auto& batch : *loader) { … }
//   }
//
// All ranks draw the same order of all samples, and rank r takes places r, r + replicas, r + 2 replicas …  The order is
// exactly Python's: torch.randperm(size) with a generator seeded with seed + epoch. So that all ranks make the same
// number of steps, the order is *padded* from its start (several times if there are fewer samples than replicas), or
// cut if drop_last is set. An evaluation needs neither: with `.pad = false` each sample is used exactly once over all
// ranks, and the ranks' numbers of samples differ by at most one.
//
//   muster::DistributedSampler test_sampler(test.size(), {.shuffle = false, .pad = false});
//
// A sampler is a *handle*: copies share one state. make_data_loader() copies the sampler that it is given, and the
// user's handle still reaches the loader's sampler: set_epoch(), save(), load(). So one sampler serves one loader at a
// time.
//
// set_epoch() takes effect when the loader's next iteration begins (begin() calls reset()); the current iteration keeps
// its order. save() stores the current epoch and how many samples next() has returned in it. A loader without workers
// draws a batch when the loop requests it, so this is the loop's position. A loader with workers is up to max_jobs
// batches ahead of the loop. After load() the next iteration starts at the saved position, unless set_epoch() has
// meanwhile set a different epoch; later iterations are whole. A sampler that was saved after its last batch has
// nothing left in its epoch: call set_epoch() to go on.
//
// A loop that counts its steps can set the position itself. This is exact even if its loader draws ahead:
//
//   sampler.seek(step / steps_per_epoch, step % steps_per_epoch * batch_size);
//
// Thread-safety: one thread at a time may use a handle and its copies (a loader draws its indices in the thread that
// iterates). Source: torch.utils.data.distributed.DistributedSampler.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace muster {

struct DistributedSamplerOptions {
  std::optional<int> num_replicas;  // default: world size of the calling thread's World
  std::optional<int> rank;          // default: rank in that World; if both are given, no World is needed
  bool shuffle = true;
  uint64_t seed = 0;       // must be the same on all ranks
  bool drop_last = false;  // drop the last size % num_replicas samples instead of padding
  bool pad = true;         // false: neither repeat nor drop a sample
};

class DistributedSampler final : public torch::data::samplers::Sampler<> {
 public:
  // `size`: number of samples in the dataset; 0 gives an empty sampler. Errors: InvalidArgument (num_replicas below 1,
  // a rank outside [0, num_replicas), drop_last together with pad = false); Aborted if a World is needed and the
  // calling thread has none.
  explicit DistributedSampler(size_t size, const DistributedSamplerOptions& options = {});

  // Takes effect at the next reset().
  void set_epoch(uint64_t epoch);
  uint64_t epoch() const;  // the one last set

  // The next iteration is of this epoch and starts at this rank's sample `index`, as after load(). InvalidArgument if
  // index is above size().
  void seek(uint64_t epoch, size_t index);

  size_t size() const;   // samples of this rank in an epoch
  size_t index() const;  // samples that next() has returned in the current epoch

  // Begins an epoch, for a dataset of `new_size` samples if given. A data loader calls it in begin().
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // The next batch_size indices, fewer at the end, then nullopt. InvalidArgument if batch_size is 0.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // load() throws CorruptError if the archive holds no DistributedSampler, and InvalidArgument if it holds one with a
  // different dataset size, seed or options (the rank may differ: ranks that step together have the same position).
  // Then the sampler is unchanged.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace muster
