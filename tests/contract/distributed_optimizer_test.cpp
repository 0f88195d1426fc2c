// DistributedOptimizer over three owners gives the results of one local optimizer, for every optimizer. Its errors name
// workers, and nothing is left behind.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "muster/autograd/context.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/optim/distributed_optimizer.h"
#include "muster/optim/functional_optimizer.h"
#include "muster/optim/lr_scheduler.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using at::Tensor;
using optim::DistributedOptimizer;
using optim::ParameterRef;
using rpc::RRef;
using Tensors = std::vector<Tensor>;

// The quasi-hyperbolic momentum of PyTorch's recipe, as a user would write it: one class, without registration.
struct QHMOptions {
  double lr = 1e-3, momentum = 0.9, nu = 0.7, weight_decay = 0;
  bool direct = false;  // the weights decay directly, not through the gradient
  MSGPACK_DEFINE(lr, momentum, nu, weight_decay, direct);
};
class QHM : public optim::FunctionalOptimizer {
 public:
  using Options = QHMOptions;
  explicit QHM(Options options) : FunctionalOptimizer(options.lr, {"momentum_buffer"}), options_(options) {
    if (options.momentum < 0) throw InvalidArgument("momentum is below 0");
  }

 private:
  void update(double lr, Tensor& parameter, const Tensor& given, optim::ParameterState& state) const override {
    Tensor gradient = given, &buffer = state.kept[0];
    if (options_.weight_decay != 0) {
      if (options_.direct)
        parameter.mul_(1 - lr * options_.weight_decay);
      else
        gradient = gradient.add(parameter, options_.weight_decay);
    }
    if (!buffer.defined()) buffer = at::zeros_like(parameter);
    buffer.mul_(options_.momentum).add_(gradient, 1 - options_.momentum);
    parameter.add_(buffer, -lr * options_.nu).add_(gradient, -lr * (1 - options_.nu));
  }
  const Options options_;
};

// Another optimizer, which uses nothing of Muster's and throws in one worker.
struct Picky {
  struct Options {
    double lr = 0.5;
    int not_in = -1;
    MSGPACK_DEFINE(lr, not_in);
  };
  explicit Picky(Options given) : options(given) {}
  void step(at::TensorList parameters, at::TensorList gradients) {
    if (rpc::worker_info().id == options.not_in) throw std::out_of_range("not here");
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (gradients[i].defined()) parameters[i].sub_(gradients[i], options.lr);
  }
  double lr() const { return options.lr; }
  void set_lr(double lr) { options.lr = lr; }
  Options options;
};

struct Layer {
  explicit Layer(int seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    weight = at::randn({4, 4}, generator, at::kDouble).set_requires_grad(true);
    bias = at::randn({4}, generator, at::kDouble).set_requires_grad(true);
    unused = at::ones({2}, at::kDouble).set_requires_grad(true);
  }
  Tensor forward(const Tensor& x) { return (x.matmul(weight) + bias).tanh(); }
  std::vector<ParameterRef> parameters() { return optim::parameter_rrefs({weight, bias, unused}); }
  Tensors values() { return {weight.detach().clone(), bias.detach().clone(), unused.detach().clone()}; }
  bool has_grad() { return weight.grad().defined() || bias.grad().defined(); }
  Tensor weight, bias, unused;
};

Tensor batch(int step) { return at::linspace(-1, 1 + 0.1 * step, 8, at::kDouble).reshape({2, 4}); }

class DistributedOptimizerTest : public CommContract {
 protected:
  void trainer(int n, const std::function<void()>& body) const {
    run(n, [&](World& world) {
      rpc::init();
      if (world.rank() == 0) {
        body();
        for (const auto& worker : rpc::all_workers()) {  // references are released by message
          const auto end = patience();
          size_t left = 0;
          while ((left = rpc::sync<[] { return rpc::census().owned_objects + autograd::census().contexts; }>(worker)) &&
                 !end.passed()) {
          }
          EXPECT_EQ(left, 0u) << worker.name;
        }
      }
      rpc::shutdown();
    });
  }
};

struct Model {
  Model() {
    for (int worker = 0; worker < 3; ++worker) layers.push_back(rpc::remote<Layer>(worker, worker));
  }
  Tensor loss(int step) const {
    Tensor x = batch(step);
    for (const auto& layer : layers) x = layer.sync<&Layer::forward>(x);
    return x.pow(2).sum();
  }
  std::vector<ParameterRef> parameters() const {  // not in the order of their owners
    std::vector<ParameterRef> all;
    for (const int i : {2, 0, 1})
      for (auto& one : layers[static_cast<size_t>(i)].sync<&Layer::parameters>()) all.push_back(std::move(one));
    return all;
  }
  Tensors values() const {
    Tensors all;
    for (const int i : {2, 0, 1})
      for (auto& one : layers[static_cast<size_t>(i)].sync<&Layer::values>()) all.push_back(std::move(one));
    return all;
  }
  std::vector<RRef<Layer>> layers;
};
struct LocalModel {
  Tensor loss(int step) {
    Tensor x = batch(step);
    for (Layer& layer : layers) x = layer.forward(x);
    return x.pow(2).sum();
  }
  Tensors parameters() {
    Tensors all;
    for (const size_t i : {2, 0, 1})
      for (const auto& one : {layers[i].weight, layers[i].bias, layers[i].unused}) all.push_back(one);
    return all;
  }
  std::vector<Layer> layers{Layer(0), Layer(1), Layer(2)};
};

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 0, 1e-12)) << "parameter " << i;
}

template <typename O>
void expect_like_local(typename O::Options options) {
  const Model model;
  LocalModel local;
  const Tensors parameters = local.parameters();
  {
    DistributedOptimizer<O> distributed(options, model.parameters());
    optim::CosineAnnealingLR schedule(distributed, 10);
    O one(options);
    optim::CosineAnnealingLR local_schedule(one, 10);
    for (int step = 0; step < 8; ++step) {
      autograd::Context context;
      autograd::backward(context, {model.loss(step)});
      distributed.step(context);
      one.step(parameters, torch::autograd::grad({local.loss(step)}, parameters, {}, {}, false, true));
      schedule.step();
      local_schedule.step();
      EXPECT_EQ(distributed.lr(), one.lr());
    }
    Tensors values;
    for (const Tensor& each : parameters) values.push_back(each.detach());
    expect_equal(model.values(), values);
    EXPECT_TRUE(at::equal(model.values()[2], at::ones({2}, at::kDouble)));  // it never had a gradient
    EXPECT_FALSE(at::allclose(model.values()[0], Layer(2).weight.detach()));
  }
}

TEST_P(DistributedOptimizerTest, IsLikeALocalOne) {
  trainer(3, [] {
    expect_like_local<optim::SGD>({.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
    expect_like_local<optim::Adam>({.lr = 0.1, .betas = {0.8, 0.9}, .amsgrad = true});
    expect_like_local<optim::AdamW>({.lr = 0.1});
    expect_like_local<optim::Adagrad>({.lr = 0.1, .lr_decay = 0.1});
    expect_like_local<optim::Adadelta>({.rho = 0.5});
    expect_like_local<optim::RMSprop>({.momentum = 0.5, .centered = true});
    expect_like_local<optim::Adamax>({.lr = 0.1});
    expect_like_local<optim::Rprop>({.lr = 0.1, .step_sizes = {1e-3, 1}});
  });
}

TEST_P(DistributedOptimizerTest, YourOwn) {
  trainer(3, [] {
    expect_like_local<QHM>({.lr = 0.1, .weight_decay = 0.1});
    expect_like_local<QHM>({.lr = 0.1, .nu = 0.3, .weight_decay = 0.1, .direct = true});
    expect_like_local<Picky>({.lr = 0.05});
    // One step of the optimizer, computed by hand.
    Tensor p = at::tensor({1.0, 2.0}, at::kDouble);
    QHM({.lr = 0.1, .momentum = 0.9, .nu = 0.7}).step({p}, {at::tensor({1.0, -1.0}, at::kDouble)});
    EXPECT_TRUE(at::allclose(p, at::tensor({1 - 0.1 * (0.07 + 0.3), 2 + 0.1 * (0.07 + 0.3)}, at::kDouble)));
  });
}

TEST_P(DistributedOptimizerTest, ItsStateGoesOn) {
  trainer(3, [] {
    const Model straight, halved;
    const auto train = [](const Model& model, auto& optimizer, int from, int to) {
      for (int step = from; step < to; ++step) {
        autograd::Context context;
        autograd::backward(context, {model.loss(step)});
        optimizer.step(context);
      }
    };
    using Adam = DistributedOptimizer<optim::Adam>;
    const optim::AdamOptions options{.lr = 0.1};
    Adam whole(options, straight.parameters());
    train(straight, whole, 0, 6);
    Adam::State state;
    {
      Adam first(options, halved.parameters());
      train(halved, first, 0, 3);
      state = first.state();
    }
    EXPECT_EQ(state.size(), 6u * 3);  // 3 owners with 2 parameters each that had gradients; step and two averages
    EXPECT_TRUE(state.contains("0.exp_avg") && state.contains("7.step") && !state.contains("8.step"));
    Adam second(options, halved.parameters());
    EXPECT_THROW(second.load_state({{"9.step", at::tensor(1)}}), InvalidArgument);
    EXPECT_THROW(second.load_state({{"step", at::tensor(1)}}), InvalidArgument);
    EXPECT_THROW(second.load_state({{"3.other", at::tensor(1)}}), RemoteError);
    second.load_state(state);
    train(halved, second, 3, 6);
    expect_equal(straight.values(), halved.values());
  });
}

TEST_P(DistributedOptimizerTest, ErrorsNameTheWorker) {
  trainer(3, [] {
    const Model model;
    const Tensors before = model.values();
    autograd::Context context;
    autograd::backward(context, {model.loss(0)});
    DistributedOptimizer<Picky> picky({.lr = 0.1, .not_in = 1}, model.parameters());
    try {
      picky.step(context);
      ADD_FAILURE() << "it did not throw";
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.worker(), "worker1");
      EXPECT_EQ(error.remote_message(), "not here");
    }
    const Tensors after = model.values();  // the others have stepped when the error comes
    EXPECT_FALSE(at::equal(before[0], after[0])) << "worker 2";
    EXPECT_FALSE(at::equal(before[3], after[3])) << "worker 0";
    EXPECT_TRUE(at::equal(before[6], after[6])) << "worker 1";

    using Sgd = DistributedOptimizer<optim::SGD>;
    EXPECT_THROW(Sgd({.lr = -1}, model.parameters()), InvalidArgument);
    EXPECT_THROW(Sgd({.lr = 0.1}, {}), InvalidArgument);
    EXPECT_THROW(Sgd({.lr = 0.1}, {ParameterRef()}), InvalidArgument);
    auto twice = model.parameters();
    twice.push_back(twice[1]);
    EXPECT_THROW(Sgd({.lr = 0.1}, twice), InvalidArgument);
    twice = model.parameters();
    twice.push_back(model.parameters()[0]);  // another reference to the same parameter
    EXPECT_THROW(Sgd({.lr = 0.1}, twice), RemoteError);
    Sgd fine({.lr = 0.1}, model.parameters());
    EXPECT_THROW(fine.set_lr(-1), InvalidArgument);
    context.end();
    EXPECT_ANY_THROW(fine.step(context));
  });
}

// Each owner's step waits for the two others: they would never end if they ran one after another.
std::mutex meeting_mutex;
std::condition_variable meeting;
int arrived = 0;
void arrive() {
  const std::lock_guard lock(meeting_mutex);
  ++arrived;
  meeting.notify_all();
}
struct Meets : Picky {
  using Options = Picky::Options;
  using Picky::Picky;
  void step(at::TensorList, at::TensorList) {
    std::vector<rpc::Future<void>> told;
    for (int i = 0; i < 3; ++i) told.push_back(rpc::async<&arrive>(i));
    for (auto& one : told) one.get();
    // All three owners have told this process. If workers are threads, that is nine times.
    std::unique_lock lock(meeting_mutex);
    if (!meeting.wait_for(lock, kPatience, [] { return arrived >= 3; }))
      throw std::runtime_error("the others did not come");
  }
};

TEST_P(DistributedOptimizerTest, AllOwnersAtOnce) {
  if (GetParam().ranks == RanksAre::kThreads) return;  // they would share `arrived`
  trainer(3, [] {
    const Model model;
    autograd::Context context;
    DistributedOptimizer<Meets> meets({}, model.parameters());
    meets.step(context);
  });
}

TEST_P(DistributedOptimizerTest, ContextsAndThreadsOfTheirOwn) {
  run(3, [](World& world) {
    rpc::init();
    // Every worker trains its own layer on the next worker, concurrently. This does not use .grad.
    const int next = (world.rank() + 1) % 3;
    const auto layer = rpc::remote<Layer>(next, world.rank());
    Layer local(world.rank());
    {
      DistributedOptimizer<optim::SGD> distributed({.lr = 0.1}, layer.sync<&Layer::parameters>());
      optim::SGD sgd({.lr = 0.1});
      for (int step = 0; step < 20; ++step) {
        autograd::Context context;
        autograd::backward(context, {layer.sync<&Layer::forward>(batch(step)).sum()});
        distributed.step(context);
        const Tensors two{local.weight, local.bias};
        sgd.step(two, torch::autograd::grad({local.forward(batch(step)).sum()}, two));
      }
    }
    EXPECT_TRUE(at::allclose(layer.sync<&Layer::values>()[0], local.weight.detach(), 0, 1e-12));
    EXPECT_FALSE(layer.sync<&Layer::has_grad>());
    barrier();
    rpc::shutdown();
  });
}

MUSTER_RPC_CONTRACT(Rpc, DistributedOptimizerTest);

}  // namespace
}  // namespace muster::test
