#include "muster/data/bucket_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "data/epoch_order.h"
#include "data/length_buckets.h"
#include "muster/base/error.h"

namespace muster {
namespace {

constexpr const char* kBucketSampler = "DistributedBucketSampler";

void check_limits(const DistributedBucketSamplerOptions& options) {
  if (!options.batch_size && !options.max_tokens)
    throw InvalidArgument(text(kBucketSampler, ": batches have no limit"), "Set batch_size, max_tokens or both");
  if (options.batch_size && *options.batch_size < 1)
    throw InvalidArgument(text(kBucketSampler, ": batch_size: expected 1 or more, got 0"));
  if (options.max_tokens && *options.max_tokens < 1)
    throw InvalidArgument(text(kBucketSampler, ": max_tokens: expected 1 or more, got ", *options.max_tokens));
  if (options.bucket_batches < 1)
    throw InvalidArgument(text(kBucketSampler, ": bucket_batches: expected 1 or more, got 0"));
}

// A permutation of 0 … size - 1, or these numbers in their order without a generator.
std::vector<size_t> permutation(size_t size, const at::Generator& generator) {
  std::vector<size_t> numbers(size);
  if (!generator.defined()) {
    std::iota(numbers.begin(), numbers.end(), size_t{0});
    return numbers;
  }
  const auto drawn = at::randperm(static_cast<int64_t>(size), generator, at::TensorOptions().dtype(at::kLong));
  std::copy_n(drawn.const_data_ptr<int64_t>(), size, numbers.begin());
  return numbers;
}

}  // namespace

namespace data {

LengthBuckets::LengthBuckets(const std::vector<int64_t>& lengths, const DistributedBucketSamplerOptions& options)
    : batch_size_(options.batch_size),
      shuffle_(options.shuffle),
      seed_(options.seed),
      hash_(static_cast<int64_t>(hash_of_bytes(lengths.data(), lengths.size() * sizeof(int64_t)))),
      sorted_(lengths.size()) {
  check_limits(options);
  const int64_t longest = options.max_tokens.value_or(std::numeric_limits<int64_t>::max());
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || lengths[i] > longest) {
      throw InvalidArgument(text(kBucketSampler, ": the length of sample ", i, ": expected ",
                                 lengths[i] < 0 ? std::string("0 or more")
                                                : text("at most the ", longest, " tokens that a batch may have"),
                                 ", got ", lengths[i]),
                            "Leave the sample out, or cut it");
    }
  }
  std::iota(sorted_.begin(), sorted_.end(), size_t{0});
  std::stable_sort(sorted_.begin(), sorted_.end(), [&](size_t a, size_t b) { return lengths[a] < lengths[b]; });
  order_ = sorted_;
  divide(lengths, options);
}

void LengthBuckets::divide(const std::vector<int64_t>& lengths, const DistributedBucketSamplerOptions& options) {
  // The most samples of a batch whose longest has the length of sorted_[place].
  const auto capacity = [&](size_t place) {
    const size_t samples = options.batch_size.value_or(std::numeric_limits<size_t>::max());
    if (!options.max_tokens) return samples;
    const int64_t length = std::max<int64_t>(lengths[sorted_[place]], 1);
    return std::min(samples, static_cast<size_t>(*options.max_tokens / length));
  };
  for (size_t begin = 0; begin < sorted_.size();) {
    size_t end = begin + 1;
    const size_t first = capacity(begin);
    // The product of bucket_batches and the capacity may overflow, so compare by division.
    while (end < sorted_.size() && (end - begin) / options.bucket_batches < capacity(end) &&
           capacity(end) >= first - first / 5) {
      ++end;
    }
    buckets_.push_back({begin, end});
    const size_t samples = end - begin, most = capacity(end - 1);
    const size_t batches = samples / most + (samples % most != 0 ? 1 : 0);
    for (size_t i = 0, from = begin; i < batches; ++i) {
      const size_t size = samples / batches + (i < samples % batches ? 1 : 0);
      batches_.push_back({from, from + size});
      from += size;
    }
    begin = end;
  }
}

size_t LengthBuckets::items(const Share& share) const {
  const size_t whole = batches_.size() / share.replicas * share.replicas;
  if (share.drop_last || whole == batches_.size()) return whole;
  return share.pad ? whole + share.replicas : batches_.size();
}

at::Tensor LengthBuckets::draw(const Share& share, uint64_t epoch) {
  const auto generator = shuffle_ ? at::make_generator<at::CPUGeneratorImpl>(seed_ + epoch) : at::Generator();
  if (shuffle_) {
    for (const auto [begin, end] : buckets_) {
      const auto within = permutation(end - begin, generator);
      for (size_t i = 0; i < within.size(); ++i) order_[begin + i] = sorted_[begin + within[i]];
    }
  }
  // The batches that are left over lie between two steps: before step `gap`, or after the last one.
  const size_t n = share.replicas, steps = batches_.size() / n, left = batches_.size() % n;
  const size_t gap = shuffle_ ? permutation(steps + 1, generator).front() : steps;
  auto order = at::empty({static_cast<int64_t>(items(share))}, at::TensorOptions().dtype(at::kLong));
  auto* place = order.mutable_data_ptr<int64_t>();
  for (const size_t step : permutation(steps, generator)) {
    const size_t first = step * n + (step < gap ? 0 : left);
    for (const size_t i : permutation(n, generator)) *place++ = static_cast<int64_t>(first + i);
  }
  if (left == 0 || share.drop_last) return order;
  const auto last = permutation(left, generator);
  for (size_t i = 0; i < (share.pad ? n : left); ++i) *place++ = static_cast<int64_t>(gap * n + last[i % left]);
  return order;
}

std::vector<size_t> LengthBuckets::batch(size_t number) const {
  const auto [begin, end] = batches_[number];
  return {order_.begin() + static_cast<ptrdiff_t>(begin), order_.begin() + static_cast<ptrdiff_t>(end)};
}

}  // namespace data

namespace {

std::shared_ptr<data::EpochOrder> batch_order(const std::shared_ptr<data::LengthBuckets>& buckets,
                                              const DistributedBucketSamplerOptions& options) {
  const auto share =
      data::make_share(kBucketSampler, options.num_replicas, options.rank, options.drop_last, options.pad);
  return std::make_shared<data::EpochOrder>(data::EpochOrder::Settings{
      .type = kBucketSampler,
      .archive = "distributed_bucket_sampler",
      .item = "batch",
      .dataset_size = buckets->samples(),
      .seed = options.seed,
      .share = share,
      .options = {{"batch_size", static_cast<int64_t>(options.batch_size.value_or(0))},
                  {"max_tokens", options.max_tokens.value_or(0)},
                  {"bucket_batches", static_cast<int64_t>(options.bucket_batches)},
                  {"shuffle", options.shuffle},
                  {"hash_of_lengths", buckets->hash_of_lengths()}},
      .items = buckets->items(share),
      .draw = [buckets, share](uint64_t epoch, size_t) { return buckets->draw(share, epoch); },
      .any_replicas = false});
}

}  // namespace

DistributedBucketSampler::DistributedBucketSampler(const std::vector<int64_t>& lengths,
                                                   const DistributedBucketSamplerOptions& options)
    : DistributedBucketSampler(options, std::make_shared<data::LengthBuckets>(lengths, options)) {}

DistributedBucketSampler::DistributedBucketSampler(const DistributedBucketSamplerOptions& options,
                                                   std::shared_ptr<data::LengthBuckets> buckets)
    : EpochSampler(batch_order(buckets, options)), buckets_(std::move(buckets)) {}

std::optional<std::vector<size_t>> DistributedBucketSampler::next(size_t batch_size) {
  if (batch_size != 1 && batch_size != buckets_->batch_size()) {
    throw InvalidArgument(
        text(kBucketSampler, ": the loader's batch size is ", batch_size, ", but this sampler makes the batches"),
        "Make the loader without a batch size");
  }
  return order_->next(1, [this](const std::vector<size_t>& items) { return buckets_->batch(items.front()); });
}

}  // namespace muster
