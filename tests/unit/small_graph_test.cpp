// Graphs that run without libtorch's engine give the same bits; graphs that need the engine are left to it.
#include "autograd/graph/small_graph.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

namespace muster::test {
namespace {

using at::Tensor;
using autograd::edge_list;
using autograd::Node;
using autograd::SmallGraph;
using autograd::variable_list;

const auto nowhere = [](Node&) { return false; };
const auto all_run = [](Node&, variable_list&) { return false; };

edge_list edges_of(const variable_list& tensors) {
  edge_list edges;
  for (const Tensor& tensor : tensors) edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  return edges;
}
bool is_small(const variable_list& roots) { return SmallGraph::of(edges_of(roots), nowhere).has_value(); }
void backward(const variable_list& roots, const variable_list& gradients, bool keep_graph = false) {
  const edge_list edges = edges_of(roots);
  auto graph = SmallGraph::of(edges, nowhere);
  ASSERT_TRUE(graph);
  graph->run(edges, gradients, keep_graph, all_run);
}

// Leaves, and a few results of random operations on them; the same for the same seed.
struct Made {
  variable_list leaves, roots;
};
Made make(uint32_t seed) {
  std::mt19937 random(seed);
  const auto type = seed % 3 ? at::kFloat : at::kDouble;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  Made made;
  for (int i = 0; i < 3; ++i) made.leaves.push_back(at::randn({4, 4}, generator, type).set_requires_grad(true));
  variable_list all = made.leaves;
  const auto any = [&]() -> Tensor& { return all[random() % all.size()]; };
  for (int step = 0; step < 6; ++step) {
    const Tensor a = any(), b = any();
    switch (random() % 10) {
      case 0:
        all.push_back(a * b);
        break;
      case 1:
        all.push_back(a + b);
        break;
      case 2:
        all.push_back(a.mm(b));
        break;
      case 3:
        all.push_back(a.sigmoid() - b);
        break;
      case 4:
        all.push_back(at::cat({a, b}, 1).narrow(1, 2, 4));
        break;
      case 5:
        all.push_back(a.sum(0, true).expand({4, 4}) * b);
        break;
      case 6:  // an operation of which only one result gets a gradient
        all.push_back(a.unbind(0)[1].unsqueeze(0) + b);
        break;
      case 7:  // in place
        all.push_back((a * 2).tanh_());
        break;
      case 8:
        all.push_back(a.t().contiguous());
        break;
      case 9:
        all.push_back(at::where(a > 0, a, b));
        break;
    }
  }
  made.roots = {all.back(), all.back(), any()};  // one of them twice; perhaps a leaf
  return made;
}

TEST(SmallGraph, GivesTheBitsOfTheEngine) {
  int small = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const Made ours = make(seed), theirs = make(seed);
    variable_list gradients;
    for (const Tensor& root : ours.roots) gradients.push_back(at::full_like(root, 0.3).set_requires_grad(false));
    if (!is_small(ours.roots)) continue;
    ++small;
    for (int round = 0; round < 2; ++round) {  // the second round accumulates
      backward(ours.roots, gradients, true);
      torch::autograd::backward(theirs.roots, gradients, true);
    }
    for (size_t i = 0; i < ours.leaves.size(); ++i) {
      ASSERT_EQ(ours.leaves[i].grad().defined(), theirs.leaves[i].grad().defined()) << seed;
      if (!ours.leaves[i].grad().defined()) continue;
      EXPECT_TRUE(at::equal(ours.leaves[i].grad(), theirs.leaves[i].grad())) << seed << ", leaf " << i;
    }
  }
  EXPECT_GT(small, 200);
}

// Gradients that can be differentiated again, with respect to leaves and to the results of one node.
TEST(SmallGraph, GradientsOfGradients) {
  const auto grad_by_engine = [](const Tensor& of, const variable_list& by) {
    return torch::autograd::grad({of}, by, {}, true, true, true);
  };
  int small = 0;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    const Made made = make(seed);
    const Tensor root = made.roots[0].sum() + (made.leaves[0] * made.leaves[1]).sum();
    const auto ours = muster::autograd::small_grad(root, made.leaves);
    if (!ours) continue;
    ++small;
    const auto theirs = grad_by_engine(root, made.leaves);
    Tensor sum = at::zeros({}, root.options()), expected = sum;
    for (size_t i = 0; i < theirs.size(); ++i) {
      ASSERT_EQ((*ours)[i].defined(), theirs[i].defined()) << seed;
      if (!theirs[i].defined()) continue;
      EXPECT_TRUE(at::equal((*ours)[i], theirs[i])) << seed;
      sum = sum + (*ours)[i].square().sum();
      expected = expected + theirs[i].square().sum();
    }
    ASSERT_EQ(sum.requires_grad(), expected.requires_grad()) << seed;
    if (!sum.requires_grad()) continue;
    const auto second = grad_by_engine(sum, made.leaves), wanted = grad_by_engine(expected, made.leaves);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!wanted[i].defined()) continue;
      EXPECT_TRUE(at::equal(second[i], wanted[i])) << seed;
    }
  }
  EXPECT_GT(small, 50);

  const Tensor x = at::rand({4, 2}).set_requires_grad(true);
  const auto parts = (x * 2).split(2);  // two results of one node
  const Tensor loss = (parts[0] * parts[1].exp()).sum();
  const auto ours = muster::autograd::small_grad(loss, parts);
  ASSERT_TRUE(ours);
  const auto theirs = grad_by_engine(loss, parts);
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal((*ours)[i], theirs[i]));
  EXPECT_TRUE(
      at::equal(grad_by_engine((*ours)[1].square().sum(), {x})[0], grad_by_engine(theirs[1].square().sum(), {x})[0]));
  const Tensor of_one = parts[0].exp(), both = (of_one * parts[0]).sum();
  EXPECT_FALSE(muster::autograd::small_grad(both, {parts[0], of_one}));  // one is a function of the other
  EXPECT_FALSE(muster::autograd::small_grad(both, {x, parts[0]}));
  const Tensor other = at::rand({2, 2}).set_requires_grad(true);
  EXPECT_FALSE(muster::autograd::small_grad((parts[0] * other.exp()).sum(), parts));  // the engine leaves `other` out
  EXPECT_FALSE(other.grad().defined());
}

// As the parameters that a remote call brings, each from a node of its own.
TEST(SmallGraph, GradientsByResultsOfSeveralNodes) {
  const auto grad_by_engine = [](const Tensor& of, const variable_list& by) {
    return torch::autograd::grad({of}, by, {}, true, true, true);
  };
  const Tensor x = at::rand({3, 3}).set_requires_grad(true), leaf = at::rand({3, 3}).set_requires_grad(true);
  const variable_list inputs = {x * 2, x.exp(), leaf};  // two have a node in common, which is before both
  const Tensor loss = (at::mm(inputs[0], inputs[1]).relu() * inputs[2] + inputs[0]).sum();
  const auto ours = muster::autograd::small_grad(loss, inputs);
  ASSERT_TRUE(ours);
  const auto theirs = grad_by_engine(loss, inputs);
  Tensor sum = at::zeros({}), expected = sum;
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(at::equal((*ours)[i], theirs[i])) << i;
    sum = sum + (*ours)[i].square().sum();
    expected = expected + theirs[i].square().sum();
  }
  for (const Tensor& by : {x, leaf})
    EXPECT_TRUE(at::equal(grad_by_engine(sum, {by})[0], grad_by_engine(expected, {by})[0]));

  Tensor deep = inputs[0];
  for (int i = 0; i < 3; ++i) deep = deep.exp();
  EXPECT_FALSE(muster::autograd::small_grad((deep * inputs[0]).sum(), {inputs[0], deep}));
  EXPECT_FALSE(muster::autograd::small_grad((deep * inputs[0]).sum(), {deep, inputs[0]}));
  EXPECT_FALSE(muster::autograd::small_grad((deep * x).sum(), {x, deep}));
  Tensor before = x;
  for (size_t i = 0; i < SmallGraph::kMostNodes + 1; ++i) before = before * 0.9;
  const Tensor other = x * 3;  // not known to be independent without a long look
  EXPECT_FALSE(muster::autograd::small_grad((before * other).sum(), {before, other}));
  inputs[0].register_hook([](const Tensor& gradient) { return gradient * 2; });
  EXPECT_FALSE(muster::autograd::small_grad(loss, inputs));
}

// The gradient of a linear layer is recorded as one node: first derivatives have the engine's bits, all orders its
// values.
TEST(SmallGraph, LinearLayersAreOneNode) {
  const auto by_engine = [](const Tensor& of, const variable_list& by) {
    return torch::autograd::grad({of}, by, {}, true, true, true);
  };
  const auto square_of = [](const variable_list& all) {
    Tensor sum = at::zeros({}, at::kDouble);
    for (const Tensor& one : all)
      if (one.defined()) sum = sum + (one.tanh() * (one * 0.5).cos()).sum();
    return sum;
  };
  struct Layers {
    const char* name;
    std::function<Tensor(const variable_list&)> of;  // x, two weights, two biases
    bool one_node = true;
  };
  const Layers cases[] = {
      {"two layers",
       [](const variable_list& v) { return at::linear(at::linear(v[0], v[1], v[3]).tanh(), v[2], v[4]); }},
      {"one layer", [](const variable_list& v) { return at::linear(v[0], v[1], v[3]); }},
      {"a weight used twice",
       [](const variable_list& v) {
         return at::linear(at::linear(v[0], v[1], v[3]).sigmoid(), v[1].t().contiguous(), v[0][0]) + v[1].sum();
       }},
      {"a transposition used twice",
       [](const variable_list& v) {
         const Tensor transposed = v[1].t();
         const Tensor first = at::addmm(v[3], v[0], transposed).tanh();
         return at::addmm(v[3], at::addmm(v[3], v[0] + first.sum(), transposed).sin().narrow(1, 0, 3), transposed) +
                transposed.sum();
       }},
      {"frozen weight",
       [](const variable_list& v) { return at::linear(at::linear(v[0], v[1].detach(), v[3]).tanh(), v[2], v[4]); }},
      {"frozen input",
       [](const variable_list& v) {
         return at::linear(at::linear(v[0].detach(), v[1], v[3]).tanh(), v[2], v[4].detach());
       }},
      {"a bias per row",
       [](const variable_list& v) { return at::addmm(at::linear(v[0], v[1], v[3]), v[0], v[1].t()).tanh(); }},
      {"three dimensions",
       [](const variable_list& v) {
         return at::linear(v[0].view({2, 2, 3}), v[1], v[3]).tanh().sum(0);
       }},
      {"other factors", [](const variable_list& v) { return at::addmm(v[3], v[0], v[1].t(), 0.5, 2); }, false},
      {"no transposition", [](const variable_list& v) { return at::addmm(v[3], v[0], v[1].t().contiguous()); }},
      {"no bias", [](const variable_list& v) { return at::linear(v[0], v[1]).tanh(); }, false}};
  for (const auto& [name, of, one_node] : cases) {
    SCOPED_TRACE(name);
    at::manual_seed(7);
    const variable_list leaves{
        at::randn({4, 3}, at::kDouble).set_requires_grad(true), at::randn({5, 3}, at::kDouble).set_requires_grad(true),
        at::randn({2, 5}, at::kDouble).set_requires_grad(true), at::randn({5}, at::kDouble).set_requires_grad(true),
        at::randn({2}, at::kDouble).set_requires_grad(true)};
    const Tensor root = square_of({of(leaves)});
    // Those that it does not depend on would need the engine.
    variable_list inputs;
    const auto reached = by_engine(root, leaves);
    for (size_t i = 0; i < leaves.size(); ++i)
      if (reached[i].defined()) inputs.push_back(leaves[i]);
    const auto ours = muster::autograd::small_grad(root, inputs);
    ASSERT_TRUE(ours);
    const auto theirs = by_engine(root, inputs);
    const auto nodes_of = [](const variable_list& all) {
      torch::autograd::edge_list edges;
      for (const Tensor& one : all) edges.push_back(torch::autograd::impl::gradient_edge(one));
      return muster::autograd::reachable(edges).size();
    };
    for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(at::equal((*ours)[i], theirs[i])) << i;
    if (one_node) {
      EXPECT_LT(nodes_of(*ours), nodes_of(theirs));
    }
    variable_list mine = *ours, wanted = theirs;
    for (int order = 2; order <= 4; ++order) {
      mine = by_engine(square_of(mine), inputs);
      wanted = by_engine(square_of(wanted), inputs);
      for (size_t i = 0; i < inputs.size(); ++i) {
        ASSERT_EQ(mine[i].defined(), wanted[i].defined()) << i;
        if (!wanted[i].defined()) continue;
        EXPECT_TRUE(at::allclose(mine[i], wanted[i], 1e-9, 1e-9)) << order << ", " << i;
      }
    }
    // A graph that is used up says so.
    const Tensor again = square_of(*muster::autograd::small_grad(square_of({of(leaves)}), inputs));
    (void)torch::autograd::grad({again}, inputs, {}, false, false, true);
    EXPECT_THROW((void)torch::autograd::grad({again}, inputs, {}, false, false, true), c10::Error);
  }
}

TEST(SmallGraph, UsedUpAsTheEngineUsesUp) {
  const Tensor x = at::ones({3}).set_requires_grad(true), y = (x * x).exp(), one = at::ones({3});
  backward({y}, {one});
  try {
    backward({y}, {one});
    ADD_FAILURE() << "a graph that was used up ran again";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find(torch::autograd::ERR_BACKWARD_TWICE), std::string::npos) << error.what();
  }
}

TEST(SmallGraph, RefusesAGradientOfAnotherShape) {
  const Tensor x = at::ones({3}).set_requires_grad(true), y = x * 2;
  const auto text_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.msg();
    }
    return "";
  };
  const std::string theirs = text_of([&] {
    torch::autograd::Engine::get_default_engine().execute(edges_of({y}), {at::ones({4})}, true, false, true, {});
  });
  EXPECT_NE(theirs, "");
  EXPECT_EQ(text_of([&] { backward({y}, {at::ones({4})}, true); }), theirs);
  EXPECT_FALSE(x.grad().defined());
}

TEST(SmallGraph, DoesNotTakeAGradientThatSomebodyElseHas) {
  const Tensor x = at::ones({3}).set_requires_grad(true), w = at::ones({3}).set_requires_grad(true), sum = x + w;
  const Tensor given = at::full({3}, 5.0);
  backward({sum}, {given}, true);
  backward({sum}, {given}, true);  // adds in place to the gradients of the leaves
  EXPECT_TRUE(at::equal(given, at::full({3}, 5.0)));
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 10.0)));
  EXPECT_TRUE(at::equal(w.grad(), at::full({3}, 10.0)));
}

TEST(SmallGraph, SumsSparseAndDense) {
  const Tensor table = at::rand({5, 2}).set_requires_grad(true);
  const Tensor rows = at::embedding(table, at::tensor({1, 3, 1}), -1, false, true);
  const Tensor others = at::embedding(table, at::tensor({3, 1, 1}), -1, false, true);
  const Tensor dense = table * 0.7;
  for (const variable_list& roots : {variable_list{rows, dense}, variable_list{dense, rows},
                                     variable_list{rows, others, rows}, variable_list{rows, dense, others}}) {
    variable_list gradients;
    for (const Tensor& root : roots) gradients.push_back(root.detach() / 3);
    table.mutable_grad() = Tensor();
    backward(roots, gradients, true);
    const Tensor ours = table.grad().clone();
    table.mutable_grad() = Tensor();
    torch::autograd::backward(roots, gradients, true);
    EXPECT_TRUE(at::equal(ours.to_dense(), table.grad().to_dense()));
  }
}

TEST(SmallGraph, EndsWhereItIsTold) {
  const Tensor x = at::ones({3}).set_requires_grad(true), y = x * 2;
  const edge_list roots = edges_of({y});
  auto graph = SmallGraph::of(roots, nowhere);
  ASSERT_TRUE(graph);
  ASSERT_EQ(graph->nodes().size(), 2u);
  Tensor taken;
  graph->run(roots, {at::ones({3})}, false, [&](Node& node, variable_list& inputs) {
    if (node.name() != "torch::autograd::AccumulateGrad") return false;
    taken = inputs.at(0);
    return true;
  });
  EXPECT_TRUE(at::equal(taken, at::full({3}, 2.0)));
  EXPECT_FALSE(x.grad().defined());
}

struct Twice : torch::autograd::Function<Twice> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x * 2; }
  static variable_list backward(torch::autograd::AutogradContext*, const variable_list& gradients) {
    return {gradients[0] * 2};
  }
};

TEST(SmallGraph, LeavesToTheEngineWhatIsMore) {
  const auto leaf = [] { return at::ones({3}).set_requires_grad(true); };
  EXPECT_TRUE(is_small({leaf() * 2}));
  {
    const Tensor y = leaf() * 2;
    y.register_hook([](const Tensor& gradient) { return gradient; });
    EXPECT_FALSE(is_small({y.exp()})) << "a hook of a tensor";
  }
  {
    const Tensor x = leaf();
    x.register_hook([](const Tensor& gradient) { return gradient; });
    EXPECT_FALSE(is_small({x * 2})) << "a hook of a leaf";
  }
  {
    const Tensor y = leaf() * 2;
    y.retain_grad();
    EXPECT_FALSE(is_small({y.exp()})) << "a gradient that is kept";
  }
  EXPECT_FALSE(is_small({Twice::apply(leaf())})) << "a user's function";
  {
    bool small = true;
    const Tensor x = leaf(), y = x * 2;
    y.register_hook([&](const Tensor& gradient) {
      const at::AutoGradMode grad(true);
      small = is_small({leaf() * 2});
      return gradient;
    });
    torch::autograd::grad({y}, {x}, {at::ones({3})});
    EXPECT_FALSE(small) << "within a run of the engine";
  }
  {
    Tensor y = leaf() * 2;
    y.select(0, 1).mul_(3);
    EXPECT_FALSE(is_small({y})) << "a view that was written";
  }
  Tensor many = leaf();
  for (size_t i = 0; i + 2 < SmallGraph::kMostNodes; ++i) many = many * 2;
  EXPECT_TRUE(is_small({many}));
  EXPECT_FALSE(is_small({many * 2 * 2})) << "many nodes";
  const torch::autograd::DetectAnomalyGuard anomaly;
  EXPECT_FALSE(is_small({leaf() * 2})) << "anomaly mode";
}

}  // namespace
}  // namespace muster::test
