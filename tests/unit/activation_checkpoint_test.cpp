// activation_checkpoint(): what its header promises, point by point.
#include "muster/parallel/activation_checkpoint.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "muster/muster.h"
#include "muster/optim/autocast.h"
#include "support/models.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using Function = std::function<Tensor(const Tensor&)>;

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

Tensor values(int64_t seed, torch::IntArrayRef sizes) {
  torch::manual_seed(seed);
  return torch::randn(sizes);
}

class ActivationCheckpoint : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

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

// An operator that counts how often it is computed.
int computed = 0;
Tensor counted_kernel(const Tensor& x) {
  ++computed;
  return x * 2;
}
Tensor counted(const Tensor& x) {
  static const torch::Library library = [] {
    torch::Library fragment(torch::Library::DEF, "muster_test", std::nullopt, __FILE__, __LINE__);
    fragment.def("counted(Tensor x) -> Tensor");
    fragment.impl("counted", c10::DispatchKey::CPU, TORCH_FN(counted_kernel));
    return fragment;
  }();
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("muster_test::counted", "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

TEST_F(ActivationCheckpoint, KeepsResultsOnRequest) {
  const auto net = std::make_shared<Blocks>();
  const Tensor weight = values(3, {Blocks::kWidth});
  std::vector<std::string> asked;
  const auto gradients_with = [&](const std::vector<std::string>& kept, int nested) {
    computed = 0;
    asked.clear();
    net->zero_grad();
    ActivationCheckpointOptions options{.keep = [&](std::string_view operation) {
      asked.emplace_back(operation);
      return std::find(kept.begin(), kept.end(), operation) != kept.end();
    }};
    const auto run = [&](const Tensor& y) { return net->forward(y * counted(weight), nested > 1) * counted(weight); };
    Tensor x = values(1, {5, Blocks::kWidth}).set_requires_grad(true);
    torch::manual_seed(2);
    const Tensor y = nested > 0 ? activation_checkpoint(options, run, x) : run(x);
    y.square().sum().backward();
    std::vector<Tensor> all = {y, x.grad()};
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  const auto expected = gradients_with({}, 0);
  const auto expect_same = [&](const std::vector<Tensor>& all, int times) {
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(all[i], expected[i])) << i;
    EXPECT_EQ(computed, times);
  };
  for (const int nested : {1, 2}) {
    SCOPED_TRACE(nested);
    expect_same(gradients_with({}, nested), 4);
    expect_same(gradients_with({"muster_test::counted"}, nested), 2);
    expect_same(
        gradients_with({"muster_test::counted", "aten::addmm", "aten::native_layer_norm", "aten::_softmax"}, nested),
        2);
    for (const char* const operation : {"aten::addmm", "aten::gelu", "aten::native_layer_norm"})
      EXPECT_NE(std::find(asked.begin(), asked.end(), operation), asked.end()) << operation;
    for (const char* const operation : {"aten::t", "aten::bernoulli_", "aten::native_dropout"})  // a view, random ones
      EXPECT_EQ(std::find(asked.begin(), asked.end(), operation), asked.end()) << operation;
  }
}

TEST_F(ActivationCheckpoint, KeptResultsEndWithTheGraphAndMustNotChange) {
  const ActivationCheckpointOptions keeps_sin{
      .keep = [](std::string_view operation) { return operation == "aten::sin"; }};
  c10::weak_intrusive_ptr<c10::StorageImpl> kept = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(nullptr);
  const auto fn = [&](const Tensor& x) {
    const Tensor y = torch::sin(x);
    kept = y.storage().getWeakStorageImpl();
    return torch::cos(y) * y.exp();
  };
  Tensor x = values(1, {1000}).set_requires_grad(true);
  {
    const Tensor y = activation_checkpoint(keeps_sin, fn, x);
    EXPECT_FALSE(kept.expired());
    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();  // again
    Tensor same = x.detach().clone().set_requires_grad(true);
    (fn(same).sum() * 2).backward();
    EXPECT_TRUE(torch::equal(x.grad(), same.grad()));
  }
  {
    const Tensor y = activation_checkpoint(keeps_sin, fn, x);
    EXPECT_FALSE(kept.expired());
  }
  EXPECT_TRUE(kept.expired());
  // Inside of a call that keeps nothing, nothing is kept.
  const Tensor outer =
      activation_checkpoint([&](const Tensor& at) { return activation_checkpoint(keeps_sin, fn, at) + 1; }, x);
  EXPECT_TRUE(kept.expired());
  outer.sum().backward();

  const Tensor other = activation_checkpoint(
      keeps_sin,
      [calls = std::make_shared<int>(0)](const Tensor& at) {
        return (++*calls == 1 ? torch::sin(at) : torch::tanh(at)).exp();
      },
      x);
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { other.sum().backward(); }), "all results that were kept");
}

// Linear over three dimensions adds its bias in place, to memory that has another version counter.
TEST_F(ActivationCheckpoint, KeptResultsThatAreChangedInPlace) {
  nn::Linear linear(nn::LinearOptions(6, 6));
  const auto keep = [](std::string_view operation) { return operation == "aten::mm" || operation == "aten::bmm"; };
  const auto expect_same = [&](const std::function<Tensor(const Tensor&, bool)>& run) {
    std::vector<Tensor> results[2];
    for (const bool kept : {false, true}) {
      linear->zero_grad();
      Tensor x = values(1, {2, 5, 6}).set_requires_grad(true);
      const Tensor y = run(x, kept), before = y.detach().clone();
      for (int time = 0; time < 2; ++time) y.square().sum().backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(torch::equal(y, before));
      results[kept] = {before, x.grad(), linear->weight.grad().clone(), linear->bias.grad().clone()};
    }
    for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << i;
  };
  const auto twice = [&](const Tensor& at) { return torch::gelu(linear(torch::gelu(linear(at)))); };
  expect_same(
      [&](const Tensor& x, bool kept) { return kept ? activation_checkpoint({.keep = keep}, twice, x) : twice(x); });
  const auto masked = [&](const Tensor& at) {
    return torch::bmm(at, linear(at).transpose(1, 2))
        .div_(3)
        .masked_fill_(at.new_ones({5, 5}).triu(1).to(torch::kBool), 0);
  };
  expect_same(
      [&](const Tensor& x, bool kept) { return kept ? activation_checkpoint({.keep = keep}, masked, x) : masked(x); });
  // By the caller, after the call.
  expect_same([&](const Tensor& x, bool kept) {
    Tensor y = kept ? activation_checkpoint({.keep = keep}, linear, x) : linear(x);
    y.relu_();
    return y;
  });
  const auto by_hand = [&](const Tensor& at) { return at.matmul(linear->weight.t()); };
  expect_same([&](const Tensor& x, bool kept) {
    Tensor y = kept ? activation_checkpoint({.keep = keep}, by_hand, x) : by_hand(x);
    y += linear->bias;
    return torch::tanh(y);
  });
}

TEST_F(ActivationCheckpoint, KeepsAttentionAndGoesWithAutocast) {
  std::vector<std::string> asked;
  const auto attention = [](const Tensor& x) { return at::scaled_dot_product_attention(x, x, x); };
  Tensor x = values(1, {2, 3, 8, 16}).set_requires_grad(true);
  const auto note = [&](std::string_view operation) {
    asked.emplace_back(operation);
    return true;
  };
  const Tensor y = activation_checkpoint({.keep = note}, attention, x);
  EXPECT_NE(std::find(asked.begin(), asked.end(), "aten::_scaled_dot_product_flash_attention_for_cpu"), asked.end());
  y.square().sum().backward();
  Tensor same = x.detach().clone().set_requires_grad(true);
  attention(same).square().sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), same.grad()));

  // In one call, the converted weight comes from autocast's cache; in the other, it does not.
  nn::Linear linear(nn::LinearOptions(16, 16).bias(false));
  int products = 0;
  const auto every_other = [&](std::string_view operation) { return operation == "aten::mm" && products++ % 2 == 0; };
  const auto thrice = [&](const Tensor& at) { return linear(torch::tanh(linear(torch::tanh(linear(at))))); };
  std::vector<Tensor> gradients;
  for (const bool kept : {false, true}) {
    linear->zero_grad();
    {
      const Autocast autocast;
      const Tensor z = values(2, {5, 16});
      (kept ? activation_checkpoint({.keep = every_other}, thrice, z) : thrice(z)).sum().backward();
    }
    gradients.push_back(linear->weight.grad().clone());
  }
  EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
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
}  // namespace muster::test
