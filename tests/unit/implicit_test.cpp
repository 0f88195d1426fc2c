// Implicit and zero-order differentiation, linear solvers, and pictures of graphs.
#include "muster/optim/implicit.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/optim/make_dot.h"
#include "muster/optim/zero_order.h"
#include "support/ask_python.h"
#include "support/finite_differences.h"
#include "support/ranks.h"
#include "support/transform_cases.h"

namespace muster::test {
namespace {

using at::Tensor;
using optim::LinearSolver;
using optim::Tensors;
using optim::ZeroOrder;

struct Data {  // meta_reference.py has the same
  Tensor x = at::cos(at::arange(24, at::kDouble) * 0.7).view({8, 3}), y = at::sin(at::arange(8, at::kDouble) * 0.9);
};

// A ridge regression with a term of the fourth order, whose solution has no formula.
Tensor ridge_optimality(const Tensor& w, const Tensor& l2, const Tensor& shift, const Data& d) {
  return d.x.t().matmul(d.x.matmul(w) - d.y) + l2 * w + shift * w.pow(3);
}
Tensor ridge_solve(Tensor w, const Tensor& l2, const Tensor& shift, const Data& d) {
  for (int i = 0; i < 60; ++i) {  // Newton's steps
    const Tensor jacobian = d.x.t().matmul(d.x) + at::diag(l2 + 3 * shift * w.pow(2));
    w = w - at::linalg_solve(jacobian, ridge_optimality(w, l2, shift, d));
  }
  return w;
}
auto ridge(LinearSolver solve) {
  return optim::custom_root<1, 2>(ridge_optimality, ridge_solve, {.solve = std::move(solve)});
}
Tensors ridge_arguments() {
  return {at::scalar_tensor(0.3, at::kDouble).set_requires_grad(true),
          at::tensor({0.1, -0.2, 0.4}, at::kDouble).set_requires_grad(true)};
}
Tensor start() { return at::zeros({3}, at::kDouble); }
Tensor weighted(const Tensor& w) { return (w.sin() * at::arange(1, 4, at::kDouble)).sum(); }

struct Inner : optim::ImplicitMetaGradientModule<Inner>, optim::TensorMembers {
  Tensor meta, weight;
  explicit Inner(Tensor given) : ImplicitMetaGradientModule(optim::solve_cg({.rtol = 1e-12})), meta(std::move(given)) {
    weight = register_parameter("weight", at::zeros({3}, at::kDouble));
    register_meta_parameter("meta", meta);
  }
  std::vector<Tensor*> tensor_members() override { return {&weight}; }
  Tensor objective(const Tensor& x, const Tensor& y) {
    return (x.matmul(weight) - y).square().sum() + (meta * weight.square()).sum();
  }
  int solve(const Tensor& x, const Tensor& y) {
    const at::NoGradGuard no_grad;
    weight.set_data(at::linalg_solve(x.t().matmul(x) + at::diag(meta), x.t().matmul(y)));
    return 7;
  }
};

TEST(Implicit, GradientsOfAnyOrderEqualDifferences) {
  for (const auto& [name, solve] : {std::pair<std::string, LinearSolver>("cg", optim::solve_cg({.rtol = 1e-12})),
                                    {"normal_cg", optim::solve_normal_cg({.rtol = 1e-12})},
                                    {"inv", optim::solve_inv()},
                                    {"neumann", optim::solve_neumann_series({.maxiter = 1000, .alpha = 0.1})}}) {
    const auto root = ridge(solve);
    const auto value = [&](const Tensors& at) { return weighted(root(start(), at[0], at[1], Data())); };
    const auto slope = [&](const Tensors& at) {
      const auto gradients = torch::autograd::grad({value(at)}, at, {}, true, true);
      return gradients[0].square() + (gradients[1] * at::arange(3, at::kDouble)).sum();
    };
    const auto curvature = [&](const Tensors& at) {
      const auto gradients = torch::autograd::grad({slope(at)}, at, {}, true, true);
      return gradients[0].square() + gradients[1].sum();
    };
    const Tensors at = ridge_arguments();
    int order = 0;
    for (const auto& of : {std::function<Tensor(const Tensors&)>(value), std::function<Tensor(const Tensors&)>(slope),
                           std::function<Tensor(const Tensors&)>(curvature)}) {
      ++order;
      const auto exact = torch::autograd::grad({of(at)}, at);
      EXPECT_LE(farthest(numbers(exact), numbers(finite_differences(of, at, 1e-5))), 1e-6)
          << name << ", order " << order;
    }
  }
}

TEST(Implicit, EqualsTorchOpt) {
  MUSTER_NEEDS_TORCHOPT();
  Comparison same;
  for (const auto& [python, solve] :
       {std::pair<std::string, LinearSolver>("solve_cg(rtol=1e-12)", optim::solve_cg({.rtol = 1e-12})),
        {"solve_cg(rtol=1e-12, ridge=0.5)", optim::solve_cg({.rtol = 1e-12, .ridge = 0.5})},
        {"solve_normal_cg(rtol=1e-12)", optim::solve_normal_cg({.rtol = 1e-12})},
        {"solve_normal_cg(maxiter=2)", optim::solve_normal_cg({.maxiter = 2})},
        {"solve_inv()", optim::solve_inv()},
        {"solve_inv(ridge=0.1)", optim::solve_inv({.ridge = 0.1})},
        {"solve_inv(ns=True, maxiter=5, alpha=0.1)", optim::solve_neumann_series({.maxiter = 5, .alpha = 0.1})}}) {
    const Tensors at = ridge_arguments();
    const Tensor w = ridge(solve)(start(), at[0], at[1], Data());
    Tensors all = torch::autograd::grad({weighted(w)}, at);
    all.insert(all.begin(), w);
    same.add("root|" + python, numbers(all), 1e-8);
  }
  for (const auto& [python, options] :
       {std::pair<std::string, optim::ZeroOrderOptions>("naive|3|0.5",
                                                        {.method = ZeroOrder::kNaive, .num_samples = 3, .sigma = 0.5}),
        {"forward|1|1", {.method = ZeroOrder::kForward}},  // TorchOpt is right for these only
        {"antithetic|4|0.2", {.method = ZeroOrder::kAntithetic, .num_samples = 4, .sigma = 0.2}}}) {
    auto with = options;
    with.sampler = [count = 0](const Tensor& like) mutable {
      return at::cos(at::arange(like.numel(), at::kDouble) * 1.7 + ++count).view(like.sizes());
    };
    const auto fn =
        optim::zero_order<0, 1>([](const Tensor& a, const Tensor& b) { return (a.sin() * b.sum()).sum(); }, with);
    const Tensors at{at::linspace(-1, 1, 4, at::kDouble).view({2, 2}).set_requires_grad(true),
                     at::linspace(0, 1, 3, at::kDouble).set_requires_grad(true)};
    same.add("zero_order|" + python, numbers(torch::autograd::grad({fn(at[0], at[1]) * 3}, at)), 1e-8);
  }
  const Tensor meta = at::tensor({0.5, 1.5, 0.2}, at::kDouble).set_requires_grad(true);
  Inner inner(meta);
  inner.solve_implicitly(Data().x, Data().y);
  same.add("implicit_module|solve_cg(rtol=1e-12)",
           numbers({inner.weight, torch::autograd::grad({inner.weight.exp().sum()}, {meta})[0]}), 1e-8);
  same.with("unit/meta_reference.py");
}

TEST(Implicit, MetaParametersHaveNames) {
  struct Named : optim::ImplicitMetaGradientModule<Named> {
    torch::nn::Linear fc{2, 1};
    Tensor rate;
    Named(Tensor given, torch::nn::Linear& outer) : rate(std::move(given)) {
      register_module("fc", fc);
      register_meta_parameter("rate", rate);
      register_meta_module("outer", *outer);
    }
  };
  torch::nn::Linear outer(3, 4);
  Named named(at::ones({}), outer);
  const auto all = named.named_meta_parameters();
  std::vector<std::string> names;
  for (const auto& one : all) names.push_back(one.first);
  EXPECT_EQ(names, (std::vector<std::string>{"rate", "outer.weight", "outer.bias"}));
  const Tensors tensors = named.meta_parameters();
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_TRUE(tensors[0].is_same(named.rate) && tensors[1].is_same(outer->weight) && tensors[2].is_same(outer->bias));
  EXPECT_TRUE(all[2].second.is_same(outer->bias));
}

TEST(Implicit, AuxiliaryOutputAndTrees) {
  using Pair = std::pair<Tensor, Tensor>;
  int calls = 0;
  const auto root = optim::custom_root<1>(  // x = a, y = 2 b
      [](const Pair& at, const std::vector<Tensor>& of) { return Pair(at.first - of[0], at.second - 2 * of[1]); },
      [&](const Pair&, const std::vector<Tensor>& of) {
        ++calls;
        EXPECT_FALSE(of[0].requires_grad());
        return optim::WithAux{Pair(of[0].clone(), 2 * of[1]), std::string("two steps")};
      });
  const Tensors of{at::ones({2}, at::kDouble).set_requires_grad(true),
                   at::ones({3}, at::kDouble).set_requires_grad(true)};
  const auto [solution, aux] = root(Pair(), of);
  EXPECT_EQ(aux, "two steps");
  EXPECT_EQ(calls, 1);
  const auto gradients = torch::autograd::grad({solution.first.sum() * 5 + solution.second.sum()}, of);
  EXPECT_EQ(gradients[0][0].item<double>(), 5);
  EXPECT_EQ(gradients[1][0].item<double>(), 2);
  EXPECT_EQ(calls, 1);  // the gradient does not solve again

  const auto wrong = optim::custom_root<1>([](const Tensor& x, const Tensor& a) { return (x - a).sum(); },
                                           [](const Tensor&, const Tensor& a) { return a.clone(); });
  EXPECT_THROW(wrong(Tensor(), of[0]).sum().backward(), InvalidArgument);
}

TEST(Implicit, Module) {
  const Data d;
  const Tensor meta = at::tensor({0.5, 1.5, 0.2}, at::kDouble).set_requires_grad(true);
  std::vector<std::shared_ptr<Inner>> kept;  // until the gradients have been computed
  const auto of = [&](const Tensors& at) {
    Inner& inner = *kept.emplace_back(std::make_shared<Inner>(at[0]));
    EXPECT_EQ(inner.solve_implicitly(d.x, d.y), 7);
    const Tensor loss = inner.weight.exp().sum();
    return torch::autograd::grad({loss}, at, {}, true, true)[0].square().sum() + loss.detach() * 0;
  };
  const auto value = [&](const Tensors& at) {
    return at::linalg_solve(d.x.t().matmul(d.x) + at::diag(at[0]), d.x.t().matmul(d.y)).exp().sum();
  };
  auto inner = std::make_shared<Inner>(meta);
  inner->solve_implicitly(d.x, d.y);
  EXPECT_TRUE(inner->parameters()[0].is_same(inner->weight));
  const Tensor loss = inner->weight.exp().sum();
  EXPECT_LE((torch::autograd::grad({loss}, {meta}, {}, true)[0] - finite_differences(value, {meta})[0])
                .abs()
                .max()
                .item<double>(),
            1e-8);
  EXPECT_TRUE(inner->meta.is_same(meta));  // what was lent for the gradient is back
  EXPECT_LE((torch::autograd::grad({of({meta})}, {meta})[0] - finite_differences(of, {meta}, 1e-5)[0])
                .abs()
                .max()
                .item<double>(),
            1e-6);
  inner.reset();
  EXPECT_THROW(loss.backward(), Aborted);
}

// With the condition that holds at the solution instead of an objective.
struct ByOptimality : optim::ImplicitMetaGradientModule<ByOptimality>, optim::TensorMembers {
  Tensor meta, weight;
  explicit ByOptimality(Tensor given)
      : ImplicitMetaGradientModule(optim::solve_cg({.rtol = 1e-12})), meta(std::move(given)) {
    weight = register_parameter("weight", at::zeros({3}, at::kDouble));
    register_meta_parameter("meta", meta);
  }
  std::vector<Tensor*> tensor_members() override { return {&weight}; }
  Tensors optimality(const Tensor& x, const Tensor& y) { return {x.t().matmul(x.matmul(weight) - y) + meta * weight}; }
  void solve(const Tensor& x, const Tensor& y) {
    const at::NoGradGuard no_grad;
    weight.set_data(at::linalg_solve(x.t().matmul(x) + at::diag(meta), x.t().matmul(y)));
  }
};

TEST(Implicit, ModuleWithOptimality) {
  const Data d;
  const Tensor meta = at::tensor({0.5, 1.5, 0.2}, at::kDouble).set_requires_grad(true);
  const auto gradient = [&](auto& inner) {
    inner.solve_implicitly(d.x, d.y);
    return torch::autograd::grad({inner.weight.exp().sum()}, {meta})[0];
  };
  ByOptimality by_optimality(meta);
  Inner by_objective(meta);
  EXPECT_LE((gradient(by_optimality) - gradient(by_objective)).abs().max().item<double>(), 1e-10);
}

// A frozen parameter is given: the solution does not include it.
struct WithAFrozenOffset : optim::ImplicitMetaGradientModule<WithAFrozenOffset>, optim::TensorMembers {
  Tensor meta, weight, offset;
  explicit WithAFrozenOffset(Tensor given)
      : ImplicitMetaGradientModule(optim::solve_cg({.rtol = 1e-12})), meta(std::move(given)) {
    offset = register_parameter("offset", at::full({1}, 0.3, at::kDouble), /*requires_grad=*/false);
    weight = register_parameter("weight", at::zeros({3}, at::kDouble));
    register_meta_parameter("meta", meta);
  }
  std::vector<Tensor*> tensor_members() override { return {&offset, &weight}; }
  Tensor objective(const Tensor& x, const Tensor& y) {
    return (x.matmul(weight) + offset - y).square().sum() + (meta * weight.square()).sum();
  }
  void solve(const Tensor& x, const Tensor& y) {
    const at::NoGradGuard no_grad;
    weight.set_data(at::linalg_solve(x.t().matmul(x) + at::diag(meta), x.t().matmul(y - offset)));
  }
};

TEST(Implicit, FrozenParametersAreGiven) {
  const Data d;
  const Tensor meta = at::tensor({0.5, 1.5, 0.2}, at::kDouble).set_requires_grad(true);
  WithAFrozenOffset inner(meta);
  inner.solve_implicitly(d.x, d.y);
  EXPECT_FALSE(inner.offset.requires_grad());
  const Tensor weight = at::linalg_solve(d.x.t().matmul(d.x) + at::diag(meta), d.x.t().matmul(d.y - 0.3));
  const auto gradient = [&](const Tensor& of) { return torch::autograd::grad({of.exp().sum()}, {meta})[0]; };
  EXPECT_LE((gradient(inner.weight) - gradient(weight)).abs().max().item<double>(), 1e-10);
}

TEST(Implicit, ArgumentsMayNotChangeBeforeTheGradient) {
  Data d;
  const Tensor meta = at::tensor({0.5, 1.5, 0.2}, at::kDouble).set_requires_grad(true);
  Inner inner(meta);
  inner.solve_implicitly(d.x, d.y);
  d.y.add_(1);  // as a loader does that uses a buffer again
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { inner.weight.sum().backward(); }), "was changed in place");
  const auto root = ridge(optim::solve_cg());
  const Tensors given = ridge_arguments();
  const Tensor w = root(start(), given[0], given[1], d);
  w.sum().backward();  // this one has not changed since
}

TEST(Implicit, AModuleAndItsSolutionAreNotACycle) {
  const Data d;
  auto inner = std::make_shared<Inner>(at::ones({3}, at::kDouble).set_requires_grad(true));
  inner->solve_implicitly(d.x, d.y);
  const c10::weak_intrusive_ptr<c10::TensorImpl> solution(inner->weight.getIntrusivePtr());
  const std::weak_ptr<Inner> module = inner;
  inner.reset();
  EXPECT_TRUE(module.expired());
  EXPECT_TRUE(solution.expired());
}

TEST(Implicit, LinearSolvers) {
  const Tensor a = at::tensor({4., 1., 0., 1., 3., 1., 0., 1., 5.}, at::kDouble).view({3, 3});
  const Tensors b{at::ones({2}, at::kDouble), at::full({1}, 2., at::kDouble)};
  const auto times = [](const Tensor& matrix) {
    return [=](const Tensors& x) {
      const Tensor y = matrix.matmul(at::cat(x));
      return Tensors{y.slice(0, 0, 2), y.slice(0, 2, 3)};
    };
  };
  const Tensor expected = at::linalg_solve(a, at::cat(b));
  for (const auto& solve :
       {optim::solve_cg({.rtol = 1e-12}), optim::solve_normal_cg({.rtol = 1e-12}), optim::solve_inv(),
        optim::solve_neumann_series({.maxiter = 500, .alpha = 0.15}),
        optim::solve_cg({.rtol = 1e-12, .init = {at::ones({2}, at::kDouble), at::ones({1}, at::kDouble)}})})
    EXPECT_LE((at::cat(solve({times(a), times(a.t())}, b)) - expected).abs().max().item<double>(), 1e-8);
  const Tensor skew = a + at::tensor({0., 2., 0., -1., 0., 0., 0., 0., 0.}, at::kDouble).view({3, 3});
  EXPECT_LE((at::cat(optim::solve_normal_cg({.rtol = 1e-12})({times(skew), times(skew.t())}, b)) -
             at::linalg_solve(skew, at::cat(b)))
                .abs()
                .max()
                .item<double>(),
            1e-8);
  // Where the operator has no curvature there is no way on: what has been found so far, and no NaN.
  const Tensor flat = at::diag(at::tensor({2., 0., 0.}, at::kDouble));
  const Tensor found = at::cat(optim::solve_cg({.rtol = 1e-12})({times(flat), times(flat)}, b));
  EXPECT_TRUE(found.isfinite().all().item<bool>()) << found;
  EXPECT_THROW(optim::solve_cg({.rtol = -1}), InvalidArgument);
  EXPECT_THROW(optim::solve_neumann_series({.alpha = 0}), InvalidArgument);
}

// The estimate of a linear function's gradient is exact on average; and the same from the same generator.
TEST(ZeroOrderTest, EstimatesAreReproducible) {
  const Tensor weights = at::tensor({1., -2., 3.}, at::kDouble);
  const auto gradient = [&](ZeroOrder method, int64_t samples) {
    const auto fn = optim::zero_order([&](const Tensor& x) { return (x * weights).sum() + 100; },
                                      {.method = method,
                                       .num_samples = samples,
                                       .sigma = 0.1,
                                       .generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{5})});
    const Tensor x = at::ones({3}, at::kDouble).set_requires_grad(true);
    fn(x).backward();
    return x.grad();
  };
  for (const auto method : {ZeroOrder::kForward, ZeroOrder::kAntithetic})
    EXPECT_LE((gradient(method, 4000) - weights).abs().max().item<double>(), 0.3);
  EXPECT_TRUE(at::equal(gradient(ZeroOrder::kNaive, 7), gradient(ZeroOrder::kNaive, 7)));
  EXPECT_FALSE(at::equal(gradient(ZeroOrder::kNaive, 7), gradient(ZeroOrder::kForward, 7)));
}

struct Guess : optim::ZeroOrderGradientModule<Guess> {
  torch::nn::Linear fc{2, 1};
  int calls = 0;
  Guess() : ZeroOrderGradientModule({.method = ZeroOrder::kAntithetic, .num_samples = 3, .sigma = 0.01}) {
    register_module("fc", fc);
  }
  Tensor evaluate(const Tensor& x) {
    ++calls;
    EXPECT_FALSE(at::GradMode::is_enabled());
    return fc(x).sum().round();  // no gradient that autograd could find
  }
};

TEST(ZeroOrderTest, Module) {
  Guess guess;
  const Tensor before = guess.fc->weight;
  const Tensor score = guess.estimate(at::full({1, 2}, 1000.f));
  EXPECT_EQ(guess.calls, 1);
  score.backward();
  EXPECT_EQ(guess.calls, 1 + 2 * 3);
  EXPECT_TRUE(guess.fc->weight.is_same(before));
  EXPECT_GT(before.grad().abs().max().item<float>(), 0);
  EXPECT_EQ(guess.fc->bias.grad().sizes(), guess.fc->bias.sizes());
  EXPECT_THROW(optim::zero_order([](const Tensor& x) { return x; })(at::ones({2})), InvalidArgument);
  EXPECT_THROW(optim::zero_order([](const Tensor& x) { return x.sum(); }, {.sigma = 0}), InvalidArgument);
  const auto wrong = optim::zero_order([](const Tensor& x) { return x.sum(); },
                                       {.sampler = [](const Tensor&) { return at::ones({7}); }});
  EXPECT_THROW(wrong(at::ones({2}).set_requires_grad(true)).backward(), InvalidArgument);
}

TEST(MakeDot, NamesOperationsAndResults) {
  torch::nn::Linear net(2, 1);
  optim::NamedTensors names;
  const auto note = [&](const std::string& when) {
    for (const auto& [name, tensor] : optim::extract_state_dict(*net).parameters)
      names.emplace_back(when + name, tensor);
  };
  note("start.");
  optim::MetaSGD inner(*net, {.lr = 0.1});
  inner.step(net(at::ones({1, 2})).square().sum());
  note("step 1.");
  const Tensor loss = net(at::ones({1, 2})).square().sum();
  const std::string dot = optim::make_dot({loss}, names);
  EXPECT_EQ(dot, optim::make_dot({loss}, names));
  for (const char* const word : {"digraph", "start.weight", "step 1.weight", "step 1.bias", "AddmmBackward0",
                                 "SumBackward0", "result 0", "[1, 2]"})
    EXPECT_NE(dot.find(word), std::string::npos) << word << "\n" << dot;
  EXPECT_EQ(dot.find("leaf"), std::string::npos) << dot;  // each leaf has a name
  EXPECT_THROW(optim::make_dot({Tensor()}), InvalidArgument);

  const std::string path = testing::TempDir() + "/graph." + std::to_string(::getpid());
  const auto written = [&](const std::string& asked) {
    const std::string to = optim::write_dot(asked, {loss}, names);
    std::ifstream file(to);
    const std::string content(std::istreambuf_iterator<char>(file), {});
    std::remove(to.c_str());
    EXPECT_FALSE(std::filesystem::exists(path + ".svg.dot"));
    if (to.ends_with(".svg")) {
      EXPECT_NE(content.find("<svg"), std::string::npos);
    } else {
      EXPECT_EQ(content, dot);
    }
    return to;
  };
  EXPECT_EQ(written(path + ".dot"), path + ".dot");
  const bool graphviz = std::system("dot -V > /dev/null 2>&1") == 0;
  EXPECT_EQ(written(path + ".svg"), path + (graphviz ? ".svg" : ".svg.dot"));
  {
    struct NoPrograms {
      const char* const found = std::getenv("PATH");
      const std::string path = found ? found : "";
      NoPrograms() { ::setenv("PATH", "/nowhere", 1); }
      ~NoPrograms() { ::setenv("PATH", path.c_str(), 1); }
    } const no_programs;
    EXPECT_EQ(written(path + ".svg"), path + ".svg.dot");
  }
  EXPECT_THROW(optim::write_dot("/no/such/folder/graph.svg", {loss}, names), InvalidArgument);
}

}  // namespace
}  // namespace muster::test
