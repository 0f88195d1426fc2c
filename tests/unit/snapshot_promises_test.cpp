// Snapshots: a load that is refused changes nothing, a folder of another host is told apart, and two Snapshots of one
// process leave each other's files alone.
#include <algorithm>
#include <fstream>
#include <memory>
#include <stdexcept>

#include "base/atomic_file.h"
#include "checkpoint/folder.h"
#include "support/archived.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/temporary_folder.h"
#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

SnapshotOptions plain(const fs::path& folder) { return {.folder = folder, .default_generator = false}; }

// An optimizer of a class that Muster does not know, and whose load() refuses.
struct Refusing : torch::optim::SGD {
  using SGD::SGD;
  bool refuses = false;
  void load(torch::serialize::InputArchive& archive) override {
    SGD::load(archive);
    if (refuses) throw InvalidArgument("these are not my moments");
  }
};

struct TwoOptimizers {
  std::shared_ptr<SnapshotNet> net = make_net(3);
  torch::optim::Adam adam{net->a->parameters(), 0.1};
  Refusing other{net->b->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  DistributedSampler sampler;
  explicit TwoOptimizers(size_t samples) : sampler(samples, {.num_replicas = 1, .rank = 0}) {}
  void add_to(Snapshot& snapshot) {
    snapshot.add("model", *net).add("adam", adam).add("other", other).add("sampler", sampler);
  }
  void step() {
    adam.zero_grad();
    other.zero_grad();
    net->forward(torch::ones({4, 6})).square().sum().backward();
    adam.step();
    other.step();
  }
  double& rate() { return static_cast<torch::optim::AdamOptions&>(adam.param_groups()[0].options()).lr(); }
  std::string state() {
    std::string all = text(bits(*net), rate());
    for (const torch::Tensor& parameter : net->a->parameters()) {
      const auto& its = static_cast<torch::optim::AdamParamState&>(*adam.state().at(parameter.unsafeGetTensorImpl()));
      all += text(its.step(), bits(its.exp_avg()), bits(its.exp_avg_sq()));
    }
    for (const torch::Tensor& parameter : net->b->parameters())
      all += bits(static_cast<torch::optim::SGDParamState&>(*other.state().at(parameter.unsafeGetTensorImpl()))
                      .momentum_buffer());
    return all;
  }
};

TEST(SnapshotPromises, ARefusedLoadChangesNothing) {
  const TemporaryFolder folder;
  run_threads(1, [&](World&) {
    TwoOptimizers training(40);
    training.step();
    Snapshot snapshot(plain(folder / "run"));
    training.add_to(snapshot);
    snapshot.save(1);
  });
  for (const bool by_sampler : {true, false})
    run_threads(1, [&](World&) {
      TwoOptimizers training(by_sampler ? 41 : 40);
      training.rate() = 0.025;
      training.step();
      training.step();
      training.other.refuses = true;
      const std::string before = training.state();
      const double& rate = training.rate();
      Snapshot snapshot(plain(folder / "run"));
      training.add_to(snapshot);
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { snapshot.restore(); }),
                      by_sampler ? "'sampler' cannot load" : "'other' cannot load its part of the snapshot: these are");
      EXPECT_EQ(training.state(), before);
      EXPECT_EQ(&training.rate(), &rate);  // a program may keep a reference
      if (by_sampler) return;
      training.step();  // and goes on
      training.other.refuses = false;
      EXPECT_EQ(snapshot.restore(), 1);
      EXPECT_EQ(training.rate(), 0.1);
      EXPECT_NE(training.state(), before);
    });
}

// What one rank refuses, the others have not loaded.
TEST(SnapshotPromises, ALoadThatOneRankRefusesChangesNothingOnTheOthers) {
  const TemporaryFolder folder;
  run_threads(2, [&](World& world) {
    int64_t number = 5;
    struct Other {
      bool refuses = false;
      void save(torch::serialize::OutputArchive& archive) const { archive.write("one", torch::ones({1})); }
      void load(torch::serialize::InputArchive&) const {
        if (refuses) throw std::runtime_error("not today");
      }
    } other;
    const auto net = make_net(1);
    Snapshot snapshot(plain(folder / "run"));
    snapshot.add("model", *net).add("number", number).add("other", other);
    snapshot.save(1);
    number = 6;
    {
      const torch::NoGradGuard no_grad;
      net->a->weight.fill_(7);
    }
    other.refuses = world.rank() == 1;
    EXPECT_CONTAINS(message_of<Error>([&] { snapshot.restore(); }), "'other' cannot load its part of the snapshot");
    EXPECT_EQ(number, 6);
    EXPECT_TRUE(torch::equal(net->a->weight, torch::full_like(net->a->weight, 7)));
  });
}

// The elements of expanded tensors lie in one place.
TEST(SnapshotPromises, ExpandedTensorsAreRestored) {
  struct Net : torch::nn::Module {
    torch::Tensor mask = register_buffer("mask", torch::ones({1, 3, 3}).expand({4, 3, 3}));
  };
  const TemporaryFolder folder;
  run_threads(1, [&](World&) {
    Net net;
    torch::Tensor tensor = torch::ones({2, 1}).expand({2, 5});
    const auto fill = [&](double value) {
      net.mask[0].fill_(value);
      tensor.select(1, 0).fill_(value);
    };
    Snapshot snapshot(plain(folder / "run"));
    snapshot.add("net", net).add("tensor", tensor);
    fill(3);
    snapshot.save(1);
    fill(4);
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_TRUE(torch::equal(net.mask, torch::full({4, 3, 3}, 3.)));
    EXPECT_TRUE(torch::equal(tensor, torch::full({2, 5}, 3.)));
    EXPECT_EQ(net.mask.stride(0), 0);

    // Values that differ do not fit.
    torch::Tensor whole = torch::arange(10.).view({2, 5});
    Snapshot other(plain(folder / "other"));
    other.add("tensor", whole).save(1);
    Snapshot refuses(plain(folder / "other"));
    refuses.add("tensor", tensor);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { refuses.restore(); }), "are one in memory");
    EXPECT_TRUE(torch::equal(tensor, torch::full({2, 5}, 3.)));
    whole = torch::full({2, 5}, NAN);
    Snapshot nothing(plain(folder / "nan"));
    nothing.add("tensor", whole).save(1);
    Snapshot takes(plain(folder / "nan"));
    takes.add("tensor", tensor);
    EXPECT_EQ(takes.restore(), 1);
    EXPECT_TRUE(tensor.isnan().all().item<bool>());
  });
}

// On each host's own disk, ranks may start on other hosts.
TEST(SnapshotPromises, RanksThatHaveChangedTheirHostsAreTold) {
  const TemporaryFolder folder;
  const auto run = [&](std::vector<std::string> hosts, int64_t saves) {
    std::vector<int64_t> restored(hosts.size());
    std::vector<std::string> messages(hosts.size());
    run_threads(static_cast<int>(hosts.size()), [&](World& world) {
      const auto rank = static_cast<size_t>(world.rank());
      const auto net = make_net(1);
      auto options = plain(folder / hosts[rank]);
      options.sharded = true;
      Snapshot snapshot(options);
      snapshot.add("model", *net);
      try {
        restored[rank] = snapshot.restore();
      } catch (const InvalidArgument& error) {
        messages[rank] = error.what();
      }
      if (saves > 0) snapshot.save(saves);
    });
    for (const auto& message : messages) EXPECT_EQ(message, messages[0]);
    return messages[0].empty() ? text(restored[0]) : messages[0];
  };
  EXPECT_EQ(run({"a", "b", "c"}, 10), "0");
  EXPECT_EQ(run({"a", "b", "c"}, 20), "10");
  EXPECT_CONTAINS(run({"b", "a", "c"}, 0), "rank 1 has a snapshot of step 20 in its folder");
  EXPECT_EQ(run({"a", "b", "c"}, 0), "20");  // nothing was removed
  testing::internal::CaptureStderr();
  EXPECT_EQ(run({"d", "b", "c"}, 0), "0");
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "rank 1 has a part of a snapshot of step 20 in its folder");
  EXPECT_EQ(run({"a", "b", "c"}, 0), "20");
}

TEST(SnapshotPromises, FilesThatThisProcessWritesAreNotRemoved) {
  const TemporaryFolder temporary;
  const checkpoint::Folder folder(temporary / "run");
  const fs::path left = text(folder.snapshot(3).string(), ".0123abcd.tmp");  // by a process that was killed
  std::ofstream(left) << "half";
  AtomicFile file(folder.snapshot(5));
  file.write("whole");
  folder.remove_temporaries(0, 1);
  EXPECT_FALSE(fs::exists(left));
  file.commit(true);
  EXPECT_EQ(folder.snapshots(), (std::vector<int64_t>{5}));
}

TEST(SnapshotPromises, AScoreIsThatOfTheNextSnapshotThatIsSaved) {
  const TemporaryFolder folder;
  run_threads(1, [&](World&) {
    const auto net = make_net(1);
    for (const bool asynchronous : {false, true}) {
      auto options = plain(folder / text("run", asynchronous));
      options.keep_best = 2;
      options.asynchronous = asynchronous;
      Snapshot snapshot(options);
      snapshot.add("model", *net);
      snapshot.score(0.5);
      fs::remove_all(options.folder);
      EXPECT_THROW(
          {
            snapshot.save(1);
            snapshot.wait();
          },
          Unavailable);
      fs::create_directories(options.folder);
      snapshot.save(2);
      snapshot.wait();
      snapshot.save(3);
      snapshot.wait();
      EXPECT_EQ(snapshot.best(), (std::vector<int64_t>{2}));
    }
  });
}

// Where its thread cannot start, the caller writes.
TEST(SnapshotPromisesFork, AnAsynchronousSaveNeedsNoThread) {
  const TemporaryFolder folder;
  ForkedRanks child(1, [&](int) -> std::string {
    int64_t restored = 0;
    run_threads(1, [&](World&) {
      auto options = plain(folder / "run");
      options.asynchronous = true;
      int64_t number = 4;
      Snapshot snapshot(options);
      snapshot.add("number", number);
      snapshot.save(4);  // makes its group
      snapshot.wait();
      number = 5;
      {
        const NoMoreThreads none;
        snapshot.save(5);
      }
      number = 6;
      snapshot.wait();
      restored = 10 * snapshot.restore() + number;
    });
    return std::to_string(restored);
  });
  EXPECT_EQ(child.wait(0, patience()).said, "55");
}

// An item may have the name that a rank's part has.
TEST(SnapshotPromises, AnAsynchronousSaveTellsNamesApart) {
  const TemporaryFolder folder;
  run_threads(1, [&](World&) {
    auto options = plain(folder / "run");
    options.asynchronous = true;
    double best = 1;
    std::map<std::string, double> of_rank = {{"best", 2}};
    Snapshot snapshot(options);
    snapshot.add("best", best).add("rank 0", of_rank, {.per_rank = false});
    snapshot.save(1);
    best = of_rank["best"] = 9;
    EXPECT_EQ(snapshot.restore(), 1);
    EXPECT_EQ(best, 1);
    EXPECT_EQ(of_rank["best"], 2);
  });
}

}  // namespace
}  // namespace muster::test::snapshots
