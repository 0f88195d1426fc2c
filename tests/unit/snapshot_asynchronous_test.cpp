// Snapshots that a thread writes while the training goes on.
#include <optional>
#include <system_error>
#include <thread>

#include "unit/snapshot_fixture.h"

namespace muster::test::snapshots {
namespace {

// What is stored is what was there when step() returned, whatever the training does while it is written.
TEST_P(SnapshotTest, AnAsynchronousSaveIsOfItsStep) {
  auto with = options(2);
  with.asynchronous = true;
  run_threads(3, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    for (int64_t step = 1; step <= 7; ++step) {
      training.step();  // whose collectives and those of the thread may come in any order
      EXPECT_FALSE(snapshot.step(step));
    }
    const auto before = training.state();
    training.step();
    snapshot.save(8);
    const auto saved = training.state();
    for (int i = 0; i < 3; ++i) training.step();
    snapshot.wait();
    EXPECT_FALSE(before == saved);
    Training again(world, 9, sgd());
    Snapshot second(options());
    again.add_to(second);
    EXPECT_EQ(second.restore(), 8);
    EXPECT_TRUE(again.state() == saved);
  });
  EXPECT_EQ(files().size(), sharded() ? 8u : 2u);  // those of steps 6 and 8
}

// Large enough that it is still being written when the training changes it.
TEST_P(SnapshotTest, AnAsynchronousSaveHasMemoryOfItsOwn) {
  auto with = options();
  with.asynchronous = true;
  run_threads(2, [&](World&) {
    torch::Tensor large = torch::full({16 << 20}, 3.0F), other = torch::full({4 << 20}, 4.0F);
    Snapshot snapshot(with);
    snapshot.add("large", large, {.per_rank = false}).add("other", other);
    for (const int64_t step : {1, 2}) {
      large.fill_(3);
      other.fill_(4);
      snapshot.save(step);
      large.fill_(7);
      other.fill_(8);
      snapshot.wait();
      EXPECT_EQ(snapshot.restore(), step);
      EXPECT_TRUE(large.eq(3).all().item<bool>());
      EXPECT_TRUE(other.eq(4).all().item<bool>());
    }
  });
}

// Threads of this process that write a snapshot.
size_t writers() {
  size_t count = 0;
  std::error_code ended;  // of a thread meanwhile
  for (const auto& task : fs::directory_iterator("/proc/self/task", ended)) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    count += std::getline(file, name) && name == "muster-snapshot" ? 1 : 0;
  }
  return count;
}

// A stop is saved, whatever went wrong before.
TEST_P(SnapshotTest, AStopIsSavedAfterAnAsynchronousFailure) {
  auto with = options(2);
  with.asynchronous = true;
  testing::internal::CaptureStderr();
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    snapshot.save(1);  // makes the group of the threads, which needs a file, too
    snapshot.wait();
    {
      std::optional<FullDisk> full;
      if (world.rank() == 0) full.emplace(40'000);
      barrier();
      EXPECT_FALSE(snapshot.step(2));
      while (writers() > 0) std::this_thread::yield();
      barrier();
    }
    snapshot.request_stop();
    training.total = 3;
    EXPECT_TRUE(snapshot.stop_here(3));
  });
  EXPECT_CONTAINS(testing::internal::GetCapturedStderr(), "no snapshot of step 2: ");
  EXPECT_EQ(restored(2), 3);
}

TEST_P(SnapshotTest, AnAsynchronousSaveIsOverBeforeTheNextAndAtTheEnd) {
  auto with = options();
  with.asynchronous = true;
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    for (const int64_t step : {1, 2, 3}) {
      training.total = step;
      snapshot.save(step);
    }
  });
  EXPECT_EQ(restored(2), 3);
  run_threads(2, [&](World& world) {
    Training training(world, 1, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 3);
    training.total = 4;
    snapshot.save(4);
    EXPECT_EQ(snapshot.restore(), 4);  // waits
    training.total = 5;
    snapshot.save(5);
    if (world.rank() == 1) snapshot.request_stop();
    training.total = 6;
    EXPECT_TRUE(snapshot.step(6));
    EXPECT_TRUE(fs::exists(folder_ / "step-6.snapshot.safetensors"));  // not later
    EXPECT_TRUE(fs::exists(folder_ / "step-5.snapshot.safetensors"));
  });
}

TEST_P(SnapshotTest, WhatGoesWrongAsynchronouslySurfacesAtTheNextCall) {
  auto with = options(2);
  with.asynchronous = true;
  testing::internal::CaptureStderr();
  run_threads(2, [&](World& world) {
    Training training(world, 2, sgd());
    Snapshot snapshot(with);
    training.add_to(snapshot);
    EXPECT_EQ(snapshot.restore(), 0);
    training.total = 2;
    EXPECT_FALSE(snapshot.step(2));
    snapshot.wait();
    const auto before = files();
    barrier();
    {
      std::optional<FullDisk> full;
      if (world.rank() == 0) full.emplace(40'000);
      barrier();
      snapshot.save(4);
      EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.wait(); }), "File too large");
      snapshot.wait();  // it has been said
      snapshot.save(5);
      EXPECT_CONTAINS(message_of<Unavailable>([&] { snapshot.save(6); }), "File too large");
      EXPECT_FALSE(snapshot.step(6));
      EXPECT_FALSE(snapshot.step(8));  // says it of 6
      snapshot.request_stop();
      EXPECT_CONTAINS(message_of<Unavailable>([&] { (void)snapshot.step(9); }), "File too large");
      barrier();
      EXPECT_EQ(files(), before);
    }
    barrier();
    training.total = 10;
    EXPECT_TRUE(snapshot.step(10));
  });
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(said, "no snapshot of step 6: ");
  EXPECT_CONTAINS(said, "no snapshot of step 8: ");
  EXPECT_EQ(restored(2), 10);
}

}  // namespace
}  // namespace muster::test::snapshots
