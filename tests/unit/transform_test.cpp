// Gradient transformations: their results are TorchOpt's, gradients flow through them, any tree will do, and misuse
// says so.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "muster/base/error.h"
#include "muster/optim/transform.h"
#include "support/ask_python.h"
#include "support/finite_differences.h"
#include "support/transform_cases.h"

namespace muster::test {
namespace {

using at::Tensor;
using optim::GradientTransformation;
using optim::OptState;
using optim::Tensors;

Tensor slope(const Tensor& parameter, size_t index, int step) {  // meta_reference.py has the same
  return parameter * (0.5 + static_cast<double>(index)) + at::cos(parameter * 3 + 0.3 * step);
}

Tensors two_parameters() { return {at::linspace(-1, 2, 7, at::kDouble), at::linspace(-1, 2, 33, at::kDouble)}; }

// 100 steps.
Tensors trained(const GradientTransformation& with, Tensors parameters, optim::UpdateOptions options = {}) {
  OptState state = with.init(parameters);
  for (int step = 0; step < 100; ++step) {
    Tensors gradients;
    for (size_t i = 0; i < parameters.size(); ++i) gradients.push_back(slope(parameters[i], i, step));
    auto [updates, next] = with.update(gradients, state, parameters, options);
    state = next;
    parameters = optim::apply_updates(parameters, updates, options);
  }
  return parameters;
}

TEST(Transform, EqualsTorchOpt) {
  MUSTER_NEEDS_TORCHOPT();
  Comparison same;
  for (const auto& one : transform_cases()) {
    same.add("functional|" + one.torchopt, numbers(trained(one.make(), two_parameters())), 1e-10);
  }
  const std::pair<std::string, optim::Schedule> schedules[] = {
      {"polynomial_schedule(0.3, 0.01, 2.5, 20, 3)",
       optim::polynomial_schedule(
           {.init_value = 0.3, .end_value = 0.01, .power = 2.5, .transition_steps = 20, .transition_begin = 3})},
      {"linear_schedule(0.1, 0.4, 30)",
       optim::linear_schedule({.init_value = 0.1, .end_value = 0.4, .transition_steps = 30})},
      {"exponential_decay(0.2, 0.8, 2, 5)",
       optim::exponential_decay({.init_value = 0.2, .decay_rate = 0.8, .transition_begin = 2, .transition_steps = 5})},
      {"exponential_decay(0.2, 0.8, 0, 5, True, 0.09)",
       optim::exponential_decay(
           {.init_value = 0.2, .decay_rate = 0.8, .transition_steps = 5, .staircase = true, .end_value = 0.09})},
  };
  for (const auto& [python, schedule] : schedules) {
    std::vector<double> values;
    for (int64_t count = 0; count < 40; ++count) values.push_back(schedule(count));
    same.add("schedule|" + python, values, 1e-14);
  }
  same.with("unit/meta_reference.py");
}

// The derivative of the last parameters with respect to the first, through three steps, by autograd and by differences.
TEST(Transform, GradientsFlowThroughSteps) {
  for (const auto& one : transform_cases()) {
    const auto with = one.make();
    const auto of = [&](const Tensors& first) {
      Tensors parameters = first;
      OptState state = with.init(parameters);
      for (int step = 0; step < 3; ++step) {
        auto [updates, next] = with.update(Tensors{slope(parameters[0], 0, step)}, state, parameters);
        state = next;
        parameters = optim::apply_updates(parameters, updates);
      }
      return (parameters[0] * at::linspace(1, 2, 5, at::kDouble)).sum();
    };
    const Tensors first{at::linspace(-0.9, 1.1, 5, at::kDouble).set_requires_grad(true)};
    const Tensor by_autograd = torch::autograd::grad({of(first)}, first)[0];
    EXPECT_LE((by_autograd - finite_differences(of, first)[0]).abs().max().item<double>(), 1e-7) << one.torchopt;
  }
}

// One step of each optimizer, twice differentiated, by the gradient and by the state before.
TEST(Transform, StepsCanBeDifferentiatedTwice) {
  for (const auto& one : transform_cases()) {
    const auto with = one.make();
    Tensors parameters{at::linspace(-0.9, 1.1, 4, at::kDouble)};
    OptState before = with.init(parameters);
    for (int step = 0; step < 2; ++step) {  // a state that is not 0
      Tensors updates{slope(parameters[0], 0, step)};
      with.update_list(updates, before, parameters);
      parameters = optim::apply_updates(parameters, updates);
    }
    Tensors in{slope(parameters[0], 0, 2)};
    for (const Tensor& kept : optim::detail::leaves_of(before)) in.push_back(kept.detach().clone());
    for (Tensor& tensor : in) tensor = tensor.detach().set_requires_grad(true);
    const auto after = [&](const Tensors& at) {
      Tensors updates{at[0]};
      OptState state = optim::detail::with_leaves(before, Tensors(at.begin() + 1, at.end()));
      with.update_list(updates, state, parameters);
      Tensor sum = (updates[0] * at::linspace(1, 2, 4, at::kDouble)).sum() * 10;
      for (const Tensor& kept : optim::detail::leaves_of(state)) sum = sum + kept.square().sum();
      return sum;
    };
    const auto first_derivative = [&](const Tensors& at) {
      Tensor sum = at::zeros({}, at::kDouble);
      for (const Tensor& gradient : torch::autograd::grad({after(at)}, at, {}, true, true, true))
        if (gradient.defined()) sum = sum + gradient.square().sum();
      return sum;
    };
    const Tensor of = first_derivative(in);
    if (!of.requires_grad()) continue;  // linear
    const auto exact = torch::autograd::grad({of}, in, {}, {}, false, true);
    const auto differences = finite_differences(first_derivative, in, 1e-7);  // adadelta's state is small
    for (size_t i = 0; i < in.size(); ++i) {
      const Tensor mine = exact[i].defined() ? exact[i] : at::zeros_like(in[i]);
      EXPECT_TRUE(at::allclose(mine, differences[i], 1e-4, 1e-5)) << one.torchopt << ", input " << i << "\n"
                                                                  << mine << differences[i];
    }
  }
}

// Gradients of gradients through a step, for each input of the fused kernel.
TEST(Transform, FusedAdamHasDerivativesOfAnyOrder) {
  for (const bool fused : {true, false}) {
    const auto adam = optim::scale_by_adam({.betas = {0.7, 0.9}, .eps = 1e-3, .eps_root = 1e-4, .fused = fused});
    const auto step = [&](const Tensors& in) {  // g and both moments in; everything that comes out counts
      OptState state{.tensors = {in[1], in[2]}, .counts = {3}};
      Tensors updates{in[0]};
      adam.update_list(updates, state, {});
      return (updates[0].square() * 2 + state.tensors[0].square() + state.tensors[1].square() * 3).sum();
    };
    const auto first_derivative = [&](const Tensors& in) {
      const auto gradients = torch::autograd::grad({step(in)}, in, {}, true, true);
      return (gradients[0].square() + gradients[1] * 3 + gradients[2].square()).sum();
    };
    const auto second_derivative = [&](const Tensors& in) {
      const auto gradients = torch::autograd::grad({first_derivative(in)}, in, {}, true, true);
      return (gradients[0] + gradients[1].square() + gradients[2]).sum();
    };
    const Tensors in{at::tensor({0.3, -1.2, 0.8}, at::kDouble).set_requires_grad(true),
                     at::tensor({0.1, 0.4, -0.6}, at::kDouble).set_requires_grad(true),
                     at::tensor({0.5, 0.9, 0.2}, at::kDouble).set_requires_grad(true)};
    int order = 0;
    for (const std::function<Tensor(const Tensors&)>& of :
         {std::function<Tensor(const Tensors&)>(step), std::function<Tensor(const Tensors&)>(first_derivative),
          std::function<Tensor(const Tensors&)>(second_derivative)}) {
      const auto exact = torch::autograd::grad({of(in)}, in);
      const auto by_differences = finite_differences(of, in);
      ++order;
      for (size_t i = 0; i < in.size(); ++i)
        EXPECT_LE((exact[i] - by_differences[i]).abs().max().item<double>(),
                  1e-6 * (1 + exact[i].abs().max().item<double>()))
            << "derivative " << order << " by input " << i << (fused ? ", fused" : "");
    }
  }
}

TEST(Transform, FusedAdamEqualsUnfused) {
  for (const auto dtype : {at::kDouble, at::kFloat})
    for (const int64_t n : {0, 1, 5, 1000, 70001}) {
      Tensors results[2], gradients[2];
      for (const bool fused : {false, true}) {
        const auto adam = optim::scale_by_adam({.eps_root = 1e-6, .fused = fused});
        Tensors first{at::linspace(-1, 1, n, at::kDouble).to(dtype).set_requires_grad(true)};
        OptState state = adam.init(first);
        Tensors sum{at::zeros({n}, dtype)};
        for (int step = 0; step < 3; ++step) {
          auto [updates, next] = adam.update(Tensors{first[0] * (step + 1)}, state, first);
          state = next;
          sum[0] = sum[0] + updates[0].sin();
        }
        results[fused] = {sum[0].detach(), state.tensors[0].detach(), state.tensors[1].detach()};
        gradients[fused] = torch::autograd::grad({(sum[0] * at::linspace(0, 1, n, at::kDouble)).sum()}, first);
      }
      const double near = dtype == at::kDouble ? 1e-12 : 1e-5;  // relative to the largest
      for (const auto* const both : {results, gradients}) {
        const auto separate = numbers(both[0]), together = numbers(both[1]);
        double largest = 1;
        for (const double each : separate) largest = std::max(largest, std::abs(each));
        EXPECT_LE(farthest(separate, together), near * largest) << n << (both == results ? "" : ", gradient");
      }
    }
}

TEST(Transform, AParameterWithoutAnyGradientAddsNothingToTheMetaGradient) {
  for (const auto& [name, with] : std::map<std::string, GradientTransformation>{
           {"adam", optim::adam({.lr = 0.1})},
           {"adam, not fused", optim::adam({.lr = 0.1, .fused = false})},
           {"rmsprop", optim::rmsprop({.lr = 0.1})},
           {"rmsprop, centered", optim::rmsprop({.lr = 0.1, .centered = true})},
           {"adagrad", optim::adagrad({.lr = 0.1})},
           {"radam", optim::radam({.lr = 0.1})}}) {
    const Tensors first{at::tensor({0.0, 1.0}, at::kDouble).set_requires_grad(true)};
    Tensors parameters = first;
    OptState state = with.init(parameters);
    for (int step = 0; step < 8; ++step) {
      auto [updates, next] =
          with.update(Tensors{parameters[0] * at::tensor({0.0, 1.0}, at::kDouble)}, state, parameters);
      state = next;
      parameters = optim::apply_updates(parameters, updates);
    }
    const auto meta = torch::autograd::grad({parameters[0].sum()}, first)[0];
    EXPECT_EQ(meta[0].item<double>(), 1) << name;
    EXPECT_TRUE(at::isfinite(meta).all().item<bool>()) << name;
  }
}

TEST(Transform, InPlaceGivesTheSameResults) {
  for (const auto& one : transform_cases()) {
    const at::NoGradGuard no_grad;
    EXPECT_LE(farthest(numbers(trained(one.make(), two_parameters(), {.inplace = true})),
                       numbers(trained(one.make(), two_parameters()))),
              1e-12)
        << one.torchopt;
  }
}

TEST(Transform, InPlaceSavesMemory) {
  for (const auto& with : {optim::sgd({.lr = 0.1, .momentum = 0.9}), optim::adam({.lr = 0.1})}) {
    const Tensors gradients{at::ones({3}), at::ones({4})};
    const OptState state = with.init(gradients);
    const auto [updates, next] = with.update(gradients, state, gradients, {.inplace = true});
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(updates[i].data_ptr(), gradients[i].data_ptr());
      EXPECT_EQ(next.parts[1].tensors[i].data_ptr(), state.parts[1].tensors[i].data_ptr());
    }
  }
  // What autograd returns twice is two gradients all the same.
  const Tensor both = at::ones({3});
  const auto [updates, next] = optim::scale(0.5).update(Tensors{both, both}, {}, {}, {.inplace = true});
  EXPECT_EQ(updates[0][0].item<float>(), 0.5);
  EXPECT_EQ(updates[1][0].item<float>(), 0.5);
  // A graph that needs the old values says that they are gone.
  const Tensors g{at::ones({3}).set_requires_grad(true)};
  const auto adam = optim::scale_by_adam();
  auto [recorded, first] = adam.update(g, adam.init(g));
  {
    const at::NoGradGuard no_grad;
    adam.update(Tensors{at::ones({3})}, first, {}, {.inplace = true});
  }
  EXPECT_THROW(recorded[0].sum().backward(), c10::Error);
}

TEST(Transform, ALearnedRateChangesNeitherShapeNorDtype) {
  const Tensor lr = at::full({1}, 0.5, at::kDouble).set_requires_grad(true);
  const auto sgd = optim::sgd({.lr = lr});
  const Tensors parameters{at::ones({2}), at::scalar_tensor(1.f)};
  const auto [updates, next] = sgd.update(parameters, sgd.init(parameters), parameters);
  const auto stepped = optim::apply_updates(parameters, updates);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(stepped[i].scalar_type(), at::kFloat);
    EXPECT_EQ(stepped[i].sizes(), parameters[i].sizes());
  }
  EXPECT_EQ(torch::autograd::grad({stepped[0].sum() + stepped[1]}, {lr})[0].item<double>(), -3);
  const auto wrong = optim::sgd({.lr = at::ones({2})});
  EXPECT_THROW(wrong.update(parameters, wrong.init(parameters), parameters), InvalidArgument);
}

TEST(Transform, GradientsFlowToTheLearningRateAndTheFirstMoments) {
  const Tensor lr = at::scalar_tensor(0.1, at::kDouble).set_requires_grad(true);
  const auto sgd = optim::sgd({.lr = lr, .momentum = 0.5, .moment_requires_grad = true});
  const Tensors parameters{at::ones({3}, at::kDouble)};
  const OptState state = sgd.init(parameters);
  auto [updates, next] = sgd.update(Tensors{at::full({3}, 2., at::kDouble)}, state, parameters);
  auto [more, last] = sgd.update(Tensors{at::full({3}, 4., at::kDouble)}, next, parameters);
  const auto gradients = torch::autograd::grad({(updates[0] + more[0]).sum()}, {lr, state.parts[1].tensors[0]});
  EXPECT_DOUBLE_EQ(gradients[0].item<double>(), -3 * (2 + (0.5 * 2 + 4)));
  EXPECT_DOUBLE_EQ(gradients[1][0].item<double>(), -0.1 * (1 + 0.5));

  const auto scheduled = optim::sgd({.lr = [&](int64_t count) { return lr * static_cast<double>(count); }});
  OptState counted = scheduled.init(parameters);
  for (const double expected : {0., -0.2, -0.4}) {
    auto [now, after] = scheduled.update(Tensors{at::full({3}, 2., at::kDouble)}, counted, parameters);
    EXPECT_DOUBLE_EQ(now[0][0].item<double>(), expected);
    counted = after;
  }
}

struct Weights {
  Tensor weight;
  std::optional<Tensor> bias;
  std::vector<Tensor> more;
  auto tree() { return std::tie(weight, bias, more); }
};

TEST(Transform, AnyTree) {
  const auto sgd = optim::sgd({.lr = 0.5, .momentum = 0.9});
  const Tensor one = at::ones({2}), two = at::full({3}, 2.f);

  torch::OrderedDict<std::string, Tensor> dict;
  dict.insert("b", one);
  dict.insert("a", two);
  auto state = sgd.init(dict);
  auto [updates, next] = sgd.update(dict, state, dict);
  const auto stepped = optim::apply_updates(dict, updates);
  EXPECT_EQ(stepped.keys(), (std::vector<std::string>{"b", "a"}));
  EXPECT_EQ(stepped["a"][0].item<float>(), 1);

  const Weights weights{one, two, {one, Tensor()}};
  auto [moved, after] = sgd.update(weights, sgd.init(weights), weights);
  EXPECT_EQ(moved.weight[0].item<float>(), -0.5);
  EXPECT_EQ((*moved.bias)[0].item<float>(), -1);
  EXPECT_FALSE(moved.more[1].defined());
  EXPECT_EQ(weights.weight[0].item<float>(), 1);  // the argument is as it was

  const std::map<std::string, Tensor> other{{"y", one}};
  const std::map<std::string, Tensor> map{{"x", one}};
  EXPECT_THROW(optim::apply_updates(map, other), InvalidArgument);
  EXPECT_THROW(sgd.update(map, sgd.init(map), other), InvalidArgument);
  EXPECT_EQ(sgd.update(map, sgd.init(map)).first.at("x")[1].item<float>(), -0.5);
}

TEST(Transform, AMissingGradientLeavesStateAndParameter) {
  for (const auto& one : transform_cases()) {
    const auto with = one.make();
    Tensors parameters{at::ones({2}, at::kDouble), at::ones({2}, at::kDouble)};
    OptState state = with.init(parameters);
    const auto step = [&](const Tensor& second) {
      auto [updates, next] = with.update(Tensors{at::ones({2}, at::kDouble), second}, state, parameters);
      state = next;
      parameters = optim::apply_updates(parameters, updates);
    };
    step(at::ones({2}, at::kDouble));
    const Tensor before = parameters[1];
    step({});
    EXPECT_TRUE(parameters[1].is_same(before)) << one.torchopt;
    step(at::ones({2}, at::kDouble));
    // The second parameter has had two updates, as the first had after two.
    Tensors twice{at::ones({2}, at::kDouble)};
    OptState its = with.init(twice);
    for (int i = 0; i < 2; ++i) {
      auto [updates, next] = with.update(Tensors{at::ones({2}, at::kDouble)}, its, twice);
      its = next;
      twice = optim::apply_updates(twice, updates);
    }
    EXPECT_EQ(parameters[1][0].item<double>(), twice[0][0].item<double>()) << one.torchopt;
  }
}

TEST(Transform, ClippingMasksAndNumbers) {
  const Tensors g{at::full({4}, 3.f), Tensor(), at::full({1}, 8.f)};  // norm 10
  auto [clipped, none] = optim::clip_grad_norm(5).update(g, {});
  EXPECT_NEAR(clipped[0][0].item<float>(), 1.5, 1e-5);
  EXPECT_NEAR(clipped[2][0].item<float>(), 4, 1e-5);
  EXPECT_NEAR(optim::clip_grad_norm(4, std::numeric_limits<double>::infinity()).update(g, {}).first[2][0].item<float>(),
              4, 1e-5);
  EXPECT_EQ(optim::clip_grad_norm(50).update(g, {}).first[0][0].item<float>(), 3);
  EXPECT_THROW(optim::clip_grad_norm(1, 2, true).update(Tensors{at::full({1}, NAN)}, {}), InvalidArgument);

  const auto cleaned =
      optim::nan_to_num(7, 8, 9).update(Tensors{at::tensor({NAN, INFINITY, -INFINITY, 1.f})}, {}).first;
  EXPECT_TRUE(at::equal(cleaned[0], at::tensor({7.f, 8.f, 9.f, 1.f})));

  const Tensors p{at::ones({1}), at::ones({1})}, zeros{at::zeros({1}), at::zeros({1})};
  const auto decay = optim::add_decayed_weights(0.5, std::vector<bool>{false, true});
  const auto decayed = decay.update(zeros, decay.init(p), p).first;
  EXPECT_EQ(decayed[0].item<float>(), 0);
  EXPECT_EQ(decayed[1].item<float>(), 0.5);
  const auto only_large = optim::masked(optim::trace(), [](at::TensorList leaves) {
    std::vector<bool> which;
    for (const Tensor& leaf : leaves) which.push_back(leaf.numel() > 1);
    return which;
  });
  const Tensors sizes{at::ones({1}), at::ones({2})};
  const OptState kept = only_large.init(sizes);
  EXPECT_FALSE(kept.parts[0].tensors[0].defined());
  EXPECT_TRUE(kept.parts[0].tensors[1].defined());
  const auto own =
      optim::chain(optim::scale(2), GradientTransformation([](at::TensorList) { return OptState{}; },
                                                           [](Tensors& all, OptState&, at::TensorList, auto) {
                                                             for (Tensor& each : all) each = each + 1;
                                                           }));
  EXPECT_EQ(own.update(sizes, own.init(sizes)).first[0].item<float>(), 3);
}

TEST(Transform, MisuseIsNamed) {
  const auto says = [](const std::string& what, const std::function<void()>& fn) {
    try {
      fn();
      ADD_FAILURE() << "no error; expected: " << what;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  says("lr: expected a finite number of 0 or more, got -1", [] { optim::sgd({.lr = -1}); });
  says("betas.first: expected a number of 0 or more and below 1, got 1", [] { optim::adam({.betas = {1, 0.9}}); });
  says("eps: expected a finite number of 0 or more, got -1", [] { optim::rmsprop({.eps = -1}); });
  says("nesterov", [] { optim::sgd({.lr = 1, .nesterov = true}); });
  says("nesterov", [] { optim::trace({.dampening = 0.1, .nesterov = true}); });
  says("transition_steps: expected 1 or more, got 0",
       [] { optim::linear_schedule({.init_value = 1, .end_value = 2, .transition_steps = 0}); });
  const Tensors one{at::ones({1})}, two{at::ones({1}), at::ones({1})};
  const auto adam = optim::adam();
  says("update(): expected 1 updates, one for each parameter, got 2", [&] { adam.update(two, adam.init(one), one); });
  says("the state: expected", [&] { adam.update(two, adam.init(one), two); });
  says("the state: expected 3 parts, as the chain has, got 0", [&] { adam.update(one, OptState{}, one); });
  says("weight decay needs the parameters", [&] {
    const auto decay = optim::adam({.weight_decay = 0.1});
    decay.update(one, decay.init(one));
  });
  says("the mask: expected 2 entries, one for each leaf, got 1",
       [&] { optim::masked(optim::scale(2), std::vector<bool>{true}).init(two); });
  says("apply_updates(): expected 2 updates, one for each parameter, got 1", [&] { optim::apply_updates(two, one); });
}

}  // namespace
}  // namespace muster::test
