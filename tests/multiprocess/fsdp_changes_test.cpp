// FullyShardedDataParallel on ranks that are threads: what changes parameters, modules it cannot share, and snapshots.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "parallel/fsdp/owners.h"
#include "parallel/kit/shared_tensor.h"

namespace muster::test {
namespace {

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
                   [&] { model(fsdp_input(world.rank(), 0)); });
    model(fsdp_input(world.rank(), 0)).sum().backward();  // once
  });
}

TEST(Fsdp, AnUpdateThatOthersMayNotExpectIsNamed) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);  // writes through data(), which no version counter sees
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      model(fsdp_input(world.rank(), 0));
    };
    model(fsdp_input(world.rank(), 0)).sum().backward();
    evaluate();
    barrier();  // so that this test itself has no race
    optimizer.step();
    expect_refusal({" changed parameter ", "after a forward() that no backward() followed", "synchronize()"}, evaluate);
    evaluate();
    model.synchronize();
    optimizer.step();
    evaluate();
    model(fsdp_input(world.rank(), 0)).sum().backward();
    optimizer.step();

    // In eval() mode only the first forward() after an update waits for the other ranks.
    net->eval();
    auto operations = world.group().stats().operations;
    for (int i = 0; i < 2 + 3 * world.rank(); ++i) evaluate();
    EXPECT_EQ(world.group().stats().operations, operations + 1);
    barrier();
    optimizer.step();
    operations = world.group().stats().operations;
    expect_refusal({"this rank changed parameter ", " after a forward() that no backward() followed"}, evaluate);
    EXPECT_EQ(world.group().stats().operations, operations);
    model.synchronize();
    evaluate();
  });
}

// A graph of before an update fails on every rank, as in one process, and not only on the owners. (After a step of SGD
// it fails nowhere: libtorch's SGD writes through data().)
TEST(Fsdp, AGraphOfBeforeAnUpdateIsRefusedOnEveryRank) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    torch::optim::AdamW optimizer(net->parameters());
    auto model = fully_shard(net);
    const auto old = model(fsdp_input(world.rank(), 0)).sum();
    model(fsdp_input(world.rank(), 1)).sum().backward();
    optimizer.step();
    const auto now = model(fsdp_input(world.rank(), 2)).sum();
    EXPECT_THROW(old.backward(), std::exception);
    now.backward();
    // Two forwards before one backward are not an update.
    const auto first = model(fsdp_input(world.rank(), 3)).sum(), second = model(fsdp_input(world.rank(), 4)).sum();
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
    model(fsdp_input(world.rank(), 0)).sum().backward();
    DistributedDataParallel ddp(saved);
    ddp(fsdp_input(world.rank(), 0)).sum().backward();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(parallel::is_shared(item.value())) << item.key();
      EXPECT_TRUE(torch::equal(item.value(), saved->named_parameters()[item.key()])) << item.key();
    }
    model.synchronize();
    optimizer.step();
    on_saved.step();
    barrier();
    expect_equal(*net, *saved);

    // On some ranks only.
    const int owner = model.owner(net->c->weight);
    if (world.rank() != owner) net->c->weight.set_data(torch::zeros({600, 600}));
    expect_refusal({"parameter c.weight has new values on rank " + std::to_string(1 - owner) + ", but not on rank " +
                    std::to_string(owner)},
                   [&] { model(fsdp_input(world.rank(), 0)); });
    net->c->weight.set_data(torch::full({600, 600}, world.rank(), torch::kFloat));
    model(fsdp_input(world.rank(), 0)).sum().backward();
    EXPECT_TRUE(net->c->weight.eq(owner).all().item<bool>());

    // Another shape or dtype.
    if (world.rank() == 1) net->d->bias.set_data(torch::zeros({6}));
    expect_refusal({"rank 1 changed the shape, dtype or device of parameter d.bias"},
                   [&] { model(fsdp_input(world.rank(), 0)); });
  });
}

// Between two evaluations, too.
TEST(Fsdp, AModuleMayBeLoadedBetweenEvaluations) {
  on_ranks(2, [](World& world) {
    auto net = make<FsdpNet>(7, {});
    const auto saved = make<FsdpNet>(99, {});
    std::stringstream file;
    torch::save(saved, file);
    auto model = fully_shard(net);
    net->eval();
    saved->eval();
    const torch::NoGradGuard no_grad;
    const auto x = fsdp_input(world.rank(), 0);
    EXPECT_FALSE(torch::equal(model(x), saved->forward(x)));
    torch::load(net, file);
    EXPECT_TRUE(torch::equal(model(x), saved->forward(x)));
    const auto operations = world.group().stats().operations;
    EXPECT_TRUE(torch::equal(model(x), saved->forward(x)));  // and then ranks need not wait for each other again
    EXPECT_EQ(world.group().stats().operations, operations);
    model.synchronize();
  });
}

// What requires grad, and which parameters there are, is settled when the module is sharded.
TEST(Fsdp, ParametersThatAreTrainedLaterAreNamedOnEveryRank) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    net->b->weight.set_requires_grad(false);
    const auto x = fsdp_input(world.rank(), 0);
    {
      auto model = fully_shard(net);
      model(x).sum().backward();
      if (world.rank() == 1) net->b->weight.set_requires_grad(true);
      const std::vector<std::string> words{"parameter b.weight requires grad now", "did not when it was shared"};
      expect_refusal({words[0], "on rank 1", words[1]}, [&] { model(x); });
      expect_refusal(words, [&] { model(x); });
      net->b->weight.set_requires_grad(false);
      model(x).sum().backward();
      {
        const torch::NoGradGuard no_grad;
        net->b->weight.set_requires_grad(true);  // matters to no evaluation
        model(x);
        net->b->weight.set_requires_grad(false);
      }
      net->eval();  // some are trained in this mode
      net->b->weight.set_requires_grad(true);
      expect_refusal(words, [&] { model(x); });
      net->b->weight.set_requires_grad(false);
      net->train();
      net->a->bias.set_requires_grad(false);
      expect_refusal({"a.bias has been frozen since the FullyShardedDataParallel was made", "find_unused_parameters"},
                     [&] { model(x).sum().backward(); });
      net->a->bias.set_requires_grad(true);
    }
    auto model = fully_shard(net);
    model(x).sum().backward();
    net->register_module("late", nn::Linear(2, 2));
    expect_refusal({"the module did not have its parameter late.weight", "then make its FullyShardedDataParallel"},
                   [&] { model(x); });
  });
}

// Two of them would take each other's averages.
TEST(Fsdp, OneAtATimeTrainsAModule) {
  on_ranks(2, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    const auto x = fsdp_input(world.rank(), 0);
    std::optional<FullyShardedDataParallel<nn::LinearImpl>> inner(std::in_place, net->b.ptr());
    std::optional<FullyShardedDataParallel<FsdpNet>> outer(std::in_place, net);
    expect_refusal({"parameter b.weight belongs to another", "Destroy the other one"}, [&] { (*outer)(x); });
    expect_refusal({"parameter weight belongs to another"}, [&] { (*inner)(torch::ones({1, 600})); });
    {
      const torch::NoGradGuard no_grad;
      (*outer)(x);  // an evaluation
    }
    inner.reset();
    (*outer)(x).sum().backward();
    outer->synchronize();
    outer.emplace(net);  // anew
    (*outer)(x).sum().backward();

    const auto other = make<FsdpNet>(8, {});
    DistributedDataParallel ddp(other);
    auto sharded = fully_shard(other);
    expect_refusal({"parameter a.weight belongs to another DistributedDataParallel"}, [&] { sharded(x); });
  });
}

// What averages or updates ordinary parameters was made before they were shared.
TEST(Fsdp, WhatWasMadeForOrdinaryParametersIsRefused) {
  on_ranks(2, [](World&) {
    const auto net = make<FsdpNet>(7, {});
    AveragedModel average(*net);
    average.update();
    ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
    auto model = fully_shard(net);
    expect_refusal({"FullyShardedDataParallel has shared a.weight among the ranks"}, [&] { average.update(); });
    expect_refusal({"FullyShardedDataParallel has shared a.weight among the ranks"},
                   [&] { const auto in_use = average.in_use(); });
    expect_refusal({"parameter 0 of group 0 belongs to a FullyShardedDataParallel"}, [&] { optimizer.step(); });
    model.synchronize();
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
    expect_refusal({"one and two are two tensors in the same memory"},
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
    of_sparse(fsdp_input(world.rank(), 0)).backward();
    EXPECT_TRUE(torch::equal(sparse->part, torch::arange(12.).view({3, 4}).narrow(1, 1, 2)));
    if (of_sparse.owner(sparse->part) == world.rank()) {
      const Tensor expected = (fsdp_input(0, 0) + fsdp_input(1, 0)).slice(0, 0, 3).slice(1, 0, 2) / 2;
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
      model(fsdp_input(world.rank(), 0)).sum().backward();
      for (const auto& parameter : net->parameters())
        EXPECT_EQ(parameter.grad().defined(), model.owner(parameter) == pair.rank());
    } else {
      EXPECT_THROW(fully_shard(net, {.group = pair}), InvalidArgument);
    }
    net->zero_grad();
    std::vector<Tensor> held;
    {
      auto model = fully_shard(net);
      model(fsdp_input(world.rank(), 0)).sum().backward();
      for (const auto& parameter : model.owned_parameters()) held.push_back(parameter.grad());
      model.synchronize();
    }
    // The parameters stay shared, and the hooks are gone.
    const auto operations = world.group().stats().operations;
    net->forward(fsdp_input(world.rank(), 0)).sum().backward();
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
          model(fsdp_input(world.rank(), static_cast<int>(step))).square().sum().backward();
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
TEST(Fsdp, ASnapshotOfAnotherDivisionIsRefusedIfEachRankHasStoredItsPart) {
  const auto folder = std::filesystem::path(testing::TempDir()) / ("fsdp-refused-" + std::to_string(::getpid()));
  std::filesystem::remove_all(folder);
  on_ranks(2, [&](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    torch::optim::AdamW optimizer(net->parameters());
    model(fsdp_input(world.rank(), 0)).sum().backward();
    optimizer.step();
    const auto other = make<FsdpNet>(7, {});
    for (auto& parameter : other->a->parameters()) parameter.set_requires_grad(false);
    auto another = fully_shard(other, {.bucket_cap_mb = 1e-3});
    bool same = true;
    for (const auto& item : net->named_parameters())
      same &= model.owner(item.value()) == another.owner(other->named_parameters()[item.key()]);
    EXPECT_FALSE(same) << "this test needs another division";
    for (const bool per_rank : {false, true}) {
      const auto snapshot_of = [&](const std::shared_ptr<FsdpNet>& of, torch::optim::AdamW& its) {
        Snapshot snapshot({.folder = folder / text(per_rank), .default_generator = false});
        return std::move(snapshot.add("model", of).add("optimizer", its, {.per_rank = per_rank}));
      };
      snapshot_of(net, optimizer).save(1);
      torch::optim::AdamW of_other(other->parameters());
      auto snapshot = snapshot_of(other, of_other);
      if (per_rank) {
        expect_refusal({"the ranks own other parameters of 'optimizer'"}, [&] { snapshot.restore(); });
      } else {
        EXPECT_EQ(snapshot.restore(), 1);
        for (const auto& parameter : another.owned_parameters())
          EXPECT_EQ(of_other.state().count(parameter.unsafeGetTensorImpl()), 1u);
        EXPECT_EQ(of_other.state().size(), another.owned_parameters().size());
      }
    }
  });
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace muster::test
