#include "muster/data/weighted_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "data/epoch_order.h"
#include "muster/base/error.h"
#include "muster/data/share.h"

namespace muster {
namespace {

constexpr const char* kWeighted = "DistributedWeightedSampler";
constexpr size_t kMostWeights = size_t{1} << 24;  // of torch.multinomial

// A copy of the weights as float64.
at::Tensor checked_weights(const at::Tensor& weights) {
  if (!weights.defined() || weights.dim() != 1 || !weights.device().is_cpu() || weights.layout() != at::kStrided ||
      weights.is_complex()) {
    throw InvalidArgument(text(kWeighted, ": the weights are not one-dimensional, dense and real, on the CPU"));
  }
  return weights.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).contiguous();
}

at::Tensor weights_tensor(const std::vector<double>& weights) {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(weights.size())}, at::TensorOptions().dtype(at::kDouble).device(at::kCPU));
  std::copy(weights.begin(), weights.end(), tensor.mutable_data_ptr<double>());
  return tensor;
}

void check_weights(std::span<const double> weights, size_t num_samples, bool replacement) {
  if (weights.size() > kMostWeights)
    throw InvalidArgument(text(kWeighted, ": the weights: expected at most 2^24, got ", weights.size()));
  double sum = 0;
  size_t positive = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw InvalidArgument(
          text(kWeighted, ": weight ", i, ": expected a finite number of 0 or more, got ", weights[i]), "Change it");
    sum += weights[i];
    if (weights[i] > 0) ++positive;
  }
  if (num_samples == 0) return;
  if (positive == 0) throw InvalidArgument(text(kWeighted, ": none of the ", weights.size(), " weights is above 0"));
  if (!std::isfinite(sum))
    throw InvalidArgument(text(kWeighted, ": the sum of the weights overflows"), "Scale them down");
  if (!replacement && num_samples > positive) {
    throw InvalidArgument(text(kWeighted, ": cannot draw ", num_samples, " samples without replacement, because ",
                               positive, " weights are above 0"),
                          "Set num_samples lower, or replacement to true");
  }
}

std::shared_ptr<data::EpochOrder> weighted_order(const at::Tensor& weights,
                                                 const DistributedWeightedSamplerOptions& options) {
  const auto share = data::make_share(kWeighted, options.num_replicas, options.rank, options.drop_last, options.pad);
  const std::span<const double> numbers(weights.const_data_ptr<double>(), static_cast<size_t>(weights.numel()));
  const size_t num_samples = options.num_samples.value_or(numbers.size());
  check_weights(numbers, num_samples, options.replacement);
  return std::make_shared<data::EpochOrder>(data::EpochOrder::Settings{
      .type = kWeighted,
      .archive = "distributed_weighted_sampler",
      .item = "sample",
      .dataset_size = numbers.size(),
      .seed = options.seed,
      .share = share,
      .options = {{"num_samples", static_cast<int64_t>(num_samples)},
                  {"replacement", options.replacement},
                  {"hash_of_weights", static_cast<int64_t>(hash_of_bytes(numbers.data(), numbers.size_bytes()))}},
      .items = num_samples,
      .draw = [weights, num_samples, replacement = options.replacement, seed = options.seed](uint64_t epoch, size_t) {
        const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + epoch);
        return at::multinomial(weights, static_cast<int64_t>(num_samples), replacement, generator);
      }});
}

}  // namespace

DistributedWeightedSampler::DistributedWeightedSampler(const std::vector<double>& weights,
                                                       const DistributedWeightedSamplerOptions& options)
    : EpochSampler(weighted_order(weights_tensor(weights), options)) {}

DistributedWeightedSampler::DistributedWeightedSampler(const at::Tensor& weights,
                                                       const DistributedWeightedSamplerOptions& options)
    : EpochSampler(weighted_order(checked_weights(weights), options)) {}

}  // namespace muster
