#include "muster/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <memory>
#include <utility>

#include "data/epoch_order.h"
#include "muster/data/share.h"

namespace muster {
namespace {

constexpr const char* kSampler = "DistributedSampler";

std::shared_ptr<data::EpochOrder> sample_order(size_t size, const DistributedSamplerOptions& options) {
  data::EpochOrder::Settings settings{
      .type = kSampler,
      .archive = "distributed_sampler",
      .item = "sample",
      .dataset_size = size,
      .seed = options.seed,
      .share = data::make_share(kSampler, options.num_replicas, options.rank, options.drop_last, options.pad),
      .options = {{"shuffle", options.shuffle}}};
  if (options.shuffle) {
    settings.draw = [seed = options.seed](uint64_t epoch, size_t dataset_size) {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + epoch);
      return at::randperm(static_cast<int64_t>(dataset_size), generator, at::TensorOptions().dtype(at::kLong));
    };
  }
  return std::make_shared<data::EpochOrder>(std::move(settings));
}

}  // namespace

DistributedSampler::DistributedSampler(size_t size, const DistributedSamplerOptions& options)
    : EpochSampler(sample_order(size, options)) {}

}  // namespace muster
