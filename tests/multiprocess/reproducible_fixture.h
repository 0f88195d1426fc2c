// What the tests of DdpOptions::reproducible share.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/text.h"
#include "multiprocess/fsdp_support.h"

namespace muster::test {

constexpr int kReproducibleShards = 8;
constexpr int64_t kRowsOfShard = 3;

// A net with all that could depend on the ranks: statistics, dropout, a large product.
struct Images : nn::Module {
  nn::Sequential layers = register_module(
      "layers",
      nn::Sequential(nn::Conv2d(nn::Conv2dOptions(2, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
                     nn::Dropout(0.3), nn::Conv2d(nn::Conv2dOptions(8, 16, 3).stride(2)), nn::BatchNorm2d(16),
                     nn::ReLU(), nn::Flatten(), nn::Dropout(0.5), nn::Linear(16 * 3 * 3, 400), nn::Linear(400, 5)));
  Tensor forward(const Tensor& sample) {
    const Tensor x =
        torch::sin(torch::arange(2 * 8 * 8, torch::kFloat).view({1, 2, 8, 8}) * 0.1 * (sample.view({-1, 1, 1, 1}) + 1));
    return torch::cross_entropy_loss(layers->forward(x), sample % 5);
  }
};

inline void add_to_hash(uint64_t& hash, const Tensor& tensor) {
  const Tensor dense = tensor.detach().contiguous();
  hash = hash_of_bytes(dense.const_data_ptr(), dense.nbytes(), hash);
}

inline std::string hash_of(const nn::Module& module) {
  uint64_t hash = 0;
  for (const auto& list : {module.parameters(), module.buffers()})
    for (const Tensor& tensor : list) add_to_hash(hash, tensor);
  return text(hash);
}

// The ranks' last words, which are to be the same.
inline std::string same_words(const std::vector<ForkedRanks::End>& ends) {
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    EXPECT_EQ(end.said, ends[0].said);
  }
  return ends[0].said;
}

}  // namespace muster::test
