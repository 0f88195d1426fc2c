// FullyShardedDataParallel with parameters in the host's memory and operators on a device, here a fake one
// (support/fake_device.h), whose kernels are those of the CPU: results are equal to the bit. Each rank has a device of
// its own, because libtorch runs all of a process's backward work of a device in one thread, and ranks are threads
// here.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/text.h"
#include "multiprocess/mixed_support.h"
#include "parallel/modules/same_module.h"
#include "support/fake_device.h"

namespace muster::test {
namespace {

const FsdpOptions kSmall{.unit_cap_mb = 1, .max_gathered_units = 2};

// Batches of this thread are there, too.
FsdpOptions on_device(FsdpOptions options, const torch::Device& device) {
  batches_on = device;
  options.compute_device = device;
  return options;
}
FsdpOptions on_own_device(FsdpOptions options) { return on_device(std::move(options), fake(World::current().rank())); }

void on_the_cpu() { batches_on = torch::kCPU; }

// The gradients that this rank has, by name.
std::vector<std::pair<std::string, Tensor>> gradients_of(const nn::Module& net) {
  std::vector<std::pair<std::string, Tensor>> all;
  for (const auto& item : net.named_parameters())
    if (item.value().grad().defined()) all.emplace_back(item.key(), item.value().grad().clone());
  return all;
}

double norm_of(const Tensor& values) { return values.norm().item<double>(); }

// What `run(model, net)` leaves in .grad is the same with a device as without, or nearly.
template <typename Net>
void expect_same_gradients(const FsdpOptions& options,
                           const std::function<void(FullyShardedDataParallel<Net>&, Net&)>& run, double apart = 0) {
  const auto result = [&](const FsdpOptions& with) {
    const auto net = make<Net>(7, {});
    auto model = fully_shard(net, with);
    run(model, *net);
    auto gradients = gradients_of(*net);
    model.synchronize();
    return gradients;
  };
  on_the_cpu();
  const auto expected = result(options);
  const auto got = result(on_own_device(options));
  on_the_cpu();
  ASSERT_EQ(got.size(), expected.size());
  EXPECT_FALSE(got.empty());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].first, expected[i].first);
    EXPECT_TRUE(got[i].second.is_cpu());
    EXPECT_LE(norm_of(got[i].second - expected[i].second), apart * norm_of(expected[i].second)) << got[i].first;
  }
}

TEST(FsdpDevices, StepsAreThoseOfTheCpu) {
  for (const HostOfRank& hosts : {HostOfRank{"a"}, HostOfRank{"a", "a"}, HostOfRank{"a", "b", "a"}})
    for (const FsdpOptions& options :
         {FsdpOptions{}, kSmall, full(), full(kSmall), full({.unit_cap_mb = 1e-6, .reshard_after_forward = false})}) {
      SCOPED_TRACE(testing::PrintToString(hosts));
      const size_t before = fake_device_counts().blocks;
      on_hosts(hosts, [&](World& world) {
        const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(world.rank()), {}), other = make<FsdpNet>(7, {});
        auto exact = fully_shard(other, options);
        train(exact, *other, world);
        auto model = fully_shard(net, on_own_device(options));
        train(model, *net, world);
        expect_owners_alone_have_gradients(model, world);
        EXPECT_TRUE(model.units_here().empty());
        model.gather();
        exact.gather();
        expect_equal(*net, *other);
        model.synchronize();
        exact.synchronize();
      });
      EXPECT_EQ(fake_device_counts().blocks, before);
    }
}

// Its table is also the last layer's weight. On this device, attention is computed by other operators than on the CPU.
TEST(FsdpDevices, ATransformer) {
  on_ranks(2, [](World& world) {
    expect_same_gradients<Transformer>(
        {.unit_cap_mb = 0.1}, [&](auto& model, Transformer&) { model.forward(world.rank(), 0).backward(); }, 1e-4);
  });
}

TEST(FsdpDevices, MixedPrecision) {
  for (const FsdpOptions& strategy : {FsdpOptions{}, full()})
    on_hosts(kApart, [&](World& world) {
      FsdpOptions options = strategy;
      options.mixed_precision = kBFloat16;
      expect_same_gradients<FsdpNet>(options, [&](auto& model, FsdpNet& net) {
        model(fsdp_input(world.rank(), 0)).square().sum().backward();
        for (const auto& parameter : net.parameters()) EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
      });
    });
}

TEST(FsdpDevices, AFewUnitsAreOnTheDevice) {
  constexpr size_t kUnit = 256 * 256 * 4;
  const size_t before = fake_device_counts().bytes;
  on_ranks(1, [&](World&) {
    const auto net = make<Chain>(7, {});
    auto model = fully_shard(net, on_own_device({.is_unit = is_linear}));
    EXPECT_EQ(model.unit_names().size(), size_t{Chain::kLayers});
    const Tensor x = drawn(0, 0, {2, 256});
    std::vector<std::vector<size_t>> forward, backward;
    auto* seen = &forward;
    size_t most = 0;
    net->at_layer = [&] {
      seen->push_back(model.units_here());
      most = std::max(most, fake_device_counts().bytes);
    };
    for (int step = 0; step < 3; ++step) {
      forward.clear();
      backward.clear();
      seen = &forward;
      const Tensor loss = model.forward(x).sum();
      seen = &backward;
      loss.backward();
      EXPECT_TRUE(model.units_here().empty());
    }
    // From the second step on, the next one is on its way.
    ASSERT_EQ(forward.size(), size_t{Chain::kLayers});
    for (size_t i = 0; i < forward.size(); ++i) {
      EXPECT_LE(forward[i].size(), 3u);
      EXPECT_TRUE(std::find(forward[i].begin(), forward[i].end(), i) != forward[i].end()) << i;
      if (i + 1 < forward.size()) {
        EXPECT_TRUE(std::find(forward[i].begin(), forward[i].end(), i + 1) != forward[i].end()) << i;
      }
    }
    EXPECT_FALSE(backward.empty());
    for (const auto& units : backward) EXPECT_LE(units.size(), 3u);
    EXPECT_GE(most, before + 2 * kUnit);
    EXPECT_LT(most, before + 4 * kUnit + kUnit / 2);  // three units, a gradient, and activations
  });
  EXPECT_EQ(fake_device_counts().bytes, before);
}

struct PartlyFrozen : FsdpNet {
  PartlyFrozen() { b->weight.set_requires_grad(false); }
};

TEST(FsdpDevices, EveryKindOfStep) {
  for (const FsdpOptions& options : {kSmall, full(kSmall)})
    on_hosts(kApart, [&](World& world) {
      const auto x = [&](int step) { return fsdp_input(world.rank(), step).requires_grad_(); };
      expect_same_gradients<FsdpNet>(options, [&](auto& model, FsdpNet&) {  // accumulation
        {
          const auto guard = model.no_sync();
          model(x(0)).sum().backward();
        }
        model(x(1)).square().sum().backward();
        model(x(2)).square().sum().backward();
      });
      expect_same_gradients<FsdpNet>(options, [&](auto& model, FsdpNet&) {  // two backwards through one forward
        const Tensor loss = model(x(0)).square().sum();
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
      });
      expect_same_gradients<Smooth>(options, [&](auto& model, Smooth&) {  // second derivatives
        const Tensor input = x(3), y = model(input);
        const Tensor slope = torch::autograd::grad({y.square().sum()}, {input}, {}, true, true)[0];
        (slope.square().sum() + y.sum()).backward();
      });
      expect_same_gradients<Smooth>(options, [&](auto& model, Smooth& net) {
        net.checkpoints = true;
        model(x(4)).sum().backward();
      });
      expect_same_gradients<PartlyFrozen>(options, [&](auto& model, FsdpNet& net) {  // and terms beside forward()
        const Tensor y = model(x(5));
        (y.sum() + net.c->weight.square().sum()).backward();
      });
      expect_same_gradients<FsdpNet>(options, [&](auto& model, FsdpNet&) {  // evaluation in between
        const Tensor y = model(x(6));
        {
          const torch::NoGradGuard no_grad;
          EXPECT_TRUE(torch::equal(model(x(6)).cpu(), y.detach().cpu()));
        }
        y.sum().backward();
      });
    });
}

// A backward() that throws leaves nothing behind: neither in the device's thread, nor on rank 1 alone in the thread
// that called it, while the device's goes on.
TEST(FsdpDevices, ABackwardThatThrows) {
  const size_t before = fake_device_counts().blocks;
  for (const FsdpOptions& options : {kSmall, full(kSmall)})
    on_hosts(kApart, [&](World& world) {
      expect_same_gradients<FsdpNet>(options, [&](auto& model, FsdpNet&) {
        Tensor y = model(fsdp_input(world.rank(), 0));
        y.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("thrown by a hook"); });
        EXPECT_CONTAINS(message_of<std::runtime_error>([&] { y.sum().backward(); }), "thrown by a hook");
        model.synchronize();
        EXPECT_TRUE(model.units_here().empty());
        model(fsdp_input(world.rank(), 1)).sum().backward();
      });
    });
  for (int round = 0; round < 5; ++round)
    on_ranks(2, [&](World& world) {
      expect_same_gradients<FsdpNet>(
          {.find_unused_parameters = true, .unit_cap_mb = 1}, [&](auto& model, FsdpNet& net) {
            bool throws = world.rank() == 1;
            net.c->weight.register_hook([&](const Tensor& gradient) {
              if (std::exchange(throws, false)) throw std::runtime_error("thrown by a parameter's hook");
              return gradient;
            });
            const auto backward = [&] { model(fsdp_input(world.rank(), 0)).sum().backward(); };
            if (world.rank() == 1)
              EXPECT_CONTAINS(message_of<std::runtime_error>(backward), "thrown by a parameter's hook");
            else
              backward();
            net.zero_grad();
            model(fsdp_input(world.rank(), 1)).sum().backward();
          });
    });
  EXPECT_EQ(fake_device_counts().blocks, before);
}

// It runs on the CPU, and has the parameter there.
TEST(FsdpDevices, AHookOfAParameterReadsIt) {
  on_hosts(kApart, [](World& world) {
    expect_same_gradients<FsdpNet>(kSmall, [&](auto& model, FsdpNet& net) {
      net.b->weight.register_hook([&](const Tensor& gradient) { return gradient + 0.01 * net.b->weight.detach(); });
      model(fsdp_input(world.rank(), 0)).sum().backward();
    });
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, on_own_device(full(kSmall)));
    net->b->weight.register_hook([&](const Tensor& gradient) { return gradient + net->b->weight.detach(); });
    const Tensor loss = model(fsdp_input(world.rank(), 0)).sum();
    expect_refusal({"a hook reads parameter b.weight on the CPU"}, [&] { loss.backward(); });
    model.synchronize();
  });
}

// Kernels that only this type of device has: libtorch's own that is made of other operators on the CPU, and a user's.
TEST(FsdpDevices, OperatorsWithKernelsForTheDeviceOnly) {
  static const torch::Library kernels = [] {
    torch::Library all(torch::Library::FRAGMENT, "muster_test", std::nullopt, __FILE__, __LINE__);
    all.def("two_layers(Tensor x, Tensor a, Tensor b) -> Tensor");
    all.impl("two_layers",
             torch::dispatch(c10::DispatchKey::PrivateUse1, [](const Tensor& x, const Tensor& a, const Tensor& b) {
               const Tensor first = x.mm(a.t());
               EXPECT_NE(b.const_data_ptr(), nullptr);  // whatever another one needed
               return first.mm(b.t());
             }));
    return all;
  }();
  on_ranks(1, [](World&) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    auto model = fully_shard(net, on_own_device({.unit_cap_mb = 1e-6, .max_gathered_units = 2}));
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("muster_test::two_layers", "")
                        .typed<Tensor(const Tensor&, const Tensor&, const Tensor&)>();
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      const Tensor x = fsdp_input(0, step);
      model(x);
      const Tensor y = op.call(x.cpu().to(fake(0)), net->a->weight, net->b->weight);
      EXPECT_TRUE(torch::equal(y.cpu(), x.cpu().mm(other->a->weight.t()).mm(other->b->weight.t())));
    }
    model.synchronize();
  });
}

struct Normed : nn::Module {
  Tensor forward(const Tensor& x) { return b(norm(a(x))); }
  nn::Linear a = register_module("a", nn::Linear(12, 40));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(40));
  nn::Linear b = register_module("b", nn::Linear(40, 3));
};

TEST(FsdpDevices, BuffersMoveAndAreThoseOfRankZero) {
  on_ranks(2, [](World& world) {
    const auto net = make<Normed>(7, {});
    auto model = fully_shard(net, on_own_device({}));
    for (int step = 0; step < 3; ++step) {
      net->norm->running_mean.fill_(10 * world.rank() + step);
      model(fsdp_input(world.rank(), step)).sum().backward();
      for (const auto& buffer : net->buffers()) EXPECT_EQ(buffer.device(), fake(world.rank()));
      // This device does not update it, because the operator's schema does not say that it would.
      EXPECT_TRUE(torch::equal(net->norm->running_mean.cpu(), torch::full({40}, float(step))));
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), step + 1);
      if (step == 0) {  // several forwards through what BatchNorm has saved of its buffers
        const Tensor first = model(fsdp_input(world.rank(), 1)).sum();
        (first + model(fsdp_input(world.rank(), 2)).sum()).backward();
        net->norm->num_batches_tracked.fill_(1);
      }
      // As torch::load() does.
      for (auto& buffer : net->buffers()) parallel::give_values(buffer, buffer.cpu());
    }
  });
}

TEST(FsdpDevices, AModuleWithBuffersIsShardedAgain) {
  on_ranks(2, [](World& world) {
    const auto net = make<Normed>(7, {});
    for (int time = 0; time < 2; ++time) {
      auto model = fully_shard(net, on_own_device({}));
      model(fsdp_input(world.rank(), 0)).sum().backward();
      model.synchronize();
    }
  });
}

TEST(FsdpDevices, TheModuleItselfIsOnTheCpu) {
  on_hosts(kApart, [](World& world) {
    for (const FsdpOptions& strategy : {FsdpOptions{}, full()})
      expect_values_in_forward_and_outside(world, on_own_device(strategy), torch::kFloat);
  });
}

TEST(FsdpDevices, AnOldGraphDoesNotUseNewValues) {
  on_ranks(2, [](World& world) { expect_old_graphs_to_fail(world, on_own_device({})); });
}

TEST(FsdpDevices, Snapshots) {
  const auto folder = std::filesystem::path(testing::TempDir()) / text("fsdp-devices-", ::getpid());
  const auto steps = [](auto& model, auto& optimizer, const World& world, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      model(fsdp_input(world.rank(), step)).square().sum().backward();
      optimizer.step();
    }
  };
  on_ranks(2, [&](World& world) {
    const auto net = make<Normed>(7, {}), other = make<Normed>(8, {});
    {
      auto model = fully_shard(net, on_own_device({}));
      torch::optim::AdamW optimizer(net->parameters());
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("model", net);
      snapshot.add("optimizer", optimizer);
      snapshot.restore();
      steps(model, optimizer, world, 0, 2);
      snapshot.save(2);
      steps(model, optimizer, world, 2, 4);
      model.synchronize();
    }
    auto model = fully_shard(other, on_own_device(kSmall));
    torch::optim::AdamW optimizer(other->parameters());
    Snapshot snapshot({.folder = folder, .default_generator = false});
    snapshot.add("model", other);
    snapshot.add("optimizer", optimizer);
    EXPECT_EQ(snapshot.restore(), 2);
    steps(model, optimizer, world, 2, 4);
    model.synchronize();
    expect_equal(*other, *net);
  });
  std::filesystem::remove_all(folder);
}

// A snapshot of a module on a device, whose optimizer is of a class that Muster does not know.
TEST(FsdpDevices, AModuleOnADeviceAndItsOptimizerAreRestoredThere) {
  struct Own : torch::optim::SGD {
    using SGD::SGD;
  };
  struct Net : nn::Module {
    explicit Net(torch::Device device)
        : a(register_parameter("a", drawn(0, 1, {12, 300}).to(device))),
          b(register_parameter("b", drawn(0, 2, {300, 5}).to(device))) {}
    Tensor forward(const Tensor& x) { return torch::tanh(x.matmul(a)).matmul(b); }
    Tensor a, b;
  };
  for (const bool sharded : {false, true}) {
    const auto folder = std::filesystem::path(testing::TempDir()) / text("module-on-device-", ::getpid());
    on_ranks(2, [&](World& world) {
      const auto device = fake(world.rank());
      const auto step = [&](Net& net, torch::optim::Optimizer& optimizer) {
        optimizer.zero_grad();
        net.forward(fsdp_input(0, 1).to(device)).square().sum().backward();
        optimizer.step();
      };
      const auto with_momentum = torch::optim::SGDOptions(1e-3).momentum(0.9);
      const auto net = std::make_shared<Net>(device), other = std::make_shared<Net>(device);
      Own optimizer(net->parameters(), with_momentum), its(other->parameters(), with_momentum);
      step(*net, optimizer);
      const SnapshotOptions options{.folder = folder, .sharded = sharded, .default_generator = false};
      Snapshot(options).add("model", net).add("optimizer", optimizer, {.per_rank = false}).save(1);
      step(*net, optimizer);
      EXPECT_EQ(Snapshot(options).add("model", other).add("optimizer", its, {.per_rank = false}).restore(), 1);
      for (const auto& [key, state] : its.state())
        EXPECT_EQ(static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().device(), device);
      EXPECT_EQ(its.state().size(), 2u);
      step(*other, its);
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(torch::equal(item.value().cpu(), other->named_parameters()[item.key()].cpu())) << item.key();
    });
    std::filesystem::remove_all(folder);
  }
}

TEST(FsdpDevices, BadUseIsSaid) {
  on_ranks(2, [](World& world) {
    const auto with = [](const torch::Device& device) {
      fully_shard(make<FsdpNet>(7, {}), {.compute_device = device});
    };
    expect_refusal({"compute_device: expected a device that computes, got meta"}, [&] { with(torch::kMeta); });
    EXPECT_CONTAINS(message_of<Unavailable>([&] { with(torch::Device(torch::kXLA, 0)); }), "0 devices of xla");
    EXPECT_CONTAINS(message_of<Unavailable>([&] { with(fake(kFakeDevices)); }), "3 devices of");
    expect_refusal({"parameter a.weight is not a dense CPU tensor", "Leave the module on the CPU"}, [&] {
      const auto net = make<FsdpNet>(7, {});
      for (const Tensor& parameter : net->parameters())
        parallel::give_values(parameter, parameter.detach().to(fake(0)));
      fully_shard(net, on_own_device({}));
    });
    EXPECT_CONTAINS(message_of<Mismatch>([&] {
                      FsdpOptions options;
                      if (world.rank() == 0) options.compute_device = fake(0);
                      fully_shard(make<FsdpNet>(7, {}), options);
                    }),
                    "differs");
    with(torch::kCPU);

    const auto net = make<FsdpNet>(7, {});
    auto model = std::make_unique<FullyShardedDataParallel<FsdpNet>>(net, on_own_device({}));
    const Tensor x = fsdp_input(world.rank(), 0);
    const Tensor y = model->forward(x);
    expect_refusal({"change the copy of parameter b.weight", "clone()"}, [&] {
      const torch::NoGradGuard no_grad;
      net->b->weight.view({-1}).to(fake(world.rank())).zero_();
    });
    model->synchronize();
    model.reset();
    expect_refusal({"the copy of parameter", "is gone", "Keep the FullyShardedDataParallel"},
                   [&] { y.sum().backward(); });
  });
}

}  // namespace
}  // namespace muster::test
