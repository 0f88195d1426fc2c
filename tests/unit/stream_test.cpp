// DistributedStream and ShardedSource: which rank gets what, the same number on all, and the position; even_batches().
#include "muster/data/stream.h"

#include <gtest/gtest.h>
#include <torch/data/dataloader.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/data/even_batches.h"
#include "muster/data/sharded_source.h"
#include "support/archived.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using Numbers = std::vector<int64_t>;

// 1000 * epoch, 1000 * epoch + 1, …: `size` numbers; throws before number `broken`.
struct Counting {
  int64_t size = 0;
  int64_t broken = -1;
  int64_t at = 0;
  int64_t first = 0;
  std::shared_ptr<size_t> read = std::make_shared<size_t>(0);

  void reset(uint64_t epoch) {
    at = 0;
    first = static_cast<int64_t>(epoch) * 1000;
  }
  std::optional<int64_t> next() {
    if (at == broken) throw std::runtime_error("the file is broken");
    if (at == size) return std::nullopt;
    ++*read;
    return first + at++;
  }
};

struct Seeking : Counting {
  void skip(size_t n) { at = std::min(size, at + static_cast<int64_t>(n)); }
};

template <typename Source>
Numbers rest_of(DistributedStream<Source>& stream) {
  Numbers all;
  while (const auto number = stream.next()) all.push_back(*number);
  EXPECT_FALSE(stream.next().has_value());
  return all;
}

template <typename Source>
Numbers whole_epoch(DistributedStream<Source>& stream, uint64_t epoch) {
  stream.set_epoch(epoch);
  stream.reset();
  return rest_of(stream);
}

TEST(DistributedStream, GivesEachRankItsPart) {
  for (const bool even : {true, false}) {
    for (int64_t size = 0; size <= 13; ++size) {
      for (int replicas = 1; replicas <= 5; ++replicas) {
        for (const size_t buffer : {0, 1, 3, 100}) {
          SCOPED_TRACE(testing::Message() << size << " examples, " << replicas << " replicas, even " << even
                                          << ", shuffle_buffer " << buffer);
          for (int rank = 0; rank < replicas; ++rank) {
            DistributedStream stream(Counting{.size = size},
                                     {.num_replicas = replicas, .rank = rank, .even = even, .shuffle_buffer = buffer});
            Numbers expected;
            for (int64_t i = rank; i < (even ? size / replicas * replicas : size); i += replicas)
              expected.push_back(2000 + i);
            auto got = whole_epoch(stream, 2);
            EXPECT_EQ(stream.index(), expected.size());
            if (buffer > 1) std::sort(got.begin(), got.end());
            EXPECT_EQ(got, expected);
          }
        }
      }
    }
  }
}

TEST(DistributedStream, TheShuffleBufferShuffles) {
  const auto shuffled = [](uint64_t seed, uint64_t epoch) {
    DistributedStream stream(Counting{.size = 100}, {.num_replicas = 1, .rank = 0, .shuffle_buffer = 10, .seed = seed});
    auto numbers = whole_epoch(stream, epoch);
    for (auto& number : numbers) number -= static_cast<int64_t>(epoch) * 1000;
    // A buffer of 10 cannot give a number before it is read.
    for (size_t i = 0; i < numbers.size(); ++i) EXPECT_LT(numbers[i], static_cast<int64_t>(i) + 10);
    return numbers;
  };
  const std::set<Numbers> orders = {shuffled(0, 0), shuffled(0, 1), shuffled(1, 0), shuffled(1, 1)};
  EXPECT_EQ(orders.size(), 4u);
  EXPECT_EQ(shuffled(1, 1), shuffled(1, 1));
  Numbers sorted(100);
  std::iota(sorted.begin(), sorted.end(), 0);
  EXPECT_FALSE(orders.contains(sorted));
}

template <typename Source>
void expect_resumes(Source source, const DistributedStreamOptions& options) {
  DistributedStream first(source, options);
  const auto whole = whole_epoch(first, 3);
  const auto after = whole_epoch(first, 4);
  for (size_t position = 0; position <= whole.size(); ++position) {
    first.set_epoch(3);
    first.reset();
    for (size_t i = 0; i < position; ++i) first.next();
    DistributedStream second(source, options);
    load(second, saved(first));
    EXPECT_EQ(saved(second), saved(first));
    second.set_epoch(second.epoch());  // as a training loop does
    second.reset();
    EXPECT_EQ(second.index(), position);
    EXPECT_EQ(rest_of(second), Numbers(whole.begin() + static_cast<ptrdiff_t>(position), whole.end()));
    EXPECT_EQ(whole_epoch(second, 4), after);
    load(second, saved(first));  // without reset()
    EXPECT_EQ(rest_of(second), Numbers(whole.begin() + static_cast<ptrdiff_t>(position), whole.end()));
  }
}

TEST(DistributedStream, ResumesAtEveryPosition) {
  for (const bool even : {true, false}) {
    for (const size_t buffer : {0, 4}) {
      for (const int rank : {0, 1, 2}) {
        const DistributedStreamOptions options{
            .num_replicas = 3, .rank = rank, .even = even, .shuffle_buffer = buffer, .seed = 5};
        expect_resumes(Counting{.size = 32}, options);
        expect_resumes(Seeking{{.size = 32}}, options);
      }
    }
  }
}

TEST(DistributedStream, ASourceThatSeeksIsNotReadAgain) {
  const Seeking source{{.size = 90}};
  DistributedStream stream(source, {.num_replicas = 3, .rank = 1});
  stream.seek(0, 20);
  stream.reset();
  EXPECT_EQ(*source.read, 0u);
  EXPECT_EQ(stream.next(), 61);
}

TEST(DistributedStream, IsADatasetOfLibtorchsLoader) {
  for (const size_t workers : {0, 1}) {
    DistributedStream stream(Counting{.size = 23}, {.num_replicas = 2, .rank = 1});
    auto loader = torch::data::make_data_loader(stream, torch::data::DataLoaderOptions(4).workers(workers));
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      stream.set_epoch(epoch);
      Numbers seen;
      size_t batches = 0;
      for (auto& batch : *loader) {
        EXPECT_EQ(batch.size(), ++batches == 3 ? 3u : 4u);
        seen.insert(seen.end(), batch.begin(), batch.end());
      }
      DistributedStream alone(Counting{.size = 23}, {.num_replicas = 2, .rank = 1});
      EXPECT_EQ(seen, whole_epoch(alone, epoch));
    }
  }
  DistributedStream stream(Counting{.size = 2}, {.num_replicas = 1, .rank = 0});
  EXPECT_THROW(stream.get_batch(0), InvalidArgument);
}

TEST(DistributedStream, AnErrorOfTheSourceIsNotAnEnd) {
  DistributedStream stream(Counting{.size = 10, .broken = 5}, {.num_replicas = 2, .rank = 0});
  EXPECT_EQ(stream.next(), 0);
  EXPECT_EQ(stream.next(), 2);
  EXPECT_THROW(stream.next(), std::runtime_error);
  EXPECT_THROW(stream.next(), std::runtime_error);
  EXPECT_EQ(stream.index(), 2u);
  stream.reset();
  EXPECT_EQ(stream.next(), 0);
  stream.seek(0, 4);  // reads up to the broken place
  EXPECT_THROW(stream.reset(), std::runtime_error);
  EXPECT_THROW(stream.next(), std::runtime_error);
}

TEST(DistributedStream, ExamplesOfABatchThatFailsAreNotGiven) {
  DistributedStream stream(Counting{.size = 10, .broken = 7}, {.num_replicas = 1, .rank = 0});
  EXPECT_EQ(stream.get_batch(4), (Numbers{0, 1, 2, 3}));
  EXPECT_THROW(stream.get_batch(4), std::runtime_error);
  EXPECT_EQ(stream.index(), 4u);
  DistributedStream whole(Counting{.size = 10}, {.num_replicas = 1, .rank = 0});
  load(whole, saved(stream));
  EXPECT_EQ(whole.get_batch(4), (Numbers{4, 5, 6, 7}));
}

// Its reset() throws, once.
struct FlakySource : Counting {
  std::shared_ptr<bool> fails = std::make_shared<bool>(true);
  void reset(uint64_t epoch) {
    if (std::exchange(*fails, false)) throw std::runtime_error("the network is away");
    Counting::reset(epoch);
  }
};

TEST(DistributedStream, AnEpochThatCannotBeginIsTriedAgainAtItsPosition) {
  for (const size_t buffer : {0, 4}) {
    const DistributedStreamOptions options{.num_replicas = 2, .rank = 1, .shuffle_buffer = buffer};
    DistributedStream whole(Counting{.size = 30}, options);
    Numbers rest = whole_epoch(whole, 3);
    rest.erase(rest.begin(), rest.begin() + 5);
    FlakySource source;
    source.size = 30;
    DistributedStream stream(source, options);
    stream.seek(3, 5);
    const auto bytes = saved(stream);
    EXPECT_THROW(stream.reset(), std::runtime_error);
    EXPECT_THROW(stream.next(), std::runtime_error);
    EXPECT_EQ(saved(stream), bytes);
    stream.reset();
    EXPECT_EQ(rest_of(stream), rest);
    *source.fails = true;
    stream.seek(3, 5);
    EXPECT_THROW(stream.next(), std::runtime_error);
    load(stream, bytes);
    EXPECT_EQ(rest_of(stream), rest);
  }
}

TEST(DistributedStream, RefusesWhatCannotBe) {
  EXPECT_THROW(DistributedStream(Counting{}, {.num_replicas = 2, .rank = 2}), InvalidArgument);
  EXPECT_THROW(DistributedStream(Counting{}), Aborted);  // no World in this thread
  DistributedStream stream(Counting{.size = 9}, {.num_replicas = 2, .rank = 0, .seed = 1});
  DistributedStream other(Counting{.size = 9}, {.num_replicas = 2, .rank = 0, .seed = 2});
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { load(other, saved(stream)); }),
                  "expected seed 2, as this one has, got 1");
  torch::serialize::OutputArchive empty;
  EXPECT_THROW(load(other, bytes_of(empty)), CorruptError);
}

// A shard: the numbers from `first` on.
struct Shard {
  int64_t first;
  int64_t size;
};
struct ShardReader {
  Shard shard;
  std::optional<int64_t> next() {
    if (shard.size == 0) return std::nullopt;
    --shard.size;
    return shard.first++;
  }
};
struct SizedReader : ShardReader {
  size_t size() const { return static_cast<size_t>(shard.size); }
};

template <typename Reader>
auto sharded(const std::vector<Shard>& shards, int rank, int replicas, std::vector<int64_t>* opened = nullptr) {
  return ShardedSource(shards,
                       [opened](const Shard& shard) {
                         if (opened != nullptr) opened->push_back(shard.first);
                         Reader reader;
                         reader.shard = shard;
                         return reader;
                       },
                       {.num_replicas = replicas, .rank = rank, .seed = 1});
}

const std::vector<Shard> kShards = {{0, 5}, {100, 0}, {200, 1}, {300, 7}, {400, 3}};

TEST(ShardedSource, EachShardIsOneRanks) {
  Numbers all;
  for (const auto& shard : kShards)
    for (int64_t i = 0; i < shard.size; ++i) all.push_back(shard.first + i);
  for (int replicas = 1; replicas <= 7; ++replicas) {
    for (const uint64_t epoch : {0, 1, 2}) {
      Numbers together;
      for (int rank = 0; rank < replicas; ++rank) {
        DistributedStream stream(sharded<ShardReader>(kShards, rank, replicas));
        const auto own = whole_epoch(stream, epoch);
        together.insert(together.end(), own.begin(), own.end());
      }
      std::sort(together.begin(), together.end());
      EXPECT_EQ(together, all) << replicas << " replicas";
    }
  }
  DistributedStream stream(sharded<ShardReader>(kShards, 0, 1));
  EXPECT_NE(whole_epoch(stream, 0), whole_epoch(stream, 1));
}

TEST(ShardedSource, ResumesAtEveryPosition) {
  for (const size_t buffer : {0, 4}) {
    for (const int rank : {0, 1}) {
      expect_resumes(sharded<ShardReader>(kShards, rank, 2), {.shuffle_buffer = buffer});
      expect_resumes(sharded<SizedReader>(kShards, rank, 2), {.shuffle_buffer = buffer});
    }
  }
}

TEST(ShardedSource, BelongsToItsRank) {
  EXPECT_CONTAINS(message_of<InvalidArgument>(
                      [] { DistributedStream(sharded<ShardReader>(kShards, 0, 2), {.num_replicas = 2, .rank = 0}); }),
                  "the source is split already");
  DistributedStream first(sharded<ShardReader>(kShards, 0, 2)), second(sharded<ShardReader>(kShards, 1, 2));
  EXPECT_EQ(second.rank(), 1);
  EXPECT_EQ(second.num_replicas(), 2);
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { load(second, saved(first)); }),
                  "expected rank 1, as this one has, got 0");
  DistributedStream other(sharded<ShardReader>({{0, 5}}, 0, 2));
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { load(other, saved(first)); }),
                  "expected shards 1, as this one has, got 5");
}

// Files of other names, or in another order, have other examples; their folder may have moved.
TEST(ShardedSource, APositionBelongsToItsFiles) {
  const auto stream_of = [](const std::vector<std::string>& files) {
    const auto open = [](const std::string&) {
      ShardReader reader;
      reader.shard = {0, 3};
      return reader;
    };
    return DistributedStream(ShardedSource(files, open, {.num_replicas = 1, .rank = 0}));
  };
  auto first = stream_of({"/old/a.tar", "/old/b.tar"});
  EXPECT_EQ(first.get_batch(2)->size(), 2U);
  auto moved = stream_of({"/new/place/a.tar", "/new/place/b.tar"});
  load(moved, saved(first));
  EXPECT_EQ(moved.index(), 2U);
  for (const auto& files :
       std::vector<std::vector<std::string>>{{"/old/b.tar", "/old/a.tar"}, {"/old/a.tar", "/old/c.tar"}}) {
    auto other = stream_of(files);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { load(other, saved(first)); }), "names_of_shards");
  }
  auto signed_once = stream_of({"s3://old/a.tar?key=1/2", "s3://old/b.tar?key=3"});
  signed_once.get_batch(2);
  auto signed_again = stream_of({"s3://new/a.tar?key=4", "s3://new/b.tar?key=5/6"});
  load(signed_again, saved(signed_once));
  EXPECT_EQ(signed_again.index(), 2U);

  // A position without names, as archives had before they counted.
  const auto open = [](const Shard& shard) {
    ShardReader reader;
    reader.shard = shard;
    return reader;
  };
  DistributedStream nameless(ShardedSource(std::vector<Shard>{{0, 3}, {0, 3}}, open, {.num_replicas = 1, .rank = 0}));
  nameless.get_batch(2);
  auto named = stream_of({"/old/a.tar", "/old/b.tar"});
  load(named, saved(nameless));
  EXPECT_EQ(named.index(), 2U);
}

// A range that throws, as a loader whose batch comes late, goes on at the same batch.
TEST(EvenBatches, AnErrorOfTheRangeIsNotItsEnd) {
  for (const size_t every : {1, 2, 4}) {
    run_threads(2, [&](World& world) {
      struct Range {
        struct Iterator {
          using iterator_category = std::input_iterator_tag;
          using value_type = int;
          using difference_type = std::ptrdiff_t;
          using pointer = int*;
          using reference = int&;
          int number = 0;
          bool fails;
          int& operator*() { return number; }
          Iterator& operator++() {
            if (number == 2 && std::exchange(fails, false)) throw std::runtime_error("late");
            ++number;
            return *this;
          }
          bool operator==(std::default_sentinel_t) const { return number == 6; }
        };
        bool fails;
        Iterator begin() const { return {.fails = fails}; }
        std::default_sentinel_t end() const { return {}; }
      };
      Range range{.fails = world.rank() == 0};
      std::vector<int> seen;
      int errors = 0;
      const auto in_try = [&](const auto& fn) {
        for (bool is_done = false; !is_done;) try {
            fn();
            is_done = true;
          } catch (const std::runtime_error&) {
            ++errors;
          }
      };
      auto batches = even_batches(range, {.every = every});
      std::optional<decltype(batches.begin())> at;
      if (every == 4 && world.rank() == 0) {
        EXPECT_THROW(batches.begin(), std::runtime_error);  // within the first four
        range.fails = false;
        ++errors;
      }
      at.emplace(batches.begin());
      for (; *at != batches.end(); in_try([&] { ++*at; })) seen.push_back(**at);
      EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 3, 4, 5}));
      EXPECT_EQ(errors, world.rank() == 0 ? 1 : 0);
    });
  }
}

TEST(EvenBatches, EndOnAllRanksTogether) {
  for (const size_t every : {1, 2, 3, 100}) {
    for (const auto& sizes : std::vector<std::vector<size_t>>{{3, 5, 4}, {0, 2, 2}, {6, 6, 6}, {0, 0, 0}, {1, 6, 6}}) {
      run_threads(3, [&](World& world) {
        Numbers range(sizes[static_cast<size_t>(world.rank())]);
        std::iota(range.begin(), range.end(), 0);
        const Numbers before = range;
        Numbers seen;
        for (auto& number : even_batches(range, {.every = every})) seen.push_back(number);
        EXPECT_EQ(range, before);
        EXPECT_EQ(seen, Numbers(range.begin(),
                                range.begin() + static_cast<ptrdiff_t>(*std::min_element(sizes.begin(), sizes.end()))));
      });
    }
  }
  Numbers range;
  EXPECT_THROW(even_batches(range, {.every = 0}), InvalidArgument);
}

TEST(EvenBatches, OfAStreamsLoader) {
  run_threads(2, [](World& world) {
    // Rank 0 has shards with 5 + 1 + 3 or 0 + 7 numbers, rank 1 the others.
    DistributedStream stream(sharded<ShardReader>(kShards, world.rank(), 2));
    auto loader = torch::data::make_data_loader(stream, torch::data::DataLoaderOptions(2));
    DistributedStream alone(sharded<ShardReader>(kShards, world.rank(), 2));
    const auto all = rest_of(alone);
    DistributedStream other(sharded<ShardReader>(kShards, 1 - world.rank(), 2));
    const size_t batches = std::min((all.size() + 1) / 2, (rest_of(other).size() + 1) / 2);
    Numbers seen;
    size_t count = 0;
    for (auto& batch : even_batches(*loader)) {
      seen.insert(seen.end(), batch.begin(), batch.end());
      ++count;
      EXPECT_EQ(stream.index(), seen.size());  // the position is exact
    }
    EXPECT_EQ(count, batches);
    EXPECT_EQ(seen, Numbers(all.begin(), all.begin() + static_cast<ptrdiff_t>(seen.size())));
  });
}

}  // namespace
}  // namespace muster::test
