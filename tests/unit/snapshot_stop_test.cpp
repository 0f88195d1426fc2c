// When a snapshot is saved: in time, and when somebody asks the training to stop.
#include <csignal>

#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

TEST_P(SnapshotTest, SavesWhenItIsTime) {
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(options(4));
    training.add_to(snapshot);
    for (int64_t step = snapshot.restore(); step < 9; ++step) {
      training.step();
      EXPECT_FALSE(snapshot.step(step + 1));
    }
  });
  EXPECT_EQ(restored(2), 8);
}

TEST_P(SnapshotTest, OneRanksWishStopsAllAtTheSameStep) {
  for (const int asked : {0, 2}) {
    fs::remove_all(folder_);
    const auto said = said_by(3, 0, [&](World& world, Training& training, Snapshot& snapshot) {
      EXPECT_FALSE(snapshot.step(1));
      EXPECT_FALSE(snapshot.stop_requested());
      if (world.rank() == asked) snapshot.request_stop();
      EXPECT_EQ(snapshot.stop_requested(), world.rank() == asked);
      training.total = 2;
      EXPECT_TRUE(snapshot.step(2));
    });
    EXPECT_EQ(said, text("rank 0: saved step 2 in ", folder_.string(), "; run again to go on\n"));
    EXPECT_EQ(restored(3), 2);
  }
}

// A stop that is requested between epochs (in an evaluation, for example) takes effect there, not after one more step.
TEST_P(SnapshotTest, AWishIsGrantedAtABoundaryThatIsNoStepToo) {
  for (const int asked : {0, 2}) {
    fs::remove_all(folder_);
    const auto said = said_by(3, 0, [&](World& world, Training& training, Snapshot& snapshot) {
      EXPECT_FALSE(snapshot.stop_here(0));
      EXPECT_FALSE(snapshot.step(1));
      training.total = 1;
      EXPECT_FALSE(snapshot.stop_here(1));
      if (world.rank() == asked) snapshot.request_stop();
      EXPECT_TRUE(snapshot.stop_here(1));
    });
    EXPECT_EQ(said, text("rank 0: saved step 1 in ", folder_.string(), "; run again to go on\n"));
    EXPECT_EQ(restored(3), 1);
    said_by(3, 1, [&](World&, Training&, Snapshot& snapshot) {  // before the first step of the next run
      snapshot.request_stop();
      EXPECT_TRUE(snapshot.stop_here(1));
    });
    EXPECT_EQ(restored(3), 1);
  }
}

TEST_P(SnapshotTest, BeforeTheFirstStepThereIsNothingToSave) {
  const auto said = said_by(2, 0, [&](World& world, Training&, Snapshot& snapshot) {
    if (world.rank() == 1) snapshot.request_stop();
    EXPECT_TRUE(snapshot.stop_here(0));
    EXPECT_THROW(static_cast<void>(snapshot.stop_here(-1)), InvalidArgument);
  });
  EXPECT_EQ(said, "rank 0: asked to stop before the first step; there is nothing to save\n");
  EXPECT_TRUE(fs::is_empty(folder_));
}

// A signal that comes before there is a Snapshot, or between two of them, is not lost and kills nothing.
TEST_P(SnapshotTest, ASigtermWaitsForTheNextSnapshotWhereAStopSignalCoversTheWay) {
  std::atomic<int> stopped{0};
  const StopSignal covers;
  EXPECT_FALSE(covers.requested());
  const auto phase = [&](bool expected, bool raise) {
    run_threads(2, [&](World& world) {
      Snapshot snapshot(options());
      Training training(world, 2, sgd());
      training.add_to(snapshot);
      const auto steps = snapshot.restore();
      EXPECT_EQ(snapshot.step(steps + 1), expected);
      if (expected) ++stopped;
    });
    if (raise) ::raise(SIGTERM);
  };
  phase(false, false);
  phase(false, true);
  EXPECT_TRUE(covers.requested());
  phase(true, false);
  EXPECT_EQ(stopped, 2);
}

std::atomic<int> others_signals{0};

TEST_P(SnapshotTest, SigtermIsAWishWhileASnapshotLivesAndWhatItWasBeforeThen) {
  struct sigaction mine {};
  struct sigaction before {};
  mine.sa_handler = [](int) { ++others_signals; };
  others_signals = 0;
  ASSERT_EQ(::sigaction(SIGTERM, &mine, &before), 0);
  run_threads(2, [&](World& world) {
    auto one = std::make_unique<Snapshot>(options()), two = std::make_unique<Snapshot>(options());
    barrier();
    EXPECT_FALSE(one->stop_requested());
    barrier();
    if (world.rank() == 0) ::raise(SIGTERM);
    barrier();
    EXPECT_TRUE(one->stop_requested());
    EXPECT_TRUE(two->stop_requested());
    one.reset();  // not the last
    barrier();
    if (world.rank() == 0) ::raise(SIGTERM);
    barrier();
  });
  EXPECT_EQ(others_signals, 0);
  ::raise(SIGTERM);
  EXPECT_EQ(others_signals, 1);
  run_threads(1, [&](World&) {
    const Snapshot next(options());  // the signals before it were not for it
    EXPECT_FALSE(next.stop_requested());
    auto deaf = options();
    deaf.on_sigterm = false;
    const Snapshot other(deaf);
    ::raise(SIGTERM);
    EXPECT_TRUE(next.stop_requested());
    EXPECT_FALSE(other.stop_requested());
  });
  EXPECT_EQ(others_signals, 1);
  ::sigaction(SIGTERM, &before, nullptr);
}

}  // namespace
}  // namespace muster::test::snapshots
