// libtorch's modules, and those of users, get the new parameters of differentiable optimizers wherever they keep them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules.h>

#include <functional>
#include <string>
#include <type_traits>
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

// A module computes with the tensors that it is given: two modules of a class, one with the other's tensors, agree.
template <typename Holder, typename... Arguments>
void takes_over(const std::function<Holder()>& make, const Arguments&... arguments) {
  auto first = make(), second = make();
  const auto state = optim::extract_state_dict(*second);
  ASSERT_FALSE(state.parameters.empty());
  optim::recover_state_dict(*first, state);
  const auto output = [&](Holder& holder) {
    auto result = holder->forward(arguments...);
    if constexpr (std::is_same_v<decltype(result), Tensor>) {
      return result;
    } else {
      return std::get<0>(result);
    }
  };
  const Tensor ours = output(first), theirs = output(second);
  EXPECT_TRUE(at::equal(ours, theirs)) << first->name();
  // And the graph is the given tensors'.
  for (const auto& [name, tensor] : state.parameters) {
    const auto gradient = torch::autograd::grad({ours.sum()}, {tensor}, {}, true, false, true)[0];
    EXPECT_TRUE(gradient.defined()) << first->name() << " " << name;
  }
}

TEST(Meta, LibtorchsModulesTakeNewParameters) {
  const auto x = at::randn({4, 6});
  const auto image = at::randn({2, 3, 8, 8});
  takes_over<nn::Linear>([] { return nn::Linear(6, 3); }, x);
  takes_over<nn::Bilinear>([] { return nn::Bilinear(6, 6, 3); }, x, x);
  takes_over<nn::Conv1d>([] { return nn::Conv1d(3, 5, 3); }, at::randn({2, 3, 8}));
  takes_over<nn::Conv2d>([] { return nn::Conv2d(3, 5, 3); }, image);
  takes_over<nn::Conv3d>([] { return nn::Conv3d(3, 5, 3); }, at::randn({2, 3, 4, 4, 4}));
  takes_over<nn::ConvTranspose1d>([] { return nn::ConvTranspose1d(3, 5, 3); }, at::randn({2, 3, 8}));
  takes_over<nn::ConvTranspose2d>([] { return nn::ConvTranspose2d(3, 5, 3); }, image);
  takes_over<nn::ConvTranspose3d>([] { return nn::ConvTranspose3d(3, 5, 3); }, at::randn({2, 3, 4, 4, 4}));
  takes_over<nn::BatchNorm1d>([] { return nn::BatchNorm1d(6); }, x);
  takes_over<nn::BatchNorm2d>([] { return nn::BatchNorm2d(3); }, image);
  takes_over<nn::BatchNorm3d>([] { return nn::BatchNorm3d(3); }, at::randn({2, 3, 4, 4, 4}));
  takes_over<nn::InstanceNorm1d>([] { return nn::InstanceNorm1d(nn::InstanceNorm1dOptions(3).affine(true)); },
                                 at::randn({2, 3, 8}));
  takes_over<nn::InstanceNorm2d>([] { return nn::InstanceNorm2d(nn::InstanceNorm2dOptions(3).affine(true)); }, image);
  takes_over<nn::InstanceNorm3d>([] { return nn::InstanceNorm3d(nn::InstanceNorm3dOptions(3).affine(true)); },
                                 at::randn({2, 3, 4, 4, 4}));
  takes_over<nn::LayerNorm>([] { return nn::LayerNorm(nn::LayerNormOptions({6})); }, x);
  takes_over<nn::GroupNorm>([] { return nn::GroupNorm(nn::GroupNormOptions(1, 3)); }, image);
  takes_over<nn::Embedding>([] { return nn::Embedding(10, 4); }, at::arange(5));
  takes_over<nn::EmbeddingBag>([] { return nn::EmbeddingBag(10, 4); }, at::arange(6).view({2, 3}));
  takes_over<nn::RNN>([] { return nn::RNN(nn::RNNOptions(6, 5).num_layers(2)); }, at::randn({3, 4, 6}));
  takes_over<nn::LSTM>([] { return nn::LSTM(nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true)); },
                       at::randn({3, 4, 6}));
  takes_over<nn::GRU>([] { return nn::GRU(nn::GRUOptions(6, 5)); }, at::randn({3, 4, 6}));
  takes_over<nn::RNNCell>([] { return nn::RNNCell(6, 5); }, x);
  takes_over<nn::LSTMCell>([] { return nn::LSTMCell(6, 5); }, x);
  takes_over<nn::GRUCell>([] { return nn::GRUCell(6, 5); }, x);
  takes_over<nn::MultiheadAttention>([] { return nn::MultiheadAttention(6, 2); }, at::randn({3, 2, 6}),
                                     at::randn({3, 2, 6}), at::randn({3, 2, 6}));
  takes_over<nn::PReLU>([] { return nn::PReLU(); }, x);
  takes_over<nn::TransformerEncoderLayer>(
      [] {
        return nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(8).dropout(0));
      },
      at::randn({3, 2, 6}));
}

// Meta-gradients through nets with state: a recurrent one, and one with batch norm, equal differences.
TEST(Meta, RealNets) {
  struct Net : nn::Module {
    nn::Conv1d conv{1, 3, 3};
    nn::BatchNorm1d norm{3};
    nn::LSTM lstm{3, 4};
    nn::Linear out{4, 1};
    Net() {
      register_module("conv", conv);
      register_module("norm", norm);
      register_module("lstm", lstm);
      register_module("out", out);
      to(at::kDouble);
    }
    Tensor forward(const Tensor& x) {
      return out(std::get<0>(lstm(norm(conv(x)).relu().permute({2, 0, 1}))).select(0, -1));
    }
  };
  const Tensor x = at::randn({5, 1, 7}, at::kDouble), y = at::randn({5, 1}, at::kDouble);
  Net net;
  const auto start = optim::extract_state_dict(net, {.detach_buffers = true});
  const auto of = [&](const Tensors& first) {
    auto state = start;
    for (size_t i = 0; i < first.size(); ++i) state.parameters[i].second = first[i];
    optim::recover_state_dict(net, state);
    optim::MetaSGD inner(net, {.lr = 0.1});
    for (int step = 0; step < 2; ++step) inner.step((net.forward(x) - y).square().mean());
    return (net.forward(x) - y).square().mean();
  };
  Tensors first;
  for (const auto& [name, tensor] : start.parameters) first.push_back(tensor);
  const auto exact = torch::autograd::grad({of(first)}, first);
  EXPECT_LE(farthest(numbers(exact), numbers(finite_differences(of, first))), 1e-6);
  optim::recover_state_dict(net, start);
  EXPECT_EQ(net.norm->num_batches_tracked.item<int64_t>(), 0);  // the buffers of the start were not overwritten
  EXPECT_TRUE(net.parameters()[0].is_same(first[0]));           // and an outer optimizer has the right tensors again
}

struct OwnScale : nn::Module {
  Tensor by;
  OwnScale() { by = register_parameter("by", at::ones({1})); }
  Tensor forward(const Tensor& x) { return x * by; }
};
struct DeclaredScale : OwnScale, optim::TensorMembers {
  std::vector<Tensor*> tensor_members() override { return {&by}; }
};
struct OnlyRegistered : nn::Module, optim::TensorMembers {
  OnlyRegistered() { register_parameter("by", at::ones({1})); }
  std::vector<Tensor*> tensor_members() override { return {}; }
};

TEST(Meta, OwnModules) {
  nn::Sequential hidden(nn::Linear(1, 1), OwnScale());
  try {
    optim::MetaSGD inner(*hidden, {.lr = 1});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("'1.by'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("OwnScale"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("TensorMembers"), std::string::npos) << error.what();
  }
  DeclaredScale declared;
  optim::MetaSGD inner(declared, {.lr = 0.5});
  inner.step(declared.forward(at::full({1}, 3.f)).sum());
  EXPECT_EQ(declared.by.item<float>(), 1 - 0.5 * 3);
  EXPECT_EQ(declared.forward(at::ones({1})).item<float>(), 1 - 0.5 * 3);

  OnlyRegistered only;
  auto other = optim::extract_state_dict(only, {.by = CopyMode::kCopy});
  optim::recover_state_dict(only, other);
  EXPECT_TRUE(only.parameters()[0].is_same(other.parameters[0].second));
}

// One more parameter than the class of libtorch that it derives from.
struct ScaledLinear : nn::LinearImpl {
  Tensor by;
  ScaledLinear() : LinearImpl(2, 2) { by = register_parameter("by", at::ones({1})); }
};

TEST(Meta, AClassThatDerivesFromOneOfLibtorchs) {
  ScaledLinear scaled;
  EXPECT_THROW(optim::MetaSGD(scaled, {.lr = 1}), InvalidArgument);
}

// Two modules that register one tensor, as an encoder and a decoder with tied weights do.
struct Tied : nn::Module, optim::TensorMembers {
  Tensor in, out;
  Tied() {
    in = register_parameter("in", at::ones({2, 2}, at::kDouble));
    out = register_parameter("out", in);
  }
  std::vector<Tensor*> tensor_members() override { return {&in, &out}; }
};

TEST(Meta, SharedParametersStayShared) {
  Tied tied;
  const Tensor one = at::ones({2, 2}, at::kDouble), two = 2 * one;
  const auto sum_with = [&](const optim::NamedTensors& given) {
    return optim::functional_call(tied, given, [&] { return (tied.in + tied.out).sum(); }).item<double>();
  };
  EXPECT_EQ(sum_with({{"out", two}}), 16);
  EXPECT_EQ(sum_with({{"in", two}, {"out", two}}), 16);
  EXPECT_THROW(sum_with({{"in", one}, {"out", two}}), Mismatch);
  optim::MetaSGD inner(tied, {.lr = 1});
  inner.step((tied.in + 2 * tied.out).sum());
  EXPECT_TRUE(tied.in.is_same(tied.out));
  EXPECT_EQ(tied.in[0][0].item<double>(), 1 - 3);

  auto state = optim::extract_state_dict(tied, {.by = CopyMode::kReference});
  optim::recover_state_dict(tied, state);
  state.parameters[1].second = at::zeros({2, 2}, at::kDouble);
  EXPECT_THROW(optim::recover_state_dict(tied, state), Mismatch);  // no longer the same tensor

  // In copies, too.
  for (const auto by : {CopyMode::kCopy, CopyMode::kDeepCopy}) {
    const auto copy = optim::extract_state_dict(tied, {.by = by});
    EXPECT_TRUE(copy.parameters[0].second.is_same(copy.parameters[1].second));
    EXPECT_FALSE(copy.parameters[0].second.is_same(tied.in));
    optim::recover_state_dict(tied, copy);
    EXPECT_TRUE(tied.in.is_same(tied.out));
  }
}

// As users of libtorch tie weights: the second module's dictionary still has the tensor that nobody uses any more.
TEST(Meta, AMemberThatHoldsAnotherModulesParameter) {
  struct Net : nn::Module {
    nn::Linear in{2, 2}, out{2, 2};
    Net() {
      register_module("in", in);
      register_module("out", out);
      register_module("in_again", in);
      out->weight = in->weight;
    }
  } net;
  optim::MetaSGD inner(net, {.lr = 0.5});
  const Tensor before = net.in->weight;
  inner.step(net.out(at::ones({1, 2})).sum());
  EXPECT_FALSE(net.in->weight.is_same(before));
  EXPECT_TRUE(net.out->weight.is_same(net.in->weight));
  const auto state = optim::extract_state_dict(net);
  EXPECT_EQ(state.parameters.size(), 6u);
  optim::recover_state_dict(net, state);
  EXPECT_TRUE(net.out->weight.is_same(net.in->weight));
}

TEST(Meta, LossesTakeNewWeights) {
  const Tensor old = at::ones({3}), weight = at::tensor({1.f, 2.f, 3.f}), x = at::rand({4, 3}),
               classes = at::tensor({0, 1, 2, 1}, at::kLong);
  const Tensor ones = at::ones({4, 3});
  const auto check = [&](auto loss, const Tensor& target, const char* name = "weight") {
    const Tensor before = loss->forward(x, target);
    const Tensor now = optim::functional_call(*loss, {{name, weight}}, [&] { return loss->forward(x, target); });
    EXPECT_FALSE(at::equal(before, now)) << loss->name() << " " << name;
    EXPECT_TRUE(at::equal(before, loss->forward(x, target)));
  };
  check(nn::NLLLoss(nn::NLLLossOptions().weight(old)), classes);
  check(nn::CrossEntropyLoss(nn::CrossEntropyLossOptions().weight(old)), classes);
  check(nn::BCELoss(nn::BCELossOptions().weight(old)), ones);
  check(nn::BCEWithLogitsLoss(nn::BCEWithLogitsLossOptions().weight(old).pos_weight(old.clone())), ones);
  check(nn::BCEWithLogitsLoss(nn::BCEWithLogitsLossOptions().weight(old).pos_weight(old.clone())), ones, "pos_weight");
  check(nn::MultiMarginLoss(nn::MultiMarginLossOptions().weight(old)), classes);
  check(nn::MultiLabelSoftMarginLoss(nn::MultiLabelSoftMarginLossOptions().weight(old)), ones);
}

TEST(Meta, FunctionalCallAndClone) {
  nn::Linear linear(2, 1);
  const Tensor x = at::ones({1, 2}), weight = at::full({1, 2}, 3.f).set_requires_grad(true);
  const Tensor own = linear->weight;
  const Tensor y =
      optim::functional_call(*linear, {{"weight", weight}, {"bias", at::zeros({1})}}, [&] { return linear(x); });
  EXPECT_EQ(y.item<float>(), 6);
  EXPECT_TRUE(linear->weight.is_same(own));
  EXPECT_TRUE(torch::autograd::grad({y.sum()}, {weight})[0].equal(x));
  EXPECT_THROW(optim::functional_call(*linear, {{"weight", weight}}, [&]() -> Tensor { throw Aborted("in the call"); }),
               Aborted);
  EXPECT_TRUE(linear->weight.is_same(own));
  EXPECT_THROW(optim::functional_call(*linear, {{"nothing", weight}}, [&] { return linear(x); }), Mismatch);

  at::manual_seed(1);
  const Tensor expected = at::rand({3});
  at::manual_seed(1);
  const auto clone = optim::module_clone(linear);
  EXPECT_TRUE(at::equal(at::rand({3}), expected));  // the clone drew no random numbers
  EXPECT_NE(clone.get(), linear.get());
  EXPECT_TRUE(clone->weight.is_same(linear->weight));
  const auto copy = optim::module_clone(linear, {.by = CopyMode::kCopy});
  EXPECT_TRUE(torch::autograd::grad({copy->weight.sum()}, {linear->weight})[0].equal(at::ones({1, 2})));
  auto deep = optim::module_clone(linear, {.by = CopyMode::kDeepCopy});
  EXPECT_TRUE(deep->weight.is_leaf() && deep->weight.requires_grad());
  EXPECT_TRUE(at::equal(deep(x), linear(x)));
  EXPECT_FALSE(deep->weight.is_alias_of(linear->weight));

  // Of a whole net: the clone's steps leave the net's parameters, and lead back to them.
  struct Net : nn::Cloneable<Net> {
    nn::Linear in{nullptr}, out{nullptr};
    nn::BatchNorm1d norm{nullptr};
    Net() { reset(); }
    void reset() override {
      in = register_module("in", nn::Linear(2, 3));
      norm = register_module("norm", nn::BatchNorm1d(3));
      out = register_module("out", nn::Linear(3, 1));
    }
    Tensor forward(const Tensor& input) { return out(norm(in(input)).tanh()); }
  } net;
  const auto before = numbers(net.parameters());
  const auto adapting = optim::module_clone(net, {.detach_buffers = true});
  optim::MetaSGD inner(*adapting, {.lr = 0.1});
  const Tensor points = at::rand({4, 2});
  for (int step = 0; step < 2; ++step) inner.step(adapting->forward(points).square().mean());
  EXPECT_EQ(numbers(net.parameters()), before);
  EXPECT_EQ(net.norm->num_batches_tracked.item<int64_t>(), 0);
  EXPECT_EQ(adapting->norm->num_batches_tracked.item<int64_t>(), 2);
  adapting->forward(points).sum().backward();
  EXPECT_GT(net.in->weight.grad().abs().max().item<float>(), 0);
}

}  // namespace
}  // namespace muster::test
