// Differentiable optimizers over workers: the meta-gradient is the same however many workers share the tasks, contexts
// carry it home, and nothing is left on any worker.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <typeinfo>
#include <vector>

#include "muster/autograd/context.h"
#include "muster/comm/collectives.h"
#include "muster/optim/implicit.h"
#include "muster/optim/meta.h"
#include "muster/optim/zero_order.h"
#include "muster/remote/auto_init_rpc.h"
#include "muster/remote/parallelize.h"
#include "muster/remote/remote_call.h"
#include "muster/rpc/call.h"
#include "support/nothing_left.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using at::Tensor;
namespace nn = torch::nn;
using Tensors = std::vector<Tensor>;

struct MetaNet : nn::Module {
  nn::Linear in{1, 6}, out{6, 1};
  MetaNet() {
    register_module("in", in);
    register_module("out", out);
    to(at::kDouble);
  }
  Tensor loss(const Tensor& x, const Tensor& y) { return (out(in(x).tanh()) - y).square().mean(); }
};

template <typename Meta>
Tensor adapted_by(optim::ModuleState model, Tensor task) {
  MetaNet net;
  optim::recover_state_dict(net, model);
  Meta inner(net, {.lr = 0.05});
  for (int step = 0; step < 3; ++step) inner.step(net.loss(task[0], task[1]));
  return net.loss(task[0] + 0.1, task[1]);
}
Tensor squared_distance(Tensor a, Tensor b) { return (a - b).square().mean(); }

Tensor tasks() {  // [task, x and y, point, 1]
  const Tensor x = at::linspace(-1, 1, 40, at::kDouble).view({4, 10, 1});
  return at::stack({x, (x * 3).sin()}, 1);
}

Tensors start_of(MetaNet& net) {
  const at::NoGradGuard no_grad;
  double i = 0;
  for (Tensor& parameter : net.parameters())
    parameter.copy_((at::cos(at::arange(parameter.numel(), at::kDouble) * 1.3 + i++) * 0.5).view_as(parameter));
  return net.parameters();
}

Tensors local_meta_gradient() {
  MetaNet net;
  const Tensors parameters = start_of(net);
  const auto state = optim::extract_state_dict(net);
  Tensors losses;
  for (const Tensor& task : tasks().unbind()) losses.push_back(adapted_by<optim::MetaAdam>(state, task));
  return torch::autograd::grad({at::stack(losses).mean()}, parameters);
}

double distance(const Tensors& a, const Tensors& b) {
  double most = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double apart = i < a.size() && a[i].defined() ? (a[i] - b[i]).abs().max().item<double>() : INFINITY;
    if (!std::isfinite(apart)) return INFINITY;
    most = std::max(most, apart);
  }
  return most;
}

class MetaWorkers : public CommContract {
 protected:
  // Runs the body in worker 0 while the others serve. Checks that nothing is left on any worker.
  void lead(int n, const std::function<void()>& body) const {
    run(n, [&](World& world) {
      at::set_num_threads(1);
      auto_init_rpc([&] {
        if (world.rank() != 0) return;
        body();
        expect_nothing_left();
      });
    });
  }
};

Tensor over_workers(const optim::ModuleState& state) {
  return remote_sync_call<&adapted_by<optim::MetaAdam>>(
      state, tasks(),
      {.partitioner = dim_partitioner(0, {.exclusive = true, .keepdim = false}), .reducer = mean_reducer});
}

TEST_P(MetaWorkers, TheSameMetaGradientOnAnyNumberOfWorkers) {
  const Tensors expected = local_meta_gradient();
  for (const int workers : {1, 2, 4})
    lead(workers, [&] {
      MetaNet net;
      const Tensors parameters = start_of(net);
      over_workers(optim::extract_state_dict(net)).backward();
      Tensors gradients;
      for (const Tensor& one : parameters) gradients.push_back(one.grad());
      EXPECT_LE(distance(gradients, expected), 1e-10) << workers;

      const autograd::Context context;
      autograd::backward(context, {over_workers(optim::extract_state_dict(net))});
      Tensors of_context;
      for (const Tensor& one : parameters) of_context.push_back(context.gradient(one));
      EXPECT_LE(distance(of_context, expected), 1e-10) << workers;
      for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(parameters[i].grad().is_same(gradients[i]));
    });
}

template <typename Meta>
Tensor mean_adapted_by(optim::ModuleState model, Tensor some) {
  Tensors losses;
  for (const Tensor& task : some.unbind()) losses.push_back(adapted_by<Meta>(model, task));
  return at::stack(losses).mean();
}

template <typename Meta>
void expect_the_same_by_every_call() {
  MetaNet net;
  const Tensors parameters = start_of(net);
  const auto state = optim::extract_state_dict(net);
  const Tensors expected = torch::autograd::grad({mean_adapted_by<Meta>(state, tasks())}, parameters);
  const auto is_expected = [&](const Tensor& loss) {
    EXPECT_LE(distance(torch::autograd::grad({loss}, parameters), expected), 1e-10) << typeid(Meta).name();
  };
  is_expected(parallelize<&mean_adapted_by<Meta>>()(state, tasks()));  // a call per worker, with its share of the tasks
  const auto by_need = dim_partitioner(0, {.exclusive = true, .keepdim = false, .balanced = true});
  is_expected(
      remote_async_call<&adapted_by<Meta>>(state, tasks(), {.partitioner = by_need, .reducer = sum_reducer}).get() / 4);
}

TEST_P(MetaWorkers, EveryOptimizerByEveryCall) {
  for (const int workers : {1, 2, 4})
    lead(workers, [] {
      expect_the_same_by_every_call<optim::MetaSGD>();
      expect_the_same_by_every_call<optim::MetaAdam>();
      expect_the_same_by_every_call<optim::MetaAdamW>();
      expect_the_same_by_every_call<optim::MetaAdaGrad>();
      expect_the_same_by_every_call<optim::MetaRMSProp>();
      expect_the_same_by_every_call<optim::MetaAdaDelta>();
      expect_the_same_by_every_call<optim::MetaAdaMax>();
      expect_the_same_by_every_call<optim::MetaRAdam>();
    });
}

// An optimizer's state is an argument and a result like any other: the inner loop goes on on another worker.
std::tuple<optim::ModuleState, std::vector<optim::OptState>> two_steps(optim::ModuleState model,
                                                                       std::vector<optim::OptState> state,
                                                                       Tensor task) {
  MetaNet net;
  optim::recover_state_dict(net, model);
  optim::MetaAdam inner(net, {.lr = 0.05});
  if (!state.empty()) inner.load_state_dict(state);
  for (int step = 0; step < 2; ++step) inner.step(net.loss(task[0], task[1]));
  return {optim::extract_state_dict(net), inner.state_dict()};
}

TEST_P(MetaWorkers, StatesTravel) {
  lead(3, [] {
    const Tensor task = tasks()[0];
    MetaNet net;
    const Tensors parameters = start_of(net);
    const auto meta_gradient = [&](const auto& steps_on) {
      auto [model, state] = steps_on(1, optim::extract_state_dict(net), std::vector<optim::OptState>());
      std::tie(model, state) = steps_on(2, model, state);
      MetaNet last;
      optim::recover_state_dict(last, model);
      return torch::autograd::grad({last.loss(task[0] + 0.1, task[1])}, parameters);
    };
    const Tensors here =
        meta_gradient([&](int, const auto& model, const auto& state) { return two_steps(model, state, task); });
    const Tensors there = meta_gradient([&](int worker, const auto& model, const auto& state) {
      return rpc::sync<&two_steps>(worker, model, state, task);
    });
    EXPECT_LE(distance(there, here), 1e-12);
  });
}

// The inner steps are here; the loss, and so the gradient of each step, is on another worker.
TEST_P(MetaWorkers, AnInnerLossMayBeARemoteCall) {
  lead(2, [&] {
    const Tensor task = tasks()[0];
    const auto meta_gradient = [&](const std::function<Tensor(const Tensor&, const Tensor&)>& loss) {
      MetaNet net;
      const Tensors parameters = start_of(net);
      optim::MetaSGD inner(net, {.lr = 0.1, .momentum = 0.5});
      const auto output = [&] { return net.out(net.in(task[0]).tanh()); };
      for (int step = 0; step < 3; ++step) inner.step(loss(output(), task[1]));
      return torch::autograd::grad({loss(output(), task[1] * 2)}, parameters);
    };
    const Tensors here = meta_gradient(squared_distance);
    const Tensors there =
        meta_gradient([](const Tensor& a, const Tensor& b) { return rpc::sync<&squared_distance>(1, a, b); });
    EXPECT_LE(distance(there, here), 1e-12);
  });
}

// The solution of an inner problem, found on whichever worker is called. Its weights are shifted by the task.
Tensor root_there(Tensor l2, Tensor task) {
  const auto condition = [](const Tensor& w, const Tensor& regularization, const Tensor& target) {
    return w + regularization * w.pow(3) - target;
  };
  const auto newton = [condition](Tensor w, const Tensor& regularization, const Tensor& target) {
    for (int i = 0; i < 60; ++i) w = w - condition(w, regularization, target) / (1 + 3 * regularization * w.square());
    return w;
  };
  const auto root = optim::custom_root<1, 2>(condition, newton, {.solve = optim::solve_cg({.rtol = 1e-12})});
  return root(at::zeros_like(task), l2, task).sin().sum();
}

// Autograd cannot differentiate what is estimated: it rounds. The seed comes with the task.
Tensor estimate_there(Tensor weight, Tensor task, uint64_t seed) {
  const auto reward = optim::zero_order([task](const Tensor& w) { return (w * task).sum().mul(8).round() / 8; },
                                        {.method = optim::ZeroOrder::kAntithetic,
                                         .num_samples = 4,
                                         .generator = at::make_generator<at::CPUGeneratorImpl>(seed)});
  return reward(weight * 2);
}

Tensor rounded_distance(Tensor a, Tensor b) { return ((a - b).square().sum() * 16).round() / 16; }

TEST_P(MetaWorkers, RootsAndEstimatesOnOtherWorkers) {
  lead(3, [] {
    const Tensor task = at::linspace(-1, 1, 5, at::kDouble).set_requires_grad(true),
                 l2 = at::scalar_tensor(0.7, at::kDouble).set_requires_grad(true);
    const auto derivatives = [&](const auto& root) {  // the first, and the gradient of its square
      const auto first = torch::autograd::grad({root(l2, task, 0) + root(l2 * 2, task, 1)}, {l2, task}, {}, true, true);
      Tensors all = first;
      for (const Tensor& one : torch::autograd::grad({first[0].square() + first[1].square().sum()}, {l2, task}))
        all.push_back(one);
      return all;
    };
    const Tensors here = derivatives([](const Tensor& l, const Tensor& t, int) { return root_there(l, t); });
    const Tensors there =
        derivatives([](const Tensor& l, const Tensor& t, int i) { return rpc::sync<&root_there>(1 + i, l, t); });
    EXPECT_LE(distance(there, here), 1e-12);

    const auto estimated = [&](const auto& estimate) {
      return torch::autograd::grad({estimate(task, task.detach(), 5) + estimate(task, task.detach() + 1, 6)}, {task});
    };
    EXPECT_LE(distance(estimated([](const Tensor& weight, const Tensor& t, uint64_t seed) {
                         return rpc::sync<&estimate_there>(static_cast<int>(seed) - 4, weight, t, seed);
                       }),
                       estimated(estimate_there)),
              1e-12);
    // The estimated function itself may be on another worker.
    const auto around = [&](const std::function<Tensor(Tensor, Tensor)>& function) {
      const auto reward =
          optim::zero_order([=](const Tensor& w) { return function(w, at::ones({5}, at::kDouble)); },
                            {.num_samples = 3, .generator = at::make_generator<at::CPUGeneratorImpl>(9)});
      return torch::autograd::grad({reward(task)}, {task});
    };
    EXPECT_LE(distance(around([](Tensor a, Tensor b) { return rpc::sync<&rounded_distance>(2, a, b); }),
                       around(rounded_distance)),
              1e-12);
  });
}

MUSTER_RPC_CONTRACT(Rpc, MetaWorkers);

}  // namespace
}  // namespace muster::test
