// What the ranks of a WireBackend tell each other before a collective, and the transfers of one step of it.
//
// Thread-safety: values; a Transfers belongs to one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/bytes.h"
#include "comm/core/descriptor.h"
#include "comm/wire/wire.h"
#include "muster/base/deadline.h"

namespace muster::comm {

inline constexpr size_t kAnnouncedBytes = 128;  // of payload that an announcement carries
inline constexpr WireTag kAnnounce{WireKind::kAnnouncement, 0}, kData{WireKind::kData, 0};

// What a rank says of a collective that is over: how long it waited for the others and, if ranks stand for hosts, which
// rank came last on its own host and how much later than the one before it. In seconds.
struct Arrival {
  float waited = -1;  // below 0: nothing to say
  float late = 0;
  int32_t last = -1;
};

struct Announcement {
  uint64_t number = 0;
  CallDescriptor call;
  uint64_t part = 0;  // bytes of an all_to_all that follow for the rank that reads this
  Arrival before;     // of an earlier one
  char site[84] = {};
  std::array<std::byte, kAnnouncedBytes> payload{};

  std::string_view where() const { return {site, ::strnlen(site, sizeof site)}; }  // "train.cpp:17"; "" if not known
};
static_assert(sizeof(Announcement) == 256);

// The last collective that a rank has announced, in one word, for threads that do not execute collectives.
struct LastCall {
  OpKind op = OpKind::kNothing;
  uint64_t number = 0;

  explicit LastCall(const Announcement& announced) : op(announced.call.op), number(announced.number) {}
  explicit LastCall(uint64_t word) : op(static_cast<OpKind>(word & 0xff)), number(word >> 8) {}
  uint64_t word() const { return number << 8 | static_cast<uint8_t>(op); }
};
static_assert(sizeof(OpKind) == 1 && static_cast<int>(OpKind::kNothing) == 0);

// The transfers of one step. Empty transfers are left out.
class Transfers {
 public:
  Transfers(Wire& wire, Deadline deadline) : wire_(wire), deadline_(deadline) {}
  void send(int peer, WireTag tag, const void* data, size_t bytes) {
    if (bytes > 0) list_.push_back(wire_.send(peer, tag, static_cast<ConstBytes>(data), bytes));
  }
  void receive(int peer, WireTag tag, void* data, size_t bytes) {
    if (bytes > 0) list_.push_back(wire_.receive(peer, tag, static_cast<Bytes>(data), bytes));
  }
  // For the one that was begun first.
  void wait_for_oldest() {
    list_.front()->wait(deadline_);
    list_.erase(list_.begin());
  }
  void wait() {
    for (auto& transfer : list_) transfer->wait(deadline_);
    list_.clear();
  }

 private:
  Wire& wire_;
  const Deadline deadline_;
  std::vector<std::unique_ptr<Wire::Transfer>> list_;
};

}  // namespace muster::comm
