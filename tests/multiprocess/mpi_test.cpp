// What only the mpi backend does; the contract suites do the rest. Runs under mpirun (mpi.sh).
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <thread>

#include "base/text.h"
#include "comm/core/backend.h"
#include "comm/world/world_starter.h"
#include "muster/comm/collectives.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

class Mpi : public CommContract {
 protected:
  // A world beside that of the test, with other ranks or another backend.
  static World world_of(World& outer, int rank, const WorldOptions& options, std::vector<std::string> hosts = {}) {
    const int n = outer.world_size();
    return comm::WorldStarter(std::move(hosts))
        .join({.rank = rank, .world_size = n, .local_rank = rank, .local_world_size = n}, outer.shared_store(),
              options);
  }
  static WorldOptions mpi() {
    WorldOptions options;
    options.backend = "mpi";
    options.timeout = kPatience;
    return options;
  }
  static void say(World& world, const std::string& key) { world.store().set(key, "1"); }
  static void hear(World& world, const std::string& key) { world.store().get(key, patience()); }
};
class MpiLarge : public Mpi {};

std::vector<Setup> of_mpi() {
  auto setups = all_setups();
  std::erase_if(setups, [](const Setup& setup) { return setup.backend != "mpi"; });
  return setups;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Mpi);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MpiLarge);
INSTANTIATE_TEST_SUITE_P(Comm, Mpi, testing::ValuesIn(of_mpi()), setup_name);
INSTANTIATE_TEST_SUITE_P(Comm, MpiLarge, testing::ValuesIn(of_mpi()), setup_name);

// One world after another, each with the ranks in another order than MPI's.
TEST_P(Mpi, RanksAreMusters) {
  run(3, [](World& outer) {
    for (int shift = 0; shift < 6; ++shift) {
      const int me = shift < 3 ? (outer.rank() + shift) % 3 : (2 * 3 - outer.rank() - shift + 2) % 3;
      World world = world_of(outer, me, mpi());
      const World::Scope scope(world);
      for (const int64_t count : {1, 50'000}) {
        const at::Tensor all = at::zeros({3 * count});
        all_gather_into_tensor(all, at::full({count}, me, at::kFloat));
        for (int r = 0; r < 3; ++r) EXPECT_TRUE(all.narrow(0, r * count, count).eq(r).all().item<bool>());
        const at::Tensor t = at::zeros({count});
        Work receive = irecv(t, (me + 1) % 3);
        send(at::full({count}, me, at::kFloat), (me + 2) % 3);
        receive.wait();
        EXPECT_TRUE(t.eq((me + 1) % 3).all().item<bool>());
      }
      const Group back = world.new_group({2, 0});
      if (me == 1) continue;  // leaves while the others are still at it
      const at::Tensor t = at::full({70'000}, me, at::kFloat);
      broadcast(t, 0, {.group = back});
      EXPECT_TRUE(t.eq(2).all().item<bool>()) << "rank 0 of the group is rank 2 of the world";
    }
  });
}

// Two threads of each rank make groups, each in a World of its own. Ranks may come to them in any order.
TEST_P(Mpi, ThreadsMakeGroupsAtTheSameTime) {
  run(2, [](World& outer) {
    World first = world_of(outer, outer.rank(), mpi()), second = world_of(outer, 1 - outer.rank(), mpi());
    const auto make_groups = [](World& world) {
      const World::Scope scope(world);
      for (int i = 0; i < 50; ++i) {
        const Group group = world.new_group({0, 1});
        const at::Tensor sum = at::ones({3});
        all_reduce(sum, {.group = group});
        EXPECT_TRUE(sum.eq(2).all().item<bool>());
      }
    };
    std::thread other([&] { make_groups(second); });
    make_groups(first);
    other.join();
  });
}

TEST_P(Mpi, RanksAsThreadsAreUnavailable) {
  run(1, [](World&) {
    EXPECT_CONTAINS(message_of<Unavailable>([] {
                      run_threads(
                          2, [](World&) {}, mpi());
                    }),
                    "several ranks in one process");
  });
}

// A rank leaves whose messages nobody has received: it does not wait for them, its memory is its own again, and
// the others learn of it, those that come late too.
TEST_P(Mpi, LeavesWithMessagesUnderWay) {
  constexpr int64_t kLarge = 8 << 20;
  for (const bool late : {false, true})
    run(3, [late](World& outer) {
      {
        World world = world_of(outer, outer.rank(), mpi());
        const World::Scope scope(world);
        barrier();
        if (world.rank() == 0) {
          Work sending, receiving;
          {
            sending = isend(at::ones({kLarge}), 1);
            receiving = irecv(at::ones({kLarge}), 2);
          }
          if (!late) hear(outer, "1 waits"), hear(outer, "2 waits");
          comm::backend_of(world.group()).leave({});
          say(outer, "left");
          EXPECT_THROW(sending.wait(), Aborted);
          EXPECT_THROW(receiving.wait(), Aborted);
        } else {
          if (late) hear(outer, "left");
          say(outer, text(world.rank(), " waits"));
          if (world.rank() == 1)
            EXPECT_THROW(recv(at::zeros({1}), 0, {.tag = 1}), PeerLost);  // which was never sent
          else
            EXPECT_THROW(send(at::zeros({kLarge}), 0, {.tag = 1}), PeerLost);  // which nobody receives
        }
      }
      barrier();
    });
}

TEST_P(Mpi, BetweenHosts) {
  run(5, [](World& outer) {
    WorldOptions options = mpi();
    options.backend = "hierarchical:mpi";
    World world = world_of(outer, outer.rank(), options, {"one", "one", "two", "two", "two"});
    const World::Scope scope(world);
    for (const int64_t count : {1, 3000, 400'000}) {
      const at::Tensor t = at::full({count}, world.rank() + 1, at::kFloat);
      all_reduce(t);
      EXPECT_TRUE(t.eq(15).all().item<bool>());
      broadcast(t.fill_(world.rank()), 3);
      EXPECT_TRUE(t.eq(3).all().item<bool>());
      // From any source, of which two are on this host and three on the other: at the root, and at the leader there.
      for (const int receiver : {0, 2}) {
        const Work sending = isend(at::full({count}, world.rank(), at::kFloat), receiver, {.tag = 6});
        double sum = 0;
        for (int i = 0; i < 5 && world.rank() == receiver; ++i) {
          const int source = recv(t, kAnySource, {.tag = 6});
          EXPECT_TRUE(t.eq(source).all().item<bool>());
          sum += source;
        }
        EXPECT_EQ(sum, world.rank() == receiver ? 10 : 0);
        Work(sending).wait();
      }
    }
  });
}

// More bytes than MPI's counts hold.
TEST_P(MpiLarge, BeyondTwoGibibytes) {
  run(2, [](World& world) {
    constexpr int64_t kCount = (int64_t{1} << 31) + 4099;
    const at::Tensor t = at::full({kCount}, world.rank() + 1, at::kByte);
    const auto holds = [&](int value) {
      for (const int64_t at : {int64_t{0}, (int64_t{1} << 30) - 2000, (int64_t{1} << 31) - 2000, kCount - 4000})
        EXPECT_TRUE(t.narrow(0, at, 4000).eq(value).all().item<bool>()) << at;
    };
    broadcast(t, 1);
    holds(2);
    if (world.rank() == 0) {
      send(t.fill_(7), 1);
    } else {
      recv(t, 0);
      holds(7);
    }
  });
}

}  // namespace
}  // namespace muster::test
