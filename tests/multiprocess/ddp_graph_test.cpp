// DistributedDataParallel with derivatives of derivatives, several forwards and several backwards: what one process
// computes with all ranks' data.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <mutex>
#include <stdexcept>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"

namespace muster::test {
namespace {

// A critic with a convolution, so that second derivatives go through more than matrix products.
struct Critic : nn::Module {
  nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 3, 3).padding(1)));
  nn::Linear a = register_module("a", nn::Linear(3 * 4 * 4, 8)), b = register_module("b", nn::Linear(8, 1));
  Tensor forward(const Tensor& x) { return b(torch::tanh(a(torch::tanh(conv(x)).flatten(1)))); }
};

std::shared_ptr<Critic> make_critic() {
  static std::mutex generator;  // libtorch's default generator is the process's
  const std::lock_guard lock(generator);
  torch::manual_seed(3);
  auto net = std::make_shared<Critic>();
  net->to(torch::kDouble);
  return net;
}

constexpr int64_t kRowsOfRank = 3;  // of each rank
Tensor data(int step, int ranks) {
  const Tensor i = torch::arange(kRowsOfRank * ranks * 2 * 4 * 4, torch::kDouble);
  return torch::sin(i * 0.7 + step).view({kRowsOfRank * ranks, 2, 4, 4});
}
Tensor rows_of(const Tensor& all, int rank) { return all.narrow(0, rank * kRowsOfRank, kRowsOfRank); }

using Forward = std::function<Tensor(const Tensor&)>;
// Steps of an optimizer on this rank's data, and in one process on all ranks' data.
using Step = std::function<void(Critic& net, const Forward& forward, const Tensor& x)>;

void expect_steps_of_one_process(const HostOfRank& hosts, const Step& step, DdpOptions options = {}) {
  on_hosts(hosts, [&](World& world) {
    const auto alone = make_critic(), net = make_critic();
    DistributedDataParallel<Critic> ddp(net, options);
    torch::optim::SGD of_all(alone->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    for (int i = 0; i < 4; ++i) {
      const Tensor x = data(i, world.world_size());
      optimizer.zero_grad();
      of_all.zero_grad();
      step(
          *net, [&](const Tensor& y) { return ddp.forward(y); }, rows_of(x, world.rank()));
      step(
          *alone, [&](const Tensor& y) { return alone->forward(y); }, x);
      for (const auto& item : net->named_parameters()) {
        const Tensor expected = alone->named_parameters()[item.key()].grad();
        EXPECT_LE((item.value().grad() - expected).abs().max().item<double>(), 1e-10) << item.key() << ", step " << i;
        EXPECT_GT(expected.abs().max().item<double>(), 0) << item.key();
      }
      optimizer.step();
      of_all.step();
    }
  });
}
void expect_steps_of_one_process(const Step& step) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, HostOfRank{"a", "a", "b"}})
    expect_steps_of_one_process(hosts, step);
  expect_steps_of_one_process({"a", "a"}, step, {.bucket_cap_mb = 1e-4, .first_bucket_cap_mb = 1e-4});
}

// WGAN-GP: the norm of the gradient with respect to the inputs is to be 1.
TEST(DdpGraph, GradientPenalty) {
  expect_steps_of_one_process([](Critic&, const Forward& forward, const Tensor& x) {
    const Tensor input = x.detach().requires_grad_();
    const Tensor score = forward(input);
    const Tensor gradient = torch::autograd::grad({score.sum()}, {input}, {}, true, /*create_graph=*/true)[0];
    const Tensor penalty = (gradient.flatten(1).norm(2, 1) - 1).square().mean();
    (score.mean() + 10 * penalty).backward();
  });
}

TEST(DdpGraph, ProductOfTheHessianAndAVector) {
  expect_steps_of_one_process([](Critic& net, const Forward& forward, const Tensor& x) {
    const auto gradients = torch::autograd::grad({forward(x).square().mean()}, net.parameters(), {}, true, true);
    Tensor product = torch::zeros({}, torch::kDouble);
    for (const Tensor& gradient : gradients) product = product + (gradient * torch::ones_like(gradient) * 0.3).sum();
    product.backward();
  });
}

// .grad is a function of the parameters: the penalty is that of the average, not of this rank's part of it.
TEST(DdpGraph, BackwardThatMakesAGraph) {
  expect_steps_of_one_process([](Critic& net, const Forward& forward, const Tensor& x) {
    forward(x).square().mean().backward({}, true, /*create_graph=*/true);
    Tensor penalty = torch::zeros({}, torch::kDouble);
    for (const Tensor& parameter : net.parameters()) penalty = penalty + parameter.grad().square().sum();
    for (const Tensor& parameter : net.parameters()) parameter.mutable_grad() = Tensor();
    penalty.backward();
  });
}
TEST(DdpGraph, BackwardThatMakesAGraphAddsToGradients) {
  expect_steps_of_one_process([](Critic& net, const Forward& forward, const Tensor& x) {
    forward(x).mean().backward();
    forward(x).square().mean().backward({}, true, /*create_graph=*/true);
    Tensor penalty = torch::zeros({}, torch::kDouble);
    for (const Tensor& parameter : net.parameters()) penalty = penalty + parameter.grad().square().sum();
    penalty.backward();
    // The optimizers of libtorch detach gradients in place.
    std::vector<Tensor> gradients;
    for (const Tensor& parameter : net.parameters()) gradients.push_back(parameter.grad().detach().clone());
    torch::optim::SGD(net.parameters(), 0.1).zero_grad();
    for (size_t i = 0; i < gradients.size(); ++i) net.parameters()[i].mutable_grad() = gradients[i];
  });
}
// A rank without a batch stays in step by a loss of zero, whose gradients are constants.
TEST(DdpGraph, ConstantGradientsOnOneRank) {
  on_ranks(2, [](World& world) {
    const auto net = make_critic(), alone = make_critic();
    DistributedDataParallel<Critic> ddp(net);
    const Tensor x = data(0, 1);
    Tensor zero = torch::zeros({}, torch::kDouble);
    for (const Tensor& parameter : net->parameters()) zero = zero + 0 * parameter.sum();
    (world.rank() == 0 ? ddp.forward(x).square().mean() : zero).backward({}, true, true);
    (alone->forward(x).square().mean() / 2).backward({}, true, true);
    for (Critic* const each : {net.get(), alone.get()}) {
      Tensor penalty = torch::zeros({}, torch::kDouble);
      for (const Tensor& parameter : each->parameters()) penalty = penalty + parameter.grad().square().sum();
      for (const Tensor& parameter : each->parameters()) parameter.mutable_grad() = Tensor();
      penalty.backward();
    }
    // Both ranks' penalties are functions of the one graph, through the average.
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::allclose(item.value().grad(), alone->named_parameters()[item.key()].grad(), 1e-10, 1e-12))
          << item.key();
  });
}
TEST(DdpGraph, ThirdDerivatives) {
  expect_steps_of_one_process([](Critic& net, const Forward& forward, const Tensor& x) {
    forward(x).square().mean().backward({}, true, /*create_graph=*/true);
    for (int order = 0; order < 2; ++order) {
      Tensor penalty = torch::zeros({}, torch::kDouble);
      for (const Tensor& parameter : net.parameters()) penalty = penalty + parameter.grad().square().sum();
      for (const Tensor& parameter : net.parameters()) parameter.mutable_grad() = Tensor();
      (0.02 * penalty).backward({}, true, /*create_graph=*/order == 0);
    }
  });
}

// Each row is a task: an inner step on half of its features, the outer loss on the others.
TEST(DdpGraph, Maml) {
  expect_steps_of_one_process([](Critic& net, const Forward& forward, const Tensor& x) {
    Tensor outer = torch::zeros({}, torch::kDouble);
    for (int64_t task = 0; task < x.size(0); ++task) {
      const Tensor mine = x.narrow(0, task, 1);
      const std::vector<Tensor> last = {net.b->weight, net.b->bias};
      const auto gradients = torch::autograd::grad({forward(mine).square().mean()}, last, {}, true, true);
      const Tensor features = torch::tanh(net.a(torch::tanh(net.conv(mine.flip(3))).flatten(1)));
      const Tensor y = torch::linear(features, last[0] - 0.1 * gradients[0], last[1] - 0.1 * gradients[1]);
      outer = outer + (y - 1).square().mean() / x.size(0);
    }
    outer.backward();
  });
}

TEST(DdpGraph, SeveralForwardsBeforeOneBackward) {
  expect_steps_of_one_process([](Critic&, const Forward& forward, const Tensor& x) {
    const Tensor first = forward(x), second = forward(x.flip(3)), third = forward(x * 2);
    (first.mean() + (second * third).mean()).backward();
  });
}
TEST(DdpGraph, SeveralBackwardsThroughOneForward) {
  expect_steps_of_one_process([](Critic&, const Forward& forward, const Tensor& x) {
    const Tensor y = forward(x);
    y.mean().backward({}, /*retain_graph=*/true);
    y.square().mean().backward({}, /*retain_graph=*/true);
    y.sin().mean().backward();
  });
}

TEST(DdpGraph, UnusedParametersExceptionsAndHooks) {
  on_ranks(2, [](World& world) {
    const auto net = make_critic();
    DistributedDataParallel<Critic> ddp(net);
    const Tensor x = data(0, 1);
    const auto partial = [&] {
      ddp.forward(x);
      return net->b(torch::ones({1, 8}, torch::kDouble)).square().sum();
    };
    const std::string what = message_of<InvalidArgument>([&] { partial().backward({}, true, true); });
    EXPECT_CONTAINS(what, "conv.weight");
    EXPECT_TRUE(net->b->weight.grad().requires_grad());
    EXPECT_FALSE(net->a->weight.grad().defined());
    // One rank has no gradient for all parameters; then the next step is a good one.
    net->zero_grad();
    EXPECT_THROW((world.rank() == 0 ? ddp.forward(x).square().mean() : partial()).backward({}, true, true),
                 InvalidArgument);
    EXPECT_GT(net->a->weight.grad().abs().max().item<double>(), 0);
    // One rank's backward() throws when it has some gradients; it makes up for that before its next forward().
    net->zero_grad();
    const Tensor features = torch::tanh(net->conv(x)).flatten(1);
    const Tensor y = net->b(torch::tanh(net->a(features))).square().mean();
    if (world.rank() == 0) features.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("fails"); });
    if (world.rank() == 0)
      EXPECT_THROW(y.backward({}, true, true), std::runtime_error);
    else
      EXPECT_THROW(y.backward({}, true, true), InvalidArgument);
    torch::optim::SGD(net->parameters(), 0.1).zero_grad();
    ddp.forward(x).square().mean().backward();
    const auto alone = make_critic();
    alone->forward(x).square().mean().backward();
    EXPECT_TRUE(torch::allclose(net->conv->weight.grad(), alone->conv->weight.grad(), 1e-12, 1e-12));
    // Accumulation without communication, then with.
    net->zero_grad();
    {
      const auto guard = ddp.no_sync();
      (ddp.forward(x).square().mean() * (world.rank() * 2)).backward({}, true, true);
    }
    (ddp.forward(x).square().mean() * 0).backward({}, true, true);
    EXPECT_TRUE(torch::allclose(net->conv->weight.grad(), alone->conv->weight.grad(), 1e-12, 1e-12));
    net->zero_grad();
    ddp.register_comm_hook(comm_hooks::all_reduce);
    expect_refusal({"create_graph", "hook"}, [&] { ddp.forward(x).square().mean().backward({}, true, true); });
  });
}

}  // namespace
}  // namespace muster::test
