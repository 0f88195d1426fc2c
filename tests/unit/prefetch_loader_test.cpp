// PrefetchLoader: order, position and random numbers with any number of threads; errors; leaving early.
#include "muster/data/prefetch_loader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/samplers/sequential.h>
#include <torch/data/transforms/stack.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/data/bucket_sampler.h"
#include "muster/data/sampler.h"
#include "muster/data/stream.h"
#include "support/archived.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using Row = std::vector<size_t>;
using Rows = std::vector<Row>;

const auto kEcho = [](Row indices) { return indices; };

DistributedSampler some_sampler(size_t size = 50) {
  return DistributedSampler(size, {.num_replicas = 2, .rank = 1, .seed = 9});
}

Rows expected_rows(uint64_t epoch, size_t batch_size, size_t size = 50) {
  auto sampler = some_sampler(size);
  sampler.set_epoch(epoch);
  Rows rows;
  while (auto row = sampler.next(batch_size)) rows.push_back(*std::move(row));
  return rows;
}

template <typename Loader>
Rows rows_of(Loader& loader) {
  Rows rows;
  for (auto& batch : loader) rows.push_back(batch);
  EXPECT_FALSE(loader.next().has_value());
  return rows;
}

template <typename T>
std::vector<T> from(const std::vector<T>& all, size_t position) {
  return {all.begin() + static_cast<ptrdiff_t>(position), all.end()};
}

TEST(PrefetchLoader, GivesTheSamplersOrder) {
  for (const size_t workers : {0, 1, 2, 7, 16}) {
    for (const size_t factor : {1, 2, 5}) {
      for (const size_t size : {0, 1, 2, 50}) {
        auto sampler = some_sampler(size);
        PrefetchLoader loader(kEcho, sampler, {.batch_size = 4, .workers = workers, .prefetch_factor = factor});
        for (uint64_t epoch = 0; epoch < 2; ++epoch) {
          sampler.set_epoch(epoch);
          EXPECT_EQ(rows_of(loader), expected_rows(epoch, 4, size));
          EXPECT_EQ(rows_of(loader), expected_rows(epoch, 4, size));  // the same epoch again
        }
      }
    }
  }
}

TEST(PrefetchLoader, NextAloneWorks) {
  PrefetchLoader loader(kEcho, some_sampler(), {.batch_size = 10, .drop_last = true});
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(loader.next(), expected_rows(0, 10)[i]);
  EXPECT_FALSE(loader.next().has_value());  // the third batch has 5
}

// A batch is fetched only when it is known that the loader has room for it, and all workers fetch concurrently.
TEST(PrefetchLoader, FetchesAheadUpToItsBound) {
  constexpr size_t kWorkers = 3;
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    size_t started = 0;
  } gate;
  const auto fetch = [&gate](Row row) {
    std::unique_lock lock(gate.mutex);
    ++gate.started;
    gate.changed.notify_all();
    // Until all workers have come here, which they do only if they run concurrently.
    if (gate.started <= kWorkers) {
      EXPECT_TRUE(patience().wait(gate.changed, lock, [&] { return gate.started >= kWorkers; }));
    }
    return row;
  };
  std::atomic<size_t> given{0};
  auto sampler = DistributedSampler(200, {.num_replicas = 1, .rank = 0});
  PrefetchLoader loader(fetch, sampler, {.workers = kWorkers, .prefetch_factor = 2});
  for ([[maybe_unused]] auto& batch : loader) {
    ++given;
    const std::scoped_lock lock(gate.mutex);
    EXPECT_LE(gate.started, given + kWorkers * 2);
  }
  EXPECT_EQ(given, 200u);
}

TEST(PrefetchLoader, SavesThePositionOfTheLoop) {
  const auto whole = expected_rows(3, 4);
  for (const size_t workers : {0, 1, 3}) {
    const PrefetchLoaderOptions options{.batch_size = 4, .workers = workers};
    for (size_t position = 0; position <= whole.size(); ++position) {
      auto sampler = some_sampler();
      PrefetchLoader loader(kEcho, sampler, options);
      sampler.set_epoch(3);
      for (size_t i = 0; i < position; ++i) EXPECT_EQ(loader.next(), whole[i]);
      const auto bytes = saved(loader);

      auto second_sampler = some_sampler();
      PrefetchLoader second(kEcho, second_sampler, options);
      load(second, bytes);
      EXPECT_EQ(saved(second), bytes);                   // also before it is used
      second_sampler.set_epoch(second_sampler.epoch());  // as a training loop does
      EXPECT_EQ(rows_of(second), from(whole, position)) << workers << " workers";
      EXPECT_EQ(rows_of(second), whole);  // only the first iteration is a rest
      second_sampler.set_epoch(4);
      EXPECT_EQ(rows_of(second), expected_rows(4, 4));

      load(loader, bytes);  // in the middle of an iteration, too
      EXPECT_EQ(rows_of(loader), from(whole, position));
      load(second, bytes);
      second_sampler.set_epoch(4);  // another epoch than the saved one: from its start
      EXPECT_EQ(rows_of(second), expected_rows(4, 4));

      auto alone = some_sampler();  // the archive is the sampler's
      load(alone, bytes);
      EXPECT_EQ(alone.index(), std::min<size_t>(position * 4, 25));
    }
  }
}

TEST(PrefetchLoader, GoesOnWhereItWasIfItCannotLoad) {
  const auto whole = expected_rows(3, 4);
  for (const size_t workers : {0, 1, 3}) {
    const PrefetchLoaderOptions options{.batch_size = 4, .workers = workers};
    for (const size_t position : {0, 2, 7}) {
      auto sampler = some_sampler();
      PrefetchLoader loader(kEcho, sampler, options);
      sampler.set_epoch(3);
      for (size_t i = 0; i < position; ++i) EXPECT_EQ(loader.next(), whole[i]);
      const auto bytes = saved(loader);
      EXPECT_THROW(load(loader, saved(some_sampler(49))), InvalidArgument);
      EXPECT_EQ(saved(loader), bytes);
      Rows rest;
      while (auto batch = loader.next()) rest.push_back(*std::move(batch));
      EXPECT_EQ(rest, from(whole, position));
      EXPECT_THROW(load(loader, saved(some_sampler(49))), InvalidArgument);
      sampler.set_epoch(4);
      EXPECT_EQ(rows_of(loader), expected_rows(4, 4));
    }
  }
}

TEST(PrefetchLoader, BreaksAndBeginsAgain) {
  for (const size_t workers : {0, 1, 4}) {
    auto sampler = some_sampler();
    PrefetchLoader loader(kEcho, sampler, {.batch_size = 2, .workers = workers, .prefetch_factor = 3});
    for (size_t stop_at = 0; stop_at < 12; ++stop_at) {
      sampler.set_epoch(stop_at);
      Rows rows;
      for (auto& batch : loader) {
        if (rows.size() == stop_at) break;
        rows.push_back(batch);
      }
      auto expected = expected_rows(stop_at, 2);
      expected.resize(stop_at);
      EXPECT_EQ(rows, expected);
    }
    sampler.set_epoch(1);
    EXPECT_EQ(rows_of(loader), expected_rows(1, 2));
  }
}

// Destroyed at every position, with batches whose destruction is counted.
TEST(PrefetchLoader, LeavesNothing) {
  const auto alive = std::make_shared<int>(0);
  for (const size_t workers : {0, 1, 3}) {
    for (size_t position = 0; position <= 13; ++position) {
      PrefetchLoader loader([alive](const Row&) { return alive; }, some_sampler(),
                            {.batch_size = 2, .workers = workers, .prefetch_factor = 2});
      for (size_t i = 0; i < position; ++i) loader.next();
    }
  }
  EXPECT_EQ(alive.use_count(), 1);
}

TEST(PrefetchLoader, AnErrorComesWhereItsBatchWouldHave) {
  const auto whole = expected_rows(0, 2);
  ASSERT_EQ(whole.size(), 13u);
  for (const size_t workers : {0, 1, 3, 13}) {
    for (const size_t broken : {0, 1, 6, 12}) {
      auto sampler = some_sampler();
      PrefetchLoader loader(
          [bad = whole[broken].front()](Row row) {
            if (row.front() == bad) throw std::out_of_range("no such sample");
            return row;
          },
          sampler, {.batch_size = 2, .workers = workers});
      Rows rows;
      try {
        for (auto& batch : loader) rows.push_back(batch);
        ADD_FAILURE() << "no error";
      } catch (const std::out_of_range& error) {
        EXPECT_STREQ(error.what(), "no such sample");
      }
      EXPECT_EQ(rows.size(), broken);
      auto resumed = some_sampler();
      load(resumed, saved(loader));
      EXPECT_EQ(resumed.index(), broken * 2);  // a restart begins with the batch that failed
      // The loop may also go on behind it.
      while (auto batch = loader.next()) rows.push_back(*std::move(batch));
      auto expected = whole;
      expected.erase(expected.begin() + static_cast<ptrdiff_t>(broken));
      EXPECT_EQ(rows, expected);
    }
  }
}

// Throws on its third batch, and always after.
struct BrokenSampler : torch::data::samplers::SequentialSampler {
  BrokenSampler() : SequentialSampler(100) {}
  std::optional<Row> next(size_t size) override {
    if (batches++ >= 2) throw std::runtime_error("the sampler is broken");
    return SequentialSampler::next(size);
  }
  size_t batches = 0;
};

TEST(PrefetchLoader, AnErrorOfTheSamplerIsNotAnEnd) {
  for (const size_t workers : {0, 1, 4}) {
    PrefetchLoader loader(kEcho, BrokenSampler(), {.batch_size = 2, .workers = workers});
    EXPECT_EQ(loader.next(), (Row{0, 1}));
    EXPECT_EQ(loader.next(), (Row{2, 3}));
    EXPECT_THROW(loader.next(), std::runtime_error);
    EXPECT_THROW(loader.next(), std::runtime_error);
  }
}

// A dataset that draws random numbers for its samples.
struct Augmented : torch::data::datasets::Dataset<Augmented, std::pair<size_t, int64_t>> {
  std::pair<size_t, int64_t> get(size_t) override { throw std::logic_error("the other get() has the generator"); }
  std::pair<size_t, int64_t> get(size_t index, at::Generator& generator) {
    return {index, at::empty({}, at::kLong).random_(generator).item<int64_t>()};
  }
  std::optional<size_t> size() const override { return 50; }
};

TEST(PrefetchLoader, RandomNumbersDependOnThePositionOnly) {
  using Examples = std::vector<std::pair<size_t, int64_t>>;
  const auto run = [](size_t workers, uint64_t epoch, uint64_t seed, int rank, size_t start = 0) {
    DistributedSampler sampler(50, {.num_replicas = 2, .rank = rank});
    PrefetchLoader loader(Augmented(), sampler, {.batch_size = 4, .workers = workers, .seed = seed});
    sampler.seek(epoch, start);
    Examples all;
    for (auto& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
    return all;
  };
  const auto reference = run(0, 0, 0, 0);
  EXPECT_EQ(reference.size(), 25u);
  for (const size_t workers : {1, 2, 5}) EXPECT_EQ(run(workers, 0, 0, 0), reference);
  EXPECT_EQ(run(2, 0, 0, 0, 8), from(reference, 8));  // after a restart
  std::set<int64_t> drawn;
  for (const auto& examples : {reference, run(2, 1, 0, 0), run(2, 0, 1, 0), run(2, 0, 0, 1)})
    for (const auto& example : examples) drawn.insert(example.second);
  EXPECT_EQ(drawn.size(), 100u);  // epochs, seeds, ranks and batches draw different numbers
}

struct ImageDataset : torch::data::datasets::Dataset<ImageDataset> {
  torch::data::Example<> get(size_t index) override {
    return {at::full({2}, static_cast<double>(index)), at::full({}, static_cast<int64_t>(index), at::kLong)};
  }
  std::optional<size_t> size() const override { return 6; }
};

TEST(PrefetchLoader, CollatesByLibtorchsTransforms) {
  PrefetchLoader loader(ImageDataset(), torch::data::samplers::SequentialSampler(6), {.batch_size = 3},
                        torch::data::transforms::Stack<>());
  for (int iteration = 0; iteration < 2; ++iteration) {
    int64_t first = 0;
    for (auto& batch : loader) {
      EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{3, 2}));
      EXPECT_EQ(batch.target[0].item<int64_t>(), first);
      first += 3;
    }
    EXPECT_EQ(first, 6);
  }
  // The same by a dataset that collates.
  auto mapped = ImageDataset().map(torch::data::transforms::Stack<>());
  PrefetchLoader other(mapped, torch::data::samplers::SequentialSampler(6), {.batch_size = 3});
  EXPECT_EQ(other.next()->data.sizes(), (std::vector<int64_t>{3, 2}));
}

TEST(PrefetchLoader, SharesADatasetOnRequest) {
  struct Counted {
    std::atomic<size_t> calls{0};
    size_t get(size_t index) {
      ++calls;
      return index;
    }
  };
  const auto shared = std::make_shared<Counted>();
  Counted lent;
  PrefetchLoader by_pointer(shared, some_sampler(), {.batch_size = 3, .workers = 3});
  PrefetchLoader by_reference(std::ref(lent), some_sampler(), {.batch_size = 3, .workers = 3});
  EXPECT_EQ(rows_of(by_pointer), expected_rows(0, 3));
  EXPECT_EQ(rows_of(by_reference), expected_rows(0, 3));
  EXPECT_EQ(shared->calls, 25u);
  EXPECT_EQ(lent.calls, 25u);
}

TEST(PrefetchLoader, TakesBatchesOfABucketSampler) {
  const std::vector<int64_t> lengths = {5, 1, 9, 3, 7, 2, 8, 4, 6, 10};
  const DistributedBucketSamplerOptions options{.num_replicas = 2, .rank = 0, .max_tokens = 12};
  DistributedBucketSampler sampler(lengths, options), alone(lengths, options);
  PrefetchLoader loader(kEcho, sampler, {.workers = 3});
  sampler.seek(1, 1);
  alone.seek(1, 1);
  Rows expected;
  while (auto batch = alone.next()) expected.push_back(*std::move(batch));
  EXPECT_EQ(rows_of(loader), expected);
}

// Numbers 0 … 40 of each epoch.
struct Source {
  size_t at = 0;
  void reset(uint64_t) { at = 0; }
  std::optional<size_t> next() { return at < 41 ? std::optional(at++) : std::nullopt; }
};

TEST(PrefetchLoader, ReadsAStream) {
  const DistributedStreamOptions of_stream{.num_replicas = 2, .rank = 1, .shuffle_buffer = 5, .seed = 3};
  const auto tenfold = [](Row row) {
    for (auto& number : row) number *= 10;
    return row;
  };
  Rows whole;
  DistributedStream alone(Source(), of_stream);
  while (auto row = alone.get_batch(3)) whole.push_back(tenfold(*row));
  for (const size_t workers : {0, 1, 4}) {
    for (size_t position = 0; position <= whole.size(); ++position) {
      DistributedStream stream(Source(), of_stream);
      PrefetchLoader loader(tenfold, stream, {.batch_size = 3, .workers = workers});
      for (size_t i = 0; i < position; ++i) EXPECT_EQ(loader.next(), whole[i]);
      DistributedStream other_stream(Source(), of_stream);
      PrefetchLoader other(tenfold, other_stream, {.batch_size = 3, .workers = workers});
      load(other, saved(loader));
      EXPECT_EQ(rows_of(other), from(whole, position)) << workers << " workers";
    }
  }
}

// A batch that never comes is an error, and the loader still ends and goes on.
TEST(PrefetchLoader, ASlowBatchTimesOut) {
  struct Gate {
    std::mutex mutex;
    std::condition_variable opened;
    bool open = false;
  } gate;
  auto sampler = some_sampler();
  PrefetchLoader loader(
      [&gate](Row row) {
        std::unique_lock lock(gate.mutex);
        EXPECT_TRUE(patience().wait(gate.opened, lock, [&] { return gate.open; }));
        return row;
      },
      sampler, {.batch_size = 25, .timeout = std::chrono::milliseconds(1)});
  EXPECT_CONTAINS(message_of<TimeoutError>([&] { loader.next(); }), "batch 0 of this iteration");
  {
    const std::scoped_lock lock(gate.mutex);
    gate.open = true;
  }
  gate.opened.notify_all();
  std::optional<Row> row;
  while (!row) {
    try {
      row = loader.next();
    } catch (const TimeoutError&) {
    }
  }
  EXPECT_EQ(row, expected_rows(0, 25).front());
}

TEST(PrefetchLoader, RefusesWhatCannotBe) {
  const auto refusal = [](const PrefetchLoaderOptions& options) {
    return message_of<InvalidArgument>([&] { PrefetchLoader(kEcho, some_sampler(), options); });
  };
  EXPECT_CONTAINS(refusal({.batch_size = 0}), "batch_size: expected 1 or more");
  EXPECT_CONTAINS(refusal({.prefetch_factor = 0}), "prefetch_factor: expected 1 or more");
  EXPECT_CONTAINS(refusal({.timeout = std::chrono::milliseconds(-1)}), "timeout: expected 0 ms or more, got -1 ms");
  auto other = DistributedSampler(51, {.num_replicas = 2, .rank = 1, .seed = 9});
  PrefetchLoader loader(kEcho, some_sampler(), {.batch_size = 4});
  const auto first = loader.next();
  EXPECT_THROW(load(loader, saved(other)), InvalidArgument);
}

static_assert(Archivable<PrefetchLoader<decltype(kEcho), DistributedSampler>>);
static_assert(Archivable<DistributedStream<Source>>);

}  // namespace
}  // namespace muster::test
