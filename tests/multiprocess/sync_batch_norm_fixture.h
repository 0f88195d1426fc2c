// What the tests of SyncBatchNorm have in common: parts of batches, inputs, and a net.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <memory>
#include <optional>
#include <vector>

#include "multiprocess/fsdp_support.h"
#include "parallel/kit/group_beside.h"

namespace muster::test::batch_norms {

inline constexpr int64_t kChannels = 5;

// How many collectives for batch norms this rank has had.
inline uint64_t collectives(const Group& group = {}) {
  const auto beside = parallel::existing_group_beside(group.resolved());
  return beside ? beside->stats().operations : 0;
}

// Rows of each rank's part, one part after another in the whole batch.
struct Parts {
  std::vector<int64_t> rows;
  int64_t whole() const { return begin(rows.size()); }
  int64_t begin(size_t rank) const {
    int64_t sum = 0;
    for (size_t r = 0; r < rank; ++r) sum += rows[r];
    return sum;
  }
  Tensor of(const Tensor& whole, int rank) const {
    const auto r = static_cast<size_t>(rank);
    return whole.narrow(0, begin(r), rows[r]);
  }
};

inline void expect_close(const Tensor& got, const Tensor& expected, double apart, const char* what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  EXPECT_LE(largest(got - expected), apart * largest(expected)) << what;
}

inline void expect_same_bits_on_all_ranks(const Tensor& tensor, const World& world) {
  const Tensor all = torch::empty({world.world_size(), tensor.numel()}, tensor.options());
  all_gather_into_tensor(all, tensor);
  for (int r = 1; r < world.world_size(); ++r) EXPECT_TRUE(torch::equal(all[r], all[0]));
}

inline Tensor sum_over_ranks(const Tensor& tensor) {
  const Tensor sum = tensor.detach().clone();
  all_reduce(sum);
  return sum;
}

// Of one kind of input: {N, kChannels, rest…}.
struct Shape {
  std::vector<int64_t> rest;
  Tensor drawn(int64_t rows, int number, at::ScalarType dtype) const {
    std::vector<int64_t> sizes{rows, kChannels};
    sizes.insert(sizes.end(), rest.begin(), rest.end());
    return test::drawn(0, number, sizes).to(dtype);
  }
};

template <typename Norm>
Norm with_values(Norm norm, at::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  norm->to(dtype);
  if (norm->weight.defined()) {
    norm->weight.copy_(torch::linspace(0.5, 2, kChannels));
    norm->bias.copy_(torch::linspace(-1, 1, kChannels));
  }
  return norm;
}

// As people write them: holders are members, one is in a Sequential.
struct SmallResNet : nn::Module {
  std::optional<ActivationCheckpointOptions> checkpoint;  // of each block
  Tensor forward(const Tensor& x) {
    const auto block = [&](ResidualBlock& of, const Tensor& at) {
      if (!checkpoint) return of.forward(at);
      return activation_checkpoint(
          *checkpoint, [&of](const Tensor& y) { return of.forward(y); }, at);
    };
    return last(block(*second, block(*first, norm(conv(x)).relu_())).mean({2, 3}));
  }
  nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).bias(false)));
  nn::BatchNorm2d norm = register_module("norm", nn::BatchNorm2d(8));
  std::shared_ptr<ResidualBlock> first = register_module("first", std::make_shared<ResidualBlock>(8, 8, 1)),
                                 second = register_module("second", std::make_shared<ResidualBlock>(8, 16, 2));
  nn::Linear last = register_module("last", nn::Linear(16, 4));
};
inline constexpr size_t kNorms = 6;

inline Tensor image_of(int rank, int step) { return drawn(rank, step, {3, 3, 8, 8}).to(torch::kDouble); }

}  // namespace muster::test::batch_norms
