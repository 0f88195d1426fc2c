// DistributedBucketSampler: its guarantees, for many small cases, and its position.
#include "muster/data/bucket_sampler.h"

#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "support/archived.h"
#include "support/dice.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using Lengths = std::vector<int64_t>;
using Batches = std::vector<std::vector<size_t>>;

Lengths random_lengths(size_t size, size_t most, uint64_t seed = 1) {
  Dice dice(seed);
  Lengths lengths(size);
  for (auto& length : lengths) length = static_cast<int64_t>(dice.below(most + 1));
  return lengths;
}

Batches batches_of(DistributedBucketSampler& sampler) {
  Batches all;
  while (auto batch = sampler.next()) all.push_back(*std::move(batch));
  EXPECT_FALSE(sampler.next().has_value());
  return all;
}

Batches batches_of(DistributedBucketSampler& sampler, uint64_t epoch) {
  sampler.set_epoch(epoch);
  sampler.reset();
  return batches_of(sampler);
}

DistributedBucketSamplerOptions of_rank(int rank, int replicas, DistributedBucketSamplerOptions options) {
  options.num_replicas = replicas;
  options.rank = rank;
  return options;
}

int64_t longest_of(const std::vector<size_t>& batch, const Lengths& lengths) {
  int64_t longest = 0;
  for (const size_t sample : batch) longest = std::max(longest, lengths.at(sample));
  return longest;
}

TEST(DistributedBucketSampler, KeepsItsPromisesForSmallDatasets) {
  using Options = DistributedBucketSamplerOptions;
  for (const size_t size : {0, 1, 2, 3, 5, 8, 13, 40}) {
    for (int replicas = 1; replicas <= 5; ++replicas) {
      for (auto options : {Options{.batch_size = 3}, Options{.max_tokens = 25}, Options{.max_tokens = 200},
                           Options{.batch_size = 4, .max_tokens = 30}}) {
        options.bucket_batches = 2;
        options.seed = 3;
        for (const bool shuffle : {false, true}) {
          for (const auto& [drop_last, pad] :
               {std::pair(false, true), std::pair(true, true), std::pair(false, false)}) {
            SCOPED_TRACE(testing::Message()
                         << size << " samples, " << replicas << " replicas, batch_size "
                         << options.batch_size.value_or(0) << ", max_tokens " << options.max_tokens.value_or(0)
                         << ", shuffle " << shuffle << ", drop_last " << drop_last << ", pad " << pad);
            options.shuffle = shuffle;
            options.drop_last = drop_last;
            options.pad = pad;
            const auto lengths = random_lengths(size, 20);
            std::set<std::vector<size_t>> distinct;
            std::map<size_t, int> times;
            size_t fewest = SIZE_MAX, most = 0;
            for (int rank = 0; rank < replicas; ++rank) {
              DistributedBucketSampler sampler(lengths, of_rank(rank, replicas, options));
              const auto batches = batches_of(sampler, 4);
              EXPECT_EQ(batches.size(), sampler.size());
              EXPECT_EQ(batches_of(sampler, 9).size(), sampler.size());  // the same in each epoch
              fewest = std::min(fewest, batches.size());
              most = std::max(most, batches.size());
              for (const auto& batch : batches) {
                ASSERT_FALSE(batch.empty());
                EXPECT_LE(batch.size(), options.batch_size.value_or(SIZE_MAX));
                EXPECT_LE(static_cast<int64_t>(batch.size()) * longest_of(batch, lengths),
                          options.max_tokens.value_or(INT64_MAX));
                const bool repeated = !distinct.insert(batch).second;
                if (!pad || drop_last) {
                  EXPECT_FALSE(repeated);
                }
                if (repeated) continue;
                for (const size_t sample : batch) ++times[sample];
              }
            }
            for (const auto& [sample, count] : times) EXPECT_EQ(count, 1) << "sample " << sample;
            if (!drop_last) {
              EXPECT_EQ(times.size(), size);
            }
            EXPECT_LE(most - fewest, pad ? 0u : 1u);
          }
        }
      }
    }
  }
}

// 1000 samples with lengths 1 … 100 in buckets of at most 80: the bucket's longest is nearly its shortest.
TEST(DistributedBucketSampler, LengthsInAStepAreSimilar) {
  const auto lengths = random_lengths(1000, 100);
  std::vector<Batches> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    DistributedBucketSampler sampler(lengths, of_rank(rank, 4, {.batch_size = 20, .bucket_batches = 4}));
    ranks.push_back(batches_of(sampler, 1));
  }
  int64_t tokens = 0, padded = 0;
  std::vector<int64_t> order;
  for (size_t step = 0; step < ranks[0].size(); ++step) {
    std::vector<int64_t> of_step;
    for (const auto& batches : ranks) {
      for (const size_t sample : batches[step]) of_step.push_back(lengths[sample]);
      padded += longest_of(batches[step], lengths) * static_cast<int64_t>(batches[step].size());
    }
    for (const int64_t length : of_step) tokens += length;
    const auto [shortest, longest] = std::minmax_element(of_step.begin(), of_step.end());
    EXPECT_LE(*longest - *shortest, 25) << "step " << step;
    order.push_back(*longest);
  }
  EXPECT_LT(static_cast<double>(padded), 1.15 * static_cast<double>(tokens));
  order.pop_back();  // the step that was left over
  const auto falls = [](int64_t longest, int64_t next) { return next < longest - 20; };
  EXPECT_NE(std::adjacent_find(order.begin(), order.end(), falls), order.end());  // steps are shuffled
}

TEST(DistributedBucketSampler, NeverExceedsItsLimits) {
  const auto lengths = random_lengths(1000, 60);
  DistributedBucketSampler sampler(lengths, of_rank(0, 1, {.batch_size = 40, .max_tokens = 600}));
  for (const auto& batch : batches_of(sampler, 2)) {
    EXPECT_LE(batch.size(), 40u);
    EXPECT_LE(static_cast<int64_t>(batch.size()) * longest_of(batch, lengths), 600);
  }
}

TEST(DistributedBucketSampler, EpochsDifferAndRanksAgree) {
  const auto lengths = random_lengths(101, 30);
  const DistributedBucketSamplerOptions options{.batch_size = 4, .seed = 8};
  DistributedBucketSampler alone(lengths, of_rank(0, 1, options)), again(lengths, of_rank(0, 1, options));
  const auto first = batches_of(alone, 0), second = batches_of(alone, 1);
  EXPECT_NE(first, second);
  EXPECT_EQ(batches_of(again, 1), second);
  EXPECT_EQ(batches_of(again, 0), first);
  std::set<std::set<size_t>> partners, later;  // samples meet others in another epoch
  for (const auto& batch : first) partners.insert(std::set(batch.begin(), batch.end()));
  for (const auto& batch : second) later.insert(std::set(batch.begin(), batch.end()));
  EXPECT_NE(partners, later);
}

// With drop_last other batches are left out in each epoch, not always the longest.
TEST(DistributedBucketSampler, DropsNotAlwaysTheSame) {
  const auto lengths = random_lengths(50, 100);
  std::set<size_t> seen;
  for (uint64_t epoch = 0; epoch < 20; ++epoch) {
    for (int rank = 0; rank < 3; ++rank) {
      DistributedBucketSampler sampler(lengths,
                                       of_rank(rank, 3, {.batch_size = 5, .bucket_batches = 1, .drop_last = true}));
      ASSERT_EQ(sampler.size(), 3u);  // of 10 batches, one is left over
      for (const auto& batch : batches_of(sampler, epoch)) seen.insert(batch.begin(), batch.end());
    }
  }
  EXPECT_EQ(seen.size(), 50u);
}

TEST(DistributedBucketSampler, ResumesAtEveryPosition) {
  const auto lengths = random_lengths(60, 30);
  const auto options = of_rank(1, 3, {.max_tokens = 60, .seed = 2});
  DistributedBucketSampler first(lengths, options);
  const auto whole = batches_of(first, 6);
  ASSERT_GT(whole.size(), 5u);
  for (size_t position = 0; position <= whole.size(); ++position) {
    first.seek(6, position);
    first.reset();
    DistributedBucketSampler second(lengths, options);
    load(second, saved(first));
    second.reset();
    EXPECT_EQ(batches_of(second), Batches(whole.begin() + static_cast<ptrdiff_t>(position), whole.end()));
  }
  EXPECT_THROW(first.seek(0, whole.size() + 1), InvalidArgument);
}

class BatchEcho : public torch::data::datasets::BatchDataset<BatchEcho, std::vector<size_t>> {
 public:
  std::vector<size_t> get_batch(at::ArrayRef<size_t> request) override { return request.vec(); }
  std::optional<size_t> size() const override { return std::nullopt; }
};

TEST(DistributedBucketSampler, FitsLibtorchsLoader) {
  const auto lengths = random_lengths(60, 30);
  const auto options = of_rank(0, 2, {.batch_size = 7, .max_tokens = 90});
  for (const size_t workers : {0, 2}) {
    DistributedBucketSampler sampler(lengths, options), alone(lengths, options);
    auto loader =
        torch::data::make_data_loader(BatchEcho(), sampler, torch::data::DataLoaderOptions().workers(workers));
    for (uint64_t epoch = 0; epoch < 2; ++epoch) {
      sampler.set_epoch(epoch);
      Batches seen;
      for (auto& batch : *loader) seen.push_back(batch);
      EXPECT_EQ(seen, batches_of(alone, epoch));
    }
  }
  DistributedBucketSampler sampler(lengths, options);
  EXPECT_TRUE(sampler.next(7).has_value());
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { sampler.next(32); }), "the loader's batch size is 32");
}

TEST(DistributedBucketSampler, RefusesWhatCannotBe) {
  const auto refusal = [](const Lengths& lengths, const DistributedBucketSamplerOptions& options) {
    return message_of<InvalidArgument>([&] { DistributedBucketSampler(lengths, of_rank(0, 1, options)); });
  };
  EXPECT_CONTAINS(refusal({1}, {}), "batches have no limit");
  EXPECT_CONTAINS(refusal({1}, {.batch_size = 0}), "batch_size: expected 1 or more");
  EXPECT_CONTAINS(refusal({1}, {.max_tokens = 0}), "max_tokens: expected 1 or more, got 0");
  EXPECT_CONTAINS(refusal({1}, {.batch_size = 1, .bucket_batches = 0}), "bucket_batches");
  EXPECT_CONTAINS(refusal({1, -2}, {.batch_size = 1}), "the length of sample 1: expected 0 or more, got -2");
  EXPECT_CONTAINS(refusal({1, 9}, {.max_tokens = 8}),
                  "sample 1: expected at most the 8 tokens that a batch may have, got 9");
  DistributedBucketSampler sampler({1, 2}, of_rank(0, 1, {.batch_size = 1}));
  DistributedBucketSampler other({1, 3}, of_rank(0, 1, {.batch_size = 1}));
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { load(other, saved(sampler)); }), "hash_of_lengths");
  // Limits near the largest number do not overflow.
  DistributedBucketSampler huge({0, 1, INT64_MAX}, of_rank(0, 1, {.batch_size = SIZE_MAX, .max_tokens = INT64_MAX}));
  EXPECT_EQ(batches_of(huge).size(), 2u);
}

}  // namespace
}  // namespace muster::test
