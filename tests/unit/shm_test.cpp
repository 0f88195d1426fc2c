// shm/: memory files, the arena, the bell and the spin. The meeting of ranks is in exchange_test.cpp, and the watch
// over peers is in peer_watch_test.cpp.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <latch>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "muster/base/error.h"
#include "shm/arena.h"
#include "shm/bell.h"
#include "shm/mapping.h"
#include "shm/spin.h"
#include "support/patience.h"
#include "support/sanitized.h"
#include "support/temporary_folder.h"

namespace muster::shm {
namespace {

using std::chrono::milliseconds;

// --- mapping ---

TEST(ShmMapping, OnePerProcessAndFile) {
  const UniqueFd fd = create_memfd("test", 10'000);
  const auto first = map_memfd(fd.get());
  EXPECT_EQ(first->size() % page_size(), 0u);
  EXPECT_GE(first->size(), 10'000u);
  const UniqueFd copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  EXPECT_EQ(map_memfd(copy.get()), first);
  const UniqueFd other = create_memfd("test", 10'000);
  EXPECT_NE(map_memfd(other.get())->data(), first->data());
}

TEST(ShmMapping, OutlivesItsDescriptor) {
  std::shared_ptr<Mapping> mapping;
  {
    const UniqueFd fd = create_memfd("test", 4096);
    mapping = map_memfd(fd.get());
  }
  std::memset(mapping->data(), 7, mapping->size());
  EXPECT_EQ(mapping->data()[4095], std::byte{7});
}

TEST(ShmMapping, OnlyOfSealedSize) {
  const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), 4096), 0);
  EXPECT_THROW(map_memfd(fd.get()), CorruptError);
  const UniqueFd sealed = create_memfd("test", 4096);
  EXPECT_NE(::ftruncate(sealed.get(), 0), 0);
  EXPECT_NE(::ftruncate(sealed.get(), 1 << 20), 0);
}

TEST(ShmMapping, CommitRefusesWhatIsNotThere) {
  const size_t much = memory_total() * 4;
  const UniqueFd fd = create_memfd("test", much);
  commit(fd.get(), 0, 0);
  commit(fd.get(), 4096, 8192);
  try {
    commit(fd.get(), 0, much);
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(much)), std::string::npos);
  }
}

// The limits of control groups count, and the cache of files, which the kernel gives up, does not.
TEST(ShmMapping, AvailableIsWhatAllLimitsLeave) {
  const test::TemporaryFolder root;
  const auto put = [&](const std::string& path, const std::string& content) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << content;
  };
  put("proc/meminfo", "MemTotal: 4000000 kB\nMemFree: 1 kB\nMemAvailable: 1000000 kB\n");
  EXPECT_EQ(shm::memory_available(root.path()), size_t{1000000} << 10);
  put("proc/self/cgroup", "0::/pod/job\n");
  const std::string pod = "sys/fs/cgroup/pod/", job = pod + "job/";
  put(job + "memory.max", "max\n");
  put(job + "memory.current", "99000000\n");
  put(pod + "memory.max", "100000000\n");
  put(pod + "memory.current", "99000000\n");
  EXPECT_EQ(shm::memory_available(root.path()), 1000000u);
  put(pod + "memory.stat", "anon 30000000\ninactive_file 60000000\nshmem 5\nactive_file 3000000\nslab_reclaimable 7\n");
  EXPECT_EQ(shm::memory_available(root.path()), 64000007u);
  put(job + "memory.max", "98000000\n");  // the least counts
  EXPECT_EQ(shm::memory_available(root.path()), 0u);
  put(job + "memory.stat", "inactive_file 5000000\n");
  EXPECT_EQ(shm::memory_available(root.path()), 4000000u);
  // A container may be told the path outside of it.
  put("proc/self/cgroup", "0::/not/there\n");
  EXPECT_EQ(shm::memory_available(root.path()), size_t{1000000} << 10);
  put("sys/fs/cgroup/memory.max", "70000000\n");
  put("sys/fs/cgroup/memory.current", "20000000\n");
  EXPECT_EQ(shm::memory_available(root.path()), 50000000u);
  // Version 1.
  put("proc/self/cgroup", "4:cpu,memory:/one\n0::/\n");
  put("sys/fs/cgroup/memory/one/memory.limit_in_bytes", "30000000\n");
  put("sys/fs/cgroup/memory/one/memory.usage_in_bytes", "20000000\n");
  put("sys/fs/cgroup/memory/one/memory.stat", "cache 1\ntotal_inactive_file 500\n");
  EXPECT_EQ(shm::memory_available(root.path()), 10000500u);
}

// --- arena ---

TEST(Arena, AlignsAndCounts) {
  Arena arena(4 << 20);
  EXPECT_EQ(arena.used(), 0u);
  std::vector<void*> blocks;
  for (const size_t size :
       {size_t{1}, size_t{127}, size_t{128}, size_t{129}, size_t{65'535}, size_t{65'536}, size_t{300'001}}) {
    void* const block = arena.allocate(size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % (size >= 65'536 ? page_size() : Arena::kAlignment), 0u);
    EXPECT_TRUE(arena.contains(block));
    EXPECT_EQ(arena.base() + arena.offset_of(block), block);
    std::memset(block, 1, size);
    blocks.push_back(block);
  }
  EXPECT_GE(arena.used(), 1u + 127 + 128 + 129 + 65'535 + 65'536 + 300'001);
  EXPECT_LE(arena.used(), arena.committed());
  EXPECT_LE(arena.committed(), arena.capacity());
  for (void* const block : blocks) arena.free(block);
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_FALSE(arena.contains(arena.base() + arena.capacity()));
}

// Freed neighbours join, so the whole arena can be allocated again, in one block and to the last byte.
TEST(Arena, GivesAllOfItAgain) {
  Arena arena(2 << 20);
  for (int round = 0; round < 3; ++round) {
    std::vector<void*> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(arena.allocate(100'000));
    EXPECT_THROW(arena.allocate(200'000), Unavailable);
    for (size_t i = 0; i < blocks.size(); i += 2) arena.free(blocks[i]);
    for (size_t i = 1; i < blocks.size(); i += 2) arena.free(blocks[i]);
    void* const all = arena.allocate(2 << 20);
    arena.free(all);
    EXPECT_EQ(arena.used(), 0u);
  }
  Arena fresh(2 << 20);
  fresh.free(fresh.allocate(2 << 20));
}

TEST(Arena, FullSaysHowMuch) {
  Arena arena(1 << 20);
  void* const some = arena.allocate(700'000);
  try {
    arena.allocate(500'000);
    FAIL();
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("1048576"), std::string::npos) << error.what();
  }
  arena.free(some);
  arena.free(arena.allocate(500'000));
}

TEST(Arena, GivesBackToTheKernel) {
  Arena arena(512 << 20);
  void* const large = arena.allocate(200 << 20);
  EXPECT_GE(arena.committed(), 200u << 20);
  arena.free(large);
  EXPECT_LE(arena.committed(), 2 << 20);
  void* const again = arena.allocate(100 << 20);
  std::memset(again, 1, 100 << 20);
  arena.free(again);
}

TEST(Arena, ARetiredBlockIsNeverGivenAgain) {
  Arena arena(1 << 20);
  auto* const first = static_cast<std::byte*>(arena.allocate(400'000));
  auto* const second = static_cast<std::byte*>(arena.allocate(400'000));
  arena.retire(second + 5000);
  arena.retire(second + 5000);
  arena.retire(first - 1);  // in no block
  arena.free(second);
  arena.retire(arena.base() + arena.capacity() - 1);
  EXPECT_GE(arena.used(), 800'000u);
  EXPECT_THROW(arena.allocate(600'000), Unavailable);
  arena.free(first);
  for (int i = 0; i < 3; ++i) {
    auto* const again = static_cast<std::byte*>(arena.allocate(400'000));
    EXPECT_TRUE(again + 400'000 <= second || again >= second + 400'000);
    arena.free(again);
  }
}

TEST(Arena, RandomUseAgainstAModel) {
  Arena arena(16 << 20);
  std::mt19937 random(1);
  std::map<std::byte*, std::pair<size_t, unsigned char>> live;
  for (int i = 0; i < 20'000; ++i) {
    if (live.size() < 60 && random() % 2) {
      const size_t size = size_t{1} << (random() % 18), exact = size + random() % size;
      const auto mark = static_cast<unsigned char>(random());
      auto* const block = static_cast<std::byte*>(arena.allocate(exact));
      const auto next = live.lower_bound(block);
      if (next != live.end()) {
        ASSERT_LE(block + exact, next->first);
      }
      if (next != live.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second.first, block);
      }
      std::memset(block, mark, exact);
      live[block] = {exact, mark};
    } else if (!live.empty()) {
      const auto victim = std::next(live.begin(), static_cast<long>(random() % live.size()));
      const auto [size, mark] = victim->second;
      ASSERT_EQ(victim->first[0], std::byte{mark});
      ASSERT_EQ(victim->first[size - 1], std::byte{mark});
      arena.free(victim->first);
      live.erase(victim);
    }
  }
  for (const auto& [block, size] : live) arena.free(block);
  EXPECT_EQ(arena.used(), 0u);
}

// --- bell and spin ---

// Two threads pass a number back and forth, always sleeping: a lost wake-up would let one sleep until the test fails.
// sleep() may end early, because the ring of the last round may come when the next sleep has begun. So a wake-up counts
// as lost only if a sleep does not end for as long as a test waits.
template <typename Condition>
bool sleep_until(Bell& bell, Condition condition) {
  for (const auto until = test::patience(); !until.passed();)
    if (bell.sleep(test::kPatience, condition)) return true;
  return false;
}

TEST(Bell, LosesNoWakeUp) {
  constexpr uint64_t kRounds = test::kSanitized ? 5'000 : 100'000;
  Bell bells[2];
  std::atomic<uint64_t> turn{0};
  const auto play = [&](uint64_t me) {
    for (uint64_t i = me; i < kRounds; i += 2) {
      ASSERT_TRUE(sleep_until(bells[me], [&] { return turn.load(std::memory_order_acquire) == i; })) << i;
      turn.store(i + 1, std::memory_order_release);
      bells[1 - me].ring();
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_EQ(turn.load(), kRounds);
  EXPECT_EQ(bells[0].waiters.load(), 0u);
}

TEST(Bell, WakesEverybodyAndKeepsItsLimit) {
  Bell bell;
  std::atomic<bool> go{false};
  std::vector<std::thread> waiters;
  std::latch there(4);
  for (int i = 0; i < 4; ++i)
    waiters.emplace_back([&] {
      there.count_down();
      EXPECT_TRUE(sleep_until(bell, [&] { return go.load(); }));
    });
  there.wait();
  go = true;
  bell.ring();
  for (auto& waiter : waiters) waiter.join();
  EXPECT_FALSE(bell.sleep(milliseconds(30), [] { return false; }));
  EXPECT_FALSE(bell.sleep(std::chrono::nanoseconds(0), [] { return false; }));
}

TEST(Spin, UntilTheConditionOrTheLimit) {
  int asked = 0;
  EXPECT_TRUE(spin_until(test::kPatience, [&] { return ++asked == 1000; }));
  EXPECT_FALSE(spin_until(milliseconds(5), [] { return false; }));
  EXPECT_FALSE(spin_until(milliseconds(0), [] { return false; }));
  EXPECT_EQ(spin_for(2, 2), std::chrono::nanoseconds(kSpin));
  EXPECT_EQ(spin_for(3, 2), std::chrono::nanoseconds(0));
}

}  // namespace
}  // namespace muster::shm
