// A group of ranks that are threads of one process, on shared memory and plain bytes, without libtorch: what
// channel_test.cpp and channel_messages_test.cpp share.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/messages.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/arena.h"
#include "shm/mapping.h"
#include "support/patience.h"

namespace muster::comm::shm_backend {

using test::patience;

// How ranks wait: kSleeps goes to the futex immediately; kSpins looks for its peers first.
struct Waiting {
  const char* name;
  std::chrono::nanoseconds spin;
};
inline void PrintTo(const Waiting& waiting, std::ostream* out) { *out << waiting.name; }
inline constexpr Waiting kWaitings[] = {{"sleeps", {}}, {"spins", shm::kSpin}};

// One rank: its part of the group, its messages, and memory that all ranks map.
struct Rank {
  Rank(Store& store, const std::string& prefix, int rank, int size, ChannelOptions options,
       const std::shared_ptr<shm::PeerWatch>& watch)
      : channel(store, prefix, rank, size, std::move(options), watch, patience()), messages(channel) {}
  ~Rank() {
    channel.leave();
    messages.stop();
  }

  Channel channel;
  Messages messages;
};

class ChannelTest : public testing::TestWithParam<Waiting> {
 protected:
  static constexpr size_t kHeap = size_t{64} << 20;

  // Runs body(rank) in n threads. If a body throws, the test fails.
  template <typename Body>
  void run(int n, Body body) {
    const auto store = make_memory_store();
    const auto watch = std::make_shared<shm::PeerWatch>();
    ChannelOptions options{.spin = GetParam().spin};
    std::vector<UniqueFd> fds;
    for (int r = 0; r < n; ++r) {
      fds.push_back(shm::create_memfd("heap", kHeap));
      options.heaps.push_back(shm::map_memfd(fds.back().get()));
    }
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
      threads.emplace_back([&, r] {
        try {
          Rank rank(*store, "group", r, n, options, watch);
          body(rank);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << r << ": " << error.what();
        }
      });
    for (auto& thread : threads) thread.join();
  }
};

// Element i of rank r's contribution to operation `number`. Sums of few of them are exact.
inline float value(int rank, size_t i, int number) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13 + static_cast<size_t>(number)) % 1001);
}
inline std::vector<float> contribution(int rank, size_t count, int number) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = value(rank, i, number);
  return values;
}
inline std::vector<float> sum(int ranks, size_t count, int number) {
  std::vector<float> values(count);
  for (int r = 0; r < ranks; ++r)
    for (size_t i = 0; i < count; ++i) values[i] += value(r, i, number);
  return values;
}

inline Bytes bytes_of(std::vector<float>& values) { return reinterpret_cast<Bytes>(values.data()); }

inline Call call_of(OpKind kind, size_t count, Bytes data, int root = 0) {
  Call call;
  call.kind = kind;
  call.root = root;
  call.count = count;
  call.item = sizeof(float);
  call.dtype = static_cast<uint8_t>(c10::ScalarType::Float);
  call.kernel = reduces(kind) ? reduce_kernel(c10::ScalarType::Float, ReduceOp::SUM) : nullptr;
  call.deadline = patience();
  call.data = data;
  return call;
}

inline Call barrier_call() { return call_of(OpKind::kBarrier, 0, nullptr); }

// Sizes on both sides of every border between tiers, and a pipeline that uses each of its buffers twice.
inline std::vector<size_t> counts(int n) {
  const Layout layout(n);
  const size_t turn = layout.turn_bytes() / sizeof(float), slot = kSlotPayload / sizeof(float);
  return {1, 77, 5, 78, slot, slot + 1, layout.early / sizeof(float) + 1, turn - 1, (2 * kTurnBuffers + 1) * turn + 5};
}

inline std::shared_ptr<Message> message_of(OpKind op, int peer, int tag, std::vector<float>& values) {
  auto message = std::make_shared<Message>();
  message->op = op;
  message->peer = peer;
  message->header = {
      .bytes = values.size() * sizeof(float), .tag = tag, .dtype = static_cast<uint8_t>(c10::ScalarType::Float)};
  message->data = bytes_of(values);
  message->deadline = patience();
  return message;
}

}  // namespace muster::comm::shm_backend
