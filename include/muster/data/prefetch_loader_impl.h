// How a PrefetchLoader calls its sampler, dataset and collate, of whatever kind they are.
//
// Thread-safety: as what they call.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/data/samplers/base.h>  // declares archives

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::data {

// Muster's samplers and streams.
template <typename Sampler>
concept HasPosition = requires(Sampler& sampler, torch::serialize::OutputArchive& out,
                               torch::serialize::InputArchive& in) {
  { sampler.epoch() } -> std::convertible_to<uint64_t>;
  { sampler.index() } -> std::convertible_to<size_t>;
  sampler.save(out);
  sampler.save_at(out, uint64_t{}, size_t{});
  sampler.load(in);
  sampler.seek(uint64_t{}, size_t{});
  sampler.set_epoch(uint64_t{});
};

// std::optional of the next batch's request: indices, or the examples themselves of a stream.
template <typename Sampler>
auto draw_from(Sampler& sampler, size_t batch_size) {
  if constexpr (requires { sampler.next(batch_size); })
    return sampler.next(batch_size);
  else
    return sampler.get_batch(batch_size);
}

template <typename Sampler>
int rank_of(const Sampler& sampler, int otherwise) {
  if constexpr (requires { sampler.rank(); })
    return sampler.rank();
  else
    return otherwise;
}

template <typename Sampler>
constexpr bool kGivesBatches = requires {
  requires Sampler::kGivesBatches;
};

template <typename Dataset>
Dataset& unwrapped(Dataset& dataset) {
  return dataset;
}
template <typename Dataset>
Dataset& unwrapped(std::shared_ptr<Dataset>& dataset) {
  return *dataset;
}
template <typename Dataset>
Dataset& unwrapped(std::reference_wrapper<Dataset>& dataset) {
  return dataset.get();
}

template <typename Request, typename Get>
auto get_each(const Request& request, const Get& get) {
  std::vector<std::remove_cvref_t<decltype(get(*request.begin()))>> examples;
  examples.reserve(request.size());
  for (const auto& index : request) examples.push_back(get(index));
  return examples;
}

template <typename Wrapped, typename Request>
auto fetch_from(Wrapped& wrapped, Request request, at::Generator& generator) {
  auto& dataset = unwrapped(wrapped);
  if constexpr (requires { dataset.get_batch(request, generator); }) {
    return dataset.get_batch(request, generator);
  } else if constexpr (requires { dataset.get(*request.begin(), generator); }) {
    return get_each(request, [&](const auto& index) { return dataset.get(index, generator); });
  } else if constexpr (requires { dataset(std::move(request), generator); }) {
    return dataset(std::move(request), generator);
  } else if constexpr (requires { dataset.get_batch(request); }) {
    return dataset.get_batch(request);
  } else if constexpr (requires { dataset.get(*request.begin()); }) {
    return get_each(request, [&](const auto& index) { return dataset.get(index); });
  } else {
    return dataset(std::move(request));
  }
}

template <typename Collate, typename Examples>
decltype(auto) collate(Collate& collate, Examples&& examples) {
  if constexpr (requires { collate.apply_batch(std::forward<Examples>(examples)); })
    return collate.apply_batch(std::forward<Examples>(examples));
  else
    return collate(std::forward<Examples>(examples));
}

}  // namespace muster::data
