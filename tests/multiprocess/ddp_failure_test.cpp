// Steps of DistributedDataParallel after a backward pass that threw, after the order of gradients has changed, and
// after the parameters themselves have.
#include <functional>
#include <stdexcept>
#include <string>

#include "multiprocess/ddp_fixture.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::ddp_replicas {
namespace {

// A backward() that throws in the first layer, when the gradients of the others are there.
struct Failing : DdpNet {
  bool fails = false;
  Failing() {
    a->weight.register_hook([this](const torch::Tensor&) {
      if (fails) throw std::runtime_error("in a hook");
    });
  }
  void backward_fails(const torch::Tensor& loss) {
    fails = true;
    EXPECT_THROW(loss.backward(), std::runtime_error);
    fails = false;
  }
};

// Of two ranks, with several buckets, of which some are under way when backward() throws. Where one waits for nothing,
// not for the usual five minutes.
void run_failing(const std::function<void(World&, Failing&, DistributedDataParallel<Failing>&, DdpNet&)>& body) {
  run_threads(2,
              [&](World& world) {
                const auto net = make<Failing>(3);
                const auto alone = make<DdpNet>(3);
                DistributedDataParallel ddp(net, {.bucket_cap_mb = 64 * kByte, .first_bucket_cap_mb = 64 * kByte});
                body(world, *net, ddp, *alone);
              },
              {.timeout = test::kPatience});
}

void expect_right_average(DistributedDataParallel<Failing>& ddp, DdpNet& alone, const World& world, int step) {
  ddp->zero_grad();
  alone.zero_grad();
  ddp(part(world.rank(), step)).sum().backward();
  for (int r = 0; r < 2; ++r) (alone.forward(part(r, step)).sum() / 2).backward();
  const auto ours = gradients(*ddp.module()), expected = gradients(alone);
  for (size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(ours[i].defined() && torch::allclose(ours[i], expected[i], 1e-4, 1e-5)) << i;
}

TEST_F(DdpTest, ABackwardThatThrewInNoSyncOwesNothing) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      if (world.rank() == 0) {
        const auto guard = ddp.no_sync();
        net.backward_fails(ddp(part(0, 10 + step)).sum());
      }
      expect_right_average(ddp, alone, world, step);
    }
  });
}

TEST_F(DdpTest, ABackwardThatThrewIsMadeUpForInNoSyncToo) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      if (step > 0) {
        const auto guard = ddp.no_sync();
        ddp(part(world.rank(), 20 + step)).sum().backward();
      }
      const auto loss = ddp(part(world.rank(), 10 + step)).sum();
      if (world.rank() == 0) {
        net.backward_fails(loss);
        const auto guard = ddp.no_sync();
        ddp(part(0, 30 + step));  // the other rank waits until then
      } else {
        EXPECT_THROW(loss.backward(), InvalidArgument);  // not all gradients are there
      }
      expect_right_average(ddp, alone, world, step);
    }
  });
}

// The gradient of the input comes after those of all parameters. So the other rank's step is right, and it is the first
// after which the ranks agree on the order of the buckets.
TEST_F(DdpTest, ABackwardThatThrewBehindAllParametersIsAStepOfTheOthers) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    // One that tells how many gradients come, and in which buckets are not made anew yet.
    ddp(part(world.rank(), 20)).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    net.zero_grad();
    torch::Tensor x = part(world.rank(), 10).set_requires_grad(true);
    if (world.rank() == 0)
      x.register_hook([](const torch::Tensor&) -> void { throw std::runtime_error("in a hook of the input"); });
    const auto loss = ddp(x * 1).sum();  // backward comes to the product last
    if (world.rank() == 0) {
      EXPECT_THROW(loss.backward(), std::runtime_error);
    } else {
      loss.backward();
      for (int r = 0; r < 2; ++r) (alone.forward(part(r, 10)).sum() / 2).backward();
      EXPECT_TRUE(torch::allclose(net.a->weight.grad(), alone.a->weight.grad(), 1e-4, 1e-5));
    }
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      expect_right_average(ddp, alone, world, step);
    }
  });
}

// Nobody knows then whether more gradients would have come.
TEST_F(DdpTest, NotIfItIsTheFirst) {
  run_failing([](World& world, Failing&, auto& ddp, DdpNet& alone) {
    torch::Tensor x = part(world.rank(), 10).set_requires_grad(true);
    if (world.rank() == 0)
      x.register_hook([](const torch::Tensor&) -> void { throw std::runtime_error("in a hook of the input"); });
    const auto loss = ddp(x * 1).sum();
    if (world.rank() == 0)
      EXPECT_THROW(loss.backward(), std::runtime_error);
    else
      EXPECT_THROW(loss.backward(), InvalidArgument);
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      expect_right_average(ddp, alone, world, step);
    }
  });
}

// What one backward() owes is made up for when the next one begins, if no forward() comes between them.
TEST_F(DdpTest, ABackwardThatThrewIsMadeUpForByTheNextOne) {
  run_failing([](World& world, Failing& net, auto& ddp, DdpNet& alone) {
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      const auto first = ddp(part(world.rank(), 10 + step)).sum(), second = ddp(part(world.rank(), step)).sum();
      net.zero_grad();
      if (world.rank() == 0)
        net.backward_fails(first);
      else
        EXPECT_THROW(first.backward(), InvalidArgument);  // not all gradients are there
      net.zero_grad();
      alone.zero_grad();
      second.backward();
      for (int r = 0; r < 2; ++r) (alone.forward(part(r, step)).sum() / 2).backward();
      const auto ours = gradients(net), expected = gradients(alone);
      for (size_t i = 0; i < ours.size(); ++i)
        EXPECT_TRUE(ours[i].defined() && torch::allclose(ours[i], expected[i], 1e-4, 1e-5)) << i;
    }
  });
}

// The gradient with which the next backward() begins is one that the failed one did not come to.
TEST_F(DdpTest, TheNextBackwardMayBeginWithAnotherParameter) {
  struct Two : torch::nn::Module {
    torch::Tensor left = register_parameter("left", torch::ones({12})),
                  right = register_parameter("right", torch::ones({12}));
    // Backward comes to the factor of the later term first.
    torch::Tensor forward(const torch::Tensor& x, bool left_first) {
      const auto earlier = (x * (left_first ? right : left)).sum();
      return earlier + (x * (left_first ? left : right)).sum();
    }
  };
  run_threads(2,
              [](World& world) {
                const auto net = make<Two>(3);
                DistributedDataParallel ddp(net, {.bucket_cap_mb = 4 * kByte, .first_bucket_cap_mb = 4 * kByte});
                bool fails = false;
                net->left.register_hook([&](const torch::Tensor&) {
                  if (fails) throw std::runtime_error("in a hook");
                });
                for (int step = 0; step < 3; ++step) {
                  SCOPED_TRACE(step);
                  const auto first = ddp(part(world.rank(), 10 + step), false),
                             second = ddp(part(world.rank(), step), true);
                  fails = world.rank() == 0;
                  EXPECT_THROW(first.backward(), std::exception);
                  fails = false;
                  net->zero_grad();
                  second.backward();
                  const auto expected = (part(0, step) + part(1, step)).sum(0) / 2;
                  EXPECT_TRUE(torch::allclose(net->left.grad(), expected, 1e-4, 1e-5));
                  EXPECT_TRUE(torch::allclose(net->right.grad(), expected, 1e-4, 1e-5));
                  net->zero_grad();
                }
              },
              {.timeout = test::kPatience});
}

// --- parameters that have changed since the DistributedDataParallel was made ---

// What the next steps of training say after `change` of the net.
std::string said_after(const std::function<void(DdpNet&)>& change, const DdpOptions& options = {}) {
  std::string said;
  run_threads(2, [&](World& world) {
    const auto net = make<DdpNet>(3);
    net->c->bias.set_requires_grad(false);
    DistributedDataParallel ddp(net, options);
    ddp(part(world.rank(), 0)).sum().backward();
    change(*net);
    std::string mine;
    try {
      for (int step = 1; step <= 16; ++step) ddp(part(world.rank(), step)).sum().backward();
    } catch (const InvalidArgument& error) {
      mine = error.what();
    }
    if (world.rank() == 0) said = mine;
  });
  return said;
}

TEST_F(DdpTest, ParametersThatHaveChangedAreNamed) {
  EXPECT_EQ(said_after([](DdpNet&) {}), "");
  EXPECT_CONTAINS(said_after([](DdpNet& net) { net.c->bias.set_requires_grad(true); }),
                  "c.bias did not require grad when the DistributedDataParallel was made, but does now. Change the "
                  "module first");
  EXPECT_CONTAINS(said_after([](DdpNet& net) {
                    net.a->weight.set_data(torch::zeros({33, 13}));
                  }),
                  "a.weight was Float [33, 12] on cpu when the DistributedDataParallel was made, and is Float [33, 13] "
                  "on cpu");
  EXPECT_CONTAINS(said_after([](DdpNet& net) { net.to(torch::kDouble); }),
                  "a.weight was Float [33, 12] on cpu when the DistributedDataParallel was made, and is Double");
  const auto add = [](DdpNet& net) { net.register_module("more", torch::nn::Linear(2, 2)); };
  EXPECT_CONTAINS(said_after(add),
                  "the module did not have its parameter more.weight when the DistributedDataParallel was made");
  EXPECT_CONTAINS(said_after([](DdpNet& net) { net.b = net.replace_module("b", torch::nn::Linear(33, 17)); },
                             {.find_unused_parameters = true}),
                  "the module did not have its parameter b.weight");
}

// What is allowed: other values, frozen parameters, new ones too, and changes of those that are ignored.
TEST_F(DdpTest, ParametersMayGetOtherValuesAndBeFrozen) {
  EXPECT_EQ(said_after([](DdpNet& net) { net.a->weight.set_data(torch::ones({33, 12})); }), "");
  EXPECT_EQ(said_after([](DdpNet& net) { net.a->bias.set_requires_grad(false); }, {.find_unused_parameters = true}),
            "");
  EXPECT_EQ(said_after([](DdpNet& net) { net.c->bias.set_requires_grad(true); }, {.ignored = {"c.bias"}}), "");
  EXPECT_EQ(said_after([](DdpNet& net) {
              net.register_parameter("constant", torch::ones({2}), false);
              net.c->bias = net.c->register_parameter("other", torch::ones({5}), false);
            }),
            "");
}

}  // namespace
}  // namespace muster::test::ddp_replicas
