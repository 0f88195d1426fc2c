// even_batches(): ends the loops of all ranks at the same batch, where ranks have different numbers of them.
//
//   for (auto& batch : muster::even_batches(*loader)) {
//     … ddp.forward(batch) … backward(); optimizer.step();
//   }
//
// Collectives in a loop that is longer on one rank than on another never end. Here all ranks ask each other, before
// each batch, whether everybody has one, by a small all_reduce (MIN). The loop ends on all ranks when one has no more;
// batches that others still have are left out. (DistributedDataParallel::join() is for loops that must use every
// batch.)
//
// With `.every = k` the ranks ask once for k batches: each first takes up to k batches from its range and keeps them,
// and all get as many as the rank that has fewest. The position that a sampler or PrefetchLoader saves then is that of
// the batches taken, up to k - 1 ahead of the loop; with `.every = 1`, the default, it is exact.
//
// Leave the loop early on all ranks at the same batch, or on none.
//
// Errors: what the range throws, on its rank; the others get PeerLost when that rank leaves the group, as in every
// collective. After an error of the range, the next ++ asks the range again. Those of all_reduce. InvalidArgument if
// `every` is 0.
// Thread-safety: use it in one thread, whose World's default group counts if no group is given.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <iterator>
#include <type_traits>
#include <utility>

#include "muster/comm/collectives.h"
#include "muster/comm/group.h"

namespace muster {

struct EvenBatchesOptions {
  size_t every = 1;  // batches for which the ranks ask each other once; the same on all ranks
  Group group = {};  // default: all ranks
  std::chrono::milliseconds timeout = kDefaultTimeout;
};

namespace data {
// The least `count` of all ranks. Throws as all_reduce.
size_t least_of_all(size_t count, const EvenBatchesOptions& options);
void check_even_batches(const EvenBatchesOptions& options);
}  // namespace data

// What even_batches() returns. It refers to the range, which must outlive it.
template <typename Range>
class EvenBatches {
  using Inner = std::decay_t<decltype(std::begin(std::declval<Range&>()))>;
  using End = std::decay_t<decltype(std::end(std::declval<Range&>()))>;

 public:
  using Batch = std::decay_t<decltype(*std::declval<Inner&>())>;

  EvenBatches(Range& range, EvenBatchesOptions options) : range_(range), options_(std::move(options)) {
    data::check_even_batches(options_);
  }

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    explicit Iterator(EvenBatches& batches)
        : options_(batches.options_), inner_(std::begin(batches.range_)), end_(std::end(batches.range_)) {
      ask();
    }
    Batch& operator*() { return batches_.front(); }
    Batch* operator->() { return &batches_.front(); }
    Iterator& operator++() {
      if (agreed_ > 0) {  // not if the last ++ has thrown
        batches_.pop_front();
        --agreed_;
      }
      if (agreed_ == 0 && more_) ask();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) {
      return iterator.agreed_ == 0 && !iterator.more_;
    }

   private:
    void ask() {
      while (batches_.size() < options_.every) {
        if (taken_) ++inner_;  // only now, because it makes a loader fetch the next batch
        taken_ = false;
        if (!(inner_ != end_)) break;
        take();
        taken_ = true;
      }
      const size_t least = data::least_of_all(batches_.size(), options_);
      more_ = least == options_.every;
      agreed_ = least;
      while (batches_.size() > least) batches_.pop_back();
    }
    // A loader's iterator owns its batch. The elements of a container stay there.
    void take() {
      if constexpr (std::is_base_of_v<std::forward_iterator_tag, Category>)
        batches_.push_back(*inner_);
      else
        batches_.push_back(std::move(*inner_));
    }
    using Category = typename std::iterator_traits<Inner>::iterator_category;

    EvenBatchesOptions options_;
    Inner inner_;
    End end_;
    std::deque<Batch> batches_;
    size_t agreed_ = 0;   // of batches_, those that all ranks have
    bool taken_ = false;  // the inner iterator's batch is in batches_, or was
    bool more_ = true;    // all ranks had as many as they were asked for
  };

  // Begins the range, and asks for the first time.
  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  Range& range_;
  EvenBatchesOptions options_;
};

template <typename Range>
EvenBatches<Range> even_batches(Range& range, EvenBatchesOptions options = {}) {
  return EvenBatches<Range>(range, std::move(options));
}

}  // namespace muster
