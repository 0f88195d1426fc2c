// activation_checkpoint(): what its header promises, point by point. Results that are kept are in
// activation_checkpoint_kept_test.cpp.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "muster/optim/autocast.h"
#include "support/patience.h"
#include "support/ranks.h"
#include "unit/activation_checkpoint_fixture.h"

namespace muster::test::activation_checkpoints {
namespace {

using Function = std::function<Tensor(const Tensor&)>;

TEST_F(ActivationCheckpoint, GivesTheBitsOfAnOrdinaryCall) {
  const auto net = std::make_shared<Blocks>();
  std::vector<Tensor> results[2];
  for (const bool checkpointed : {false, true}) {
    net->zero_grad();
    Tensor x = values(1, {5, Blocks::kWidth}).set_requires_grad(true);
    torch::manual_seed(2);
    const Tensor y = net->forward(x, checkpointed);
    (y * y).sum().backward();
    auto& all = results[checkpointed];
    all = {y, x.grad(), torch::rand({3})};  // the generator goes on as if there had been no second call
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
  }
  for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << i;
}

TEST_F(ActivationCheckpoint, KeepsOnlyTheArguments) {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> inside;
  int calls = 0, ends = 0;
  const auto fn = [&](const Tensor& x, double factor) {
    ++calls;
    Tensor y = x;
    for (int i = 0; i < 5; ++i) {
      y = torch::sin(y * factor);
      inside.emplace_back(y.getIntrusivePtr());
    }
    const Tensor last = y.exp() + 1;
    ++ends;
    return last;
  };
  Tensor x = values(1, {10}).set_requires_grad(true);
  const Tensor y = activation_checkpoint({.early_stop = true}, fn, x, 1.5);
  ASSERT_EQ(inside.size(), 5u);
  // exp() saves its result, so none of the five is needed any more.
  for (const auto& tensor : inside) EXPECT_TRUE(tensor.expired());
  EXPECT_EQ(calls, 1);
  y.sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(ends, 1) << "the second call went on when all was there";
  Tensor same = x.detach().clone().set_requires_grad(true);
  fn(same, 1.5).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), same.grad()));
  x.mutable_grad() = Tensor();
  calls = ends = 0;
  activation_checkpoint(fn, x, 1.5).sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(ends, 2);
  EXPECT_TRUE(torch::equal(x.grad(), same.grad()));

  // Nothing to find again: not called.
  calls = 0;
  activation_checkpoint([&](const Tensor& z) { return ++calls, z + 1; }, x).sum().backward();
  EXPECT_EQ(calls, 1);
  // Without gradients it is an ordinary call.
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(activation_checkpoint(fn, x, 1.5).requires_grad());
}

TEST_F(ActivationCheckpoint, Nests) {
  std::vector<int> calls(3);
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> between;
  const Function inner = [&](const Tensor& x) { return ++calls[0], torch::sin(torch::exp(x)); };
  const Function middle = [&](const Tensor& x) {
    ++calls[1];
    const Tensor y = torch::tanh(activation_checkpoint(inner, x));
    between.emplace_back(y.getIntrusivePtr());
    return activation_checkpoint(inner, y);
  };
  const Function outer = [&](const Tensor& x) {
    ++calls[2];
    return activation_checkpoint(middle, activation_checkpoint(middle, torch::cos(x)));
  };
  Tensor x = values(1, {6}).to(torch::kDouble).set_requires_grad(true),
         same = x.detach().clone().set_requires_grad(true);
  const Tensor y = activation_checkpoint(outer, x);
  for (const auto& tensor : between) EXPECT_TRUE(tensor.expired()) << "an inner call keeps its argument";
  y.sum().backward();
  const auto plain = [](Tensor z) {
    z = torch::cos(z);
    for (int i = 0; i < 2; ++i) z = torch::sin(torch::exp(torch::tanh(torch::sin(torch::exp(z)))));
    return z;
  };
  plain(same).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), same.grad()));
  EXPECT_EQ(calls[2], 2);
}

TEST_F(ActivationCheckpoint, SecondBackwardsAndSecondDerivatives) {
  const Function fn = [](const Tensor& x) { return torch::sin(x * x) * torch::exp(x); };
  Tensor x = values(1, {6}).to(torch::kDouble).set_requires_grad(true);
  const Tensor y = activation_checkpoint(fn, x).sum(), plain = fn(x).sum();
  for (int i = 0; i < 2; ++i) {
    x.mutable_grad() = Tensor();
    y.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(torch::equal(x.grad(), torch::autograd::grad({plain}, {x}, {}, true)[0]));
  }
  const auto derivatives = [&](const Tensor& of) {
    std::vector<Tensor> all{of};
    for (int order = 0; order < 3; ++order)
      all.push_back(torch::autograd::grad({all.back().sum()}, {x}, {}, true, true)[0]);
    return all;
  };
  const auto ours = derivatives(activation_checkpoint(fn, x)), expected = derivatives(fn(x));
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(torch::allclose(ours[i], expected[i], 1e-12, 1e-12)) << i;
}

TEST_F(ActivationCheckpoint, SeveralArgumentsAndResults) {
  Tensor a = values(1, {4}).set_requires_grad(true), b = values(2, {4}), c = values(3, {4}).set_requires_grad(true);
  const auto fn = [](const Tensor& p, int power, Tensor q, const Tensor& nothing, const Tensor& r) {
    EXPECT_FALSE(nothing.defined());
    return std::make_pair(torch::sin(p * q).pow(power), torch::cos(r * p));
  };
  const auto [one, two] = activation_checkpoint(fn, a, 3, b, Tensor(), c);
  (one.sum() + 2 * two.sum()).backward();
  const auto grads = std::make_pair(a.grad().clone(), c.grad().clone());
  a.mutable_grad() = c.mutable_grad() = Tensor();
  const auto [three, four] = fn(a, 3, b, Tensor(), c);
  (three.sum() + 2 * four.sum()).backward();
  EXPECT_TRUE(torch::equal(grads.first, a.grad()));
  EXPECT_TRUE(torch::equal(grads.second, c.grad()));
}

// As C++ programs use autocast: what it keeps is cleared when it ends, before backward().
TEST_F(ActivationCheckpoint, AutocastIsThatOfTheFirstCall) {
  std::vector<Tensor> weights;
  for (const bool checkpointed : {false, true}) {
    torch::manual_seed(7);
    nn::Linear layer(16, 16);
    const auto fn = [&](const Tensor& x) { return torch::relu(layer->forward(torch::relu(layer->forward(x)))); };
    torch::optim::SGD optimizer(layer->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      Tensor x = values(step, {3, 16}).set_requires_grad(true);
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const Tensor y = checkpointed ? activation_checkpoint(fn, x) : fn(x);
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
      y.sum().backward();
      optimizer.step();
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    }
    weights.push_back(layer->weight.detach());
  }
  EXPECT_TRUE(torch::equal(weights[0], weights[1]));
}

TEST_F(ActivationCheckpoint, TheFunctionMayComputeGradients) {
  const auto fn = [](const Tensor& x) {
    Tensor y = torch::sin(x * x).sum();
    for (int i = 0; i < 2; ++i) y = torch::autograd::grad({y}, {x}, {}, true, true)[0].pow(2).sum();
    return y * torch::exp(x);
  };
  for (const bool early_stop : {false, true}) {
    Tensor x = values(1, {4}).to(torch::kDouble).set_requires_grad(true);
    const auto expected = torch::autograd::grad({fn(x).sum()}, {x})[0];
    activation_checkpoint({.early_stop = early_stop}, fn, x).sum().backward();
    EXPECT_TRUE(torch::allclose(x.grad(), expected, 1e-12, 1e-12));
  }
}

TEST_F(ActivationCheckpoint, ChangesInPlaceAreNamed) {
  const Tensor x = values(1, {4}).set_requires_grad(true) * 1;
  const auto of_argument = [](Tensor y) { return y.relu_().sin(); };
  EXPECT_THROW(activation_checkpoint(of_argument, x), InvalidArgument);
  const Tensor inside = activation_checkpoint(
      [](const Tensor& z) {
        Tensor y = torch::exp(z);
        y.add_(1);
        return torch::sin(y);
      },
      values(1, {4}).set_requires_grad(true));
  EXPECT_THROW(inside.sum().backward(), InvalidArgument);
  // An argument of an inner call that the outer one changes afterwards.
  const Tensor nested = activation_checkpoint(
      [](const Tensor& z) {
        Tensor y = z * 2;
        const Tensor of_inner = activation_checkpoint([](const Tensor& w) { return torch::sin(w + 1); }, y);
        y.add_(of_inner);
        return torch::exp(y);
      },
      values(1, {4}).set_requires_grad(true));
  EXPECT_THROW(nested.sum().backward(), InvalidArgument);
}

TEST_F(ActivationCheckpoint, RunningStatisticsAreNoObstacle) {
  nn::Sequential net(nn::Conv2d(3, 4, 3), nn::BatchNorm2d(4), nn::ReLU(), nn::Conv2d(4, 2, 3));
  Tensor x = values(1, {2, 3, 8, 8}).set_requires_grad(true);
  net->forward(x).sum().backward();
  std::vector<Tensor> expected;
  for (const auto& parameter : net->parameters()) expected.push_back(parameter.grad().clone());
  net->zero_grad();
  activation_checkpoint([&](const Tensor& y) { return net->forward(y); }, x).sum().backward();
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(net->parameters()[i].grad(), expected[i])) << i;
}

// libtorch moves to other threads when backward() runs inside of backward() many times. Its own engine has run before.
TEST_F(ActivationCheckpoint, TheEngineHasItsThreads) {
  const std::function<Tensor(const Tensor&, int)> nested = [&](const Tensor& x, int depth) -> Tensor {
    Tensor y = torch::sin(x);
    if (depth > 0)
      y.register_hook([&nested, depth](const Tensor& gradient) -> Tensor {
        const torch::AutoGradMode with_grad(true);
        Tensor inner = torch::ones({2}).set_requires_grad(true);
        nested(inner, depth - 1).sum().backward();
        return gradient + 0 * inner.grad();
      });
    return y;
  };
  Tensor x = torch::ones({2}).set_requires_grad(true);
  nested(x, 80).sum().backward();
  const auto expected = x.grad().clone();
  x.mutable_grad() = Tensor();
  activation_checkpoint([](const Tensor& y) { return torch::sin(y); }, x).sum().backward();
  x.mutable_grad() = Tensor();
  nested(x, 80).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), expected));
}

TEST_F(ActivationCheckpoint, AFunctionThatComputesSomethingElseIsNamed) {
  Tensor x = values(1, {6}).set_requires_grad(true);
  const auto message = [&](const std::function<Tensor(const Tensor&, int)>& fn) -> std::string {
    int call = 0;
    const Tensor y = activation_checkpoint([&](const Tensor& z) { return fn(z, ++call); }, x);
    try {
      y.sum().backward();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  const auto fewer = message([](const Tensor& z, int call) { return call == 1 ? torch::sin(torch::exp(z)) : z * 2; });
  EXPECT_NE(fewer.find("keeps 0 tensors, and kept 2 the first time"), fewer.npos) << fewer;
  const auto more =
      message([](const Tensor& z, int call) { return call == 1 ? torch::sin(z) : torch::sin(torch::exp(z)); });
  EXPECT_NE(more.find("keeps 2 tensors, and kept 1 the first time"), more.npos) << more;
  const auto other = message([](const Tensor& z, int call) { return torch::sin(call == 1 ? z : z.narrow(0, 0, 3)); });
  EXPECT_NE(other.find("keeps a tensor Float [3] where it kept Float [6] the first time"), other.npos) << other;

  int call = 0;
  const Tensor y = activation_checkpoint(
      [&](const Tensor& z) {
        if (++call == 2) throw std::runtime_error("the second time");
        return torch::sin(z);
      },
      x);
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  y.sum().backward();  // the third
  EXPECT_TRUE(torch::allclose(x.grad(), torch::cos(x)));
}

// Between the ranks: hooks on gradients, and blocks of gradients that are freed during backward, see nothing of it.
struct Checkpointed : nn::Module {
  Tensor forward(int rank, int step, bool checkpointed) {
    return net->forward(drawn(rank, step, {6, Blocks::kWidth}), checkpointed).square().sum();
  }
  std::shared_ptr<Blocks> net = register_module("net", std::make_shared<Blocks>());
};
template <template <typename> typename Parallel>
void expect_steps_of_ordinary_calls() {
  run_threads(2,
              [](World& world) {
                std::vector<std::shared_ptr<Checkpointed>> nets;
                for (const bool checkpointed : {false, true}) {
                  const auto net = nets.emplace_back(make<Checkpointed>(7, {}));
                  net->net->eval();  // no dropout: ranks that are threads share the generator
                  Parallel<Checkpointed> model(net);
                  torch::optim::SGD optimizer(net->parameters(), 0.1);
                  for (int step = 0; step < 3; ++step) {
                    optimizer.zero_grad();
                    {
                      const auto guard = model.no_sync();
                      model(world.rank(), step, checkpointed).backward();
                    }
                    model(world.rank(), 10 + step, checkpointed).backward();
                    optimizer.step();
                  }
                  barrier();
                }
                for (const auto& item : nets[0]->named_parameters())
                  EXPECT_TRUE(torch::allclose(item.value(), nets[1]->named_parameters()[item.key()])) << item.key();
              },
              {.timeout = kPatience});
}
TEST_F(ActivationCheckpoint, InDistributedDataParallel) { expect_steps_of_ordinary_calls<DistributedDataParallel>(); }
TEST_F(ActivationCheckpoint, InFullyShardedDataParallel) { expect_steps_of_ordinary_calls<FullyShardedDataParallel>(); }

}  // namespace
}  // namespace muster::test::activation_checkpoints
