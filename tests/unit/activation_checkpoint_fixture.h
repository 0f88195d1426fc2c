// What the tests of activation_checkpoint() have in common.
#pragma once

#include "muster/parallel/activation_checkpoint.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include "muster/muster.h"
#include "support/models.h"

namespace muster::test::activation_checkpoints {

// Blocks with dropout, norms, saved inputs and saved results.
struct Blocks : nn::Module {
  static constexpr int64_t kWidth = 48;
  struct Block : nn::Module {
    nn::Linear in = register_module("in", nn::Linear(kWidth, 2 * kWidth)),
               out = register_module("out", nn::Linear(2 * kWidth, kWidth));
    nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    Tensor forward(const Tensor& x) {
      return x + torch::softmax(out(torch::dropout(torch::gelu(in(norm(x))), 0.3, is_training())), -1);
    }
  };
  Blocks() {
    for (int i = 0; i < 4; ++i) layers->push_back(Block());
    register_module("layers", layers);
  }
  Tensor forward(Tensor x, bool checkpointed) {
    for (size_t i = 0; i < layers->size(); ++i) {
      Block& block = *layers[i]->as<Block>();
      const auto run = [&block](const Tensor& y) { return block.forward(y); };
      x = checkpointed ? activation_checkpoint(run, x) : run(x);
    }
    return x;
  }
  nn::ModuleList layers;
};

inline Tensor values(int64_t seed, torch::IntArrayRef sizes) {
  torch::manual_seed(seed);
  return torch::randn(sizes);
}

class ActivationCheckpoint : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

}  // namespace muster::test::activation_checkpoints
