// Snapshots of sharded models and their optimizers: each rank stores what it owns, and gets what it needs.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/nn.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "muster/optim/optimizers.h"
#include "support/full_run.h"
#include "support/memory_peak.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;

fs::path folder_for(const char* test) {
  return fs::path(testing::TempDir()) / text("fsdp-snapshot-", test, "-", ::getpid());
}

// Each rank stores what it owns, in one file or in several; a new job resumes to the bit.
TEST(FsdpSnapshot, WithFullShard) {
  const auto folder = std::filesystem::path(testing::TempDir()) / text("fsdp-full-", ::getpid());
  for (const bool sharded : {false, true}) {
    std::vector<Tensor> undisturbed;
    for (const bool again : {false, true}) {
      on_hosts(kTwoEach, [&](World& world) {
        const auto net = make<FsdpNet>(7, {});
        {  // dense, but not contiguous
          const torch::NoGradGuard no_grad;
          net->b->weight.set_data(net->b->weight.t().contiguous().t());
        }
        auto model = fully_shard(net, full());
        torch::optim::AdamW optimizer(net->parameters(), 1e-2);
        Snapshot snapshot({.folder = folder, .sharded = sharded, .default_generator = false});
        snapshot.add("model", net).add("optimizer", optimizer);
        const int64_t first = snapshot.restore();
        EXPECT_EQ(first, again ? 2 : 0);
        for (int64_t step = first; step < 4; ++step) {
          optimizer.zero_grad();
          model(fsdp_input(world.rank(), static_cast<int>(step))).square().sum().backward();
          optimizer.step();
          if (step == 1) snapshot.save(2);
        }
        model.gather();
        if (world.rank() == 0) {
          const auto now = copies(net->named_parameters()).values();
          if (!again) undisturbed = now;
          for (size_t i = 0; i < now.size(); ++i)
            EXPECT_TRUE(torch::equal(now[i], undisturbed[i])) << i << ": " << (now[i] - undisturbed[i]).abs().max();
        }
        model.synchronize();
        if (again) {
          Snapshot of_each({.folder = folder / "each", .sharded = sharded, .default_generator = false});
          of_each.add("model", net, {.per_rank = true});
          EXPECT_EQ(of_each.restore(), 0);
          expect_refusal({"none has all of it"}, [&] { of_each.save(1); });
        }
        // A part of the ranks has not all parameters.
        const Group some = world.new_group({0, 1});
        if (!again || !some.is_member()) return;
        Snapshot of_some({.folder = folder / "some", .sharded = sharded, .default_generator = false, .group = some});
        of_some.add("model", net);
        EXPECT_EQ(of_some.restore(), 0);
        expect_refusal({"all ranks of the FullyShardedDataParallel"}, [&] { of_some.save(1); });
      });
    }
    std::filesystem::remove_all(folder);
  }
}

// One of three ranks owns nothing: its optimizer has no parameters, and the snapshot no states of it.
TEST(FsdpSnapshot, OfARankThatOwnsNothing) {
  const auto folder = std::filesystem::path(testing::TempDir()) / text("fsdp-nothing-", ::getpid());
  for (const bool again : {false, true})
    on_hosts({"a", "a", "b"}, [&](World& world) {
      const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {});
      auto model = fully_shard(net);
      torch::optim::Adagrad optimizer(model.owned_parameters());
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("model", net).add("optimizer", optimizer);
      EXPECT_EQ(snapshot.restore(), again ? 1 : 0);
      if (!again) {
        model(fsdp_input(world.rank(), 0)).sum().backward();
        optimizer.step();
        snapshot.save(1);
        return;
      }
      model.synchronize();
      EXPECT_FALSE(torch::equal(net->b->weight, other->b->weight));
      EXPECT_EQ(optimizer.state().size(), model.owned_parameters().size());
    });
  std::filesystem::remove_all(folder);
}

// A job that trains with one of the ways to divide a model among ranks.
enum class Way { kDdp, kHybrid, kFull };
struct Job {
  Way way;
  HostOfRank hosts;
};
const std::vector<Job> kJobs = {{Way::kDdp, {"a"}},         {Way::kDdp, {"a", "b", "a"}},
                                {Way::kHybrid, {"a", "a"}}, {Way::kHybrid, {"a", "b", "b"}},
                                {Way::kFull, {"a", "b"}},   {Way::kFull, {"a", "b", "b", "a"}}};

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;
template <typename Kind, typename Options>
MakeOptimizer optimizer(Options options) {
  return [options](std::vector<Tensor> parameters) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>(parameters.begin(), parameters.begin() + 3),
                        std::make_unique<Options>(options));
    groups.emplace_back(std::vector<Tensor>(parameters.begin() + 3, parameters.end()));
    return std::make_unique<Kind>(std::move(groups), options);
  };
}
const std::vector<MakeOptimizer> kOptimizers = {
    optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true)),
    optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9)),
    optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.5)),
    optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).lr_decay(0.01)),
    optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2)),
    [](const std::vector<Tensor>& all) {
      return std::make_unique<muster::NAdam>(
          std::vector{muster::NAdam::group({all.begin(), all.begin() + 3}, {.lr = 1e-2}),
                      torch::optim::OptimizerParamGroup(std::vector<Tensor>(all.begin() + 3, all.end()))});
    },
    [](std::vector<Tensor> all) {
      return std::make_unique<muster::AdamW>(std::move(all), optim::AdamWOptions{.lr = 1e-2, .amsgrad = true});
    }};

// Trains from the newest snapshot on until `last`, saves there, and returns the parameters. All ranks have the same
// batch, so that their number makes no difference but for rounding: in doubles, because Adam makes much of that where
// gradients are small.
std::vector<Tensor> go_on(const Job& job, const MakeOptimizer& make_optimizer, const SnapshotOptions& options,
                          int64_t first, int64_t last) {
  std::vector<Tensor> result;
  on_hosts(job.hosts, [&](World& world) {
    const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(first), {});
    net->to(torch::kDouble);
    std::optional<DistributedDataParallel<FsdpNet>> ddp;
    std::optional<FullyShardedDataParallel<FsdpNet>> sharded;
    if (job.way == Way::kDdp)
      ddp.emplace(net);
    else
      sharded.emplace(net, job.way == Way::kFull ? full() : FsdpOptions{});
    const auto its_optimizer = make_optimizer(net->parameters());
    Snapshot snapshot(options);
    snapshot.add("model", net).add("optimizer", *its_optimizer);
    EXPECT_EQ(snapshot.restore(), first);
    for (int64_t step = first; step < last; ++step) {
      its_optimizer->zero_grad();
      const Tensor x = fsdp_input(0, static_cast<int>(step)).to(torch::kDouble);
      (ddp ? ddp->forward(x) : sharded->forward(x)).square().mean().backward();
      its_optimizer->step();
    }
    if (first == 0) snapshot.save(last);
    if (sharded) sharded->gather();
    if (world.rank() == 0) result = copies(net->named_parameters()).values();
    if (sharded) sharded->synchronize();
  });
  return result;
}

// What one job has saved, every other restores: on more ranks or fewer, on other hosts, sharded in another way or not.
TEST(FsdpSnapshot, EveryJobGoesOnWithWhatAnyHasSaved) {
  const auto folder = folder_for("any");
  const SnapshotOptions undisturbed{.folder = folder / "undisturbed", .default_generator = false};
  for (size_t o = 0; o < kOptimizers.size(); ++o) {
    const auto expected = go_on(kJobs[0], kOptimizers[o], undisturbed, 0, 4);
    for (size_t from = o % 2; from < kJobs.size(); from += 2) {
      SnapshotOptions options{.folder = folder / "saved", .sharded = (from + o) % 3 != 0, .default_generator = false};
      go_on(kJobs[from], kOptimizers[o], options, 0, 2);
      for (size_t to = 0; to < kJobs.size(); ++to) {
        if (!full_run() && (to + from + o) % 5 != 0) continue;
        SCOPED_TRACE(text("optimizer ", o, ", from ", from, " to ", to, options.sharded ? ", sharded" : ""));
        const auto got = go_on(kJobs[to], kOptimizers[o], options, 2, 4);
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-9, 1e-9)) << (got[i] - expected[i]).abs().max();
      }
      fs::remove_all(options.folder);
    }
    fs::remove_all(undisturbed.folder);
  }
  fs::remove_all(folder);
}

// An optimizer over owned_parameters() has others on each rank, so it is stored for each, and needs the same ranks.
TEST(FsdpSnapshot, OfOwnedParametersNeedsTheSameRanks) {
  const auto folder = folder_for("owned");
  const auto in_job = [&](const HostOfRank& hosts, const std::function<void(Snapshot&)>& use) {
    on_hosts(hosts, [&](World&) {
      const auto net = make<FsdpNet>(7, {});
      auto model = fully_shard(net);
      torch::optim::Adagrad optimizer(model.owned_parameters());
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("model", net).add("optimizer", optimizer);
      use(snapshot);
    });
  };
  in_job({"a", "a"}, [](Snapshot& snapshot) { snapshot.save(1); });
  in_job({"a", "a"}, [](Snapshot& snapshot) { EXPECT_EQ(snapshot.restore(), 1); });
  in_job({"a", "a", "a"}, [](Snapshot& snapshot) {
    expect_refusal({"was written by 2 ranks, but this job has 3", "each rank has stored 'optimizer'"},
                   [&] { snapshot.restore(); });
  });
  in_job({"a", "b"}, [](Snapshot& snapshot) {  // each rank owns all: it could be stored once
    expect_refusal({"'optimizer' is per rank in the snapshot, and not here"}, [&] { snapshot.restore(); });
  });
  fs::remove_all(folder);
}

// Each rank stores the whole model, because its buffers are its own.
TEST(FsdpSnapshot, ForEachRank) {
  struct Counting : FsdpNet {
    Tensor calls = register_buffer("calls", torch::zeros({1}));
    Tensor forward(const Tensor& x) {
      calls += 1;
      return FsdpNet::forward(x);
    }
  };
  const auto folder = folder_for("each");
  const auto in_job = [&](const HostOfRank& hosts, const FsdpOptions& options,
                          const std::function<void(FullyShardedDataParallel<Counting>&, Snapshot&, World&)>& use) {
    on_hosts(hosts, [&](World& world) {
      FsdpOptions with = options;
      with.broadcast_buffers = false;
      auto model = fully_shard(make<Counting>(7, {}), with);
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("model", model.module(), {.per_rank = true});
      use(model, snapshot, world);
    });
  };
  const HostOfRank together{"a", "a"};
  in_job(together, {}, [](auto& model, Snapshot& snapshot, World& world) {
    snapshot.restore();
    model.module()->calls.fill_(10 * world.rank());
    snapshot.save(1);
  });
  for (const bool gathers : {false, true})
    in_job(gathers ? kApart : together, gathers ? full() : FsdpOptions{},
           [](auto& model, Snapshot& snapshot, World& world) {
             const torch::NoGradGuard no_grad;
             for (auto& parameter : model.owned_parameters()) parameter.zero_();
             EXPECT_EQ(snapshot.restore(), 1);
             model.forward(fsdp_input(0, 0));  // finds no change that it should not find
             EXPECT_EQ(model.module()->calls.template item<float>(), static_cast<float>(10 * world.rank() + 1));
             model.gather();
             expect_equal(*model.module(), *make<Counting>(7, {}));
             model.synchronize();
           });
  fs::remove_all(folder);
}

// Between torch::load() and forward() the parameters are not shared, so that no rank knows whose states they are.
struct OwnAdamW : torch::optim::AdamW {  // whose state is stored as an archive
  using AdamW::AdamW;
};
template <typename Optimizer>
void expect_no_save_before_sharing(const std::string& name) {
  const auto folder = folder_for(name.c_str());
  for (const bool sharded : {false, true})
    on_hosts({"a", "a", "b"}, [&](World& world) {
      const auto net = make<FsdpNet>(7, {});
      auto model = fully_shard(net);
      Optimizer optimizer(net->parameters());
      Snapshot snapshot({.folder = folder / text(sharded), .sharded = sharded, .default_generator = false});
      snapshot.add("model", net).add("optimizer", optimizer);
      model.forward(fsdp_input(world.rank(), 0)).sum().backward();
      optimizer.step();
      model.synchronize();
      for (auto& parameter : net->parameters()) parameter.set_data(parameter.detach().clone());
      expect_refusal({"'optimizer' would be stored once, but each rank has another part", "Call forward()"},
                     [&] { snapshot.save(1); });
      model.forward(fsdp_input(world.rank(), 0));
      snapshot.save(1);
    });
  fs::remove_all(folder);
}
TEST(FsdpSnapshot, NotBeforeLoadedParametersAreShared) {
  expect_no_save_before_sharing<torch::optim::AdamW>("loaded");
  expect_no_save_before_sharing<OwnAdamW>("loaded-own");
}

// Two models of one name, each on ranks of its own, and one snapshot: their optimizers are stored for each rank.
TEST(FsdpSnapshot, OfModelsOnPartsOfTheRanks) {
  const auto folder = folder_for("parts");
  for (const bool again : {false, true})
    on_hosts({"a", "a", "a", "a"}, [&](World& world) {
      const Group first = world.new_group({0, 1}), second = world.new_group({2, 3});
      const Group& group = first.is_member() ? first : second;
      const auto net = make<FsdpNet>(7 + static_cast<uint64_t>(world.rank()) / 2, {});
      auto model = fully_shard(net, {.group = group});
      torch::optim::AdamW optimizer(net->parameters());
      Snapshot snapshot({.folder = folder, .default_generator = false});
      snapshot.add("model", net, {.per_rank = true}).add("optimizer", optimizer);
      EXPECT_EQ(snapshot.restore(), again ? 1 : 0);
      if (!again) {
        model.forward(fsdp_input(world.rank(), 0)).sum().backward();
        optimizer.step();
        snapshot.save(1);
      }
      EXPECT_EQ(optimizer.state().size(), model.owned_parameters().size());
      model.synchronize();
    });
  fs::remove_all(folder);
}

// A model with more layers takes what one process has saved: each rank what it owns.
TEST(FsdpSnapshot, InPart) {
  struct Deeper : FsdpNet {
    nn::Linear e = register_module("e", nn::Linear(600, 600));
  };
  const auto folder = folder_for("in-part");
  for (const bool sharded : {false, true}) {
    const SnapshotOptions options{.folder = folder / text(sharded), .sharded = sharded, .default_generator = false};
    Values saved, before;
    on_hosts({"a"}, [&](World&) {
      const auto net = make<FsdpNet>(7, {});
      saved = copies(net->named_parameters());
      Snapshot snapshot(options);
      snapshot.add("model", net).save(1);
    });
    on_hosts(kTwoEach, [&](World& world) {
      const auto net = make<Deeper>(8, {});
      if (world.rank() == 0) before = copies(net->named_parameters());
      auto model = fully_shard(net, full());
      Snapshot snapshot(options);
      snapshot.add("model", net);
      EXPECT_EQ(snapshot.restore({.strict = false}), 1);
      model.gather();
      if (world.rank() == 0)
        for (const auto& each : copies(net->named_parameters())) {
          const Tensor* const expected = saved.find(each.key());
          EXPECT_TRUE(torch::equal(each.value(), expected ? *expected : before[each.key()])) << each.key();
        }
      model.synchronize();
    });
  }
  fs::remove_all(folder);
}

// An optimizer for another model, or of another kind.
TEST(FsdpSnapshot, AnotherOptimizerIsRefused) {
  const auto folder = folder_for("another");
  const SnapshotOptions options{.folder = folder, .sharded = true, .default_generator = false};
  go_on(kJobs[2], kOptimizers[0], options, 0, 2);
  on_hosts({"a", "b"}, [&](World&) {
    const auto net = make<FsdpNet>(7, {});
    net->to(torch::kDouble);
    auto model = fully_shard(net, full());
    const auto own = [&] {
      std::vector<Tensor> values;
      for (const auto& parameter : model.owned_parameters()) values.push_back(parameter.detach().clone());
      return values;
    };
    const auto before = own();
    const auto refuse = [&](torch::optim::Optimizer& optimizer, const std::vector<std::string>& parts) {
      Snapshot snapshot(options);
      snapshot.add("model", net).add("optimizer", optimizer);
      expect_refusal(parts, [&] { snapshot.restore(); });
      EXPECT_TRUE(optimizer.state().empty());
      const auto after = own();
      for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(after[i], before[i]));
    };
    const auto parameters = net->parameters();
    refuse(*kOptimizers[1](parameters), {"this optimizer keeps nothing like 'optimizer/state/1/step'"});
    refuse(*kOptimizers[0]({parameters.begin(), parameters.begin() + 6}),
           {"'optimizer' in the snapshot: expected ", " parameters in a group, as here, got 5"});
    refuse(*kOptimizers[0]({parameters.rbegin(), parameters.rend()}),
           {"'optimizer/state/1/exp_avg' is Double [600 x 12] in the snapshot, and its parameter is Double [5]"});
  });
  fs::remove_all(folder);
}

// A plain file fills a sharded model, also one that was made without memory, and gets all of it.
TEST(FsdpSnapshot, SafetensorsFiles) {
  const auto folder = folder_for("plain");
  fs::create_directories(folder);
  const auto net = make<FsdpNet>(7, {});
  const auto path = folder / "net.safetensors";
  save_safetensors(path, *net, {{"format", "pt"}});
  for (const bool gathers : {false, true})
    for (const bool without_memory : {false, true}) {
      SCOPED_TRACE(text(gathers, without_memory));
      on_hosts(kTwoEach, [&](World& world) {
        FsdpOptions options = gathers ? full() : FsdpOptions{};
        const auto file = std::make_shared<const SafetensorsFile>(path);
        options.init = [file](const std::string& name, Tensor values, at::Generator) {
          values.copy_(file->tensor(name));
        };
        const auto own = without_memory ? on_meta([] { return std::make_shared<FsdpNet>(); }) : make<FsdpNet>(8, {});
        auto model = fully_shard(own, options);
        if (!without_memory) {
          model.synchronize();
          file->load_into(*own);
        }
        model.forward(fsdp_input(world.rank(), 0)).sum().backward();  // finds no change that it should not find
        model.gather();
        expect_equal(*own, *net);
        const auto again = folder / text("rank-", world.rank(), ".safetensors");
        save_safetensors(again, *own, {{"format", "pt"}});
        model.synchronize();
        std::ifstream a(path, std::ios::binary), b(again, std::ios::binary);
        EXPECT_TRUE(std::equal(std::istreambuf_iterator<char>(a), {}, std::istreambuf_iterator<char>(b), {}));
      });
    }
  fs::remove_all(folder);
}

// The others send what they own, whether rank 0 can write it or not.
TEST(FsdpSnapshotProcess, OneFileThatCannotBeWritten) {
  const auto folder = folder_for("full-disk");
  const auto ends = in_processes({"a", "a", "a"}, [&](World& world) {
    const auto net = make<FsdpNet>(7, {}), alone = make<FsdpNet>(8, {});
    auto model = fully_shard(net);
    std::optional<Snapshot> snapshot(std::in_place, SnapshotOptions{.folder = folder, .default_generator = false});
    snapshot->add("model", net);
    snapshot->restore();
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    if (world.rank() == 0) {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};
      ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    const std::string what = message_of<Unavailable>([&] { snapshot->save(1); });
    EXPECT_CONTAINS(what, "step-1.snapshot.safetensors");
    ::setrlimit(RLIMIT_FSIZE, &before);
    snapshot->save(2);
    snapshot.emplace(SnapshotOptions{.folder = folder, .default_generator = false});
    snapshot->add("model", *alone);
    EXPECT_EQ(snapshot->restore(), 2);
    model.synchronize();
    expect_equal(*alone, *net);
    model.synchronize();
    return std::string("done");
  });
  for (const auto& end : ends) EXPECT_EQ(end.said, "done");
  fs::remove_all(folder);
}

// A rank needs memory for a few MiB to save, and to restore for the part that it has read and for what it owns.
TEST(FsdpSnapshotProcess, NeedsNoMemoryForWhatOthersOwn) {
  struct Wide : nn::Module {
    nn::Sequential layers = register_module("layers", nn::Sequential());
    Wide() {
      for (int i = 0; i < 8; ++i) layers->push_back(nn::Linear(1024, 1024));
    }
    Tensor forward(const Tensor& x) { return layers->forward(x); }
  };
  constexpr size_t kAll = 3 * 8 * 1024 * 1024 * sizeof(float);  // with the states of Adam
  const auto folder = folder_for("memory");
  for (const bool sharded : {true, false}) {
    for (const bool again : {false, true}) {
      const auto ends = in_processes({"a", "a", "b", "b"}, [&](World& world) {
        const auto net = make<Wide>(7, {});
        auto model = fully_shard(net, full());
        torch::optim::Adam optimizer(net->parameters());
        Snapshot snapshot({.folder = folder, .sharded = sharded, .default_generator = false});
        snapshot.add("model", net).add("optimizer", optimizer);
        if (!again) {
          model.forward(torch::ones({2, 1024})).sum().backward();
          optimizer.step();
          const size_t peak = peak_of([&] { snapshot.save(1); });
          EXPECT_LT(peak, kAll / 4) << "rank " << world.rank();  // no rank collects what the others have
          return std::string("done");
        }
        const size_t peak = peak_of([&] { EXPECT_EQ(snapshot.restore(), 1); });
        // It has what it owns, a quarter of all. In a shard that it reads there is as much again; rank 0 has read the
        // only file.
        if (sharded || world.rank() > 0) {
          EXPECT_LT(peak, kAll * 5 / 8) << "rank " << world.rank();
        }
        EXPECT_EQ(optimizer.state().empty(), model.owned_parameters().empty());
        return std::string("done");
      });
      for (const auto& end : ends) EXPECT_EQ(end.said, "done");
    }
    fs::remove_all(folder);
  }
}

}  // namespace
}  // namespace muster::test
