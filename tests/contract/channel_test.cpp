// The lock-free code of shared memory on plain bytes, without libtorch: collectives in every tier, failures.
// The ranks are threads of one process, so ThreadSanitizer sees every access to memory that two of them share.

#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/shm/take.h"
#include "shm/arena.h"
#include "shm/mapping.h"
#include "support/channel_group.h"
#include "support/full_run.h"

namespace muster::comm::shm_backend {
namespace {

// In the gate an even and an odd number.
std::vector<int> numbers_of_ranks() { return test::full_run() ? std::vector{1, 2, 3, 4} : std::vector{2, 3}; }

TEST_P(ChannelTest, ReducesInEveryTier) {
  for (const int n : numbers_of_ranks())
    run(n, [n](Rank& rank) {
      Channel& channel = rank.channel;
      const int me = channel.rank();
      int number = 0;
      for (const size_t count : counts(n)) {
        ++number;
        auto values = contribution(me, count, number);
        all_reduce(channel, call_of(OpKind::kAllReduce, count, bytes_of(values)));
        ASSERT_EQ(values, sum(n, count, number)) << "all_reduce of " << count;

        const int root = number % n;
        values = contribution(me, count, ++number);
        all_reduce(channel, call_of(OpKind::kReduce, count, bytes_of(values), root));
        ASSERT_EQ(values, me == root ? sum(n, count, number) : contribution(me, count, number))
            << "reduce of " << count;

        std::vector<float> whole = contribution(me, count * static_cast<size_t>(n), ++number), part(count);
        std::vector<ConstBytes> inputs;
        for (int r = 0; r < n; ++r) inputs.push_back(bytes_of(whole) + static_cast<size_t>(r) * count * sizeof(float));
        Call call = call_of(OpKind::kReduceScatter, count, bytes_of(part));
        call.inputs = inputs;
        reduce_scatter(channel, call);
        const auto expected = sum(n, whole.size(), number);
        ASSERT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + me * static_cast<ptrdiff_t>(count)))
            << "reduce_scatter of " << count;
      }
    });
}

// Tensors on the heap are reduced in place, by all ranks in each other's memory.
TEST_P(ChannelTest, ReducesInPlaceOnTheHeaps) {
  for (const int n : numbers_of_ranks())
    run(n, [n](Rank& rank) {
      Channel& channel = rank.channel;
      for (int number = 0; number < 40; ++number) {
        const size_t count = 20'000 + static_cast<size_t>(number), offset = 4096 * static_cast<size_t>(number % 5);
        Bytes const data = channel.heap(channel.rank()) + offset;
        const auto mine = contribution(channel.rank(), count, number);
        std::memcpy(data, mine.data(), count * sizeof(float));
        Call call = call_of(OpKind::kAllReduce, count, data);
        call.heap_offset = offset;
        all_reduce(channel, call);
        const auto expected = sum(n, count, number);
        ASSERT_EQ(std::memcmp(data, expected.data(), count * sizeof(float)), 0) << "all_reduce " << number;
      }
    });
}

TEST_P(ChannelTest, MovesInEveryTier) {
  for (const int n : numbers_of_ranks())
    run(n, [n](Rank& rank) {
      Channel& channel = rank.channel;
      const int me = channel.rank();
      int number = 0;
      for (const size_t count : counts(n)) {
        const int root = ++number % n;
        const size_t bytes = count * sizeof(float);
        auto values = contribution(me, count, number);
        broadcast(channel, call_of(OpKind::kBroadcast, count, bytes_of(values), root));
        ASSERT_EQ(values, contribution(root, count, number)) << "broadcast of " << count;

        auto mine = contribution(me, count, ++number);
        std::vector<std::vector<float>> parts(static_cast<size_t>(n), std::vector<float>(count));
        std::vector<Bytes> outputs;
        for (auto& part : parts) outputs.push_back(bytes_of(part));
        Call call = call_of(OpKind::kAllGather, count, bytes_of(mine));
        call.outputs = outputs;
        all_gather(channel, call);
        for (int r = 0; r < n; ++r)
          ASSERT_EQ(parts[static_cast<size_t>(r)], contribution(r, count, number)) << "all_gather of " << count;

        ++number;
        std::vector<float> sent = contribution(me, count * static_cast<size_t>(n), number), got(sent.size());
        std::vector<ConstBytes> inputs;
        outputs.clear();
        for (size_t r = 0; r < static_cast<size_t>(n); ++r) {
          inputs.push_back(bytes_of(sent) + r * bytes);
          outputs.push_back(bytes_of(got) + r * bytes);
        }
        const std::vector<uint64_t> sizes(static_cast<size_t>(n), bytes);
        call = call_of(OpKind::kAllToAll, 0, nullptr);
        call.inputs = inputs;
        call.outputs = outputs;
        call.send = call.receive = sizes;
        all_to_all(channel, call);
        for (int r = 0; r < n; ++r)
          for (size_t i = 0; i < count; ++i)
            ASSERT_EQ(got[static_cast<size_t>(r) * count + i], value(r, static_cast<size_t>(me) * count + i, number))
                << "all_to_all of " << count;
        barrier(channel, barrier_call());
      }
    });
}

constexpr auto kLong = std::chrono::minutes(10);  // only a hang can reach it

// The copy is whole, and writes only one word per line of what it reads: the same again, or 0. With every instruction
// set that is compiled in and that this processor has.
TEST(Take, CopiesAnyBytesAndLeavesWhatItMust) {
  constexpr size_t kRoom = 4 << 10;
  std::vector<std::byte> from(kRoom + kCacheLine), to(kRoom + 2 * kCacheLine);
  const auto begin_of_line = [](std::vector<std::byte>& memory) {
    return memory.data() + (kCacheLine - reinterpret_cast<uintptr_t>(memory.data()) % kCacheLine) % kCacheLine;
  };
  std::byte *const lines = begin_of_line(from), *const out = begin_of_line(to);
  const auto fill = [&] {
    for (size_t i = 0; i < kRoom; ++i) lines[i] = static_cast<std::byte>(i * 7 + i / 251 + 1);
    std::fill(to.begin(), to.end(), std::byte{0xaa});
  };
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
    for (const size_t bytes : {0, 1, 8, 63, 64, 65, 128, 200, 256, 320, 575, 1000, 4000})
      for (const size_t offset : {0, 1, 8, 63})
        for (const bool stream : {false, true}) {
          SCOPED_TRACE(testing::Message() << hwy::TargetName(target) << ", " << bytes << " bytes at " << offset
                                          << (stream ? ", streamed" : ""));
          const auto is_copied = [&](const std::byte* source) {
            return std::equal(source, source + bytes, out + offset) &&
                   std::all_of(out + offset + bytes, to.data() + to.size(),
                               [](std::byte b) { return b == std::byte{0xaa}; });
          };
          fill();
          const std::vector<std::byte> before(lines, lines + kRoom);
          take_bytes(out + offset, lines + 32 - offset % 32, bytes, stream);
          EXPECT_TRUE(is_copied(before.data() + 32 - offset % 32));
          EXPECT_TRUE(std::equal(before.begin(), before.end(), lines));

          fill();
          look_at_bytes(out + offset, lines, bytes, stream);
          EXPECT_TRUE(is_copied(before.data()));
          EXPECT_TRUE(std::equal(before.begin(), before.end(), lines));
        }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

// --- failures ---

// Rank 1 is lost while the others are at work.
TEST_P(ChannelTest, EverybodyLearnsOfALostRank) {
  for (const int n : {2, 4})
    run(n, [](Rank& rank) {
      for (int number = 0; number < 20; ++number) barrier(rank.channel, barrier_call());
      if (rank.channel.rank() == 1) return rank.channel.lose(1, "rank 1 died");
      try {
        for (;;) {
          auto values = contribution(rank.channel.rank(), 50'000, 0);
          all_reduce(rank.channel, call_of(OpKind::kAllReduce, values.size(), bytes_of(values)));
        }
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank(), 1);
      }
    });
}

TEST_P(ChannelTest, ARankThatLeavesIsNamed) {
  for (const int n : {2, 3})
    run(n, [](Rank& rank) {
      barrier(rank.channel, barrier_call());
      if (rank.channel.rank() == 1) return rank.channel.leave();
      try {
        barrier(rank.channel, barrier_call());
        ADD_FAILURE() << "a barrier without rank 1";
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.rank(), 1);
      }
    });
}

TEST_P(ChannelTest, AMismatchIsTheSameErrorOnAllRanks) {
  run(3, [](Rank& rank) {
    auto values = contribution(rank.channel.rank(), 100, 0);
    try {
      all_reduce(rank.channel, call_of(OpKind::kAllReduce, rank.channel.rank() == 2 ? 99 : 100, bytes_of(values)));
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_NE(std::string(error.what()).find("all_reduce of 99 x Float"), std::string::npos) << error.what();
    }
  });
}

// What a rank says of its heap is not believed.
TEST_P(ChannelTest, APlaceOutsideOfTheHeapIsDamage) {
  for (const uint64_t place : {kHeap, kHeap - 4096, kEvenParts - 1})
    for (const OpKind kind : {OpKind::kBroadcast, OpKind::kAllReduce})
      run(2, [&](Rank& rank) {
        std::vector<float> values(10'000);
        Call call = call_of(kind, values.size(), bytes_of(values));
        call.heap_offset = rank.channel.rank() == 0 ? place : 0;
        try {
          kind == OpKind::kBroadcast ? broadcast(rank.channel, call) : all_reduce(rank.channel, call);
          ADD_FAILURE() << "no error";
        } catch (const Unavailable& error) {
          EXPECT_NE(std::string(error.what()).find("rank 0 announced 40000 bytes at "), std::string::npos)
              << error.what();
        }
      });
}

INSTANTIATE_TEST_SUITE_P(Shm, ChannelTest, testing::ValuesIn(kWaitings),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster::comm::shm_backend
