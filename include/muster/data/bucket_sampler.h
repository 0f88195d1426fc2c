// DistributedBucketSampler: batches of sequences of similar length, so that little of a batch is padding.
//
//   std::vector<int64_t> lengths = …;              // of each sample of the dataset
//   muster::DistributedBucketSampler sampler(lengths, {.batch_size = 64, .max_tokens = 8192});
//   auto loader = torch::data::make_data_loader(dataset, sampler);      // without a batch size
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& batch : *loader) { … }
//   }
//
// The samples, sorted by length, are cut into *buckets* of up to bucket_batches batches. All batches of a bucket have
// nearly equal numbers of samples: at most batch_size, and at most max_tokens / (longest sample of the bucket). A
// bucket ends before a sample that would lower this limit by more than a fifth. So the number of batches is the same in
// all epochs. In an epoch
//   1. the samples of each bucket are shuffled and cut into its batches;
//   2. in the order of buckets, num_replicas batches in succession are a *step*, one batch for each rank: so ranks that
//      step together work on batches of similar length;
//   3. the steps are shuffled, and the batches within each.
// All ranks draw the same from seed + epoch, without communication. If the number of batches is not a multiple of the
// number of ranks, some batches in succession, elsewhere in each epoch, are left over. They become the last step. It is
// *padded* with batches of its own, or left out if drop_last is set, or incomplete with `.pad = false`. Without
// shuffle, samples and steps come in order of length, and the longest are left over.
//
// Batches have different numbers of samples. DistributedDataParallel averages the ranks' gradients with equal weights,
// so with a mean as loss a sample of a small batch weighs more.
//
// One item (epoch_sampler.h) is one batch: size(), index(), seek() and save() count batches. The loader's batch size
// must be 1, its default, or the option batch_size, and its drop_last must not be set. load() compares a hash of the
// lengths. epoch_sampler.h says what set_epoch(), seek(), save() and load() do, and which threads may call them.
// Source: Khomenko et al., "Accelerating recurrent neural network training using sequence bucketing and multi-GPU data
// parallelization", DSMP 2016.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "muster/data/epoch_sampler.h"

namespace muster {

namespace data {
class LengthBuckets;
}

struct DistributedBucketSamplerOptions {
  std::optional<int> num_replicas;    // default: world size of the calling thread's World
  std::optional<int> rank;            // default: rank in that World; if both are given, no World is needed
  std::optional<size_t> batch_size;   // most samples of a batch
  std::optional<int64_t> max_tokens;  // most tokens of a batch, padding included: its samples times its longest length
  size_t bucket_batches = 16;         // more: batches mix more; fewer: less padding
  bool shuffle = true;
  uint64_t seed = 0;       // must be the same on all ranks
  bool drop_last = false;  // leave the incomplete step out instead of padding it
  bool pad = true;         // false: neither repeat nor drop a batch
};

class DistributedBucketSampler final : public EpochSampler {
 public:
  static constexpr bool kGivesBatches = true;  // for PrefetchLoader

  // `lengths`: in tokens, at least 0; none give an empty sampler. Errors: InvalidArgument (neither batch_size nor
  // max_tokens, or one below 1; bucket_batches 0; a negative length, or one above max_tokens; the ranks as for
  // DistributedSampler); Aborted if a World is needed and the calling thread has none.
  explicit DistributedBucketSampler(const std::vector<int64_t>& lengths,
                                    const DistributedBucketSamplerOptions& options);

  // The indices of the next batch, or nullopt. InvalidArgument if batch_size is neither 1 nor the option of this name.
  std::optional<std::vector<size_t>> next(size_t batch_size = 1) override;

 private:
  DistributedBucketSampler(const DistributedBucketSamplerOptions& options,
                           std::shared_ptr<data::LengthBuckets> buckets);
  std::shared_ptr<data::LengthBuckets> buckets_;
};

}  // namespace muster
