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
// Python's to the bit: torch.randperm(size) by a generator with seed + epoch. So that all ranks make the same number of
// steps, the order is *padded* from its start (again and again where there are fewer samples than replicas), or cut
// with drop_last. An evaluation wants neither: with `.pad = false` each sample comes exactly once over all ranks, and
// ranks differ by at most one sample.
//
//   muster::DistributedSampler test_sampler(test.size(), {.shuffle = false, .pad = false});
//
// A sampler is a *handle*: copies share one state. make_data_loader() copies the sampler that it is given, so the
// handle that the user keeps is how to reach the loader's: set_epoch(), save(), load(). Hence one sampler serves one
// loader at a time.
//
// set_epoch() takes effect when the loader's next iteration begins (begin() calls reset()); one under way keeps its
// order. save() stores the epoch under way and the place reached in it: what next() has given out. A loader without
// workers draws a batch when the loop asks for it, so that is where the loop is; one with workers runs ahead and has
// drawn up to max_jobs batches more. load() makes the next iteration go on at that place, unless set_epoch() has
// meanwhile asked for another epoch than the saved one; the iterations after it are whole. A sampler saved after its
// last batch has nothing left: set_epoch() to go on.
//
// A loop that counts its own steps can say itself where to go on, whatever its loader draws ahead:
//
//   sampler.seek(step / steps_per_epoch, step % steps_per_epoch * batch_size);
//
// Thread-safety: a handle and its copies together, one thread at a time (a loader draws its indices in the thread that
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
  std::optional<int> rank;          // default: rank in that World; with both given no World is needed
  bool shuffle = true;
  uint64_t seed = 0;       // must be the same on all ranks
  bool drop_last = false;  // drop the last samples that do not go round, instead of padding
  bool pad = true;         // false: no sample twice, none dropped
};

class DistributedSampler final : public torch::data::samplers::Sampler<> {
 public:
  // `size`: number of samples in the dataset; 0 gives an empty sampler. Errors: InvalidArgument (no replicas, a rank
  // that is not among them, drop_last together with pad = false); Aborted where a World is needed and there is none.
  explicit DistributedSampler(size_t size, const DistributedSamplerOptions& options = {});

  // From the next reset() on. Sampler is what it was until then.
  void set_epoch(uint64_t epoch);
  uint64_t epoch() const;  // the one last set

  // The next iteration is of this epoch, from its sample `index` of this rank on, as after load(). InvalidArgument for
  // an index above size().
  void seek(uint64_t epoch, size_t index);

  size_t size() const;   // samples of this rank in an epoch
  size_t index() const;  // samples that next() has given out in the epoch under way

  // Begins an epoch, for a dataset of `new_size` samples where given. A data loader calls it in begin().
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  // The next batch_size indices, fewer at the end, then nullopt. InvalidArgument for a batch size of 0.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  // load() throws Corrupt where the archive holds no DistributedSampler, and InvalidArgument where it holds one of
  // another dataset size, seed or options (the rank may differ: ranks that step together are at the same place).
  // Nothing has changed then.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace muster
