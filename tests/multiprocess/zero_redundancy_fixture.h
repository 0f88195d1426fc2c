// What the tests of optimizers of several ranks have in common.
#pragma once

#include "muster/parallel/zero_redundancy_optimizer.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "multiprocess/fsdp_support.h"
#include "muster/comm/objects.h"

namespace muster::test::divided_states {

namespace fs = std::filesystem;
namespace topt = torch::optim;
using topt::AdamWOptions, topt::SGDOptions;

template <typename Net>
using Ddp = DistributedDataParallel<Net>;
template <typename Inner>
using Zero = ZeroRedundancyOptimizer<Inner>;

inline void backward(auto& model, const World& world, int step) {
  model(fsdp_input(world.rank(), step)).square().sum().backward();
}

// `states`: of all ranks' parameters that have some.
inline void expect_states_once(auto& zero, const World& world, size_t states) {
  int64_t bytes = 0;
  size_t mine = 0;
  for (const auto& group : zero.param_groups())
    for (const Tensor& parameter : group.params()) {
      const bool is_mine = zero.owner(parameter) == world.rank();
      if (!is_mine) {
        EXPECT_EQ(zero.state().count(parameter.unsafeGetTensorImpl()), 0u);
        continue;
      }
      bytes += static_cast<int64_t>(parameter.nbytes());
      ++mine;
    }
  EXPECT_EQ(zero.state().size(), std::min(mine, states));
  const auto all = all_gather_object(bytes);
  const int64_t largest = 600 * 600 * 4;
  EXPECT_LE(*std::max_element(all.begin(), all.end()) - *std::min_element(all.begin(), all.end()), largest);
}

// SGD that fails when it is told to.
struct Failing : topt::SGD {
  using SGD::SGD;
  bool fails = false;
  Tensor step(LossClosure closure = nullptr) override {
    if (fails) throw std::runtime_error("no step");
    return SGD::step(std::move(closure));
  }
};

}  // namespace muster::test::divided_states
