// DistributedSampler compared with Python's, and checked against its guarantees, for all small cases.
#include "muster/data/sampler.h"

#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/data/bucket_sampler.h"
#include "muster/data/weighted_sampler.h"
#include "support/archived.h"
#include "support/hash.h"

namespace muster::test {
namespace {

using Indices = std::vector<size_t>;

// The rest of the epoch under way, in batches of `batch`.
Indices drain(DistributedSampler& sampler, size_t batch = 7) {
  Indices all;
  while (const auto part = sampler.next(batch)) {
    EXPECT_FALSE(part->empty());
    EXPECT_LE(part->size(), batch);
    all.insert(all.end(), part->begin(), part->end());
  }
  EXPECT_FALSE(sampler.next(batch).has_value());  // and stays at its end
  return all;
}

Indices epoch_of(DistributedSampler& sampler, uint64_t epoch) {
  sampler.set_epoch(epoch);
  sampler.reset();
  return drain(sampler);
}

// Made with torch.utils.data.distributed.DistributedSampler of PyTorch 2.13. Hashes of each rank's length and indices,
// rank after rank.
TEST(DistributedSampler, GivesPythonsOrderToTheBit) {
  struct Case {
    size_t size;
    int replicas;
    uint64_t seed, epoch;
    bool shuffle, drop_last;
    uint64_t hash;
  };
  const Case cases[] = {
      {10, 2, 0U, 0, true, false, 0x5828a206a55ad744ULL},         // rank 0: 4, 7, 3, 0, 6
      {10, 3, 0U, 1, true, false, 0x965759a2ad3b4ee3ULL},         // rank 0: 5, 2, 9, 4
      {10, 3, 7U, 2, true, true, 0xe8c0236a4dca8b04ULL},          // rank 0: 0, 7, 9
      {11, 4, 7U, 2, false, false, 0x5822340153ebdd4eULL},        // rank 0: 0, 4, 8
      {3, 8, 1U, 0, true, false, 0x932ea4c1685b1fc6ULL},          // rank 0: 1
      {2, 5, 0U, 0, false, false, 0x3eeb576ed706e0a4ULL},         // rank 0: 0
      {3, 8, 1U, 0, true, true, 0xb9b23f3a46fd0825ULL},           // rank 0: nothing
      {1000, 3, 12345U, 17, true, false, 0xa5f51eeadc253591ULL},  // rank 0: 932, 590, 135, 792, 520, …
      {1000, 7, 1099511627781U, 3, true, true, 0x0c87fbe9caaf8fbcULL},
      {60000, 2, 0U, 0, true, false, 0xa17415cae8fae719ULL},
      {60000, 7, 1U, 9, true, false, 0xf2416f7195ec2146ULL},
      {65535, 2, 3U, 1, true, false, 0x4dd82bf7acd7ca09ULL},
      {300007, 3, 3U, 1, true, false, 0xdf64704902e52d34ULL},
      {0, 3, 0U, 0, true, false, 0x81d23fd7003c2305ULL},
      {1, 1, 0U, 0, true, false, 0x392209f14dea4c24ULL},
      {60000, 4, 9223372036854775808U, 5, true, false, 0x1a301b867d631a91ULL},
  };
  for (const auto& c : cases) {
    Hash hash;
    for (int rank = 0; rank < c.replicas; ++rank) {
      DistributedSampler sampler(
          c.size,
          {.num_replicas = c.replicas, .rank = rank, .shuffle = c.shuffle, .seed = c.seed, .drop_last = c.drop_last});
      const auto indices = epoch_of(sampler, c.epoch);
      hash.add(indices.size());
      for (const auto index : indices) hash.add(index);
    }
    EXPECT_EQ(hash.get(), c.hash) << c.size << " samples, " << c.replicas << " replicas, seed " << c.seed;
  }
  // Spelled out, so that a failure above can be distinguished from a wrong hash.
  const Indices expected[] = {{5, 4, 9, 2}, {0, 1, 6, 5}, {3, 7, 8, 0}};
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler sampler(10, {.num_replicas = 3, .rank = rank, .seed = 5});
    EXPECT_EQ(epoch_of(sampler, 2), expected[rank]);
  }
}

TEST(DistributedSampler, DividesEverySmallDatasetAsItPromises) {
  for (size_t size = 0; size <= 20; ++size) {
    for (int replicas = 1; replicas <= 5; ++replicas) {
      for (const bool shuffle : {false, true}) {
        for (const auto& [drop_last, pad] : {std::pair(false, true), std::pair(true, true), std::pair(false, false)}) {
          SCOPED_TRACE(testing::Message() << size << " samples, " << replicas << " replicas, shuffle " << shuffle
                                          << ", drop_last " << drop_last << ", pad " << pad);
          std::map<size_t, int> times;
          size_t total = 0, shortest = SIZE_MAX, longest = 0;
          for (int rank = 0; rank < replicas; ++rank) {
            DistributedSampler sampler(size, {.num_replicas = replicas,
                                              .rank = rank,
                                              .shuffle = shuffle,
                                              .seed = 3,
                                              .drop_last = drop_last,
                                              .pad = pad});
            const auto indices = epoch_of(sampler, 4);
            EXPECT_EQ(indices.size(), sampler.size());
            for (const auto index : indices) {
              EXPECT_LT(index, size);
              ++times[index];
            }
            total += indices.size();
            shortest = std::min(shortest, indices.size());
            longest = std::max(longest, indices.size());
          }
          const size_t n = static_cast<size_t>(replicas);
          int most = 0;
          for (const auto& [index, count] : times) most = std::max(most, count);
          if (drop_last) {
            EXPECT_EQ(longest, shortest);
            EXPECT_EQ(total, size / n * n);
            EXPECT_TRUE(times.empty() || most == 1);
          } else if (pad) {
            EXPECT_EQ(longest, shortest);
            EXPECT_EQ(total, (size + n - 1) / n * n);
            EXPECT_EQ(times.size(), size);  // all are there
          } else {
            EXPECT_LE(longest - shortest, 1u);
            EXPECT_EQ(total, size);
            EXPECT_EQ(times.size(), size);
            EXPECT_TRUE(times.empty() || most == 1);
          }
        }
      }
    }
  }
}

TEST(DistributedSampler, BatchesOfRanksTogetherAreTheBatchesOfOne) {
  DistributedSampler alone(96, {.num_replicas = 1, .rank = 0, .seed = 1});
  DistributedSampler first(96, {.num_replicas = 2, .rank = 0, .seed = 1}),
      second(96, {.num_replicas = 2, .rank = 1, .seed = 1});
  while (const auto whole = alone.next(12)) {
    std::set<size_t> halves;
    for (auto* sampler : {&first, &second}) {
      const auto half = sampler->next(6);
      ASSERT_TRUE(half.has_value());
      halves.insert(half->begin(), half->end());
    }
    EXPECT_EQ(halves, std::set<size_t>(whole->begin(), whole->end()));
  }
}

TEST(DistributedSampler, RefusesWhatCannotBe) {
  const auto message = [](const DistributedSamplerOptions& options) -> std::string {
    try {
      DistributedSampler sampler(10, options);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({.num_replicas = 2, .rank = 2}),
            "DistributedSampler: rank: expected 0 to 1 among 2 replicas, got 2. Use 0 to 1");
  EXPECT_NE(message({.num_replicas = 2, .rank = -1}).find("got -1"), std::string::npos);
  EXPECT_NE(message({.num_replicas = 0, .rank = 0}).find("num_replicas: expected 1 or more, got 0"), std::string::npos);
  EXPECT_NE(message({.num_replicas = 2, .rank = 0, .drop_last = true, .pad = false}).find("drop_last"),
            std::string::npos);
  DistributedSampler sampler(10, {.num_replicas = 2, .rank = 0});
  EXPECT_THROW(sampler.next(0), InvalidArgument);
  EXPECT_THROW(DistributedSampler(10), Aborted);  // no World in this thread
}

TEST(DistributedSampler, AnotherSizeTakesEffectAtReset) {
  DistributedSampler sampler(10, {.num_replicas = 2, .rank = 1, .shuffle = false});
  sampler.reset(5);
  EXPECT_EQ(drain(sampler), (Indices{1, 3, 0}));
  sampler.reset();
  EXPECT_EQ(drain(sampler), (Indices{1, 3, 0}));
}

// A dataset whose batches are their own indices.
class Echo : public torch::data::datasets::BatchDataset<Echo, Indices> {
 public:
  explicit Echo(size_t size) : size_(size) {}
  Indices get_batch(at::ArrayRef<size_t> request) override { return request.vec(); }
  std::optional<size_t> size() const override { return size_; }

 private:
  size_t size_;
};

template <typename Loader>
Indices all_of(Loader& loader) {
  Indices all;
  for (auto& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

TEST(DistributedSampler, TheUsersHandleReachesTheLoadersCopy) {
  for (const size_t workers : {0, 2}) {
    DistributedSampler sampler(50, {.num_replicas = 2, .rank = 1, .seed = 5});
    auto loader = torch::data::make_data_loader(Echo(50), sampler, torch::data::DataLoaderOptions(4).workers(workers));
    std::set<Indices> orders;
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      sampler.set_epoch(epoch);
      const auto seen = all_of(*loader);
      DistributedSampler alone(50, {.num_replicas = 2, .rank = 1, .seed = 5});
      EXPECT_EQ(seen, epoch_of(alone, epoch));
      orders.insert(seen);
    }
    EXPECT_EQ(orders.size(), 3u);
    EXPECT_EQ(all_of(*loader), all_of(*loader));  // the same epoch again is the same order
  }
}

TEST(DistributedSampler, SetEpochLeavesTheEpochUnderWayAlone) {
  DistributedSampler sampler(30, {.num_replicas = 1, .rank = 0});
  const auto before = epoch_of(sampler, 0), after = epoch_of(sampler, 1);
  sampler.set_epoch(0);
  sampler.reset();
  auto seen = *sampler.next(10);
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.epoch(), 1u);
  const auto rest = drain(sampler);
  seen.insert(seen.end(), rest.begin(), rest.end());
  EXPECT_EQ(seen, before);
  sampler.reset();
  EXPECT_EQ(drain(sampler), after);
}

const DistributedSamplerOptions kSecondOfTwo{.num_replicas = 2, .rank = 1, .seed = 9};

TEST(DistributedSampler, SeeksWhateverTheLoaderDrawsAhead) {
  for (const size_t workers : {0, 2}) {
    DistributedSampler sampler(50, kSecondOfTwo);
    auto loader = torch::data::make_data_loader(Echo(50), sampler, torch::data::DataLoaderOptions(4).workers(workers));
    const auto whole = epoch_of(sampler, 2);
    sampler.seek(2, 8);
    EXPECT_EQ(sampler.epoch(), 2u);
    EXPECT_EQ(all_of(*loader), Indices(whole.begin() + 8, whole.end())) << workers << " workers";
    EXPECT_EQ(all_of(*loader), whole);  // only the first iteration is a rest
    sampler.seek(2, 25);
    EXPECT_TRUE(all_of(*loader).empty());
    EXPECT_THROW(sampler.seek(0, 26), InvalidArgument);
  }
}

TEST(DistributedSampler, ResumesInTheMiddleOfAnEpoch) {
  DistributedSampler first(50, kSecondOfTwo);
  auto loader = torch::data::make_data_loader(Echo(50), first, 4);
  const auto whole = epoch_of(first, 3), next_epoch = epoch_of(first, 4);
  first.set_epoch(3);
  Indices seen;
  std::string bytes;
  for (auto& batch : *loader) {
    seen.insert(seen.end(), batch.begin(), batch.end());
    if (seen.size() == 12) {
      bytes = saved(first);
      break;
    }
  }
  ASSERT_EQ(first.index(), 12u);

  DistributedSampler second(50, kSecondOfTwo);
  auto other = torch::data::make_data_loader(Echo(50), second, 4);
  load(second, bytes);
  EXPECT_EQ(second.epoch(), 3u);
  EXPECT_EQ(second.index(), 12u);
  EXPECT_EQ(saved(second), bytes);   // also before it is used
  second.set_epoch(second.epoch());  // as a training loop does
  const auto rest = all_of(*other);
  seen.insert(seen.end(), rest.begin(), rest.end());
  EXPECT_EQ(seen, whole);
  EXPECT_EQ(all_of(*other), whole);  // only the first iteration is a rest
  second.set_epoch(4);
  EXPECT_EQ(all_of(*other), next_epoch);

  load(second, bytes);  // another epoch than the saved one: from its start
  second.set_epoch(4);
  EXPECT_EQ(all_of(*other), next_epoch);

  load(second, bytes);  // and without a loader
  EXPECT_EQ(drain(second), rest);

  const auto end = saved(second);
  load(first, end);
  first.reset();
  EXPECT_TRUE(drain(first).empty());  // nothing is left of that epoch
}

TEST(DistributedSampler, AnEvaluationResumesOnAShorterRank) {
  DistributedSampler longer(7, {.num_replicas = 2, .rank = 0, .shuffle = false, .pad = false});
  DistributedSampler shorter(7, {.num_replicas = 2, .rank = 1, .shuffle = false, .pad = false});
  EXPECT_EQ(drain(longer).size(), 4u);
  load(shorter, saved(longer));
  EXPECT_TRUE(drain(shorter).empty());
}

TEST(DistributedSampler, LoadsOnlyWhatIsItsOwn) {
  DistributedSampler sampler(50, kSecondOfTwo);
  sampler.next(6);
  const auto bytes = saved(sampler);
  DistributedSampler other_size(51, kSecondOfTwo);
  EXPECT_THROW(load(other_size, bytes), InvalidArgument);
  DistributedSampler other_seed(50, {.num_replicas = 2, .rank = 1, .seed = 10});
  try {
    load(other_seed, bytes);
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("expected seed 10, as this one has, got 9"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(other_seed.index(), 0u);

  torch::serialize::OutputArchive empty;
  EXPECT_THROW(load(sampler, bytes_of(empty)), CorruptError);
  EXPECT_EQ(sampler.index(), 6u);

  torch::serialize::OutputArchive beyond;
  for (const auto& [key, value] : std::map<std::string, int64_t>{{"distributed_sampler", 1},
                                                                 {"dataset_size", 50},
                                                                 {"replicas", 2},
                                                                 {"shuffle", 1},
                                                                 {"seed", 9},
                                                                 {"drop_last", 0},
                                                                 {"pad", 1},
                                                                 {"epoch", 0},
                                                                 {"index", 26}}) {
    beyond.write(key, c10::IValue(value));
  }
  EXPECT_THROW(load(sampler, bytes_of(beyond)), CorruptError);
}

// Every rank gives out `each` samples; then other ranks load what rank 0 has saved, and give out the rest.
template <typename Make>
std::map<size_t, int> times_given(int before, int after, size_t each, const Make& make) {
  std::map<size_t, int> times;
  std::string bytes;
  for (int rank = 0; rank < before; ++rank) {
    auto sampler = make(before, rank);
    sampler.set_epoch(3);
    sampler.reset();
    for (size_t left = each; left > 0;) {
      const auto part = sampler.next(std::min<size_t>(left, 5));
      if (!part) break;
      left -= part->size();
      for (const size_t index : *part) ++times[index];
    }
    if (rank == 0) bytes = saved(sampler);
  }
  for (int rank = 0; rank < after; ++rank) {
    auto sampler = make(after, rank);
    load(sampler, bytes);
    EXPECT_EQ(sampler.epoch(), 3u);
    sampler.reset();
    while (const auto part = sampler.next(4))
      for (const size_t index : *part) ++times[index];
  }
  return times;
}

TEST(DistributedSampler, AnyNumberOfRanksGoesOnWhereAnyOtherWas) {
  static constexpr size_t kSize = 53, kGiven = 24;  // a multiple of 1, 2, 3 and 4
  const auto expect_once = [](const std::map<size_t, int>& times, size_t most) {
    EXPECT_EQ(times.size(), kSize);
    size_t again = 0;
    for (const auto& [index, count] : times) again += static_cast<size_t>(count - 1);
    EXPECT_LE(again, most);
  };
  for (int before = 1; before <= 4; ++before)
    for (int after = 1; after <= 4; ++after)
      for (const bool shuffle : {false, true}) {
        SCOPED_TRACE(testing::Message() << "from " << before << " to " << after << " ranks, shuffle " << shuffle);
        const size_t n = static_cast<size_t>(before), m = static_cast<size_t>(after);
        const auto of = [&](bool pad, bool drop_last = false) {
          return [=](int replicas, int rank) {
            return DistributedSampler(kSize, {.num_replicas = replicas,
                                              .rank = rank,
                                              .shuffle = shuffle,
                                              .seed = 7,
                                              .drop_last = drop_last,
                                              .pad = pad});
          };
        };
        for (const size_t given : {size_t{0}, kGiven, 2 * kGiven}) {
          expect_once(times_given(before, after, given / n, of(false)), 0);
          const auto padded = times_given(before, after, given / n, of(true));
          expect_once(padded, (m - kSize % m) % m);
          const auto dropped = times_given(before, after, given / n, of(true, true));
          EXPECT_EQ(dropped.size(), kSize / m * m);
          for (const auto& [index, count] : dropped) EXPECT_EQ(count, 1) << index;
        }
        expect_once(times_given(before, after, kSize, of(false)), 0);  // an epoch that is over
        expect_once(times_given(before, after, kSize, of(true)), (n - kSize % n) % n);
        expect_once(times_given(before, after, kGiven / n,
                                [&](int replicas, int rank) {
                                  return DistributedWeightedSampler(
                                      std::vector<double>(kSize, 1),
                                      {.num_replicas = replicas, .rank = rank, .replacement = false, .pad = false});
                                }),
                    0);
      }
}

TEST(DistributedSampler, APositionBetweenTheStepsOfOtherRanksIsRefused) {
  DistributedSampler two(50, kSecondOfTwo), three(50, {.num_replicas = 3, .rank = 2, .seed = 9});
  two.next(5);
  three.next(1);
  try {
    load(three, saved(two));
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what())
                  .find("DistributedSampler: position: expected a multiple of 3 samples, because as many ranks go on, "
                        "got 10, which 2 ranks have given out. Save when"),
              std::string::npos)
        << error.what();
  }
  EXPECT_EQ(three.index(), 1u);
  two.next(1);
  load(three, saved(two));
  EXPECT_EQ(three.index(), 4u);

  // The order of these depends on the number of ranks.
  const std::vector<int64_t> lengths(40, 3);
  DistributedBucketSampler one(lengths, {.num_replicas = 1, .rank = 0, .batch_size = 4}),
      other(lengths, {.num_replicas = 2, .rank = 0, .batch_size = 4});
  EXPECT_THROW(load(other, saved(one)), InvalidArgument);
}

}  // namespace
}  // namespace muster::test
