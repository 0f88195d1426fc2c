// Gradients through remote calls equal local ones, to any order, with what else PyTorch's autograd has. How passes run
// is in autograd_passes_test.cpp.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "contract/autograd_fixture.h"
#include "muster/base/error.h"

namespace muster::test::gradients {
namespace {

// --- the functions that are called ---

Tensor smooth(const Tensor& x, const Tensor& y) { return (x * y).sin() + x.pow(3) * y.exp(); }
Tensor smooth_there(int worker, const Tensor& x, const Tensor& y) {
  return rpc::sync<&smooth>(worker, x * 2, y).tanh() + y;
}

// A recurrent net: what a step leaves is used by the next.
struct Memory {
  Tensor step(const Tensor& x) {
    state = (state.defined() ? state * weight + x : x * weight).tanh();
    return state;
  }
  Tensor grad_and_forget() {
    state = Tensor();
    const Tensor grad = weight.grad();
    weight.mutable_grad() = Tensor();
    return grad;
  }
  Tensor weight = leaf({0.9, -1.3}), state;
};

// Compares local and remote results of the same function, and their derivatives up to `order`, in random directions.
using Function = std::function<Tensor(const Tensors&)>;
void expect_derivatives(const Function& local, const Function& remote, const Tensors& inputs, int order) {
  const auto derivatives = [&](const Function& function) {
    Tensors all, last{function(inputs)};
    for (int i = 0; i <= order; ++i) {
      all.insert(all.end(), last.begin(), last.end());
      if (i == order) break;
      Tensor scalar = at::zeros({}, at::kDouble);
      for (const Tensor& one : last) scalar = scalar + (one * one.detach().cos()).sum();
      last = torch::autograd::grad({scalar}, inputs, {}, true, true);
    }
    return all;
  };
  const Tensors here = derivatives(local), there = derivatives(remote);
  ASSERT_EQ(here.size(), there.size());
  for (size_t i = 0; i < here.size(); ++i) expect_close(here[i], there[i]);
}

// Compares the gradient with finite differences.
void expect_gradient(const Function& function, Tensors inputs) {
  const Tensors gradients = torch::autograd::grad({function(inputs).sum()}, inputs, {}, {}, true);
  const at::NoGradGuard no_grad;
  constexpr double kStep = 1e-6;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor flat = inputs[i].detach().reshape(-1);
    for (int64_t k = 0; k < flat.numel(); ++k) {
      const auto at_offset = [&](double offset) {
        Tensors moved = inputs;
        moved[i] = flat.clone().index_put_({at::tensor(k)}, flat[k] + offset).reshape(inputs[i].sizes());
        const at::AutoGradMode grad(true);  // a gradient is itself computed with gradients
        for (Tensor& one : moved) one = one.detach().set_requires_grad(true);
        return function(moved).sum().item<double>();
      };
      const double numeric = (at_offset(kStep) - at_offset(-kStep)) / (2 * kStep);
      EXPECT_NEAR(gradients[i].reshape(-1)[k].item<double>(), numeric, 1e-5 * std::max(1.0, std::abs(numeric)));
    }
  }
}

// --- one call ---

TEST_P(Autograd, BackwardIsLikeLocal) {
  trainer(2, [] {
    const Tensor x = leaf({1, -2, 3}), y = leaf({0.5, 0.25, -1});
    rpc::sync<&smooth>(1, x, y).sum().backward();
    const Tensor x1 = leaf({1, -2, 3}), y1 = leaf({0.5, 0.25, -1});
    smooth(x1, y1).sum().backward();
    expect_close(x.grad(), x1.grad());
    expect_close(y.grad(), y1.grad());
  });
}

TEST_P(Autograd, DerivativesOfThreeOrders) {
  trainer(3, [] {
    const Tensors inputs{leaf({0.3, -0.2, 0.9}), leaf({0.5, 0.25, -0.1})};
    const auto local = [](const Tensors& in) { return smooth(in[0], in[1]); };
    for (const int to : {1, 0})
      expect_derivatives(
          local, [to](const Tensors& in) { return rpc::sync<&smooth>(to, in[0], in[1]); }, inputs, 3);
    // Nested calls: 0 calls 1, which calls 2, or 0 again.
    const auto nested = [](const Tensors& in) { return smooth(in[0] * 2, in[1]).tanh() + in[1]; };
    for (const int to : {2, 0})
      expect_derivatives(
          nested, [to](const Tensors& in) { return rpc::sync<&smooth_there>(1, to, in[0], in[1]); }, inputs, 3);
    // Four concurrent calls whose results are combined.
    const auto four = [](const auto& call) {
      return [call](const Tensors& in) {
        std::vector<rpc::Future<Tensor>> parts;
        for (int i = 0; i < 4; ++i) parts.push_back(call(i % 3, in[0] * (i + 1), in[1]));
        Tensor sum = parts[0].get();
        for (int i = 1; i < 4; ++i) sum = sum * 0.5 + parts[i].get();
        return sum;
      };
    };
    expect_derivatives(four([](int, Tensor x, Tensor y) { return rpc::make_ready_future(smooth(x, y)); }),
                       four([](int to, Tensor x, Tensor y) { return rpc::async<&smooth>(to, x, y); }), inputs, 3);
  });
}

TEST_P(Autograd, FiniteDifferencesAgree) {
  trainer(3, [] {
    const Tensors inputs{leaf({0.3, -0.2}), leaf({0.5, 0.25})};
    const auto one = [](const Tensors& in) { return rpc::sync<&smooth>(1, in[0], in[1]); };
    const auto nested = [](const Tensors& in) { return rpc::sync<&smooth_there>(1, 2, in[0], in[1]); };
    const auto four = [](const Tensors& in) {
      std::vector<rpc::Future<Tensor>> parts;
      for (int i = 0; i < 4; ++i) parts.push_back(rpc::async<&smooth>(1 + i % 2, in[0] * i, in[1]));
      Tensor sum = at::zeros({2}, at::kDouble);
      for (auto& part : parts) sum = sum + part.get();
      return sum;
    };
    const auto derivative = [](const Function& function) {
      return [function](const Tensors& in) {
        const auto gradients = torch::autograd::grad({function(in).sum()}, in, {}, true, true);
        return gradients[0] * gradients[1];
      };
    };
    for (const Function& function : {Function(one), Function(nested), Function(four)}) {
      expect_gradient(function, inputs);
      expect_gradient(derivative(function), inputs);
    }
    expect_gradient(derivative(derivative(one)), inputs);
  });
}

TEST_P(Autograd, ParametersThereGetTheirGradients) {
  trainer(2, [] {
    const auto model = rpc::remote<Linear>(1, uint64_t{7});
    Linear local(7);
    const Tensor x = random_leaf({2, 3}, 1), x1 = x.detach().clone().set_requires_grad(true);
    for (int step = 0; step < 2; ++step) {  // they add up
      model.sync<&Linear::forward>(x).sum().backward();
      local.forward(x1).sum().backward();
    }
    expect_close(model.sync<&Linear::grad>(), local.weight.grad());
    expect_close(x.grad(), x1.grad());
    // An argument that does not require grad.
    model.sync<&Linear::forward>(x.detach()).sum().backward();
    local.forward(x1.detach()).sum().backward();
    expect_close(model.sync<&Linear::grad>(), local.weight.grad());
    // grad() does not change them.
    const auto y = model.sync<&Linear::forward>(x);
    expect_close(torch::autograd::grad({y.sum()}, {x})[0], torch::autograd::grad({local.forward(x1).sum()}, {x1})[0]);
    expect_close(model.sync<&Linear::grad>(), local.weight.grad());
  });
}

// Backward of a sum gives the same tensor for both arguments.
Tensor sum_of(const Tensor& x, const Tensor& y) { return x + y; }
TEST_P(Autograd, GradientsOfOneCallDoNotShareMemory) {
  trainer(2, [] {
    for (const int to : {1, 0}) {
      const Tensor x = leaf({1, 2}), y = leaf({3, 4});
      for (const double factor : {2.0, 5.0}) (rpc::sync<&sum_of>(to, x, y) * factor).sum().backward();
      expect_close(x.grad(), at::full({2}, 7.0, at::kDouble));
      expect_close(y.grad(), at::full({2}, 7.0, at::kDouble));
      x.grad().zero_();
      expect_close(y.grad(), at::full({2}, 7.0, at::kDouble));
    }
    // Of gradients too.
    const auto parts = [](const Tensors& in) { return Tensors{in[0].sin() * in[1].exp(), in[0] * in[1].cos()}; };
    const auto sum = [&](const Tensors& in) { return sum_of(parts(in)[0], parts(in)[1]); };
    const auto sum_there = [&](const Tensors& in) { return rpc::sync<&sum_of>(1, parts(in)[0], parts(in)[1]); };
    expect_derivatives(sum, sum_there, {leaf({0.3, -0.2}), leaf({0.5, 0.25})}, 3);
  });
}

// --- other features of PyTorch's autograd ---

std::tuple<Tensor, int, std::string, Tensor, Tensor> several(Tensor x, Tensor numbers, std::string word) {
  return {x * 2, 5, word, x.exp(), numbers + 1};
}
Tensor uses_first(const Tensor& x, const Tensor&) { return x * 3; }
Tensor in_place(Tensor x) {
  x.mul_(2);
  return x * x;
}
bool records() { return at::GradMode::is_enabled(); }
rpc::Task<bool> records_after_a_wait(int back) {
  co_await rpc::async<&records>(back);
  co_return at::GradMode::is_enabled();
}

TEST_P(Autograd, OutputsOfOtherKindsAndUnusedOnes) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    const auto [twice, five, word, exp, numbers] = rpc::sync<&several>(1, x, at::tensor({1, 2}), "w");
    EXPECT_EQ(five, 5);
    EXPECT_EQ(word, "w");
    EXPECT_FALSE(numbers.requires_grad());
    twice.sum().backward();  // exp is not used
    expect_close(x.grad(), at::tensor({2.0, 2.0}, at::kDouble));
  });
}

TEST_P(Autograd, UnusedArguments) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2}), y = leaf({3, 4});
    const Tensor z = rpc::sync<&uses_first>(1, x, y).sum();
    EXPECT_THROW(torch::autograd::grad({z}, {y}, {}, true), c10::Error);
    const auto gradients = torch::autograd::grad({z}, {x, y}, {}, {}, false, true);
    expect_close(gradients[0], at::tensor({3.0, 3.0}, at::kDouble));
    EXPECT_FALSE(gradients[1].defined());
  });
}

TEST_P(Autograd, GradModeTravels) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    EXPECT_TRUE(rpc::sync<&records>(1));
    EXPECT_TRUE(rpc::sync<&records_after_a_wait>(1, 0));
    {
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(rpc::sync<&triple>(1, x).requires_grad());
      EXPECT_FALSE(rpc::sync<&records>(1));
      EXPECT_FALSE(rpc::sync<&records_after_a_wait>(1, 0));
      EXPECT_FALSE(at::GradMode::is_enabled());
    }
    EXPECT_FALSE(rpc::sync<&triple>(1, x.detach()).requires_grad());
  });
}

TEST_P(Autograd, InPlaceUpdates) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    Tensor y = x * 1;
    const Tensor z = rpc::sync<&in_place>(1, y);  // changes the callee's copy
    expect_close(y.detach(), x.detach());
    y.mul_(5);  // the call has used the earlier values
    (z.sum() + y.sum()).backward();
    expect_close(x.grad(), 8 * x.detach() + 5);
    // Of a result.
    Tensor w = rpc::sync<&triple>(1, x);
    w.add_(1).mul_(2);
    expect_close(torch::autograd::grad({w.sum()}, {x})[0], 6 * x.detach() * x.detach());
  });
}

// Two tensors of one message that share memory, as they did before.
TEST_P(Autograd, AChangeThroughAnotherTensorOfTheMessageIsNoticed) {
  static constexpr auto spoils = [](const Tensor& whole, const Tensor& part) {
    Tensor square = whole * whole;
    const at::NoGradGuard no_grad;
    part.add_(1);
    return square;
  };
  trainer(2, [] {
    const Tensor x = leaf({1, 2}) * 1;
    try {
      rpc::sync<spoils>(1, x, x[0]).sum().backward();
      ADD_FAILURE() << "the gradient is wrong";
    } catch (const RemoteError& error) {
      EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos) << error.what();
    }
  });
}

TEST_P(Autograd, HooksRunAndMayChangeGradients) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2}).clone().detach().set_requires_grad(true);
    const Tensor y = rpc::sync<&triple>(1, x);
    int seen = 0;
    y.register_hook([&](Tensor gradient) {
      ++seen;
      return gradient * 10;
    });
    x.register_hook([&](Tensor gradient) {
      ++seen;
      return gradient + 1;
    });
    y.sum().backward();
    EXPECT_EQ(seen, 2);
    expect_close(x.grad(), 30 * x.detach() * x.detach() + 1);
  });
}

struct Tenfold : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    torch::autograd::variable_list tenfold;
    for (const Tensor& output : outputs) tenfold.push_back(output.defined() ? output * 10 : output);
    return tenfold;
  }
};

TEST_P(Autograd, HooksOfTheNodeMayChangeGradientsToo) {
  trainer(2, [] {
    const auto model = rpc::remote<Linear>(1, uint64_t{7});
    Linear local(7);
    const Tensor x = random_leaf({2, 3}, 1), x1 = x.detach().clone().set_requires_grad(true);
    const Tensor y = model.sync<&Linear::forward>(x);
    y.grad_fn()->add_post_hook(std::make_unique<Tenfold>());
    y.sum().backward();
    (local.forward(x1).sum() * 10).backward();
    expect_close(x.grad(), x1.grad());
    expect_close(model.sync<&Linear::grad>(), local.weight.grad());  // once
  });
}

// One backward(), without retain_graph, that comes to several calls whose graphs share nodes there.
TEST_P(Autograd, OneBackwardThroughCallsThatShareNodes) {
  trainer(3, [] {
    const auto expect_gradients = [](const std::function<Tensor(const Tensor&)>& remote,
                                     const std::function<Tensor(const Tensor&)>& local) {
      for (int round = 0; round < 3; ++round) {
        const Tensor x = leaf({0.3, -0.7, 1.1}), same = leaf({0.3, -0.7, 1.1});
        remote(x).backward();
        local(same).backward();
        expect_close(x.grad(), same.grad());
      }
    };
    const auto penalized = [](const std::function<Tensor(const Tensor&)>& function) {
      return [function](const Tensor& x) {
        const Tensor y = function(x);
        const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
        return y.square().sum() + slope.norm() + slope.pow(3).sum();
      };
    };
    const auto cubes = [](const Tensor& x) { return triple(x).tanh(); };
    // A gradient penalty: the gradients of a call and the call itself.
    expect_gradients(penalized([&](const Tensor& x) { return rpc::sync<&triple>(1, x).tanh(); }), penalized(cubes));
    expect_gradients(penalized([&](const Tensor& x) { return rpc::sync<&smooth_there>(1, 2, x, x * 2); }),
                     penalized([](const Tensor& x) { return smooth(x * 2, x * 2).tanh() + x * 2; }));
    // Two results of one value.
    expect_gradients(
        [](const Tensor& x) {
          const auto kept = rpc::remote<&triple>(1, x);
          return (kept.to_here() * kept.to_here().sin()).sum();
        },
        [](const Tensor& x) { return (triple(x) * triple(x).sin()).sum(); });
    // What a call leaves in an object, with parameters of the object's and without arguments that need gradients.
    const auto memory = rpc::remote<Memory>(2);
    for (const bool has_gradient : {true, false}) {
      const Tensor x = leaf({0.2, 0.4}), given = has_gradient ? x : x.detach();
      Memory here;
      const auto loss = [&](const auto& step) {
        const Tensor first = step(given), second = step(given * 2), third = step(given.sin());
        return (first * second * third).sum() + first.sum();
      };
      loss([&](const Tensor& input) { return memory.sync<&Memory::step>(input); }).backward();
      const Tensor there = has_gradient ? x.grad().clone() : Tensor();
      x.mutable_grad() = Tensor();
      loss([&](const Tensor& input) { return here.step(input); }).backward();
      if (has_gradient) expect_close(there, x.grad());
      expect_close(memory.sync<&Memory::grad_and_forget>(), here.grad_and_forget());
    }
    // What no other call shares is used up: the next step begins where there is no graph any more.
    memory.sync<&Memory::step>(leaf({1, 2})).sum().backward();
    const Tensor next = memory.sync<&Memory::step>(leaf({1, 2})).sum();
    EXPECT_CONTAINS(message_of<c10::Error>([&] { next.backward(); }), "backward through the graph a second time");
    memory.sync<&Memory::grad_and_forget>();
  });
}

MUSTER_RPC_CONTRACT(Rpc, Autograd);

}  // namespace
}  // namespace muster::test::gradients
