// LengthBuckets: the batches of a DistributedBucketSampler. bucket_sampler.h says how they are made.
//
// Thread-safety: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "muster/data/bucket_sampler.h"
#include "muster/data/share.h"

namespace muster::data {

class LengthBuckets {
 public:
  LengthBuckets(const std::vector<int64_t>& lengths, const DistributedBucketSamplerOptions& options);

  std::optional<size_t> batch_size() const { return batch_size_; }
  int64_t hash_of_lengths() const { return hash_; }
  size_t samples() const { return sorted_.size(); }
  // Batches of an epoch over all ranks, repeated and dropped ones considered.
  size_t items(const Share& share) const;
  // Shuffles; returns the numbers of the batches in their order, items() many.
  at::Tensor draw(const Share& share, uint64_t epoch);
  // The samples of a batch, as of the last draw().
  std::vector<size_t> batch(size_t number) const;

 private:
  struct Range {
    size_t begin, end;  // places in sorted_ and order_
  };
  void divide(const std::vector<int64_t>& lengths, const DistributedBucketSamplerOptions& options);

  const std::optional<size_t> batch_size_;
  const bool shuffle_;
  const uint64_t seed_;
  int64_t hash_ = 0;
  std::vector<size_t> sorted_;  // samples by length
  std::vector<size_t> order_;   // the same, shuffled within each bucket
  std::vector<Range> buckets_;
  std::vector<Range> batches_;  // in the order of buckets
};

}  // namespace muster::data
