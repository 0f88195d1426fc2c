// Functional optimizers give the results of torch.optim, in Python and in C++; saved state can be continued; schedules.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/error.h"
#include "muster/optim/functional_optimizer.h"
#include "muster/optim/lr_scheduler.h"
#include "support/ask_python.h"

namespace muster::test {
namespace {

using at::Tensor;
using optim::FunctionalOptimizer;
using Tensors = std::vector<Tensor>;
using MadeOptimizer = std::unique_ptr<FunctionalOptimizer>;

Tensor gradient(const Tensor& parameter, size_t index, int step) {  // optim_reference.py has the same
  return parameter * (0.5 + static_cast<double>(index)) + at::cos(parameter * 3 + 0.3 * step);
}
Tensors start(at::ScalarType dtype, bool only_matrices = false) {
  const auto numbers = [&](int64_t n) { return at::linspace(-1, 2, n, at::kDouble).to(dtype); };
  return {only_matrices ? numbers(7).view({1, 7}) : numbers(7), numbers(33).view({3, 11})};
}
Tensors gradients(const Tensors& parameters, int step) {
  Tensors all;
  for (size_t i = 0; i < parameters.size(); ++i)
    all.push_back(i == 1 && step % 7 == 3 ? Tensor() : gradient(parameters[i], i, step));
  return all;
}

template <typename O>
std::function<MadeOptimizer()> maker(typename O::Options options) {
  return [options] { return std::make_unique<O>(options); };
}

struct Case {
  std::string python;
  std::function<MadeOptimizer()> make;
  bool only_matrices = false;
};
std::vector<Case> cases() {
  using namespace optim;
  return {
      {"SGD(lr=0.1)", maker<SGD>({.lr = 0.1})},
      {"SGD()", maker<SGD>({})},
      {"SGD(lr=0.05, momentum=0.9)", maker<SGD>({.lr = 0.05, .momentum = 0.9})},
      {"SGD(lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01)",
       maker<SGD>({.lr = 0.05, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01})},
      {"SGD(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1)",
       maker<SGD>({.lr = 0.05, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true})},
      {"SGD(lr=0.01, momentum=0.5, maximize=True)", maker<SGD>({.lr = 0.01, .momentum = 0.5, .maximize = true})},
      {"Adagrad()", maker<Adagrad>({})},
      {"Adagrad(lr=0.2, lr_decay=0.01, weight_decay=0.02, initial_accumulator_value=0.5, eps=1e-6)",
       maker<Adagrad>(
           {.lr = 0.2, .lr_decay = 0.01, .weight_decay = 0.02, .initial_accumulator_value = 0.5, .eps = 1e-6})},
      {"Adagrad(lr=0.05, maximize=True)", maker<Adagrad>({.lr = 0.05, .maximize = true})},
      {"Adam()", maker<Adam>({})},
      {"Adam(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)",
       maker<Adam>({.lr = 0.05, .betas = {0.8, 0.95}, .eps = 1e-6, .weight_decay = 0.1})},
      {"Adam(lr=0.05, amsgrad=True)", maker<Adam>({.lr = 0.05, .amsgrad = true})},
      {"Adam(lr=0.02, maximize=True, amsgrad=True)", maker<Adam>({.lr = 0.02, .amsgrad = true, .maximize = true})},
      {"AdamW()", maker<AdamW>({})},
      {"AdamW(lr=0.05, weight_decay=0.3, amsgrad=True)",
       maker<AdamW>({.lr = 0.05, .weight_decay = 0.3, .amsgrad = true})},
      {"AdamW(lr=0.02, betas=(0.5, 0.9), maximize=True)",
       maker<AdamW>({.lr = 0.02, .betas = {0.5, 0.9}, .maximize = true})},
      {"Adadelta()", maker<Adadelta>({})},
      {"Adadelta(lr=0.5, rho=0.7, eps=1e-4, weight_decay=0.1)",
       maker<Adadelta>({.lr = 0.5, .rho = 0.7, .eps = 1e-4, .weight_decay = 0.1})},
      {"Adadelta(maximize=True)", maker<Adadelta>({.maximize = true})},
      {"RMSprop()", maker<RMSprop>({})},
      {"RMSprop(lr=0.02, alpha=0.9, centered=True, weight_decay=0.05)",
       maker<RMSprop>({.lr = 0.02, .alpha = 0.9, .weight_decay = 0.05, .centered = true})},
      {"RMSprop(lr=0.01, momentum=0.7, eps=1e-5)", maker<RMSprop>({.lr = 0.01, .eps = 1e-5, .momentum = 0.7})},
      {"RMSprop(lr=0.005, momentum=0.7, centered=True, maximize=True)",
       maker<RMSprop>({.lr = 0.005, .momentum = 0.7, .centered = true, .maximize = true})},
      {"Adamax()", maker<Adamax>({})},
      {"Adamax(lr=0.05, betas=(0.7, 0.9), eps=1e-5, weight_decay=0.1)",
       maker<Adamax>({.lr = 0.05, .betas = {0.7, 0.9}, .eps = 1e-5, .weight_decay = 0.1})},
      {"Adamax(lr=0.02, maximize=True)", maker<Adamax>({.lr = 0.02, .maximize = true})},
      {"NAdam()", maker<NAdam>({})},
      {"NAdam(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, momentum_decay=0.02)",
       maker<NAdam>({.lr = 0.05, .betas = {0.8, 0.95}, .eps = 1e-6, .weight_decay = 0.1, .momentum_decay = 0.02})},
      {"NAdam(lr=0.02, weight_decay=0.3, decoupled_weight_decay=True, maximize=True)",
       maker<NAdam>({.lr = 0.02, .weight_decay = 0.3, .decoupled_weight_decay = true, .maximize = true})},
      {"RAdam(lr=0.05)", maker<RAdam>({.lr = 0.05})},
      {"RAdam(lr=0.05, betas=(0.7, 0.9), eps=1e-5, weight_decay=0.1)",
       maker<RAdam>({.lr = 0.05, .betas = {0.7, 0.9}, .eps = 1e-5, .weight_decay = 0.1})},
      {"RAdam(lr=0.02, weight_decay=0.3, decoupled_weight_decay=True, maximize=True)",
       maker<RAdam>({.lr = 0.02, .weight_decay = 0.3, .decoupled_weight_decay = true, .maximize = true})},
      {"ASGD()", maker<ASGD>({})},
      {"ASGD(lr=0.1, lambd=0.01, alpha=0.5, t0=20, weight_decay=0.1)",
       maker<ASGD>({.lr = 0.1, .lambd = 0.01, .alpha = 0.5, .t0 = 20, .weight_decay = 0.1})},
      {"ASGD(lr=0.02, maximize=True)", maker<ASGD>({.lr = 0.02, .maximize = true})},
      {"Adafactor()", maker<Adafactor>({})},
      {"Adafactor(lr=0.1, beta2_decay=-0.5, eps=(1e-6, 1e-2), d=1.5, weight_decay=0.1)",
       maker<Adafactor>({.lr = 0.1, .beta2_decay = -0.5, .eps = {1e-6, 1e-2}, .d = 1.5, .weight_decay = 0.1})},
      {"Adafactor(lr=0.02, maximize=True)", maker<Adafactor>({.lr = 0.02, .maximize = true})},
      {"Muon()", maker<Muon>({}), true},
      {"Muon(lr=0.05, weight_decay=0, momentum=0.8, nesterov=False, ns_steps=3, adjust_lr_fn='match_rms_adamw')",
       maker<Muon>(
           {.lr = 0.05, .weight_decay = 0, .momentum = 0.8, .nesterov = false, .ns_steps = 3, .match_rms_adamw = true}),
       true},
      {"Rprop()", maker<Rprop>({})},
      {"Rprop(lr=0.1, etas=(0.3, 1.5), step_sizes=(1e-3, 0.2))",
       maker<Rprop>({.lr = 0.1, .etas = {0.3, 1.5}, .step_sizes = {1e-3, 0.2}})},
      {"Rprop(lr=0.001, step_sizes=(1e-6, 0.1), maximize=True)",
       maker<Rprop>({.lr = 0.001, .step_sizes = {1e-6, 0.1}, .maximize = true})},
  };
}

struct Schedule {
  std::string python;
  std::function<std::unique_ptr<optim::LRScheduler>(FunctionalOptimizer&)> make;
};
std::vector<Schedule> schedules() {
  using namespace optim;
  const auto of = [](auto make) { return make; };
  return {
      {"StepLR(optimizer, 7, gamma=0.8)", of([](auto& o) { return std::make_unique<StepLR>(o, 7, 0.8); })},
      {"MultiStepLR(optimizer, [3, 20, 60], gamma=0.5)", of([](auto& o) {
         return std::make_unique<MultiStepLR>(o, std::vector<int64_t>{3, 20, 60}, 0.5);
       })},
      {"ExponentialLR(optimizer, 0.97)", of([](auto& o) { return std::make_unique<ExponentialLR>(o, 0.97); })},
      {"LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))", of([](auto& o) {
         return std::make_unique<LambdaLR>(o, [](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); });
       })},
      {"CosineAnnealingLR(optimizer, 30, eta_min=0.001)",
       of([](auto& o) { return std::make_unique<CosineAnnealingLR>(o, 30, 0.001); })},
      {"ConstantLR(optimizer, 0.5, total_iters=7)",
       of([](auto& o) { return std::make_unique<ConstantLR>(o, 0.5, 7); })},
      {"PolynomialLR(optimizer, 40, power=2)", of([](auto& o) { return std::make_unique<PolynomialLR>(o, 40, 2); })},
      {"LinearLR(optimizer, 0.25, total_iters=10)",
       of([](auto& o) { return std::make_unique<LinearLR>(o, 0.25, 1.0, 10); })},
  };
}

std::vector<double> trajectory(const MadeOptimizer& optimizer, at::ScalarType dtype, const Schedule* schedule = nullptr,
                               bool only_matrices = false) {
  Tensors parameters = start(dtype, only_matrices);
  const auto scheduler = schedule ? schedule->make(*optimizer) : nullptr;
  std::vector<double> numbers;
  for (int step = 0; step < 100; ++step) {
    optimizer->step(parameters, gradients(parameters, step));
    if (scheduler) {
      scheduler->step();
      numbers.push_back(optimizer->lr());
      EXPECT_EQ(scheduler->last_lr(), optimizer->lr());
    }
    if (step % 10 != 9) continue;
    for (const Tensor& parameter : parameters) {
      const Tensor values = parameter.to(at::kDouble);
      numbers.insert(numbers.end(), values.data_ptr<double>(), values.data_ptr<double>() + values.numel());
    }
  }
  return numbers;
}

TEST(Optim, EqualsPython) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch ('" << kPython << "'): pip install torch==2.13.0";
  std::vector<std::string> lines;
  std::vector<std::vector<double>> ours;
  const auto all = cases();
  for (const auto dtype : {at::kDouble, at::kFloat})
    for (const Case& one : all) {
      lines.push_back(std::string(dtype == at::kDouble ? "double" : "float") + "|" + one.python + "|");
      ours.push_back(trajectory(one.make(), dtype, nullptr, one.only_matrices));
    }
  const auto plans = schedules();
  for (const Schedule& plan : plans) {
    lines.push_back("double|SGD(lr=0.1, momentum=0.5)|" + plan.python);
    ours.push_back(
        trajectory(std::make_unique<optim::SGD>(optim::SGDOptions{.lr = 0.1, .momentum = 0.5}), at::kDouble, &plan));
  }
  const auto theirs = ask_python("unit/optim_reference.py", lines);
  ASSERT_EQ(theirs.size(), lines.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    const double apart = farthest(ours[i], theirs[i]);
    EXPECT_LE(apart, lines[i].starts_with("double") ? 1e-12 : 1e-6) << lines[i];
    EXPECT_GT(farthest(std::vector<double>(ours[i].end() - 40, ours[i].end()), {}), 0) << "it has moved";
  }
}

// Compares with the optimizers of the C++ API, whose defaults differ.
template <typename Theirs, typename Options>
void expect_like_cpp(Options options, const MadeOptimizer& ours) {
  Tensors parameters = start(at::kDouble), mine = start(at::kDouble);
  for (Tensor& parameter : parameters) parameter.requires_grad_();
  Theirs theirs(parameters, options);
  for (int step = 0; step < 100; ++step) {
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].mutable_grad() = i == 1 && step % 7 == 3 ? Tensor() : gradient(parameters[i].detach(), i, step);
    theirs.step();
    ours->step(mine, gradients(mine, step));
  }
  for (size_t i = 0; i < mine.size(); ++i)
    EXPECT_LE((mine[i] - parameters[i].detach()).abs().max().item<double>(), 1e-9);
}

TEST(Optim, EqualsCpp) {
  namespace t = torch::optim;
  using namespace optim;
  const auto make = [](const auto& maker) { return maker(); };
  expect_like_cpp<t::SGD>(t::SGDOptions(0.05).momentum(0.9).weight_decay(0.1).nesterov(true),
                          make(maker<SGD>({.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true})));
  expect_like_cpp<t::SGD>(t::SGDOptions(0.05).momentum(0.9).dampening(0.5),
                          make(maker<SGD>({.lr = 0.05, .momentum = 0.9, .dampening = 0.5})));
  expect_like_cpp<t::Adam>(t::AdamOptions(0.05).weight_decay(0.1).amsgrad(true),
                           make(maker<Adam>({.lr = 0.05, .weight_decay = 0.1, .amsgrad = true})));
  expect_like_cpp<t::AdamW>(t::AdamWOptions(0.05).weight_decay(0.1),
                            make(maker<AdamW>({.lr = 0.05, .weight_decay = 0.1})));
  expect_like_cpp<t::Adagrad>(t::AdagradOptions(0.1).lr_decay(0.01).eps(1e-10),
                              make(maker<Adagrad>({.lr = 0.1, .lr_decay = 0.01})));
  expect_like_cpp<t::RMSprop>(t::RMSpropOptions(0.01).momentum(0.7).centered(true),
                              make(maker<RMSprop>({.lr = 0.01, .momentum = 0.7, .centered = true})));
}

TEST(Optim, SavedStateGoesOnToTheBit) {
  for (const Case& one : cases()) {
    Tensors straight = start(at::kFloat, one.only_matrices), halved = start(at::kFloat, one.only_matrices);
    const MadeOptimizer whole = one.make(), first = one.make(), second = one.make();
    for (int step = 0; step < 20; ++step) whole->step(straight, gradients(straight, step));
    for (int step = 0; step < 10; ++step) first->step(halved, gradients(halved, step));
    const auto state = first->state(halved);
    EXPECT_TRUE(state.contains("0.step") && state.contains("1.step"));
    first->step(halved, gradients(halved, 10));  // must not reach what was saved
    halved = start(at::kFloat, one.only_matrices);
    const MadeOptimizer again = one.make();
    for (int step = 0; step < 10; ++step) again->step(halved, gradients(halved, step));
    second->load_state(halved, state);
    for (int step = 10; step < 20; ++step) second->step(halved, gradients(halved, step));
    for (size_t i = 0; i < halved.size(); ++i) EXPECT_TRUE(at::equal(straight[i], halved[i])) << one.python;
  }
}

TEST(Optim, StateIsNamedAsInPython) {
  Tensors parameters = start(at::kFloat);
  optim::Adam adam({.amsgrad = true});
  adam.step(parameters, {gradient(parameters[0], 0, 0), Tensor()});
  std::vector<std::string> names;
  for (const auto& [name, tensor] : adam.state(parameters)) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"0.exp_avg", "0.exp_avg_sq", "0.max_exp_avg_sq", "0.step"}));
  EXPECT_EQ(adam.state(parameters)["0.step"].item<int64_t>(), 1);
  const auto before = adam.state(parameters);
  using State = FunctionalOptimizer::State;
  const auto refused = [&](State state) { EXPECT_THROW(adam.load_state(parameters, state), InvalidArgument); };
  refused({{"0.momentum_buffer", at::zeros({7})}, {"0.step", at::tensor(1)}});
  refused({{"2.step", at::tensor(1)}});
  refused({{"step", at::tensor(1)}});
  refused({{"0.exp_avg", at::zeros({8})}, {"0.step", at::tensor(1)}});
  refused({{"0.exp_avg", at::zeros({7})}});
  refused({{"0.step", Tensor()}});
  EXPECT_TRUE(at::equal(adam.state(parameters)["0.exp_avg"], before.at("0.exp_avg")));
  adam.load_state(parameters, {});
  EXPECT_TRUE(adam.state(parameters).empty());
}

TEST(Optim, BadArguments) {
  using namespace optim;
  EXPECT_THROW(SGD({.lr = -1}), InvalidArgument);
  EXPECT_THROW(SGD({.lr = std::nan("")}), InvalidArgument);
  EXPECT_THROW(SGD({.nesterov = true}), InvalidArgument);
  EXPECT_THROW(SGD({.momentum = 0.9, .dampening = 0.1, .nesterov = true}), InvalidArgument);
  EXPECT_THROW(Adam({.betas = {1, 0.9}}), InvalidArgument);
  EXPECT_THROW(AdamW({.betas = {0.9, -0.1}}), InvalidArgument);
  EXPECT_THROW(Adamax({.eps = -1}), InvalidArgument);
  EXPECT_THROW(Adagrad({.lr_decay = -1}), InvalidArgument);
  EXPECT_THROW(Adadelta({.rho = 1.5}), InvalidArgument);
  EXPECT_THROW(RMSprop({.alpha = -1}), InvalidArgument);
  EXPECT_THROW(Rprop({.etas = {1.1, 1.2}}), InvalidArgument);
  EXPECT_THROW(NAdam({.momentum_decay = -1}), InvalidArgument);
  EXPECT_THROW(RAdam({.betas = {0.9, 1}}), InvalidArgument);
  EXPECT_THROW(ASGD({.weight_decay = -1}), InvalidArgument);
  EXPECT_THROW(Adafactor({.beta2_decay = 0.1}), InvalidArgument);
  EXPECT_THROW(Adafactor({.d = 0.5}), InvalidArgument);
  EXPECT_THROW(Muon({.ns_steps = 100}), InvalidArgument);
  EXPECT_THROW(Muon().step({at::ones({3})}, {at::ones({3})}), InvalidArgument);
  for (const auto& make : std::vector<std::function<MadeOptimizer()>>{maker<Adafactor>({}), maker<Muon>({})}) {
    const Tensor complex = at::ones({2, 2}, at::kComplexFloat);
    EXPECT_THROW(make()->step({complex}, {complex}), InvalidArgument);
    EXPECT_TRUE(at::equal(complex, at::ones({2, 2}, at::kComplexFloat)));
  }
  SGD sgd({.lr = 0.1});
  EXPECT_THROW(sgd.set_lr(-1), InvalidArgument);
  EXPECT_THROW(StepLR(sgd, 0), InvalidArgument);
  EXPECT_THROW(CosineAnnealingLR(sgd, 0), InvalidArgument);
  Tensors parameters = start(at::kFloat);
  const Tensor before = parameters[0].clone();
  EXPECT_THROW(sgd.step(parameters, {before}), InvalidArgument);
  EXPECT_THROW(sgd.step(parameters, {before, at::zeros({1})}), InvalidArgument);  // would be broadcast
  EXPECT_THROW(Adam().step(parameters, {before.to_sparse(), Tensor()}), InvalidArgument);
  EXPECT_TRUE(at::equal(parameters[0], before));  // nothing was changed, not even the first one
}

TEST(Optim, SparseGradientsAreLikeDenseOnes) {
  const Tensor indices = at::tensor({1, 4, 1}, at::kLong).reshape({1, 3});
  const Tensor sparse = at::sparse_coo_tensor(indices, at::tensor({1.0, 2.0, 3.0}), {6}, at::kDouble);
  const std::vector<std::function<MadeOptimizer()>> makers{
      maker<optim::SGD>({.lr = 0.1}), maker<optim::SGD>({.lr = 0.1, .maximize = true}),
      maker<optim::Adagrad>({.lr = 0.1, .initial_accumulator_value = 0.1}),
      maker<optim::Adagrad>({.lr = 0.1, .maximize = true})};
  for (const auto& make : makers) {
    const Tensor a = at::linspace(0, 1, 6, at::kDouble), b = a.clone();
    const MadeOptimizer first = make(), second = make();
    for (int step = 0; step < 5; ++step) {
      first->step({a}, {sparse});
      second->step({b}, {sparse.to_dense()});
    }
    EXPECT_TRUE(at::allclose(a, b, 0, 1e-12));
    EXPECT_FALSE(at::equal(a, at::linspace(0, 1, 6, at::kDouble)));
  }
}

TEST(Optim, ComplexOnesArePairs) {
  for (const Case& one : cases()) {
    if (one.python.starts_with("Adafactor") || one.python.starts_with("Muon")) continue;  // they refuse them
    const Tensor real = at::linspace(-1, 2, 10, at::kDouble).reshape({5, 2}), pairs = real.clone();
    const Tensor complex = at::view_as_complex(pairs);
    const MadeOptimizer first = one.make(), second = one.make();
    for (int step = 0; step < 3; ++step) {
      const Tensor g = gradient(real, 0, step);
      first->step({real}, {g});
      second->step({complex}, {at::view_as_complex(g)});
    }
    EXPECT_TRUE(at::equal(real, pairs)) << one.python;
  }
}

// Autograd does not record a step, even if grad mode is on and the parameter is a leaf.
TEST(Optim, StepsAreNotRecorded) {
  const Tensor parameter = at::ones({3}).requires_grad_();
  optim::Adam adam;
  adam.step({parameter}, {at::ones({3}).requires_grad_()});
  EXPECT_TRUE(parameter.is_leaf());
  for (const auto& [name, tensor] : adam.state({parameter})) EXPECT_FALSE(tensor.requires_grad()) << name;
}

// A step of many parameters gives the same as a step of each alone: of two dtypes, some that no fused kernel can take,
// one that comes later, one that is there twice. Gradients stay as they are.
TEST(Optim, ManyAtOnceAreLikeEachAlone) {
  using namespace optim;
  const auto make_parameters = [] {
    Tensors all = {at::linspace(-1, 2, 7, at::kFloat),
                   at::linspace(-1, 2, 33, at::kDouble),
                   at::linspace(-1, 2, 12, at::kFloat).view({3, 4}).t(),
                   at::empty({0}),
                   at::linspace(-1, 2, 16, at::kDouble),
                   at::linspace(-1, 2, 16, at::kBFloat16)};
    all.push_back(all[0]);
    return all;
  };
  for (const auto& make : std::vector<std::function<MadeOptimizer()>>{
           maker<Adam>({.lr = 0.02}), maker<Adam>({.lr = 0.02, .weight_decay = 0.1, .amsgrad = true}),
           maker<AdamW>({.lr = 0.02, .amsgrad = true, .maximize = true}), maker<SGD>({.lr = 0.02, .momentum = 0.9}),
           maker<SGD>({.lr = 0.02, .weight_decay = 0.1}), maker<Adagrad>({.lr = 0.02, .lr_decay = 0.1})}) {
    const Tensors together = make_parameters(), alone = make_parameters();
    const auto one = make();
    std::vector<MadeOptimizer> each;
    for (size_t i = 0; i + 1 < alone.size(); ++i) each.push_back(make());
    each.push_back(nullptr);  // the first one's
    for (int step = 0; step < 20; ++step) {
      Tensors given = gradients(together, step), kept;
      if (step < 5) given[4] = Tensor();
      for (size_t i = 0; i < given.size(); ++i) {
        if (given[i].defined() && i + 1 < given.size()) given[i] = gradient(alone[i], i, step);
        kept.push_back(given[i].defined() ? given[i].clone() : given[i]);
      }
      given.back() = kept.back() = given[0].clone();
      one->step(together, given);
      for (size_t i = 0; i < alone.size(); ++i) (each[i] ? each[i] : each[0])->step({alone[i]}, {kept[i]});
      for (size_t i = 0; i < given.size(); ++i) EXPECT_TRUE(!given[i].defined() || at::equal(given[i], kept[i])) << i;
    }
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(at::equal(together[i], alone[i])) << i;
  }
}

// A graph that has saved a parameter's value notices the step, like every in-place operation.
TEST(Optim, GraphsThatKeptAValueNoticeTheStep) {
  using namespace optim;
  for (const auto& make : std::vector<std::function<MadeOptimizer()>>{
           maker<Adam>({.lr = 0.02}), maker<AdamW>({.lr = 0.02}), maker<SGD>({.lr = 0.02})})
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexDouble}) {
      SCOPED_TRACE(dtype);
      const Tensor w = at::ones({4}, at::dtype(dtype).requires_grad(true));
      const Tensor loss = at::real((w * w).sum());
      make()->step({w}, {at::ones_like(w)});
      EXPECT_THROW(loss.backward(), c10::Error);
    }
}

// A step that throws leaves each parameter either stepped or not begun: a parameter that has not stepped has not
// counted a step, and its next step is as if nothing had happened.
TEST(Optim, AStepThatThrowsIsWholeForEachParameter) {
  optim::Adam one({.lr = 0.1}), other({.lr = 0.1});
  const Tensor a = at::ones({3}), b = at::ones({3}, at::kDouble), like_a = at::ones({3}), like_b = b.clone();
  const Tensor bad = at::ones({3}, at::kComplexFloat);  // cannot be the gradient of a real parameter
  EXPECT_ANY_THROW(one.step({a, b}, {at::ones({3}), bad}));
  ASSERT_TRUE(at::equal(a, like_a) || one.state({a})["0.step"].item<int64_t>() == 1);
  if (!at::equal(a, like_a)) other.step({like_a}, {at::ones({3})});
  for (int i = 0; i < 3; ++i) {
    one.step({a, b}, {at::ones({3}), at::ones({3}, at::kDouble)});
    other.step({like_a, like_b}, {at::ones({3}), at::ones({3}, at::kDouble)});
  }
  EXPECT_TRUE(at::equal(a, like_a));
  EXPECT_TRUE(at::equal(b, like_b));
}

TEST(Optim, DifferentParametersAtOnce) {
  constexpr int kThreads = 4, kSteps = 200, kEach = 8;
  optim::Adam shared({.lr = 0.01});
  std::vector<Tensors> parameters(kThreads);
  for (auto& few : parameters)
    for (int i = 0; i < kEach; ++i) few.push_back(at::linspace(-1, 2, 5 + i, at::kDouble));
  std::vector<std::thread> threads;
  for (auto& few : parameters)
    threads.emplace_back([&shared, &few] {
      for (int step = 0; step < kSteps; ++step) shared.step(few, gradients(few, step));
    });
  for (auto& thread : threads) thread.join();
  Tensors alone;
  for (int i = 0; i < kEach; ++i) alone.push_back(at::linspace(-1, 2, 5 + i, at::kDouble));
  optim::Adam own({.lr = 0.01});
  for (int step = 0; step < kSteps; ++step) own.step(alone, gradients(alone, step));
  for (const auto& few : parameters)
    for (size_t i = 0; i < few.size(); ++i) EXPECT_TRUE(at::equal(few[i], alone[i]));
}

}  // namespace
}  // namespace muster::test
