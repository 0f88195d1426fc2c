// Differentiable optimizers of modules: their steps and meta-gradients are TorchOpt's. How modules get the new
// parameters is in meta_modules_test.cpp.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/optim/meta.h"
#include "support/ask_python.h"
#include "support/finite_differences.h"
#include "support/transform_cases.h"

namespace muster::test {
namespace {

using at::Tensor;
using optim::CopyMode;
using optim::Tensors;
namespace nn = torch::nn;

// meta_reference.py has the same net and points.
nn::Sequential small_net() {
  nn::Sequential net(nn::Linear(1, 8), nn::Tanh(), nn::Linear(8, 1));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  double i = 0;
  for (Tensor& parameter : net->parameters())
    parameter.copy_((at::cos(at::arange(parameter.numel(), at::kDouble) * 1.3 + i++) * 0.5).view_as(parameter));
  return net;
}

Tensor loss_of(nn::Sequential& net, int step) {
  const Tensor x = at::linspace(-2, 2, 16, at::kDouble).unsqueeze(1);
  return (net->forward(x) - at::sin(1.5 * x + 0.1 * step)).square().mean();
}

std::string meta_name(const std::string& name) {
  const std::pair<std::string, std::string> names[] = {
      {"sgd", "MetaSGD"},         {"adam", "MetaAdam"},         {"adamw", "MetaAdamW"},   {"adagrad", "MetaAdaGrad"},
      {"rmsprop", "MetaRMSProp"}, {"adadelta", "MetaAdaDelta"}, {"adamax", "MetaAdaMax"}, {"radam", "MetaRAdam"}};
  for (const auto& [ours, meta] : names)
    if (ours == name) return meta;
  ADD_FAILURE() << name;
  return {};
}

// Compares the parameters after the steps, and the gradient of a loss after them by those before.
void compare(Comparison& same, const optim::GradientTransformation& with, int steps, const std::string& torchopt) {
  auto net = small_net();
  const Tensors first = net->parameters();
  optim::MetaOptimizer inner(*net, with);
  for (int step = 0; step < steps; ++step) inner.step(loss_of(net, step));
  const std::string question = "|" + std::to_string(steps) + "|" + torchopt;
  same.add("meta_parameters" + question, numbers(net->parameters()), 1e-10);
  same.add("meta_gradients" + question, numbers(torch::autograd::grad({loss_of(net, 1000)}, first)), 1e-9);
}

TEST(Meta, EqualsTorchOpt) {
  MUSTER_NEEDS_TORCHOPT();
  Comparison same;
  for (const auto& one : transform_cases())
    for (const int steps : {5, 20, 100}) {
      const bool explodes = one.torchopt.find("maximize=True") != std::string::npos && steps > 5;
      if (!explodes) compare(same, one.make(), steps, meta_name(one.name) + one.torchopt.substr(one.name.size()));
    }
  for (const auto& [name, with] : {std::pair<std::string, optim::GradientTransformation>("MetaAdam", optim::adam()),
                                   {"MetaAdamW", optim::adamw()},
                                   {"MetaAdaGrad", optim::adagrad()},
                                   {"MetaRMSProp", optim::rmsprop()},
                                   {"MetaAdaDelta", optim::adadelta({.lr = 1.0})},
                                   {"MetaAdaMax", optim::adamax({.lr = 2e-3, .eps = 1e-8})},
                                   {"MetaRAdam", optim::radam({.eps = 1e-8})}}) {  // the classes' defaults
    compare(same, with, 5, name + "()");
  }
  same.with("unit/meta_reference.py");
}

TEST(Meta, MetaGradientsEqualDifferences) {
  for (const auto& [name, with] :
       {std::pair<std::string, optim::GradientTransformation>("sgd", optim::sgd({.lr = 0.1, .momentum = 0.9})),
        {"adam", optim::adam({.lr = 0.05})},
        {"rmsprop", optim::rmsprop({.lr = 0.01})}}) {
    const auto of = [&](const Tensors& first) {
      auto net = small_net();
      auto state = optim::extract_state_dict(*net);
      for (size_t i = 0; i < first.size(); ++i) state.parameters[i].second = first[i];
      optim::recover_state_dict(*net, state);
      optim::MetaOptimizer inner(*net, with);
      for (int step = 0; step < 5; ++step) inner.step(loss_of(net, step));
      return loss_of(net, 1000);
    };
    auto net = small_net();
    const Tensors first = net->parameters();
    const auto exact = torch::autograd::grad({of(first)}, first);
    EXPECT_LE(farthest(numbers(exact), numbers(finite_differences(of, first))), 1e-6) << name;
  }
}

TEST(Meta, EachClassHasItsOptimizerWithTorchOptsDefaults) {
  using Make = std::function<std::unique_ptr<optim::MetaOptimizer>(nn::Module&)>;
  const auto plain = []<typename M>(std::type_identity<M>) -> Make {
    return [](nn::Module& module) { return std::make_unique<M>(module); };
  };
  const std::pair<std::string, std::pair<Make, optim::GradientTransformation>> classes[] = {
      {"MetaSGD(lr=0.1)",
       {[](nn::Module& m) { return std::make_unique<optim::MetaSGD>(m, optim::FuncSGDOptions{.lr = 0.1}); },
        optim::sgd({.lr = 0.1})}},
      {"MetaAdam()", {plain(std::type_identity<optim::MetaAdam>()), optim::adam()}},
      {"MetaAdamW()", {plain(std::type_identity<optim::MetaAdamW>()), optim::adamw()}},
      {"MetaAdaGrad()", {plain(std::type_identity<optim::MetaAdaGrad>()), optim::adagrad()}},
      {"MetaRMSProp()", {plain(std::type_identity<optim::MetaRMSProp>()), optim::rmsprop()}},
      {"MetaAdaDelta()", {plain(std::type_identity<optim::MetaAdaDelta>()), optim::adadelta({.lr = 1.0})}},
      {"MetaAdaMax()", {plain(std::type_identity<optim::MetaAdaMax>()), optim::adamax({.lr = 2e-3, .eps = 1e-8})}},
      {"MetaRAdam()", {plain(std::type_identity<optim::MetaRAdam>()), optim::radam({.eps = 1e-8})}}};
  for (const auto& [name, both] : classes) {
    auto a = small_net(), b = small_net();
    const auto one = both.first(*a);
    optim::MetaOptimizer other(*b, both.second);
    for (int step = 0; step < 2; ++step) one->step(loss_of(a, step)), other.step(loss_of(b, step));
    EXPECT_EQ(numbers(a->parameters()), numbers(b->parameters())) << name;
    EXPECT_NE(numbers(a->parameters()), numbers(small_net()->parameters())) << name;
  }
}

// A step differentiates by the module's parameters, and touches no other leaf's .grad.
TEST(Meta, AStepTouchesNoOtherGradient) {
  auto net = small_net();
  const Tensors outer = net->parameters();
  const Tensor rate = at::scalar_tensor(0.1, at::kDouble).set_requires_grad(true);
  optim::MetaSGD inner(*net, {.lr = 0.1});
  const auto proximal = [&](int step) {
    Tensor loss = loss_of(net, step);
    for (size_t i = 0; i < outer.size(); ++i) loss = loss + rate * (net->parameters()[i] - outer[i]).square().sum();
    return loss;
  };
  for (int step = 0; step < 3; ++step) inner.step(proximal(step));
  auto frozen = small_net();
  for (const Tensor& one : frozen->parameters()) one.set_requires_grad(false);
  inner.add_param_group(*frozen);
  inner.step(proximal(3) + loss_of(frozen, 3));
  EXPECT_FALSE(rate.grad().defined());
  for (const Tensor& one : outer) EXPECT_FALSE(one.grad().defined());
  EXPECT_EQ(inner.state_dict().size(), 2u);
  inner.load_state_dict(inner.state_dict());
  EXPECT_THROW(inner.load_state_dict({}), InvalidArgument);
}

TEST(Meta, AnErrorLeavesModuleAndStateAsTheyWere) {
  auto net = small_net(), other = small_net();
  const auto chain = optim::chain(optim::scale_by_adam(), optim::clip_grad_norm(1, 2, /*error_if_nonfinite=*/true),
                                  optim::scale(-0.1));
  optim::MetaOptimizer inner(*net, chain), same(*other, chain);
  inner.step(loss_of(net, 0)), same.step(loss_of(other, 0));
  EXPECT_THROW(inner.step(loss_of(net, 1) * NAN), InvalidArgument);
  inner.step(loss_of(net, 1)), same.step(loss_of(other, 1));
  EXPECT_EQ(numbers(net->parameters()), numbers(other->parameters()));
}

TEST(Meta, ParametersThatTheLossLacksStay) {
  auto net = small_net();
  const Tensors before = net->parameters();
  before[1].set_requires_grad(false);
  optim::MetaSGD inner(*net, {.lr = 0.1});
  inner.step(before[0].square().sum());
  const Tensors after = net->parameters();
  EXPECT_FALSE(after[0].is_same(before[0]));
  for (const size_t i : {1, 2, 3}) EXPECT_TRUE(after[i].is_same(before[i])) << i;
  EXPECT_THROW(inner.step(at::ones({2}).requires_grad_()), InvalidArgument);
  EXPECT_THROW(inner.step(at::ones({1})), InvalidArgument);
  EXPECT_THROW(inner.step(Tensor()), InvalidArgument);
}

TEST(Meta, StatesByReferenceAndCopies) {
  auto net = small_net();
  auto outer = net->parameters();
  const auto reference = optim::extract_state_dict(*net);
  EXPECT_TRUE(reference.parameters[0].second.is_same(outer[0]));
  const auto copy = optim::extract_state_dict(*net, {.by = CopyMode::kCopy});
  EXPECT_FALSE(copy.parameters[0].second.is_leaf());
  EXPECT_FALSE(copy.parameters[0].second.is_alias_of(outer[0]));
  const auto deep = optim::extract_state_dict(*net, {.by = CopyMode::kDeepCopy});
  EXPECT_TRUE(deep.parameters[0].second.is_leaf() && deep.parameters[0].second.requires_grad());
  EXPECT_FALSE(deep.parameters[0].second.is_alias_of(outer[0]));

  optim::MetaAdam inner(*net);
  const auto fresh = inner.state_dict();
  inner.step(loss_of(net, 0));
  const auto after_one = inner.extract_state_dict();
  const auto one = optim::extract_state_dict(*net);
  inner.step(loss_of(net, 1));
  const auto two = numbers(net->parameters());
  // Back to the state after one step, and the same second step again.
  optim::recover_state_dict(*net, one);
  inner.load_state_dict(after_one);
  inner.step(loss_of(net, 1));
  EXPECT_EQ(numbers(net->parameters()), two);
  // And from the beginning.
  optim::recover_state_dict(*net, reference);
  inner.load_state_dict(fresh);
  inner.step(loss_of(net, 0));
  EXPECT_EQ(numbers(net->parameters()), numbers([&] {
              Tensors all;
              for (const auto& [name, tensor] : one.parameters) all.push_back(tensor);
              return all;
            }()));

  optim::stop_gradient(*net);
  inner.stop_gradient();
  for (const Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
  EXPECT_FALSE(one.parameters[0].second.is_leaf());  // what was extracted keeps its graph
  auto cut = one;
  optim::stop_gradient(cut);
  EXPECT_TRUE(cut.parameters[0].second.is_leaf());

  net->eval();
  optim::recover_state_dict(*net, reference);
  EXPECT_FALSE(net->is_training());

  auto wrong = reference;
  wrong.parameters[0].first = "9.weight";
  EXPECT_THROW(optim::recover_state_dict(*net, wrong), Mismatch);
  wrong = reference;
  wrong.parameters[0].second = at::ones({3});
  EXPECT_THROW(optim::recover_state_dict(*net, wrong), Mismatch);
  wrong = reference;
  wrong.parameters.pop_back();
  EXPECT_THROW(optim::recover_state_dict(*net, wrong), Mismatch);
}

// kMeta: a device that every libtorch has.
TEST(Meta, StatesOnAnotherDevice) {
  auto net = small_net();
  optim::MetaAdam inner(*net);
  inner.step(loss_of(net, 0));
  for (const auto by : {CopyMode::kCopy, CopyMode::kDeepCopy}) {
    const auto state = optim::extract_state_dict(*net, {.by = by, .device = at::kMeta});
    ASSERT_EQ(state.parameters.size(), net->parameters().size());
    for (const auto& [name, tensor] : state.parameters) {
      EXPECT_TRUE(tensor.is_meta()) << name;
      EXPECT_EQ(tensor.sizes(), net->named_parameters()[name].sizes());
    }
    const auto states = inner.extract_state_dict(by, at::kMeta);
    ASSERT_EQ(states.size(), 1u);
    const Tensors leaves = optim::detail::leaves_of(states[0]);
    EXPECT_EQ(leaves.size(), 2 * net->parameters().size());  // both moments
    for (const Tensor& one : leaves) EXPECT_TRUE(one.is_meta());
  }
  const auto clone = optim::module_clone(nn::Linear(2, 3), {.by = CopyMode::kDeepCopy, .device = at::kMeta});
  EXPECT_TRUE(clone->weight.is_meta());
  for (const Tensor& one : net->parameters()) EXPECT_TRUE(one.is_cpu());
}

// Nothing of an inner loop is left once its loss is gone.
TEST(Meta, InnerLoopsLeaveNoMemory) {
  auto net = small_net();
  const auto start = optim::extract_state_dict(*net);
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> seen;
  for (int round = 0; round < 3; ++round) {
    optim::recover_state_dict(*net, start);
    optim::MetaAdam inner(*net);
    for (int step = 0; step < 3; ++step) {
      inner.step(loss_of(net, step));
      for (const Tensor& each : net->parameters()) seen.emplace_back(each.getIntrusivePtr());
    }
    loss_of(net, 1000).backward();
  }
  optim::recover_state_dict(*net, start);
  for (const auto& each : seen) EXPECT_TRUE(each.expired());
}

}  // namespace
}  // namespace muster::test
