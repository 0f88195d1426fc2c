// What the tests of DistributedDataParallel have in common.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <memory>
#include <mutex>
#include <vector>

#include "muster/muster.h"

namespace muster::test::ddp_replicas {

inline constexpr double kByte = 1.0 / (1 << 20);  // in MiB

struct DdpNet : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(12, 33)),
                    b = register_module("b", torch::nn::Linear(33, 17)),
                    c = register_module("c", torch::nn::Linear(17, 5));
  torch::Tensor forward(torch::Tensor x) { return c(torch::relu(b(torch::relu(a(x))))); }
};

// Rank r's part of the batch of one step, the same whoever asks.
inline torch::Tensor batch(int rank, int step, int rows = 8) {
  torch::manual_seed(1000 * step + rank);
  return torch::randn({rows, 12});
}

inline std::vector<torch::Tensor> gradients(torch::nn::Module& module) {
  std::vector<torch::Tensor> list;
  for (const auto& parameter : module.parameters())
    list.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  return list;
}

inline void expect_equal_on_all_ranks(const torch::Tensor& tensor, const World& world) {
  const auto flat = tensor.contiguous().view(-1).view(torch::kByte);
  auto all = torch::zeros({world.world_size(), flat.numel()}, torch::kByte);
  all_gather_into_tensor(all, flat);
  for (int r = 0; r < world.world_size(); ++r) EXPECT_TRUE(torch::equal(all[r], flat)) << "rank " << r;
}

// One at a time makes something from a seed: libtorch's default generator is the process's.
inline std::mutex generator;

template <typename Module>
std::shared_ptr<Module> make(uint64_t seed) {
  const std::lock_guard lock(generator);
  torch::manual_seed(seed);
  return std::make_shared<Module>();
}
inline torch::Tensor part(int rank, int step, int rows = 8) {
  const std::lock_guard lock(generator);
  return batch(rank, step, rows);
}

class DdpTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

}  // namespace muster::test::ddp_replicas
