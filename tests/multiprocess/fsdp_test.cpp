// FullyShardedDataParallel on ranks that are threads: what it promises in its header, point by point.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "muster/muster.h"
#include "parallel/fsdp/owners.h"
#include "parallel/shared_tensor.h"
#include "support/forked.h"
#include "support/models.h"
#include "support/patience.h"

namespace muster::test {
namespace {

// Parameters of a megabyte and more, and small ones.
struct FsdpNet : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(12, 600)), b = register_module("b", nn::Linear(600, 600)),
             c = register_module("c", nn::Linear(600, 600)), d = register_module("d", nn::Linear(600, 5));
  Tensor forward(const Tensor& x) { return d(torch::relu(c(torch::relu(b(torch::relu(a(x))))))); }
};

Tensor input(int rank, int step) { return drawn(rank, step, {4, 12}); }

void on_ranks(int n, const std::function<void(World&)>& fn) {
  at::set_num_threads(1);
  run_threads(n, fn, {.timeout = kPatience});
}

// The message of the InvalidArgument that fn throws.
std::string refusal(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}
void expect_refusal(const std::vector<std::string>& parts, const std::function<void()>& fn) {
  const std::string what = refusal(fn);
  for (const auto& part : parts) EXPECT_NE(what.find(part), what.npos) << part << " is not in: " << what;
}

TEST(Fsdp, ParametersExistOnceAndEachHasOneOwner) {
  for (const int n : {1, 2, 3, 4}) {
    SCOPED_TRACE(n);
    on_ranks(n, [n](World& world) {
      const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(world.rank()), {});
      const auto first = make<FsdpNet>(7, {});  // what rank 0 has
      const auto before = net->parameters();
      torch::optim::AdamW optimizer(net->parameters());  // before or after: the tensors stay the same
      auto model = fully_shard(net);
      const auto parameters = net->parameters();
      size_t all = 0, mine = 0;
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(parameters[i].is_same(before[i]));
        EXPECT_TRUE(torch::equal(parameters[i], first->parameters()[i]));
        EXPECT_TRUE(parallel::is_shared(parameters[i]));
        EXPECT_EQ(parallel::belongs_to_another_rank(parameters[i]), model.owner(parameters[i]) != world.rank());
        all += parameters[i].nbytes();
        if (model.owner(parameters[i]) == world.rank()) mine += parameters[i].nbytes();
      }
      EXPECT_LE(mine, all / static_cast<size_t>(n) + parameters[2].nbytes());  // the largest one may be too much
      barrier();

      // What an owner writes, all read.
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : model.owned_parameters()) parameter.fill_(world.rank() + 1);
      }
      model.synchronize();
      for (const auto& parameter : parameters) EXPECT_TRUE(parameter.eq(model.owner(parameter) + 1).all().item<bool>());
      model(input(world.rank(), 0)).sum().backward();
      for (const auto& parameter : parameters)
        EXPECT_EQ(parameter.grad().defined(), model.owner(parameter) == world.rank());
      optimizer.step();
      EXPECT_EQ(optimizer.state().size(), model.owned_parameters().size());
      EXPECT_THROW(model.owner(torch::ones({2})), InvalidArgument);
    });
  }
}

TEST(Fsdp, OwnersAreBalanced) {
  std::vector<parallel::NamedTensor> parameters;
  const auto add = [&](int64_t numel, bool trained = true) {
    parameters.push_back({"p", torch::empty({numel}, torch::requires_grad(trained))});
  };
  for (int layer = 0; layer < 12; ++layer) {
    for (const int64_t large : {1 << 20, 1 << 20, 1 << 18, 1 << 19}) add(large);
    for (int small = 0; small < 6; ++small) add(600 * (small + 1));
    add(1 << 19, false);
  }
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const auto owners = fsdp::balanced_owners(parameters, ranks, 25 << 20);
    std::map<bool, std::vector<double>> load{{true, std::vector<double>(static_cast<size_t>(ranks))},
                                             {false, std::vector<double>(static_cast<size_t>(ranks))}};
    for (size_t i = 0; i < owners.size(); ++i)
      load[parameters[i].tensor.requires_grad()][static_cast<size_t>(owners[i])] +=
          static_cast<double>(parameters[i].tensor.nbytes());
    const auto [least, most] = std::minmax_element(load[true].begin(), load[true].end());
    EXPECT_LE(*most, 1.15 * *least) << ranks;
    const auto [least_frozen, most_frozen] = std::minmax_element(load[false].begin(), load[false].end());
    EXPECT_LE(*most_frozen, *least_frozen + (1 << 21)) << ranks;
  }
  // Fewer parameters than ranks, empty ones, none.
  EXPECT_EQ(fsdp::balanced_owners({{"p", torch::empty({3})}, {"q", torch::empty({0})}}, 4, 25 << 20).size(), 2u);
  EXPECT_TRUE(fsdp::balanced_owners({}, 4, 25 << 20).empty());
}

// In place of zero_grad(): averages of several backward() calls, with and without no_sync(), add up as in one process.
TEST(Fsdp, GradientsAccumulate) {
  for (const int n : {1, 2, 3}) {
    SCOPED_TRACE(n);
    on_ranks(n, [n](World& world) {
      const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
      auto model = fully_shard(net);
      for (int round = 0; round < 3; ++round) {
        SCOPED_TRACE(round);
        net->zero_grad(/*set_to_none=*/round != 1);
        alone->zero_grad();
        const auto backward = [&](int step) {
          model(input(world.rank(), step)).sum().backward();
          for (int r = 0; r < n; ++r) (alone->forward(input(r, step)).sum() / n).backward();
        };
        if (round != 1) {  // zeros count as an average
          const auto guard = model.no_sync();
          {
            const torch::NoGradGuard no_grad;
            model(input(world.rank(), 0));  // the first one after the last round
          }
          const auto operations = world.group().stats().operations;
          backward(0);
          EXPECT_EQ(world.group().stats().operations, operations) << "no_sync() communicated";
          for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.grad().defined());
        }
        backward(1);
        backward(2);
        backward(3);
        for (const auto& item : net->named_parameters()) {
          if (model.owner(item.value()) != world.rank()) {
            EXPECT_FALSE(item.value().grad().defined()) << item.key();
            continue;
          }
          Tensor expected = alone->named_parameters()[item.key()].grad();
          EXPECT_TRUE(torch::allclose(item.value().grad(), expected, 1e-4, 1e-5)) << item.key();
        }
        if (round != 1) {
          const auto guard = model.no_sync();
          const auto loss = model(input(world.rank(), 4)).sum();
          expect_refusal({"in no_sync() would add to the gradient of", "zero_grad()"}, [&] { loss.backward(); });
        }
      }
    });
  }
}

TEST(Fsdp, ClipsByTheNormOfAllGradients) {
  on_ranks(3, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    DistributedDataParallel ddp(other);
    for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()})
      for (const double limit : {1e-2, 1e6}) {
        net->zero_grad();
        other->zero_grad();
        model(input(world.rank(), 1)).square().sum().backward();
        ddp(input(world.rank(), 1)).square().sum().backward();
        const double norm = model.clip_grad_norm_(limit, type);
        EXPECT_NEAR(norm, nn::utils::clip_grad_norm_(other->parameters(), limit, type), 1e-5 * norm);
        for (const auto& item : net->named_parameters())
          if (const Tensor& grad = item.value().grad(); grad.defined()) {
            EXPECT_TRUE(torch::allclose(grad, other->named_parameters()[item.key()].grad(), 1e-5, 1e-9));
          }
      }
    // One rank's gradient is not finite: all ranks know.
    for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
      for (const double type : {2.0, std::numeric_limits<double>::infinity()}) {
        if (world.rank() == 1) model.owned_parameters()[0].mutable_grad().view(-1)[0] = bad;
        const auto operations = world.group().stats().operations;
        EXPECT_THROW(model.clip_grad_norm_(1, type, true), InvalidArgument) << bad << ' ' << type;
        EXPECT_EQ(world.group().stats().operations, operations + 1);
      }
    EXPECT_FALSE(std::isfinite(model.clip_grad_norm_(1)));
    for (const auto& parameter : model.owned_parameters()) EXPECT_TRUE(parameter.grad().isnan().any().item<bool>());
    EXPECT_THROW(model.clip_grad_norm_(1, 0), InvalidArgument);
  });
}

TEST(Fsdp, UnusedParametersAreNamedOnEveryRank) {
  on_ranks(2, [](World& world) {
    struct Branches : nn::Module {
      nn::Linear left = register_module("left", nn::Linear(12, 1)), right = register_module("right", nn::Linear(12, 1)),
                 nobody = register_module("nobody", nn::Linear(12, 1));
      Tensor forward(const Tensor& x, bool use_right) { return use_right ? right(x) : left(x); }
    };
    const auto net = make<Branches>(3, {});
    {
      auto model = fully_shard(net);
      const auto loss = model(input(world.rank(), 0), world.rank() == 1).sum();
      expect_refusal({"on all ranks: nobody.", "on some ranks: ", "left.weight", "right.weight"},
                     [&] { loss.backward(); });
    }
    auto allowing = fully_shard(net, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      allowing(input(world.rank(), step), world.rank() == 1).sum().backward();
      const auto expect = [&](const Tensor& parameter, const Tensor& expected) {
        if (allowing.owner(parameter) == world.rank()) {
          EXPECT_TRUE(torch::allclose(parameter.grad(), expected, 1e-5, 1e-6));
        } else {
          EXPECT_FALSE(parameter.grad().defined());
        }
      };
      EXPECT_FALSE(net->nobody->weight.grad().defined());
      expect(net->left->weight, input(0, step).sum(0, true) / 2);
      expect(net->right->weight, input(1, step).sum(0, true) / 2);
    }
  });
}

TEST(Fsdp, ABackwardThatThrewIsMadeUpFor) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    bool fails = false;
    net->b->weight.register_hook([&](const Tensor&) {
      if (fails) throw std::runtime_error("in a hook");
    });
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      const auto loss = model(input(world.rank(), 10 + step)).sum(), next = model(input(world.rank(), step)).sum();
      fails = world.rank() == 0;
      EXPECT_THROW(loss.backward(), std::exception);  // on the other rank, because not all gradients are there
      fails = false;
      net->zero_grad();
      alone->zero_grad();
      if (step % 2 == 0)
        next.backward();
      else
        model(input(world.rank(), step)).sum().backward();
      for (int r = 0; r < 2; ++r) (alone->forward(input(r, step)).sum() / 2).backward();
      for (const auto& item : net->named_parameters()) {
        const Tensor& grad = item.value().grad();
        EXPECT_EQ(grad.defined(), model.owner(item.value()) == world.rank()) << item.key();
        if (!grad.defined()) continue;
        EXPECT_TRUE(torch::allclose(grad, alone->named_parameters()[item.key()].grad(), 1e-4, 1e-5)) << item.key();
      }
      net->zero_grad();
    }
  });
}

// --- changes of parameters ---

TEST(Fsdp, ChangesByOthersThanTheOwnerAreNamedOnEveryRank) {
  on_ranks(3, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    model.synchronize();
    const int owner = model.owner(net->b->weight), other = (owner + 1) % 3;
    if (world.rank() == other) {
      const torch::NoGradGuard no_grad;
      net->b->weight.mul_(1);
    }
    expect_refusal({"rank " + std::to_string(other) + " changed parameter b.weight",
                    "which rank " + std::to_string(owner) + " owns", "owned_parameters()"},
                   [&] { model(input(world.rank(), 0)); });
    model(input(world.rank(), 0)).sum().backward();  // once
  });
}

TEST(Fsdp, AnUpdateThatOthersMayNotExpectIsNamed) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);  // writes through data(), which no version counter sees
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      model(input(world.rank(), 0));
    };
    model(input(world.rank(), 0)).sum().backward();
    evaluate();
    barrier();  // so that this test itself has no race
    optimizer.step();
    expect_refusal({" changed parameter ", "after a forward() that no backward() followed", "synchronize()"}, evaluate);
    evaluate();
    model.synchronize();
    optimizer.step();
    evaluate();
    model(input(world.rank(), 0)).sum().backward();
    optimizer.step();

    // In eval() mode only the first forward() after an update waits for the other ranks.
    net->eval();
    auto operations = world.group().stats().operations;
    for (int i = 0; i < 2 + 3 * world.rank(); ++i) evaluate();
    EXPECT_EQ(world.group().stats().operations, operations + 1);
    barrier();
    optimizer.step();
    operations = world.group().stats().operations;
    expect_refusal({"has changed after a forward() that no backward() followed"}, evaluate);
    EXPECT_EQ(world.group().stats().operations, operations);
    model.synchronize();
    evaluate();
  });
}

// A graph of before an update fails on every rank, as in one process, and not only on the owners. (After a step of SGD it
// fails nowhere: libtorch's SGD writes through data().)
TEST(Fsdp, AGraphOfBeforeAnUpdateIsRefusedOnEveryRank) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    torch::optim::AdamW optimizer(net->parameters());
    auto model = fully_shard(net);
    const auto old = model(input(world.rank(), 0)).sum();
    model(input(world.rank(), 1)).sum().backward();
    optimizer.step();
    const auto now = model(input(world.rank(), 2)).sum();
    EXPECT_THROW(old.backward(), std::exception);
    now.backward();
    // Two forwards before one backward are not an update.
    const auto first = model(input(world.rank(), 3)).sum(), second = model(input(world.rank(), 4)).sum();
    (first + second).backward();
  });
}

TEST(Fsdp, LoadedModulesAreSharedAgain) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {}), saved = make<FsdpNet>(99, {});
    std::stringstream file;
    torch::save(saved, file);
    auto model = fully_shard(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1), on_saved(saved->parameters(), 0.1);
    auto to_load = net;
    torch::load(to_load, file);
    model(input(world.rank(), 0)).sum().backward();
    DistributedDataParallel ddp(saved);
    ddp(input(world.rank(), 0)).sum().backward();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(parallel::is_shared(item.value())) << item.key();
      EXPECT_TRUE(torch::equal(item.value(), saved->named_parameters()[item.key()])) << item.key();
    }
    model.synchronize();
    optimizer.step();
    on_saved.step();
    barrier();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::equal(item.value(), saved->named_parameters()[item.key()])) << item.key();

    // On some ranks only.
    const int owner = model.owner(net->c->weight);
    if (world.rank() != owner) net->c->weight.set_data(torch::zeros({600, 600}));
    expect_refusal({"parameter c.weight has new values on rank " + std::to_string(1 - owner) + ", but not on rank " +
                    std::to_string(owner)},
                   [&] { model(input(world.rank(), 0)); });
    net->c->weight.set_data(torch::full({600, 600}, world.rank(), torch::kFloat));
    model(input(world.rank(), 0)).sum().backward();
    EXPECT_TRUE(net->c->weight.eq(owner).all().item<bool>());

    // Another shape or dtype.
    if (world.rank() == 1) net->d->bias.set_data(torch::zeros({6}));
    expect_refusal({"rank 1 changed the shape, dtype or device of parameter d.bias"},
                   [&] { model(input(world.rank(), 0)); });
  });
}

TEST(Fsdp, ModulesItCannotShare) {
  on_ranks(2, [](World& world) {
    EXPECT_THROW(fully_shard(std::shared_ptr<FsdpNet>()), InvalidArgument);
    EXPECT_THROW(fully_shard(make<FsdpNet>(1, {}), {.bucket_cap_mb = 0}), InvalidArgument);
    struct Aliases : nn::Module {
      Tensor one = register_parameter("one", torch::ones({3})), two = register_parameter("two", one.detach());
      Tensor forward(const Tensor& x) { return x * one * two; }
    };
    expect_refusal({"parameters one and two are two tensors in the same memory"},
                   [] { fully_shard(std::make_shared<Aliases>()); });
    {
      const auto net = make<FsdpNet>(1, {});
      fully_shard(net);
      expect_refusal({"FullyShardedDataParallel has shared parameter a.weight"},
                     [&] { DistributedDataParallel<FsdpNet> ddp(net); });
    }
    struct Grows : nn::Module {
      explicit Grows(int64_t n) { weight = register_parameter("weight", torch::ones({n})); }
      Tensor forward() { return weight.sum(); }
      Tensor weight;
    };
    EXPECT_THROW(fully_shard(std::make_shared<Grows>(3 + world.rank())), Mismatch);

    // No parameter is trained, or there is none at all; less parameters than ranks; a parameter that is not dense.
    auto frozen = std::make_shared<Grows>(3);
    frozen->weight.set_requires_grad(false);
    auto of_frozen = fully_shard(frozen);
    EXPECT_EQ(of_frozen().item<double>(), 3);
    EXPECT_TRUE(parallel::is_shared(frozen->weight));
    EXPECT_TRUE(of_frozen.bucket_names().empty());
    struct Nothing : nn::Module {
      Tensor forward() { return torch::ones({1}); }
    };
    fully_shard(std::make_shared<Nothing>())();
    struct Sparse : nn::Module {
      Tensor part = register_parameter("part", torch::arange(12.).view({3, 4}).narrow(1, 1, 2));
      Tensor forward(const Tensor& x) { return (part * x.narrow(1, 0, 2).narrow(0, 0, 3)).sum(); }
    };
    const auto sparse = std::make_shared<Sparse>();
    auto of_sparse = fully_shard(sparse);
    of_sparse(input(world.rank(), 0)).backward();
    EXPECT_TRUE(torch::equal(sparse->part, torch::arange(12.).view({3, 4}).narrow(1, 1, 2)));
    if (of_sparse.owner(sparse->part) == world.rank()) {
      const Tensor expected = (input(0, 0) + input(1, 0)).slice(0, 0, 3).slice(1, 0, 2) / 2;
      EXPECT_TRUE(torch::allclose(sparse->part.grad(), expected));
    }
  });
}

// A sub-group; then all ranks over the same module; then nobody.
TEST(Fsdp, GroupsAndWhatStaysWhenItEnds) {
  on_ranks(3, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    const Group pair = world.new_group({2, 0});
    if (pair.is_member()) {
      auto model = fully_shard(net, {.group = pair});
      model(input(world.rank(), 0)).sum().backward();
      for (const auto& parameter : net->parameters())
        EXPECT_EQ(parameter.grad().defined(), model.owner(parameter) == pair.rank());
    } else {
      EXPECT_THROW(fully_shard(net, {.group = pair}), InvalidArgument);
    }
    net->zero_grad();
    std::vector<Tensor> held;
    {
      auto model = fully_shard(net);
      model(input(world.rank(), 0)).sum().backward();
      for (const auto& parameter : model.owned_parameters()) held.push_back(parameter.grad());
      model.synchronize();
    }
    // The parameters stay shared, and the hooks are gone.
    const auto operations = world.group().stats().operations;
    net->forward(input(world.rank(), 0)).sum().backward();
    EXPECT_EQ(world.group().stats().operations, operations);
    for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.grad().defined());
    for (const auto& grad : held) EXPECT_TRUE(grad.isfinite().all().item<bool>());
  });
}

// --- snapshots ---

TEST(Fsdp, ASnapshotResumesToTheBit) {
  const auto folder = std::filesystem::path(testing::TempDir()) / ("fsdp-" + std::to_string(::getpid()));
  for (const bool sharded : {false, true}) {
    std::filesystem::remove_all(folder);
    std::map<std::string, Tensor> wanted;
    for (const bool again : {false, true})
      on_ranks(2, [&](World& world) {
        const auto net = make<FsdpNet>(again ? 99 : 7, {});
        auto model = fully_shard(net);
        torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
        Snapshot snapshot({.folder = folder, .every = 3, .sharded = sharded, .default_generator = false});
        snapshot.add("model", net).add("optimizer", optimizer);
        const int64_t first = snapshot.restore();
        EXPECT_EQ(first, again ? 3 : 0);
        for (int64_t step = first; step < 5; ++step) {
          optimizer.zero_grad();
          model(input(world.rank(), static_cast<int>(step))).square().sum().backward();
          optimizer.step();
          EXPECT_FALSE(snapshot.step(step + 1));
        }
        EXPECT_EQ(optimizer.state().size(), model.owned_parameters().size());
        model.synchronize();
        for (const auto& item : net->named_parameters()) {
          if (world.rank() != 0) continue;
          if (again) {
            EXPECT_TRUE(torch::equal(item.value(), wanted[item.key()])) << item.key();
          } else {
            wanted[item.key()] = item.value().detach().clone();
          }
        }
      });
  }
  std::filesystem::remove_all(folder);
}

// What would resume with states of other parameters, or without some, is refused.
TEST(Fsdp, ASnapshotOfAnotherDivisionIsRefused) {
  const auto folder = std::filesystem::path(testing::TempDir()) / ("fsdp-refused-" + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  on_ranks(2, [&](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    torch::optim::AdamW optimizer(net->parameters());
    const auto snapshot_of = [&](const SnapshotItemOptions& item) {
      Snapshot snapshot({.folder = folder, .default_generator = false});
      return std::move(snapshot.add("model", net).add("optimizer", optimizer, item));
    };
    model(input(world.rank(), 0)).sum().backward();
    optimizer.step();
    {
      auto snapshot = snapshot_of({.per_rank = false});
      EXPECT_THROW(snapshot.save(1), InvalidArgument);
    }
    {
      auto snapshot = snapshot_of({});
      snapshot.save(1);
    }
    // Restored where ranks own other parameters.
    const auto other = make<FsdpNet>(7, {});
    for (auto& parameter : other->a->parameters()) parameter.set_requires_grad(false);
    auto another = fully_shard(other, {.bucket_cap_mb = 1e-3});
    torch::optim::AdamW of_other(other->parameters());
    bool same = true;
    for (const auto& item : net->named_parameters())
      same &= model.owner(item.value()) == another.owner(other->named_parameters()[item.key()]);
    EXPECT_FALSE(same) << "this test needs another division";
    Snapshot snapshot({.folder = folder, .default_generator = false});
    snapshot.add("model", other).add("optimizer", of_other);
    EXPECT_THROW(snapshot.restore(), InvalidArgument);
  });
  std::filesystem::remove_all(folder);
}

// --- memory ---

// Gradients of other ranks are freed while backward goes on: no rank ever needs blocks for all.
TEST(Fsdp, ARankNeedsLittleMemoryForGradientsOfOthers) {
  struct Deep : nn::Module {
    Deep() {
      for (int i = 0; i < 24; ++i) layers->push_back(nn::Linear(nn::LinearOptions(512, 512).bias(false)));
      register_module("layers", layers);
    }
    Tensor forward(Tensor x) { return layers->forward(x); }
    nn::Sequential layers;
  };
  constexpr size_t kLayer = 512 * 512 * 4;
  on_ranks(3, [](World& world) {
    const auto net = make<Deep>(7, {});
    auto model = fully_shard(net);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const Tensor x = drawn(world.rank(), step, {4, 512}).set_requires_grad(true);
      Tensor y = x;
      // In each layer's backward all ranks have reduced the gradients of the layers behind it, up to the last few.
      for (size_t i = 0; i < net->layers->size(); ++i) {
        y = net->layers[i]->as<nn::Linear>()->forward(y);
        y.register_hook([&](const Tensor&) -> void { barrier(); });
      }
      model.synchronize();
      y.sum().backward();
      EXPECT_LE(world.heap().used(), (24 / 3 + 8) * (kLayer + kLayer / 16)) << "step " << step;
      model.synchronize();
    }
  });
}

// --- errors of backward() ---

template <template <typename> typename Parallel>
void expect_refusal_of_a_second_gradient() {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    Parallel<FsdpNet> model(net, {.bucket_cap_mb = 1e-3, .first_bucket_cap_mb = 1e-3});
    const Tensor x = input(world.rank(), 0).set_requires_grad(true);
    const Tensor y = x * 1;
    y.register_hook([&](const Tensor&) -> void {  // when those of all layers have come
      const torch::AutoGradMode with_grad(true);
      net->d->weight.sum().backward();
    });
    const Tensor loss = model(y).sum();
    expect_refusal({"parameter d.weight got a second gradient in one backward()"}, [&] { loss.backward(); });
    net->zero_grad();
    model(input(world.rank(), 1)).sum().backward();
  });
}
TEST(Fsdp, ASecondGradientInOneBackwardIsRefused) { expect_refusal_of_a_second_gradient<FullyShardedDataParallel>(); }
TEST(Fsdp, ASecondGradientInOneBackwardIsRefusedByDdpToo) {
  expect_refusal_of_a_second_gradient<DistributedDataParallel>();
}

TEST(Fsdp, CollectivesOfTheModelMakeUpForABackwardThatThrew) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net, {.find_unused_parameters = true});
    bool fails = false;
    net->b->weight.register_hook([&](const Tensor&) {
      if (fails) throw std::runtime_error("in a hook");
    });
    for (const bool clips : {false, true}) {
      const auto loss = model(input(world.rank(), 0)).sum();
      fails = world.rank() == 0;
      if (fails)
        EXPECT_THROW(loss.backward(), std::exception);
      else
        loss.backward();
      fails = false;
      if (clips)
        EXPECT_GT(model.clip_grad_norm_(1), 0);
      else
        model.synchronize();
      net->zero_grad();
    }
  });
}

// --- ranks that are processes ---

TEST(FsdpProcess, StepsAreThoseOfDdp) {
  const ForkedJob job;
  ForkedRanks ranks(3, [&](int rank) {
    at::set_num_threads(1);
    World world = job.join(rank, 3, {.timeout = kPatience});
    const World::Scope scope(world);
    const auto train = [&](auto& model, FsdpNet& net) {
      torch::optim::AdamW optimizer(net.parameters());
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model(input(rank, step)).square().sum().backward();
        optimizer.step();
      }
      barrier();
    };
    const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
    DistributedDataParallel ddp(net);
    train(ddp, *net);
    {
      auto model = fully_shard(other);
      train(model, *other);
    }
    for (const auto& item : other->named_parameters())
      EXPECT_TRUE(torch::equal(item.value(), net->named_parameters()[item.key()])) << item.key();
    barrier();
    return std::string("done");
  });
  for (const auto& end : ranks.wait_all(Deadline::after(kPatience))) EXPECT_EQ(end.said, "done");
}

// The rank that dies is named, and what it owned stays readable.
TEST(FsdpProcess, TheDeathOfAnOwnerIsNamedAndItsMemoryStays) {
  const ForkedJob job;
  ForkedRanks ranks(3, [&](int rank) {
    at::set_num_threads(1);
    World world = job.join(rank, 3, {.timeout = kPatience});
    const World::Scope scope(world);
    const auto net = make<FsdpNet>(7, {}), first = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    const auto loss = model(input(rank, 0)).sum();
    if (rank == 1) {
      net->b->weight.register_hook([](const Tensor&) -> void { ::raise(SIGKILL); });
      loss.backward();
    }
    std::string what;
    try {
      loss.backward();
    } catch (const PeerLost& error) {
      what = error.what();
    }
    EXPECT_NE(what.find("rank 1"), what.npos) << what;
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::equal(item.value(), first->named_parameters()[item.key()])) << item.key();
    return std::string("done");
  });
  const auto ends = ranks.wait_all(Deadline::after(kPatience));
  EXPECT_EQ(ends[0].said, "done");
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_EQ(ends[2].said, "done");
}

}  // namespace
}  // namespace muster::test
