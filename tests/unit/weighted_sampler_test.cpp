// DistributedWeightedSampler compared with Python's WeightedRandomSampler, and its position.
#include "muster/data/weighted_sampler.h"

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "muster/base/error.h"
#include "muster/data/sampler.h"
#include "support/archived.h"
#include "support/hash.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using Weights = std::vector<double>;

std::vector<size_t> rest_of(EpochSampler& sampler) {
  std::vector<size_t> all;
  while (const auto part = sampler.next(7)) all.insert(all.end(), part->begin(), part->end());
  return all;
}

std::vector<size_t> whole_epoch(EpochSampler& sampler, uint64_t epoch) {
  sampler.set_epoch(epoch);
  sampler.reset();
  return rest_of(sampler);
}

Weights some_weights(size_t size) {
  Weights weights(size);
  for (size_t i = 0; i < size; ++i) weights[i] = i % 5 == 4 ? 0.0 : static_cast<double>(i * i % 7) + 0.5;
  return weights;
}

// Made with WeightedRandomSampler of PyTorch 2.13, a generator seeded with seed + epoch, and DistributedSampler's
// padding. Hashes of each rank's length and indices, rank after rank.
TEST(DistributedWeightedSampler, DrawsWhatPythonDraws) {
  struct Case {
    size_t size, num_samples;
    bool replacement;
    uint64_t seed, epoch;
    int replicas;
    uint64_t hash;
  };
  const Case cases[] = {
      {10, 10, true, 0U, 0, 2, 0x806e9021339c5a64ULL},           // rank 0: 8, 3, 5, 2, 5
      {10, 8, false, 0U, 1, 3, 0xeaf2e9b57d67ddafULL},           // rank 0: 5, 0, 8
      {10, 25, true, 7U, 2, 3, 0x60542513d3d43764ULL},           // rank 0: 2, 1, 1, 5, 5, …
      {1000, 1000, true, 12345U, 17, 3, 0x8928daec97823fd4ULL},  // rank 0: 15, 72, 643, 928, 40, …
      {1000, 800, false, 12345U, 17, 7, 0x8c35e24ae90df720ULL},  // rank 0: 782, 720, 572, 910, 760, …
      {60000, 60000, true, 1U, 9, 4, 0xa59b0a6c7553031fULL},
      {60000, 1000, false, 3U, 1, 2, 0xe083d98ce2278d10ULL},
      {1, 1, false, 0U, 0, 1, 0x392209f14dea4c24ULL},
      {3, 2, false, 5U, 0, 5, 0x05dbdf1dfe3c95e6ULL},  // rank 0: 2
  };
  for (const auto& c : cases) {
    // Without replacement libtorch draws from MKL's generator, if it was built with MKL.
    if (!c.replacement && !at::hasMKL()) continue;
    Hash hash;
    for (int rank = 0; rank < c.replicas; ++rank) {
      DistributedWeightedSampler sampler(some_weights(c.size), {.num_replicas = c.replicas,
                                                                .rank = rank,
                                                                .num_samples = c.num_samples,
                                                                .replacement = c.replacement,
                                                                .seed = c.seed});
      const auto indices = whole_epoch(sampler, c.epoch);
      hash.add(indices.size());
      for (const auto index : indices) hash.add(index);
    }
    EXPECT_EQ(hash.get(), c.hash) << c.size << " samples, " << c.replicas << " replicas, seed " << c.seed;
  }
  // Spelled out, so that a failure above can be distinguished from a wrong hash.
  const Weights weights = {0.1, 0.9, 0.4, 0.7, 3.0, 0.6};
  DistributedWeightedSampler with(weights, {.num_replicas = 1, .rank = 0, .num_samples = 8, .seed = 7});
  EXPECT_EQ(rest_of(with), (std::vector<size_t>{3, 3, 4, 4, 5, 4, 3, 4}));
  if (!at::hasMKL()) return;
  const DistributedWeightedSamplerOptions options{
      .num_replicas = 1, .rank = 0, .num_samples = 4, .replacement = false, .seed = 7};
  DistributedWeightedSampler without(weights, options), of_tensor(at::tensor(weights, at::kDouble), options);
  EXPECT_EQ(rest_of(without), (std::vector<size_t>{1, 4, 3, 5}));
  EXPECT_EQ(rest_of(of_tensor), (std::vector<size_t>{1, 4, 3, 5}));
}

TEST(DistributedWeightedSampler, SplitsItsDrawAsDistributedSamplerDoes) {
  for (size_t draws = 0; draws <= 12; ++draws) {
    for (int replicas = 1; replicas <= 5; ++replicas) {
      for (const auto& [drop_last, pad] : {std::pair(false, true), std::pair(true, true), std::pair(false, false)}) {
        DistributedWeightedSampler alone(some_weights(6),
                                         {.num_replicas = 1, .rank = 0, .num_samples = draws, .seed = 2});
        const auto all = whole_epoch(alone, 3);
        EXPECT_EQ(all.size(), draws);
        for (int rank = 0; rank < replicas; ++rank) {
          DistributedWeightedSampler sampler(some_weights(6), {.num_replicas = replicas,
                                                               .rank = rank,
                                                               .num_samples = draws,
                                                               .seed = 2,
                                                               .drop_last = drop_last,
                                                               .pad = pad});
          DistributedSampler places(
              draws, {.num_replicas = replicas, .rank = rank, .shuffle = false, .drop_last = drop_last, .pad = pad});
          std::vector<size_t> expected;
          for (const size_t place : rest_of(places)) expected.push_back(all[place]);
          EXPECT_EQ(whole_epoch(sampler, 3), expected);
          EXPECT_EQ(sampler.size(), expected.size());
        }
      }
    }
  }
  DistributedWeightedSampler empty(Weights{}, {.num_replicas = 2, .rank = 1});
  EXPECT_FALSE(empty.next(1).has_value());
}

TEST(DistributedWeightedSampler, ResumesAtEveryPosition) {
  const DistributedWeightedSamplerOptions options{.num_replicas = 2, .rank = 1, .num_samples = 21, .seed = 4};
  DistributedWeightedSampler first(some_weights(9), options);
  const auto whole = whole_epoch(first, 5);
  for (size_t position = 0; position <= whole.size(); ++position) {
    first.seek(5, 0);
    first.reset();
    if (position > 0) first.next(position);
    DistributedWeightedSampler second(some_weights(9), options);
    load(second, saved(first));
    second.set_epoch(5);
    second.reset();
    EXPECT_EQ(second.index(), position);
    EXPECT_EQ(rest_of(second), std::vector<size_t>(whole.begin() + static_cast<ptrdiff_t>(position), whole.end()));
  }
}

TEST(DistributedWeightedSampler, RefusesWhatCannotBeDrawn) {
  const auto refusal = [](const Weights& weights, DistributedWeightedSamplerOptions options = {}) {
    options.num_replicas = 1;
    options.rank = 0;
    return message_of<InvalidArgument>([&] { DistributedWeightedSampler(weights, options); });
  };
  EXPECT_CONTAINS(refusal({1, -1}), "weight 1: expected a finite number of 0 or more, got -1");
  EXPECT_CONTAINS(refusal({std::nan(""), 1}), "weight 0: expected a finite number of 0 or more, got nan");
  EXPECT_CONTAINS(refusal({std::numeric_limits<double>::infinity()}),
                  "weight 0: expected a finite number of 0 or more, got inf");
  EXPECT_CONTAINS(refusal({0, 0}), "none of the 2 weights is above 0");
  EXPECT_CONTAINS(refusal({}, {.num_samples = 1}), "none of the 0 weights is above 0");
  EXPECT_CONTAINS(refusal({1e308, 1e308}), "overflows");
  EXPECT_CONTAINS(refusal({1, 0, 1}, {.num_samples = 3, .replacement = false}), "because 2 weights are above 0");
  EXPECT_CONTAINS(message_of<InvalidArgument>([] {
                    DistributedWeightedSampler(at::ones({2, 2}), {.num_replicas = 1, .rank = 0});
                  }),
                  "one-dimensional");
  DistributedWeightedSampler sampler({1, 2}, {.num_replicas = 1, .rank = 0});
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { sampler.reset(3); }),
                  "reset(): expected 2 samples, as it was made for, got 3");
  sampler.reset(2);
  EXPECT_THROW(sampler.next(0), InvalidArgument);
  EXPECT_THROW(sampler.seek(0, 3), InvalidArgument);
}

TEST(DistributedWeightedSampler, LoadsOnlyWhatIsItsOwn) {
  DistributedWeightedSampler sampler({1, 2, 3}, {.num_replicas = 1, .rank = 0});
  DistributedWeightedSampler other({1, 2, 4}, {.num_replicas = 1, .rank = 0});
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { load(other, saved(sampler)); }), "hash_of_weights");
  DistributedSampler plain(3, {.num_replicas = 1, .rank = 0});
  EXPECT_CONTAINS(message_of<CorruptError>([&] { load(sampler, saved(plain)); }),
                  "does not hold a DistributedWeightedSampler");
}

}  // namespace
}  // namespace muster::test
