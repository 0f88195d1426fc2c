// DistributedStream: this rank's part of a stream of examples whose number nobody knows.
//
//   struct Lines {                                             // a *source*
//     std::ifstream file;
//     void reset(uint64_t epoch) { file = std::ifstream("corpus.txt"); }
//     std::optional<std::string> next() {                      // nullopt: the end
//       std::string line;
//       return std::getline(file, line) ? std::optional(line) : std::nullopt;
//     }
//   };
//   muster::DistributedStream stream(Lines(), {.shuffle_buffer = 10000});
//   while (auto line = stream.next()) { … }
//
// Every rank reads the whole stream, and rank r takes examples r, r + replicas, r + 2 replicas … So all ranks must read
// the same examples in the same order. They communicate nothing. A rank reads whole *rounds* of `replicas` examples and
// leaves out the last one if it is incomplete: so all ranks get equally many examples, and none waits for another. With
// `.even = false` the first ranks get the rest. (Where reading costs much, let each rank read files of its own:
// sharded_source.h.)
//
// With a shuffle buffer of n examples, a rank keeps n of its examples and gives a random one of them; the choice
// depends on the seed, the epoch and the rank.
//
// It is a stateful dataset of libtorch, too: get_batch() gives vectors of up to batch_size examples.
//
//   auto loader = torch::data::make_data_loader(stream, torch::data::DataLoaderOptions(32));
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     stream.set_epoch(epoch);
//     for (std::vector<std::string>& batch : *loader) { … }    // begin() calls reset()
//   }
//
// A stream is a *handle*: copies share one state, so the user's handle reaches the loader's stream. set_epoch() takes
// effect at the next reset(). save() stores the epoch and the number of examples given in it. libtorch's loader without
// workers reads a batch when the loop requests it, so this is the loop's position; with workers it reads ahead, and
// with two or more the order of batches depends on the threads. PrefetchLoader (prefetch_loader.h) keeps order and
// position.
//
// After load() the next reset() goes to the saved position: by the source's `void skip(size_t n)`, which leaves out its
// next n examples or as many as there are, if it has one and there is no shuffle buffer; else by reading them again.
//
// A source may be *split* already: then it has `int rank() const` and `int num_replicas() const`, and the stream gives
// all of its examples. ShardedSource is one. The ranks' numbers of examples then differ: see even_batches.h. A source
// may also have `data::Identity identity() const`: numbers that load() compares with the saved ones.
//
// Thread-safety: all functions; one thread at a time reads the source. The source must not call its stream.
// Source: torch.utils.data.IterableDataset; datasets.distributed.split_dataset_by_node of Hugging Face.
#pragma once

#include <torch/data/datasets/stateful.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "muster/base/random.h"
#include "muster/data/epoch_position.h"
#include "muster/data/share.h"

namespace muster {

template <typename Source>
using SourceExample = typename std::remove_cvref_t<decltype(std::declval<Source&>().next())>::value_type;

template <typename Source>
concept StreamSource = requires(Source& source, uint64_t epoch) {
  source.reset(epoch);
  { source.next() } -> std::same_as<std::optional<SourceExample<Source>>>;
};

template <typename Source>
concept SplitSource = StreamSource<Source> && requires(const Source& source) {
  { source.rank() } -> std::convertible_to<int>;
  { source.num_replicas() } -> std::convertible_to<int>;
};

struct DistributedStreamOptions {
  std::optional<int> num_replicas;  // default: world size of the calling thread's World; not for a split source
  std::optional<int> rank;          // default: rank in that World; if both are given, no World is needed
  bool even = true;           // false: the last, incomplete round goes to the first ranks. No effect on a split source
  size_t shuffle_buffer = 0;  // examples that are kept to shuffle; 0 or 1: the source's order
  uint64_t seed = 0;          // of the shuffle buffer
};

template <StreamSource Source>
class DistributedStream final
    : public torch::data::datasets::StatefulDataset<DistributedStream<Source>, std::vector<SourceExample<Source>>> {
 public:
  using Example = SourceExample<Source>;

  // Errors: InvalidArgument (num_replicas below 1, a rank outside [0, num_replicas), either of them with a split
  // source); Aborted if a World is needed and the calling thread has none.
  explicit DistributedStream(Source source, const DistributedStreamOptions& options = {})
      : state_(std::make_shared<State>(std::move(source), options)) {}

  // Takes effect at the next reset().
  void set_epoch(uint64_t epoch) {
    const std::scoped_lock lock(state_->mutex);
    state_->position.set_epoch(epoch);
  }
  uint64_t epoch() const {  // the one last set
    const std::scoped_lock lock(state_->mutex);
    return state_->position.wanted();
  }
  size_t index() const {  // examples given in the current epoch
    const std::scoped_lock lock(state_->mutex);
    return state_->position.index();
  }
  int rank() const { return static_cast<int>(state_->share.rank); }
  int num_replicas() const { return static_cast<int>(state_->share.replicas); }

  // The next reset() begins this epoch and leaves out this rank's first `index` examples, as after load().
  void seek(uint64_t epoch, size_t index) {
    const std::scoped_lock lock(state_->mutex);
    state_->resume(epoch, index);
  }

  // Begins the epoch. A data loader calls it in begin(). Throws what the source throws.
  void reset() override {
    const std::scoped_lock lock(state_->mutex);
    state_->begin();
  }
  // This rank's next example, or nullopt at the end of the epoch. Throws what the source throws, and again at each
  // further call until reset().
  std::optional<Example> next() {
    const std::scoped_lock lock(state_->mutex);
    auto batch = state_->next(1);
    if (batch.empty()) return std::nullopt;
    return std::move(batch.front());
  }
  // The next `batch_size` examples, fewer at the end, then nullopt. InvalidArgument if batch_size is 0.
  std::optional<std::vector<Example>> get_batch(size_t batch_size) override {
    if (batch_size == 0) throw InvalidArgument("DistributedStream: the batch size: expected 1 or more, got 0");
    const std::scoped_lock lock(state_->mutex);
    auto batch = state_->next(batch_size);
    if (batch.empty()) return std::nullopt;
    return batch;
  }
  std::optional<size_t> size() const override { return std::nullopt; }

  // load() throws CorruptError if the archive does not hold a DistributedStream, and InvalidArgument if it holds one
  // with other options (the rank may differ if the source is not split, and there is no shuffle buffer). Then the
  // stream is unchanged.
  void save(torch::serialize::OutputArchive& archive) const override {
    const std::scoped_lock lock(state_->mutex);
    state_->position.save(archive, kNames, state_->identity);
  }
  // Writes what save() would write at this position: for a loader that has read more than its loop has got.
  void save_at(torch::serialize::OutputArchive& archive, uint64_t epoch, size_t index) const {
    data::EpochPosition::save_at(archive, kNames, state_->identity, epoch, index);
  }
  void load(torch::serialize::InputArchive& archive) override {
    const std::scoped_lock lock(state_->mutex);
    constexpr auto kMost = static_cast<size_t>(std::numeric_limits<int64_t>::max());
    const auto saved = data::EpochPosition::read(archive, kNames, state_->identity, kMost);
    state_->resume(saved.epoch, saved.index);
  }

 private:
  static constexpr data::ArchiveNames kNames{.type = "DistributedStream", .key = "distributed_stream"};
  static constexpr bool kSplit = SplitSource<Source>;

  struct State {
    State(Source a_source, const DistributedStreamOptions& some)
        : source(std::move(a_source)), options(some), share(share_of(source, some)), identity(make_identity()) {}

    static data::Share share_of(const Source& source, const DistributedStreamOptions& options) {
      if constexpr (kSplit) {
        if (options.num_replicas || options.rank) {
          throw InvalidArgument("DistributedStream: the source is split already, and num_replicas or rank is given",
                                "Give them to the source");
        }
        return data::make_share("DistributedStream", source.num_replicas(), source.rank());
      } else {
        return data::make_share("DistributedStream", options.num_replicas, options.rank);
      }
    }

    data::Identity make_identity() const {
      data::Identity all = {{"replicas", static_cast<int64_t>(share.replicas)},
                            {"even", options.even},
                            {"shuffle_buffer", static_cast<int64_t>(options.shuffle_buffer)},
                            {"seed", static_cast<int64_t>(options.seed)},
                            {"split", kSplit}};
      if (kSplit || shuffles()) all.emplace_back("rank", static_cast<int64_t>(share.rank));
      if constexpr (requires { source.identity(); }) {
        for (auto& item : source.identity()) all.push_back(std::move(item));
      }
      return all;
    }
    bool shuffles() const { return options.shuffle_buffer > 1; }

    // Leaves the position as it is if the source throws: a further begin() tries again.
    void begin() {
      auto wanted = position;
      wanted.begin();
      ended = false;
      failed = nullptr;
      buffer.clear();
      random = SplitMix64(mixed_seed({options.seed, wanted.epoch(), share.rank}));
      noting_failure([&] {
        source.reset(wanted.epoch());
        skip(wanted.index());
      });
      position = wanted;
    }

    void resume(uint64_t epoch, size_t index) {
      position.resume(epoch, index);
      failed = nullptr;
    }

    // Keeps what fn() throws, because nobody knows where the source is then.
    template <typename Fn>
    void noting_failure(const Fn& fn) {
      try {
        fn();
      } catch (...) {
        failed = std::current_exception();
        throw;
      }
    }

    void skip(size_t examples) {
      const size_t read = kSplit ? examples : examples * share.replicas;
      if constexpr (requires { source.skip(read); }) {
        if (!shuffles()) return source.skip(read);
      }
      for (size_t i = 0; i < examples && take(); ++i) {
      }
    }

    // This rank's next `count` examples, fewer at the end. If the source throws, none of them counts as given.
    std::vector<Example> next(size_t count) {
      if (failed) std::rethrow_exception(failed);
      if (!position.begun()) begin();
      std::vector<Example> batch;
      noting_failure([&] {
        while (batch.size() < count) {
          auto example = take();
          if (!example) break;
          batch.push_back(*std::move(example));
        }
      });
      position.advance(batch.size());
      return batch;
    }

    // One of this rank's examples: a random one of the buffer, or the source's next.
    std::optional<Example> take() {
      if (!shuffles()) return read();
      while (!ended && buffer.size() < options.shuffle_buffer) {
        if (auto example = read()) buffer.push_back(*std::move(example));
      }
      if (buffer.empty()) return std::nullopt;
      std::swap(buffer[random.below(buffer.size())], buffer.back());
      std::optional<Example> example(std::move(buffer.back()));
      buffer.pop_back();
      return example;
    }

    // This rank's next example in the order of the source.
    std::optional<Example> read() {
      std::optional<Example> own;
      if (ended) return own;
      if constexpr (kSplit) {
        own = source.next();
        ended = !own;
        return own;
      }
      for (size_t place = 0; place < share.replicas; ++place) {
        auto example = source.next();
        if (!example) {
          ended = true;
          if (options.even) own.reset();
          break;
        }
        if (place == share.rank) own = std::move(example);
      }
      return own;
    }

    mutable std::mutex mutex;
    Source source;
    const DistributedStreamOptions options;
    const data::Share share;
    const data::Identity identity;  // of the options and the source: what a saved position must agree with
    data::EpochPosition position;
    bool ended = false;         // the source has no more
    std::exception_ptr failed;  // what it threw
    std::vector<Example> buffer;
    SplitMix64 random{0};
  };
  std::shared_ptr<State> state_;
};

}  // namespace muster
