// How backward passes run through remote calls: those that fail, that begin on other workers, and several side by side;
// and that what is kept for them is released.
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <thread>
#include <vector>

#include "contract/autograd_fixture.h"
#include "muster/base/error.h"

namespace muster::test::gradients {
namespace {

TEST_P(Autograd, FailedPassesLeaveNothing) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    const Tensor z = x * 2;
    z.register_hook([](Tensor) -> Tensor { throw std::runtime_error("no"); });
    const Tensor y = rpc::sync<&triple>(1, x), bad = (z * y).sum();
    for (int i = 0; i < 3; ++i) {
      EXPECT_THROW(bad.backward({}, true, true), std::runtime_error);
      torch::autograd::backward({y.sum()}, {}, true, true, {y});  // ends at the call's result
    }
  });
}

Tensor fails_in_backward(const Tensor& x) {
  const Tensor y = x * 2;
  y.register_hook([](Tensor) -> Tensor { throw std::out_of_range("in a hook"); });
  return y;
}

// The user's own loss.backward() fails, in a run of the engine that is not Muster's. libtorch keeps the nodes that it
// has not run for this thread's next run, which does not come before the end.
TEST_P(Autograd, AFailedBackwardOfTheUserLeavesNothing) {
  const auto more = [](const Tensor& x) { return rpc::sync<&triple>(1, x).sum(); };
  trainer(2, [&] {  // there: the other calls' parts of the graph have not run when it fails
    const Tensor x = leaf({1, 2});
    const Tensor loss = more(x.exp()) + rpc::sync<&fails_in_backward>(1, x.sin()).sum() +
                        more(rpc::sync<&fails_in_backward>(1, x.cos()));
    EXPECT_THROW(loss.backward(), RemoteError);
  });
  trainer(2, [&] {  // here, in what stands beside calls and behind one
    const Tensor x = leaf({1, 2});
    const Tensor y = more(x.exp());
    const Tensor bad = more(x.sin()).mul(2);
    bad.register_hook([](Tensor) -> Tensor { throw std::out_of_range("here"); });
    const Tensor loss = more(y * y) + bad * more(x.cos());
    EXPECT_THROW(loss.backward(), std::out_of_range);
  });
  trainer(2, [&] {  // in a handler, whose run finds arguments of this worker
    const Tensor x = leaf({1, 2});
    static constexpr auto runs = [](const Tensor& x) {
      const Tensor inner = x.detach().set_requires_grad(true);
      (rpc::sync<&triple>(0, x).sum() + rpc::sync<&fails_in_backward>(0, inner).sum() +
       rpc::sync<&triple>(0, inner).sum())
          .backward();
    };
    EXPECT_THROW(rpc::sync<runs>(1, x), RemoteError);
  });
}

// A backward fails on one worker while it goes on on another one. When the error comes, the other one has ended, too:
// otherwise it would add to the gradients of the user's next step.
struct Holder {
  void put(const Tensor& x) { held = x; }
  void backward_with(const Tensor& other) { (other.sum() + held.sum()).backward(); }
  Tensor held;
};
struct Slow {
  void put_into(RRef<Holder> holder) { holder.sync<&Holder::put>(forward(at::ones({2}, at::kDouble))); }
  Tensor forward(const Tensor& x) {
    const Tensor y = weight * x;
    y.register_hook([](Tensor gradient) {
      try {
        World::current().store().get("caught", Deadline::after(300ms));
        ADD_FAILURE() << "the error came first";
      } catch (const TimeoutError&) {
      }
      return gradient;
    });
    return y;
  }
  Tensor grad() { return weight.grad(); }
  Tensor weight = leaf({1, 2});
};

TEST_P(Autograd, NothingGoesOnAfterAFailedBackward) {
  trainer(3, [] {
    for (const bool first : {true, false}) {  // the engine waits for either call first
      const auto slow = rpc::remote<Slow>(2);
      const Tensor x = leaf({1, 2});
      const Tensor a = first ? slow.sync<&Slow::forward>(x) : rpc::sync<&fails_in_backward>(1, x);
      const Tensor b = first ? rpc::sync<&fails_in_backward>(1, x) : slow.sync<&Slow::forward>(x);
      EXPECT_THROW((a + b).sum().backward(), RemoteError);
      EXPECT_TRUE(slow.sync<&Slow::grad>().defined());
    }
    World::current().store().set("caught", "1");
  });
}

// A backward() in a handler sends gradients to the arguments' workers, of which one fails.
TEST_P(Autograd, NothingGoesOnAfterAFailedBackwardInAHandler) {
  trainer(3, [] {
    const auto slow = rpc::remote<Slow>(2);
    const auto holder = rpc::remote<Holder>(1);
    slow.sync<&Slow::put_into>(holder);
    const Tensor bad = leaf({1, 2}) * 2;
    bad.register_hook([](Tensor) -> Tensor { throw std::out_of_range("here"); });
    EXPECT_THROW(holder.sync<&Holder::backward_with>(bad), RemoteError);
    EXPECT_TRUE(slow.sync<&Slow::grad>().defined());
    World::current().store().set("caught", "1");
  });
}

// If the run fails before it reaches a call, none of Muster's nodes can clean up. The thread's next run does that; a
// run in a context begins with a node of Muster's.
TEST_P(Autograd, AFailureBeforeTheFirstCallLeavesNothingToTheNextRun) {
  const auto fails = [] {
    const Tensor x = leaf({1, 2});
    const Tensor y = rpc::sync<&triple>(1, x).sum().exp(), bad = x.sum().sin();
    bad.register_hook([](Tensor) -> Tensor { throw std::out_of_range("here"); });
    return y.exp() + bad;
  };
  trainer(2, [&] {
    EXPECT_THROW(fails().backward(), std::out_of_range);
    leaf({1}).exp().backward();
  });
  trainer(2, [&] {
    autograd::Context context;
    EXPECT_THROW(autograd::backward(context, {fails()}), std::out_of_range);
    context.end();
  });
}

TEST_P(Autograd, RetainedAndUsedUp) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    const Tensor y = rpc::sync<&triple>(1, x).sum();
    y.backward({}, true);
    y.backward();
    expect_close(x.grad(), 6 * x.detach() * x.detach());
    EXPECT_CONTAINS(message_of<c10::Error>([&] { y.backward(); }), "backward through the graph a second time");
    // What is used up is the way through a call, not what other calls may share there.
    const auto kept = rpc::remote<&triple>(1, x);
    const Tensor one = kept.to_here().sum(), other = kept.to_here().sum();
    x.mutable_grad() = Tensor();
    one.backward();
    other.backward();
    expect_close(x.grad(), 6 * x.detach() * x.detach());
    EXPECT_CONTAINS(message_of<c10::Error>([&] { one.backward(); }), "backward through the graph a second time");
  });
}

TEST_P(Autograd, ErrorsOfBackwardName) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    static constexpr auto throws = [](Tensor x) {
      Tensor y = x * 2;
      y.register_hook([](Tensor) -> Tensor { throw std::out_of_range("in a hook"); });
      return y;
    };
    const Tensor y = rpc::sync<throws>(1, x).sum();
    EXPECT_CONTAINS(message_of<RemoteError>([&] { y.backward(); }), "in a hook");
    EXPECT_FALSE(x.grad().defined());
  });
}

TEST_P(Autograd, FromManyThreads) {
  trainer(2, [] {
    const auto model = rpc::remote<Linear>(1, uint64_t{3});
    const Tensor x = random_leaf({2, 3}, 5);
    const Tensor y = model.sync<&Linear::forward>(x).sum();
    const Tensor expected = torch::autograd::grad({y}, {x}, {}, true)[0];
    World& world = World::current();
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        const World::Scope scope(world);
        for (int k = 0; k < 10; ++k) y.backward({}, true);
      });
    for (auto& thread : threads) thread.join();
    expect_close(x.grad(), 40 * expected, 1e-10);
  });
}

// --- values that stay with their owner, and third workers ---

struct Keeper {
  void put(Tensor x) { kept = x * 2; }
  Tensor get() { return kept.exp(); }
  Tensor kept;
};
Tensor use_there(RRef<Tensor> rref, Tensor y) { return rref.to_here() * y; }
double loss_there(Tensor x, double factor) {  // runs backward itself
  const Tensor loss = (x * x * factor).sum();
  loss.backward();
  return loss.item<double>();
}

TEST_P(Autograd, ThroughWhatStaysThere) {
  trainer(3, [] {
    const Tensor x = leaf({0.1, 0.2}), y = leaf({3, 4});
    const auto kept = rpc::remote<&triple>(1, x);
    rpc::sync<&use_there>(2, kept, y).sum().backward({}, true);  // 0 → 2 → 1, whose argument is 0's
    expect_close(x.grad(), 3 * x.detach().square() * y.detach());
    expect_close(y.grad(), x.detach().pow(3));
    const auto keeper = rpc::remote<Keeper>(2);
    keeper.sync<&Keeper::put>(x);  // the state of an object
    const Tensor got = keeper.sync<&Keeper::get>();
    expect_close(torch::autograd::grad({got.sum()}, {x})[0], 2 * (2 * x.detach()).exp());
    keeper.sync<&Keeper::put>(Tensor(y.detach()));  // lets go
  });
}

// Worker 0 has the argument, worker 1 the value, and worker 2 runs backward, which ends in worker 0's .grad.
double backward_of(RRef<Tensor> rref) {
  const Tensor value = rref.to_here();
  (value.sum() + value.sum()).backward();
  return value.sum().item<double>();
}

TEST_P(Autograd, AThirdWorkerRunsBackward) {
  trainer(3, [] {
    const Tensor x = leaf({0.1, 0.2}), scaled = x * 2;
    const auto kept = rpc::remote<&triple>(1, scaled);
    rpc::sync<&backward_of>(2, kept);
    expect_close(x.grad(), 2 * 6 * (2 * x.detach()).square());
  });
}

TEST_P(Autograd, AHandlerMayRunBackward) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    rpc::sync<&loss_there>(1, x, 3.0);
    expect_close(x.grad(), 6 * x.detach());  // as if it had been called here
  });
}

// --- concurrent passes ---

// The backward passes of four calls wait for each other: they would never end if they ran one after another.
Tensor four_meet_backward(Tensor x) {
  Tensor y = x * 2;
  y.register_hook([](Tensor gradient) {
    Store& store = World::current().store();
    store.add("backward", 1);
    for (const auto end = patience(); store.add("backward", 0) < 4; std::this_thread::sleep_for(1ms))
      if (end.passed()) throw std::runtime_error("the others did not come");
    return gradient;
  });
  return y;
}

TEST_P(Autograd, IndependentCallsRunBackwardSideBySide) {
  trainer(5, [] {
    const Tensor x = leaf({1, 2});
    Tensor sum = at::zeros({2}, at::kDouble);
    for (int i = 1; i <= 4; ++i) sum = sum + rpc::sync<&four_meet_backward>(i, x);
    sum.sum().backward();
    expect_close(x.grad(), at::full({2}, 8.0, at::kDouble));
  });
}

// A call's own timeout is that of its backward, too. Its forward ends long before.
Tensor waits_in_backward(Tensor x) {
  Tensor y = x * 2;
  y.register_hook([](Tensor gradient) {
    World::current().store().get("timed out", patience());
    return gradient;
  });
  return y;
}

TEST_P(Autograd, TheBackwardOfACallHasItsTimeout) {
  const auto body = [] {
    const Tensor x = leaf({1, 2});
    const Tensor y = rpc::sync<&waits_in_backward>({1, {.timeout = 200ms}}, x);
    try {
      y.sum().backward();
      ADD_FAILURE() << "no timeout";
    } catch (const TimeoutError& timeout) {
      EXPECT_NE(std::string(timeout.what()).find("did not answer"), std::string::npos) << timeout.what();
    }
    World::current().store().set("timed out", "1");
    EXPECT_FALSE(x.grad().defined());
  };
  trainer(2, body, {.timeout = 0ms});  // other calls have none
}

}  // namespace
}  // namespace muster::test::gradients
