// PrefetchLoader: positions when a first batch fails and when the rest is dropped; seeds without a sampler's rank; what
// a stuck dataset says; fork().
#include <gtest/gtest.h>
#include <torch/data/samplers/sequential.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/data/bucket_sampler.h"
#include "muster/data/prefetch_loader.h"
#include "muster/data/sampler.h"
#include "support/archived.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::prefetch {
namespace {

using Row = std::vector<size_t>;

const auto kSame = [](Row indices) { return indices; };

DistributedSampler part(int replicas, int rank = 0) {
  return DistributedSampler(400, {.num_replicas = replicas, .rank = rank});
}

using Loader = PrefetchLoader<std::function<Row(Row)>, DistributedSampler>;

TEST(PrefetchLoader, AnIterationWhoseFirstBatchFailsIsTriedAgainAtItsPosition) {
  for (const size_t workers : {0, 2}) {
    std::atomic<bool> fails{true};
    auto sampler = part(1);
    PrefetchLoader loader(
        [&](Row row) {
          if (fails) throw std::runtime_error("no such file");
          return row;
        },
        sampler, {.batch_size = 10, .workers = workers});
    auto other = part(1);
    other.seek(2, 30);
    load(loader, saved(other));
    sampler.set_epoch(2);
    EXPECT_THROW(loader.begin(), std::runtime_error);
    EXPECT_THROW(loader.begin(), std::runtime_error);
    EXPECT_EQ(saved(loader), saved(other));
    fails = false;
    size_t batches = 0;
    for (auto& batch : loader) batches += batch.size() / 10;
    EXPECT_EQ(batches, 37U);
    batches = 0;
    for (auto& batch : loader) batches += batch.size() / 10;  // the whole epoch, as usual
    EXPECT_EQ(batches, 40U);

    load(loader, saved(other));
    fails = true;
    EXPECT_THROW(loader.begin(), std::runtime_error);
    other.seek(2, 380);  // past what cannot be read
    load(loader, saved(other));
    fails = false;
    batches = 0;
    for (auto& batch : loader) batches += batch.size() / 10;
    EXPECT_EQ(batches, 2U);

    load(loader, saved(other));
    fails = true;
    EXPECT_THROW(loader.begin(), std::runtime_error);
    fails = false;
    sampler.set_epoch(3);  // another epoch begins at its beginning
    EXPECT_EQ((*loader.begin()).size(), 10U);
    EXPECT_EQ(sampler.epoch(), 3U);
    batches = 1;
    while (loader.next()) ++batches;
    EXPECT_EQ(batches, 40U);
  }
}

TEST(PrefetchLoader, WithoutItsRestAnEpochIsOver) {
  for (const size_t workers : {0, 2}) {
    auto sampler = part(4);
    PrefetchLoader loader(kSame, sampler, {.batch_size = 64, .workers = workers, .drop_last = true});
    size_t batches = 0;
    for (auto& batch : loader) {
      EXPECT_EQ(batch.size(), 64U);
      ++batches;
    }
    EXPECT_EQ(batches, 1U);
    for (const int replicas : {1, 2, 3}) {  // other ranks find nothing left of the epoch
      auto other = part(replicas);
      load(other, saved(loader));
      other.set_epoch(0);
      other.reset();
      EXPECT_FALSE(other.next(64).has_value()) << replicas;
    }
  }
}

TEST(PrefetchLoader, DropLastIsTheSamplersWhereItsItemsAreBatches) {
  const std::vector<int64_t> lengths(100, 7);
  const DistributedBucketSampler sampler(lengths, {.num_replicas = 1, .rank = 0, .batch_size = 64});
  EXPECT_CONTAINS(
      message_of<InvalidArgument>([&] { PrefetchLoader(kSame, sampler, {.batch_size = 64, .drop_last = true}); }),
      "each item of the sampler is a whole batch");
}

// The first number of each batch's generator.
struct First {
  std::pair<size_t, int64_t> get(size_t index, at::Generator& generator) {
    const std::lock_guard lock(generator.mutex());
    return {index, static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(generator)->random64())};
  }
};

TEST(PrefetchLoader, RanksDrawOtherNumbersWithLibtorchsSamplers) {
  const auto first_of = [](std::optional<int> rank) {
    PrefetchLoader loader(First(), torch::data::samplers::SequentialSampler(4), {.batch_size = 4, .rank = rank});
    return loader.next()->front().second;
  };
  EXPECT_EQ(first_of({}), first_of(0));
  EXPECT_NE(first_of(1), first_of(0));
  run_threads(2, [&](World& world) { EXPECT_EQ(first_of({}), first_of(world.rank())); });
}

// A dataset that a test lets go on.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }
  void wait_for_somebody() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(patience().wait(opened_, lock, [&] { return is_reached_; }));
  }
  void pass() {
    std::unique_lock lock(mutex_);
    is_reached_ = true;
    opened_.notify_all();
    EXPECT_TRUE(patience().wait(opened_, lock, [&] { return is_open_; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false, is_reached_ = false;
};

// What is written to standard error goes to the test meanwhile.
class StandardError {
 public:
  StandardError() : before_(::dup(STDERR_FILENO)) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    read_ = UniqueFd(ends[0]);
    const UniqueFd write(ends[1]);
    ::dup2(write.get(), STDERR_FILENO);
  }
  StandardError(const StandardError&) = delete;
  StandardError& operator=(const StandardError&) = delete;
  ~StandardError() { ::dup2(before_.get(), STDERR_FILENO); }
  std::string line() {
    std::string text;
    for (char c = 0; c != '\n' && ::read(read_.get(), &c, 1) == 1;) text += c;
    return text;
  }

 private:
  const UniqueFd before_;
  UniqueFd read_;
};

// A loop that ends because a batch has not come waits for the dataset; then nobody would see the error.
TEST(PrefetchLoader, SaysWhatItsEndWaitsFor) {
  Gate gate;
  StandardError standard_error;
  auto loader = std::make_unique<Loader>(
      [&gate](Row row) {
        gate.pass();
        return row;
      },
      part(1), PrefetchLoaderOptions{.batch_size = 25, .workers = 1, .timeout = std::chrono::milliseconds(1)});
  EXPECT_THROW(loader->next(), TimeoutError);
  gate.wait_for_somebody();
  std::thread end([&] { loader.reset(); });
  const std::string said = standard_error.line();
  gate.open();
  end.join();
  EXPECT_CONTAINS(said, "batch 0 of this iteration was not there after 1 ms");
  EXPECT_CONTAINS(said, "the end of this iteration waits for 1 thread in functions of the dataset or sampler");
}

TEST(PrefetchLoaderFork, AChildMakesItsOwn) {
  const PrefetchLoaderOptions options{.batch_size = 25, .workers = 2};
  auto loader = std::make_unique<Loader>(kSame, part(1), options);
  EXPECT_TRUE(loader->next().has_value());
  ForkedRanks child(1, [&](int) -> std::string {
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { loader->next(); }), "the process that this one was forked from");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { loader->begin(); }), "Make the loader after fork()");
    size_t batches = 0;
    const auto count = [&](Loader& own) {
      for (auto& batch : own) batches += batch.size() / 25;
    };
    {
      Loader own(kSame, part(1), options);
      count(own);
    }
    auto own = std::make_unique<Loader>(kSame, part(1), options);
    EXPECT_TRUE(own->next().has_value());
    loader.reset();  // while a loader of this process has threads, which may have the same handles
    count(*own);
    own.reset();
    return std::to_string(batches);
  });
  const auto end = child.wait(0, patience());
  EXPECT_EQ(end.said, "32") << end.signal;
  size_t rest = 0;
  while (loader->next()) ++rest;
  EXPECT_EQ(rest, 15U);
}

}  // namespace
}  // namespace muster::test::prefetch
