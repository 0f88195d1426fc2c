// Differentiable collectives: first and second derivatives equal those of the same computation in one process.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "muster/comm/functional.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using Tensors = std::vector<at::Tensor>;

class Functional : public CommContract {};
MUSTER_COMM_CONTRACT(Functional);

// The input of each rank; the same on all ranks.
at::Tensor start_of(int rank) {
  return at::sin(at::arange(12, at::kDouble).view({6, 2}) * (rank + 1) + 0.3 * rank).set_requires_grad(true);
}

// A rank's loss. It is not linear, so that no second derivative is zero.
at::Tensor loss_of(const at::Tensor& y, int rank) {
  return (y.pow(3) * at::arange(1, y.numel() + 1, at::kDouble).view(y.sizes()) * (0.1 + 0.05 * rank)).sum();
}

struct Differentiable {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x)> here;  // on one rank
  std::function<Tensors(const Tensors& xs)> together;   // all ranks' results from all ranks' inputs, in one process
};

at::Tensor sum_of(const Tensors& xs) { return at::stack(xs).sum(0); }
Tensors repeated(const at::Tensor& y, size_t n) { return Tensors(n, y); }

std::vector<Differentiable> cases(int n) {
  namespace f = functional;
  const auto count = static_cast<size_t>(n);
  return {
      {"all_reduce", [](const auto& x) { return f::all_reduce(x); },
       [=](const auto& xs) { return repeated(sum_of(xs), count); }},
      {"all_reduce AVG", [](const auto& x) { return f::all_reduce(x, {.op = ReduceOp::AVG}); },
       [=](const auto& xs) { return repeated(sum_of(xs) / n, count); }},
      {"all_reduce MAX", [](const auto& x) { return f::all_reduce(x, {.op = ReduceOp::MAX}); },
       [=](const auto& xs) { return repeated(std::get<0>(at::stack(xs).max(0)), count); }},
      {"broadcast", [](const auto& x) { return f::broadcast(x, 1); },
       [=](const auto& xs) { return repeated(xs[1], count); }},
      {"reduce", [](const auto& x) { return f::reduce(x, 1); },
       [=](const auto& xs) {
         Tensors ys = repeated(sum_of(xs) * 0, count);
         ys[1] = sum_of(xs);
         return ys;
       }},
      {"reduce AVG", [](const auto& x) { return f::reduce(x, 0, {.op = ReduceOp::AVG}); },
       [=](const auto& xs) {
         Tensors ys = repeated(sum_of(xs) * 0, count);
         ys[0] = sum_of(xs) / n;
         return ys;
       }},
      {"all_gather", [](const auto& x) { return f::all_gather(x); },
       [=](const auto& xs) { return repeated(at::cat(xs), count); }},
      {"reduce_scatter", [](const auto& x) { return f::reduce_scatter(x); },
       [=](const auto& xs) { return sum_of(xs).chunk(n); }},
      {"reduce_scatter AVG", [](const auto& x) { return f::reduce_scatter(x, {.op = ReduceOp::AVG}); },
       [=](const auto& xs) { return (sum_of(xs) / n).chunk(n); }},
      {"all_to_all", [](const auto& x) { return f::all_to_all(x); },
       [=](const auto& xs) {
         Tensors ys;
         for (int r = 0; r < n; ++r) {
           Tensors parts;
           for (const auto& x : xs) parts.push_back(x.chunk(n)[static_cast<size_t>(r)]);
           ys.push_back(at::cat(parts));
         }
         return ys;
       }},
  };
}

// First derivatives of the sum of all losses, and of the sum of their squares.
std::pair<Tensors, Tensors> derivatives(const at::Tensor& loss, const Tensors& inputs) {
  const auto or_zero = [&](Tensors gradients) {  // zero for a rank's input that does not affect the results
    for (size_t i = 0; i < gradients.size(); ++i)
      if (!gradients[i].defined()) gradients[i] = at::zeros_like(inputs[i]);
    return gradients;
  };
  const Tensors first = or_zero(torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, /*create_graph=*/true,
                                                      /*allow_unused=*/true));
  at::Tensor squares = at::zeros({}, at::kDouble);
  for (const auto& gradient : first) squares = squares + gradient.pow(2).sum();
  return {first, or_zero(torch::autograd::grad({squares}, inputs, {}, true, false, true))};
}

TEST_P(Functional, DerivativesOfTwoOrders) {
  for (const int n : {2, 3}) {
    const auto all = cases(n);
    for (size_t i = 0; i < all.size(); ++i)
      run(n, [n, i](World& world) {
        const Differentiable c = cases(n)[i];
        SCOPED_TRACE(c.name);
        const at::Tensor x = start_of(world.rank());
        const at::Tensor y = c.here(x);
        const auto [first, second] = derivatives(loss_of(y, world.rank()), {x});

        Tensors xs;
        for (int r = 0; r < n; ++r) xs.push_back(start_of(r));
        const Tensors ys = c.together(xs);
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (int r = 0; r < n; ++r) loss = loss + loss_of(ys[static_cast<size_t>(r)], r);
        const auto [expected_first, expected_second] = derivatives(loss, xs);
        const auto me = static_cast<size_t>(world.rank());
        EXPECT_TRUE(at::allclose(y, ys[me], 1e-12, 1e-12));
        EXPECT_TRUE(at::allclose(first[0], expected_first[me], 1e-12, 1e-12)) << first[0] << expected_first[me];
        EXPECT_TRUE(at::allclose(second[0], expected_second[me], 1e-12, 1e-12)) << second[0] << expected_second[me];
        const auto size = [](const Tensors& list) {
          double sum = 0;
          for (const auto& gradient : list) sum += gradient.abs().sum().item<double>();
          return sum;
        };
        EXPECT_GT(size(expected_second), 0);
      });
  }
}

// Their gradients are conjugated only when they are read.
TEST_P(Functional, ComplexNumbers) {
  run(2, [](World& world) {
    const auto check = [&](const char* what, const std::function<at::Tensor(const at::Tensor&)>& fn, double expected) {
      SCOPED_TRACE(what);
      const at::Tensor x =
          at::full({2, 2}, c10::complex<double>(1, world.rank() + 1), at::kComplexDouble).set_requires_grad(true);
      at::imag(fn(x).conj()).sum().backward();
      // Of -imag(x): -i, from each place to which it goes.
      EXPECT_TRUE(at::allclose(x.grad(), at::full({2, 2}, c10::complex<double>(0, -expected), at::kComplexDouble)))
          << x.grad();
    };
    check(
        "all_gather", [](const auto& x) { return functional::all_gather(x); }, 2);
    check(
        "reduce_scatter", [](const auto& x) { return functional::reduce_scatter(x); }, 1);
    check(
        "all_to_all", [](const auto& x) { return functional::all_to_all(x); }, 1);
    check(
        "all_reduce", [](const auto& x) { return functional::all_reduce(x); }, 2);
    check(
        "of a conjugate", [](const auto& x) { return functional::all_gather(x.conj()).conj(); }, 2);
  });
}

// Rank 0 sends; rank 1 computes with what it receives and its own input.
TEST_P(Functional, SendAndReceive) {
  run(2, [](World& world) {
    const at::Tensor a = start_of(0), b = start_of(1);
    const at::Tensor loss = loss_of(a * b, 1);
    const Tensors expected = torch::autograd::grad({loss}, {a, b}, {}, true, true);
    const Tensors expected_second =
        torch::autograd::grad({expected[0].pow(2).sum() + expected[1].pow(2).sum()}, {a, b});
    if (world.rank() == 0) {
      const at::Tensor token = functional::send(a, 1);
      EXPECT_EQ(token.item<double>(), 0);
      const Tensors first = torch::autograd::grad({token}, {a}, {}, true, true);
      EXPECT_TRUE(at::allclose(first[0], expected[0], 1e-12, 1e-12));
      const Tensors second = torch::autograd::grad({first[0].pow(2).sum() + token}, {a});
      EXPECT_TRUE(at::allclose(second[0], expected_second[0], 1e-12, 1e-12)) << second[0] << expected_second[0];
    } else {
      const at::Tensor like = at::zeros({6, 2}, at::kDouble).set_requires_grad(true);
      const at::Tensor received = functional::recv(like, 0);
      const at::Tensor mine = loss_of(received * b, 1);
      const Tensors first = torch::autograd::grad({mine}, {like, b}, {}, true, true);
      EXPECT_EQ(first[0].count_nonzero().item<int64_t>(), 0);
      EXPECT_TRUE(at::allclose(first[1], expected[1], 1e-12, 1e-12));
      const Tensors second = torch::autograd::grad({first[0].sum() + first[1].pow(2).sum()}, {like, b});
      EXPECT_TRUE(at::allclose(second[1], expected_second[1], 1e-12, 1e-12)) << second[1] << expected_second[1];
    }
  });
}

TEST_P(Functional, WhatIsNotDifferentiable) {
  run(2, [](World&) {
    const at::Tensor x = at::ones({4}), scalar = at::ones({}), three = at::ones({3});
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { functional::all_reduce(x, {.op = ReduceOp::PRODUCT}); }),
                    "PRODUCT is not differentiable here");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { functional::reduce(x, 0, {.op = ReduceOp::MAX}); }), "MAX");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { functional::all_gather(scalar); }), "at least one dimension");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { functional::reduce_scatter(three); }), "3 rows");
  });
}

TEST_P(Functional, AMismatchNamesTheUsersLines) {
  run(2, [](World& world) {
    const int64_t rows = world.rank() == 0 ? 3 : 4;
    const at::Tensor x = at::ones({rows}).set_requires_grad(true);
    const auto text = message_of<Mismatch>([&] { functional::broadcast(x); });
    const auto first = text.find("(comm_functional_test.cpp:"), last = text.rfind("(comm_functional_test.cpp:");
    EXPECT_NE(first, last) << text;
  });
}

}  // namespace
}  // namespace muster::test
