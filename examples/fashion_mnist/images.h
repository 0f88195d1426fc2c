// Fashion-MNIST as a dataset for torch::data. One operation gathers a whole batch by its indices.
#pragma once

#include <muster/data/idx.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/types.h>

#include <algorithm>

class Images : public torch::data::datasets::BatchDataset<Images, torch::data::Example<>> {
 public:
  // The first `limit` images of a part, or all of them if `limit` is 0.
  Images(const std::filesystem::path& folder, muster::FashionMnistPart part, int64_t limit)
      : raw_(muster::load_fashion_mnist(folder, part)) {
    if (limit == 0) return;
    raw_.images = raw_.images.slice(0, 0, limit);
    raw_.labels = raw_.labels.slice(0, 0, limit);
  }

  torch::data::Example<> get_batch(at::ArrayRef<size_t> request) override {
    const auto count = static_cast<int64_t>(request.size());
    const auto index = torch::empty({count}, torch::kLong);
    std::copy(request.begin(), request.end(), index.mutable_data_ptr<int64_t>());
    // Mean 0 and deviation 1. The shape is N x 1 x 28 x 28 with the channel last in memory: convolutions run twice as
    // fast on that.
    auto images = raw_.images.index_select(0, index).to(torch::kFloat).mul_(1 / 255.0 / 0.3530).sub_(0.2860 / 0.3530);
    return {images.view({count, 28, 28, 1}).permute({0, 3, 1, 2}), raw_.labels.index_select(0, index)};
  }

  std::optional<size_t> size() const override { return static_cast<size_t>(raw_.labels.numel()); }

 private:
  muster::FashionMnist raw_;
};
