// The state that muster::elastic::run() keeps a copy of, and sends to new ranks.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/optim/optimizers.h"
#include "muster/train/elastic.h"

namespace muster::test {
namespace {

using torch::nn::Linear;

Linear fresh_linear() {
  torch::manual_seed(3);
  return Linear(6, 4);
}

at::Tensor loss_of(Linear& net) { return net->forward(torch::linspace(-1, 1, 18).view({3, 6})).square().sum(); }

// The copy of before the first step has no states. A step that is undone leaves none either, and the next one is the
// first again.
TEST(TrainingState, NothingStaysOfAStepThatIsUndone) {
  using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
  using Parameters = std::vector<at::Tensor>;
  const std::vector<std::function<Optimizer(Parameters)>> makers{
      [](Parameters of) {
        return std::make_unique<torch::optim::SGD>(of, torch::optim::SGDOptions(0.1).momentum(0.9));
      },
      [](Parameters of) { return std::make_unique<torch::optim::Adam>(of, torch::optim::AdamOptions(0.1)); },
      [](Parameters of) { return std::make_unique<muster::AdamW>(of, muster::AdamW::Options{.lr = 0.1}); }};
  for (const auto& make : makers) {
    Linear net = fresh_linear(), expected = fresh_linear();
    const Optimizer optimizer = make(net->parameters()), other = make(expected->parameters());
    const auto step = [](Linear& of, torch::optim::Optimizer& by) {
      by.zero_grad();
      loss_of(of).backward();
      by.step();
    };
    elastic::TrainingState state(*net, *optimizer);
    for (int done = 0; done < 2; ++done) {
      const std::string copy = state.save();
      step(net, *optimizer);
      state.load(copy);
      EXPECT_EQ(optimizer->state().size(), done == 0 ? 0U : 2U);
      step(net, *optimizer);
      step(expected, *other);
      EXPECT_TRUE(torch::equal(net->weight, expected->weight)) << done;
    }
  }
}

TEST(TrainingState, OfAnLbfgs) {
  Linear net = fresh_linear(), again = fresh_linear();
  const auto steps = [](Linear& of, torch::optim::LBFGS& by) {
    for (int i = 0; i < 3; ++i)
      by.step([&] {
        by.zero_grad();
        const at::Tensor loss = loss_of(of);
        loss.backward();
        return loss;
      });
  };
  const torch::optim::LBFGSOptions few = torch::optim::LBFGSOptions(0.1).max_iter(3);
  torch::optim::LBFGS optimizer(net->parameters(), few), other(again->parameters(), few);
  steps(net, optimizer);
  elastic::TrainingState(*again, other).load(elastic::TrainingState(*net, optimizer).save());
  steps(net, optimizer);
  steps(again, other);
  EXPECT_TRUE(torch::equal(net->weight, again->weight));
}

}  // namespace
}  // namespace muster::test
