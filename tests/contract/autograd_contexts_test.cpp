// Contexts: gradients of one step apart from those of others, sums that do not depend on who is late (in contexts and
// in .grad), and what the end of a context frees.
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "autograd/passes/context.h"
#include "autograd/passes/tape.h"
#include "contract/autograd_fixture.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "support/eventually.h"

namespace muster::test::gradients {
namespace {

class AutogradContexts : public Autograd {};

TEST_P(AutogradContexts, AContextKeepsGradientsApart) {
  trainer(3, [] {
    const auto model = rpc::remote<Linear>(1, uint64_t{7});
    Linear local(7), mine(8), mine_local(8);
    const Tensor x = random_leaf({2, 3}, 1);
    {
      autograd::Context context;
      const Tensor y = mine.forward(model.sync<&Linear::forward>(x)).sum();
      autograd::backward(context, {y});
      mine_local.forward(local.forward(x.detach().set_requires_grad(true))).sum().backward();
      EXPECT_FALSE(x.grad().defined());
      EXPECT_FALSE(mine.weight.grad().defined());
      expect_close(context.gradient(mine.weight), mine_local.weight.grad());
      EXPECT_TRUE(context.gradient(x).defined());
      EXPECT_EQ(context.gradients().size(), 2u);
      context.gradient(mine.weight).zero_();  // the caller's own tensor
      expect_close(model.sync<&Linear::context_grad>(), local.weight.grad());
      {
        autograd::Context other;  // of its own
        EXPECT_FALSE(model.sync<&Linear::context_grad>().defined());
      }
      expect_close(model.sync<&Linear::context_grad>(), local.weight.grad());
      context.end();
      EXPECT_THROW(context.gradients(), Aborted);
    }
    EXPECT_FALSE(model.sync<&Linear::grad>().defined());
    EXPECT_THROW(model.sync<&Linear::context_grad>(), RemoteError);  // in none
  });
}

TEST_P(AutogradContexts, EndInAnyOrder) {
  trainer(2, [] {
    const auto id = [] { return autograd::current_context()->id(); };
    auto context = std::make_unique<autograd::Context>();
    for (int step = 0; step < 3; ++step) {
      context = std::make_unique<autograd::Context>();  // the one before ends after this one begins
      EXPECT_EQ(id(), context->id());
      EXPECT_NO_THROW(rpc::sync<&triple>(1, leaf({1})));
    }
    autograd::Context other;
    context.reset();
    EXPECT_EQ(id(), other.id());
    other.end();
    EXPECT_THROW(autograd::gradients(), InvalidArgument) << "in none";
    EXPECT_NO_THROW(rpc::sync<&triple>(1, leaf({1})));
  });
}

TEST_P(AutogradContexts, GradInAContextAccumulatesNowhere) {
  trainer(2, [] {
    const auto model = rpc::remote<Linear>(1, uint64_t{7});
    Linear local(7), mine(8), mine_local(8);
    const Tensor x = random_leaf({2, 3}, 1), x1 = x.detach().clone().set_requires_grad(true);
    const Tensor ones = at::ones({2, 3}, at::kDouble), other = leaf({1});
    autograd::Context context;
    const Tensor y = mine.forward(model.sync<&Linear::forward>(x)), y1 = mine_local.forward(local.forward(x1));
    const Tensors got = autograd::grad(context, {y}, {x, mine.weight, other}, {ones}, true, true, true),
                  expected = torch::autograd::grad({y1}, {x1, mine_local.weight}, {ones}, true, true);
    ASSERT_EQ(got.size(), 3u);
    expect_close(got[0], expected[0]);
    expect_close(got[1], expected[1]);
    EXPECT_FALSE(got[2].defined());  // it was not used
    // Of a gradient too.
    expect_close(autograd::grad(context, {got[0].square().sum()}, {x})[0],
                 torch::autograd::grad({expected[0].square().sum()}, {x1})[0]);
    EXPECT_TRUE(context.gradients().empty());
    EXPECT_FALSE(x.grad().defined());
    EXPECT_FALSE(mine.weight.grad().defined());
    EXPECT_FALSE(model.sync<&Linear::context_grad>().defined());
    EXPECT_FALSE(model.sync<&Linear::grad>().defined());
    context.end();
    EXPECT_THROW(autograd::grad(context, {y}, {x}, {ones}), Aborted);
  });
}

TEST_P(AutogradContexts, AContextKeepsNoTensorOfTheCallers) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2}), y = leaf({3, 4});
    autograd::Context context;
    Tensor gradient = at::empty({2}, at::kDouble);  // one for both passes
    for (const double value : {1.0, 10.0}) {
      gradient.fill_(value);
      autograd::backward(context, {rpc::sync<&triple>(1, x) + y}, {gradient});
    }
    gradient.zero_();
    expect_close(context.gradient(x), 11 * 3 * x.detach().square());
    expect_close(context.gradient(y), at::full({2}, 11.0, at::kDouble));
    context.end();
  });
}

TEST_P(AutogradContexts, TheEndOfAContextEndsItsGraphs) {
  trainer(2, [] {
    const Tensor x = leaf({1, 2});
    Tensor y;
    {
      autograd::Context context;
      y = rpc::sync<&triple>(1, x).sum();
      context.end();
      const auto end = patience();
      while (rpc::sync<[] { return autograd::census().contexts; }>(1) != 0 && !end.passed()) {
      }
      EXPECT_EQ(rpc::sync<[] { return autograd::census().contexts; }>(1), 0u);
    }
    EXPECT_THROW(y.backward(), Aborted);
  });
}

int held_until_go() {
  World::current().store().get("go", patience());
  return 0;
}

TEST_P(AutogradContexts, EndKeepsItsTimeAlsoWhenNoCallCanBeMade) {
  trainer(2,
          [] {
            autograd::Context context;
            const auto only = rpc::async<&held_until_go>(1);
            EXPECT_THROW(context.end(10ms), TimeoutError);
            World::current().store().set("go", "");
            EXPECT_EQ(only.get(), 0);
            EXPECT_TRUE(eventually([] { return rpc::sync<[] { return autograd::census().contexts; }>(1) == 0; }))
                << "worker 1 was told all the same";
          },
          {.max_calls = 1});
}

Tensor same(Tensor x) { return x; }

TEST_P(AutogradContexts, ACallThatHasWaitedIsNotSentInAContextThatHasEndedMeanwhile) {
  static constexpr size_t kMost = size_t{1} << 20;
  trainer(2,
          [] {
            const Tensor half = at::ones({kMost / 8});  // in bytes
            const auto agent = rpc::current_agent();
            autograd::Context context;
            const auto first = rpc::async<&held_until_go>(1);
            const auto large = rpc::async<&same>(1, half);
            std::thread other([agent, id = context.id(), store = World::current().shared_store()] {
              EXPECT_TRUE(eventually([&] { return agent->census().pending_calls == 3; }));
              autograd::tape_of(*agent).ended(id);
              store->set("go", "");
            });
            EXPECT_THROW(rpc::async<&same>(1, half), Aborted);  // there is no room for it before "go"
            other.join();
            EXPECT_EQ(first.get(), 0);
            EXPECT_TRUE(at::equal(large.get(), half));
          },
          {.max_threads = 1, .max_call_bytes = kMost});
}

TEST_P(AutogradContexts, AContextOfATimeThatIsOverIsNoOther) {
  run(2, [](World& world) {
    rpc::init();
    std::optional<autograd::Context> old;
    if (world.rank() == 0) {
      old.emplace();
      rpc::sync<&triple>(1, leaf({1}));
    }
    rpc::shutdown();
    rpc::init();
    if (world.rank() == 0) {
      EXPECT_THROW(rpc::sync<&triple>(1, leaf({1})), Aborted);  // the old context is still this thread's
      std::optional<autograd::Context> context(std::in_place);
      EXPECT_EQ(context->id(), old->id());
      const auto model = rpc::remote<Linear>(1, uint64_t{7});
      autograd::backward(*context, {model.sync<&Linear::forward>(random_leaf({1, 3}, 1)).sum()});
      EXPECT_TRUE(model.sync<&Linear::context_grad>().defined());
      context.reset();
    }
    old.reset();
    rpc::shutdown();
  });
}

// A handler's own context, and calls that belong to no context.
int own_context(int back) {
  autograd::Context mine;
  rpc::sync<&triple>(back, leaf({1}));
  return 0;
}
TEST_P(AutogradContexts, AHandlersOwnContextEndsEverywhere) {
  trainer(3, [] {
    autograd::Context context;
    for (int i = 0; i < 3; ++i) rpc::sync<&own_context>(1, 2);
    context.end();
  });
}

// Six calls on three workers add to one gradient. They come to its owner in the given orders: each waits, forward and
// backward, until the one before it is through.
struct Turn {
  std::string after, own;  // keys of the store; no wait if `after` is empty
  MSGPACK_DEFINE(after, own);
  void wait() const {
    if (!after.empty()) World::current().store().get(after, patience());
  }
  void end() const { World::current().store().set(own, "through"); }
};

Tensor part_in_turn(RRef<Linear> model, int part, Turn forward, Turn backward) {
  Tensor x = at::full({1, 3}, 0.1 * part, at::kDouble).set_requires_grad(true);
  forward.wait();
  Tensor y = model.sync<&Linear::forward>(x);
  forward.end();
  y.register_hook([backward](Tensor gradient) {
    backward.wait();
    return gradient;
  });
  x.register_hook([backward](Tensor gradient) {
    backward.end();
    return gradient;
  });
  return y;
}

// In a context, or in .grad.
std::vector<double> sum_in_turns(const std::string& name, const std::vector<int>& forward,
                                 const std::vector<int>& backward, bool in_context = true) {
  std::optional<autograd::Context> context;
  if (in_context) context.emplace();
  const auto self = rpc::make_rref(std::make_shared<Linear>(5));
  std::vector<rpc::Future<Tensor>> parts;
  for (int part = 1; part <= 6; ++part) {
    const auto turn = [&](const std::string& phase, const std::vector<int>& order) {
      const auto place = std::find(order.begin(), order.end(), part);
      const std::string base = name + phase;
      return Turn{place == order.begin() ? "" : base + std::to_string(place[-1]), base + std::to_string(part)};
    };
    parts.push_back(
        rpc::async<&part_in_turn>(part % 3, self, part, turn(" forward ", forward), turn(" backward ", backward)));
  }
  Tensor loss = at::zeros({}, at::kDouble);
  for (auto& one : parts) loss = loss + one.get().sum();
  const Tensor& weight = self.local_value()->weight;
  if (context)
    autograd::backward(*context, {loss});
  else
    loss.backward();
  const Tensor gradient = context ? context->gradient(weight) : weight.grad();
  return {gradient.data_ptr<double>(), gradient.data_ptr<double>() + gradient.numel()};
}

TEST_P(AutogradContexts, SumsHaveTheSameBitsInAnyOrderOfArrival) {
  trainer(3, [] {
    const std::vector<int> ahead{1, 2, 3, 4, 5, 6}, back{6, 5, 4, 3, 2, 1}, mixed{4, 1, 6, 3, 2, 5};
    const std::vector<double> sum = sum_in_turns("a", ahead, ahead);
    EXPECT_EQ(sum_in_turns("b", ahead, back), sum);
    EXPECT_EQ(sum_in_turns("c", back, mixed), sum);
    EXPECT_EQ(sum_in_turns("d", mixed, ahead), sum);
  });
}

TEST_P(AutogradContexts, SumsInGradDoTooIfTheProgramWantsDeterministicAlgorithms) {
  trainer(3, [] {
    const std::vector<int> ahead{1, 2, 3, 4, 5, 6}, back{6, 5, 4, 3, 2, 1}, mixed{4, 1, 6, 3, 2, 5};
    EXPECT_NE(sum_in_turns("e", ahead, back, false), sum_in_turns("f", ahead, ahead, false));  // as they come
    struct Deterministic {
      Deterministic() { at::globalContext().setDeterministicAlgorithms(true, false); }
      ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
    } const deterministic;
    const std::vector<double> sum = sum_in_turns("a", ahead, ahead, false);
    EXPECT_EQ(sum_in_turns("b", ahead, back, false), sum);
    EXPECT_EQ(sum_in_turns("c", back, mixed, false), sum);
    EXPECT_EQ(sum_in_turns("d", mixed, ahead, false), sum);
    EXPECT_EQ(sum_in_turns("g", mixed, back, true), sum);  // in a context
  });
}

TEST_P(AutogradContexts, ContextsOfAllWorkersAtOnce) {
  run(3, [](World& world) {
    rpc::init();
    const auto model = rpc::remote<Linear>((world.rank() + 1) % 3, uint64_t{9});
    Linear local(9);
    for (int step = 0; step < 20; ++step) {
      autograd::Context context;
      const Tensor x = random_leaf({2, 3}, static_cast<uint64_t>(100 * world.rank() + step));
      autograd::backward(context, {model.sync<&Linear::forward>(x).sum()});
      local.weight.mutable_grad() = Tensor();
      local.forward(x.detach()).sum().backward();
      expect_close(model.sync<&Linear::context_grad>(), local.weight.grad());
    }
    barrier();
    rpc::shutdown();
  });
}

MUSTER_RPC_CONTRACT(Rpc, AutogradContexts);

}  // namespace
}  // namespace muster::test::gradients
