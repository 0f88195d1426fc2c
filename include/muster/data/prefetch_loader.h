// PrefetchLoader: threads that fetch and collate batches ahead of the loop, in the sampler's order.
//
//   muster::DistributedSampler sampler(dataset.size());
//   muster::PrefetchLoader loader(dataset, sampler, {.batch_size = 64, .workers = 4},
//                                 torch::data::transforms::Stack<>());
//   snapshot.add("loader", loader);                        // instead of the sampler
//   snapshot.restore();
//   for (uint64_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& batch : loader) { … }
//   }
//
// Each worker draws the next batch's indices from the sampler (one worker at a time), fetches them from the dataset and
// collates them (concurrently), and keeps the batch for the loop. Up to workers * prefetch_factor batches are drawn
// that the loop has not got. The loop gets them in the order of the draw.
//
// **The dataset** has one of these functions; the first that compiles is called. A request is what the sampler's next()
// gives, usually std::vector<size_t>.
//   Batch get_batch(request, at::Generator&)
//   Example get(size_t index, at::Generator&)      for each index of the request
//   Batch operator()(request, at::Generator&)      a lambda, for example
//   the same three without a generator             all datasets of libtorch have get_batch(request)
// What get() returns becomes a std::vector. Then `collate`, a function or a transform of libtorch with apply_batch(),
// makes a batch of it; without collate it stays as it is. As in libtorch's loader, each worker has a copy of the
// dataset and of collate. To share a dataset whose functions any thread may call, give a std::shared_ptr or std::ref()
// of it.
//
// **The generator** has a seed that is made of options.seed, the epoch, the rank and the position of the batch. If the
// dataset draws its random numbers from it, results depend neither on the number of workers nor on a restart. With a
// sampler of libtorch, which has no epoch, the number of the loader's iteration takes its place.
// libtorch's default generator belongs to all threads: what a worker draws from it depends on the others.
//
// **The sampler** is one of Muster's, any other of libtorch, or a DistributedStream. A stream is read by one worker at
// a time; the dataset then gets vectors of its examples: muster::PrefetchLoader(stream_decoder, stream, {…}).
//
// **The position** that save() stores is that of the loop: batches which the loop has got, whatever the workers have
// drawn. load() sets the sampler's. The archives are the sampler's, so a sampler can load a loader's and the reverse.
// Both need a sampler of Muster or a stream.
//
// **Errors.** If a worker throws, next() throws the same in place of that batch, after all batches before it. This
// batch does not count for save(). next() then goes on with the batch after it. An error of the sampler or stream ends
// the iteration: each further next() throws it again.
//
// If the first batch of an iteration does not come, the next begin() goes on where this one would have; to go on
// elsewhere, load() into the loader.
//
// **Leaving early.** A loop may break at any batch. begin() of the next iteration, load() and the destructor stop the
// workers: each first finishes the batch that it works on, since a function of the user cannot be interrupted, and a
// warning says so if that takes long; what they have fetched is thrown away. The threads live until the loader's end.
// After fork() the child makes a loader of its own.
//
// Workers are threads. Python's loader uses processes, because its interpreter runs one thread at a time. C++ has no
// such lock, and threads neither copy a batch to the loop nor need shared memory for it. A large operator of libtorch
// runs on at::get_num_threads() threads in each worker, in addition to the loop's.
//
// Thread-safety: one thread uses the loader. set_epoch() of the sampler may be called at any time; nothing else may
// change the sampler during an iteration.
// Source: torch.utils.data.DataLoader.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "muster/base/random.h"
#include "muster/data/prefetch_loader_impl.h"
#include "muster/data/prefetch_queue.h"
#include "muster/data/share.h"

namespace muster {

struct PrefetchLoaderOptions {
  size_t batch_size = 1;       // what the sampler's next() is called with
  size_t workers = 2;          // threads; 0: fetch in the loop's own thread, when the loop needs the batch
  size_t prefetch_factor = 2;  // batches of each worker that are drawn and not yet the loop's
  uint64_t seed = 0;           // of the generators
  bool drop_last = false;      // leave out a last batch of fewer than batch_size items; then the epoch ends before it
  std::optional<int> rank;     // of the seeds, if the sampler has none; default: that in the World, 0 without one
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // of the loop's wait for a batch; 0: none
};

template <typename Dataset, typename Sampler, typename Collate = std::identity>
class PrefetchLoader {
  using Request = typename decltype(data::draw_from(std::declval<Sampler&>(), size_t{}))::value_type;

 public:
  using Batch = std::remove_cvref_t<decltype(data::collate(
      std::declval<Collate&>(),
      data::fetch_from(std::declval<Dataset&>(), std::declval<Request>(), std::declval<at::Generator&>())))>;

  // InvalidArgument if batch_size is 0, or prefetch_factor with workers; if timeout is negative; if drop_last is set
  // and the sampler's items are whole batches, as those of DistributedBucketSampler.
  PrefetchLoader(Dataset dataset, Sampler sampler, PrefetchLoaderOptions options = {}, Collate collate = {})
      : options_(options),
        rank_(options.rank ? *options.rank : data::rank_in_world()),
        sampler_(std::move(sampler)),
        queue_(options.workers, options.workers * options.prefetch_factor, options.timeout) {
    if (options.batch_size == 0) throw InvalidArgument("PrefetchLoader: batch_size: expected 1 or more, got 0");
    if (data::kGivesBatches<Sampler> && options.drop_last)
      throw InvalidArgument("PrefetchLoader: drop_last is set, but each item of the sampler is a whole batch",
                            "Set drop_last of the sampler");
    for (size_t worker = 1; worker < options.workers; ++worker) tools_.push_back({dataset, collate});
    tools_.push_back({std::move(dataset), std::move(collate)});
  }
  PrefetchLoader(const PrefetchLoader&) = delete;
  PrefetchLoader& operator=(const PrefetchLoader&) = delete;

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    explicit Iterator(PrefetchLoader& loader) : loader_(&loader), batch_(loader.next()) {}
    Batch& operator*() { return *batch_; }
    Batch* operator->() { return &*batch_; }
    Iterator& operator++() {
      batch_.reset();  // the next one may need its memory
      batch_ = loader_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) { return !iterator.batch_; }

   private:
    PrefetchLoader* loader_;
    std::optional<Batch> batch_;
  };

  // Begins an iteration: resets the sampler, which begins its epoch or goes on where load() has set it, and waits for
  // the first batch. Iterators of earlier iterations must not be used any more.
  Iterator begin() {
    restart();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  // The next batch of the iteration that begin() or the first next() has begun; nullopt at its end. Throws what the
  // worker threw; TimeoutError if the batch does not come in time, and the next call goes on waiting for it.
  std::optional<Batch> next() {
    if (!running_) restart();
    const auto job = queue_.next();
    if (job && job->error) std::rethrow_exception(job->error);
    untouched_ = false;
    if (!job) return std::nullopt;
    auto& own = static_cast<Job&>(*job);
    given_.index = own.end;
    return std::move(own.batch);
  }

  // In the middle of a loop's body: the current batch counts as done.
  template <typename Archive>
  requires data::HasPosition<Sampler>
  void save(Archive& archive) const {
    if (begun_)
      sampler_.save_at(archive, given_.epoch, given_.index);
    else
      sampler_.save(archive);
  }
  // Ends the iteration under way. The next begin() goes on at the saved position, unless the sampler's set_epoch() sets
  // another epoch. Throws what the sampler's load() throws; the next begin() or next() then goes on where the loop was.
  template <typename Archive>
  requires data::HasPosition<Sampler>
  void load(Archive& archive) {
    stop();
    try {
      sampler_.load(archive);
      begun_ = false;
    } catch (...) {
      if (begun_) {  // the workers have drawn more than the loop has got
        const uint64_t wanted = sampler_.epoch();
        sampler_.seek(given_.epoch, given_.index);
        sampler_.set_epoch(wanted);
      }
      throw;
    }
  }

 private:
  struct Tools {
    Dataset dataset;
    Collate collate;
  };
  // Where the sampler is. A sampler without a position has the number of the iteration, and of the item in it.
  struct Place {
    uint64_t epoch = 0;
    size_t index = 0;
  };

  struct Job final : data::PrefetchJob {
    Job(PrefetchLoader& a_loader, Request a_request, uint64_t a_seed, size_t an_end)
        : loader(a_loader), request(std::move(a_request)), seed(a_seed), end(an_end) {}
    void fetch(size_t worker) override {
      auto& [dataset, collate] = loader.tools_[worker];
      auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
      batch.emplace(data::collate(collate, data::fetch_from(dataset, std::move(request), generator)));
    }
    PrefetchLoader& loader;
    Request request;
    const uint64_t seed;
    const size_t end;  // the sampler's index after this batch
    std::optional<Batch> batch;
  };

  void stop() {
    queue_.stop();
    running_ = false;
  }

  void restart() {
    stop();
    if constexpr (data::HasPosition<Sampler>) {
      if (begun_ && untouched_) {
        const uint64_t wanted = sampler_.epoch();
        sampler_.seek(given_.epoch, given_.index);
        sampler_.set_epoch(wanted);
      }
    }
    sampler_.reset();
    if constexpr (data::HasPosition<Sampler>)
      given_ = {.epoch = sampler_.epoch(), .index = sampler_.index()};
    else
      given_ = {.epoch = iterations_++, .index = 0};
    drawn_ = given_;
    begun_ = untouched_ = true;
    queue_.start([this] { return draw(); });
    running_ = true;
  }

  std::unique_ptr<data::PrefetchJob> draw() {
    auto request = data::draw_from(sampler_, options_.batch_size);
    if (!request || (options_.drop_last && std::size(*request) < options_.batch_size)) return nullptr;
    const uint64_t seed =
        mixed_seed({options_.seed, drawn_.epoch, static_cast<uint64_t>(data::rank_of(sampler_, rank_)), drawn_.index});
    if constexpr (data::HasPosition<Sampler>)
      drawn_.index = sampler_.index();
    else
      drawn_.index += std::size(*request);
    return std::make_unique<Job>(*this, *std::move(request), seed, end_of_draw());
  }

  // What drop_last leaves out belongs to the last batch.
  size_t end_of_draw() const {
    if constexpr (requires { requires std::same_as<decltype(sampler_.size()), size_t>; })
      if (const size_t size = sampler_.size(); options_.drop_last && size - drawn_.index < options_.batch_size)
        return size;
    return drawn_.index;
  }

  const PrefetchLoaderOptions options_;
  const int rank_;
  Sampler sampler_;
  std::vector<Tools> tools_;  // of each worker
  bool begun_ = false;        // since construction or load(): given_ is the loop's position
  bool running_ = false;      // the queue
  bool untouched_ = false;    // the loop has got nothing of this iteration: neither a batch nor an end
  uint64_t iterations_ = 0;
  Place given_;  // what the loop has got
  Place drawn_;  // what the workers have drawn; theirs while the queue runs
  data::PrefetchQueue queue_;
};

}  // namespace muster
