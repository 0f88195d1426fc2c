// The layout of a group's shared segment. There is one memfd per group. Its rank 0 makes it, and all members map it:
//
//   | GroupHeader | RankControl x N | board | staging x N | message rings x N x N |
//
// Every word has one writer (named below) except the abort word (compare-and-swap), the bells (fetch_add), and the
// words that readers store back (take.h). Each word that is written often has its own pair of cache lines (128 bytes,
// because processors fetch cache lines in pairs).
//
// Slots. A rank announces its operation number s (from 1) in slots[s % 2]: it writes the descriptor and, for a small
// operation, the data itself, then `seq` with release. So the flag travels with the data: one cache line for up to 24
// bytes. Two slots suffice: before a rank announces s + 1, it reads all ranks' descriptors of s. So it has finished
// with s - 1, whose slot s + 1 reuses.
//
// Board. Words for the code that made the group (Backend::board()); most groups have none.
//
// Staging. Each rank has one buffer for data that it stores before it announces the operation; when the operation ends,
// only the owner reads it. Each rank also has kTurnBuffers turn buffers for pipelines. Turns are numbered through the
// group's life; `staged`, `reduced` and `done` say how far a rank is (see turns.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/core/bytes.h"
#include "comm/core/descriptor.h"
#include "shm/bell.h"
#include "shm/mapping.h"

namespace muster::comm::shm_backend {

// "\0muster7"; change it with the layout below, and with that of messages (messages.h).
inline constexpr uint64_t kMagic = 0x37726574'73756d00;
inline constexpr size_t kLine = 128;
inline constexpr size_t kSlots = 2;
inline constexpr size_t kSlotPayload = 4096;  // of one operation's data
inline constexpr size_t kSlotTables = 1024;   // after it: the sizes of the parts of an all_to_all of up to 64 ranks
inline constexpr size_t kTurnBuffers = 4;
inline constexpr uint64_t kEvenParts = uint64_t{1} << 63;  // all_to_all: heap_offset is this plus the size of each part
inline bool says_even_parts(uint64_t heap_offset) { return heap_offset >= kEvenParts && heap_offset != kNotOnHeap; }

// What a rank says about an operation. `call` must be the same on all ranks; each rank has its own heap_offset and
// arrived.
struct Descriptor {
  CallDescriptor call;
  uint64_t heap_offset = kNotOnHeap;  // of the tensor in the rank's heap, or kEvenParts + a size
  uint64_t arrived = 0;               // cycles()
};

struct alignas(kLine) Slot {
  std::atomic<uint64_t> seq{0};
  Descriptor descriptor;
  std::byte payload[kSlotPayload + kSlotTables];
};
static_assert(offsetof(Slot, payload) == 40);

enum class Presence : uint32_t { kAbsent, kHere, kLeft };

enum class Phase : uint8_t { kIdle, kAnnounced, kStaging, kReducing, kCollecting, kFinishing };

// How far a rank is: operation number, operation, phase. They are in one word, so that the report of a timeout never
// reads parts of two states.
constexpr uint64_t pack_position(uint64_t seq, OpKind op, Phase phase) {
  return seq << 16 | uint64_t{static_cast<uint8_t>(op)} << 8 | static_cast<uint8_t>(phase);
}

// What a rank waits for: that a peer announces operation `value`, or that a counter of the peer reaches `value`.
struct Awaited {
  enum Event : uint8_t { kAnnounced, kStaged, kReduced, kDone };
  int peer = -1;  // -1: nothing
  Event event = kAnnounced;
  uint64_t value = 0;

  uint64_t pack() const { return value << 18 | uint64_t{event} << 16 | static_cast<uint64_t>(peer + 1); }
  static Awaited unpack(uint64_t word) {
    return {static_cast<int>(word & 0xffff) - 1, static_cast<Event>(word >> 16 & 3), word >> 18};
  }
};

inline constexpr size_t kSourceFiles = 128;

// Only its rank writes it, except for the bells.
struct alignas(kLine) RankControl {
  alignas(kLine) std::atomic<uint64_t> staged{0};
  alignas(kLine) std::atomic<uint64_t> reduced{0};
  alignas(kLine) std::atomic<uint64_t> done{0};
  alignas(kLine) shm::Bell bell;   // rung when this rank published something, or when the group failed
  alignas(kLine) shm::Bell inbox;  // rung by peers that wrote to or read from a message ring of this rank
  alignas(kLine) std::atomic<uint64_t> position{0};
  std::atomic<uint64_t> awaits{
      0};                         // what it sleeps for (Awaited), or 0; from it a timeout finds who holds up the others
  std::atomic<int32_t> core{-1};  // on which it was when it last announced an operation or began to wait
  std::atomic<int32_t> pid{0};
  int32_t lost_pid{0};     // of a lost rank: its process
  int32_t finder{0};       // of the failure: the rank that found it, perhaps in another group
  uint32_t missing_count;  // of a timeout: the ranks that had not come, as far as there is room
  uint16_t missing[254];
  std::atomic<Presence> presence{Presence::kAbsent};  // apart from what each operation writes: peers look at it often
  // This rank's text of the group's failure, and what to do, if that is not what its kind says. Written before the
  // abort word names the rank.
  char failure[2048], advice[256];
  struct CallSite {
    std::atomic<uint64_t> of{0};  // the operation
    char text[120];               // where this rank called it, written before `of`
  } sites[kSlots];                // only written if operations do not match; reused like the slots
  char files[kSourceFiles][48];   // names of the source files from which this rank has sent messages, from 1 on
  Slot slots[kSlots];
};

struct alignas(kLine) GroupHeader {
  uint64_t magic = 0;
  uint32_t size = 0;
  uint64_t stamp_key = 0;                         // a random number, for the stamps of messages
  alignas(kLine) std::atomic<uint64_t> abort{0};  // 0, or ErrorCode + 1 | subject's rank << 8 | reporter's rank << 32
};

inline constexpr size_t kRecordLine = 64;  // records of a ring begin and end on multiples of it

// A receive that waits for the record at a position of a ring, and whose tensor lies on the receiver's heap. The
// receiver writes the fields, then `position`. The sender reads them while it is at that position, and until it has
// written a record there, the receiver does not change them.
struct PostedReceive {
  std::atomic<uint64_t> position{0};  // plus 1; 0: there is none
  std::atomic<uint64_t> place{0};     // of the tensor in the receiver's heap
  uint64_t bytes = 0;
  int32_t tag = 0;
  uint8_t dtype = 0;
};

// A byte stream of records (messages.h) from one rank to another. The counters only grow; positions are the counters
// modulo the ring's size.
struct alignas(kLine) RingControl {
  alignas(kLine) std::atomic<uint64_t> written{0};  // by the sender
  alignas(kLine) std::atomic<uint64_t> read{0};     // by the receiver
  std::atomic<uint64_t> copied{0};                  // messages by reference whose data the receiver has
  alignas(kLine) PostedReceive posted;              // by the receiver
  // Of the message by reference that is under way, which both ranks copy. By the receiver: the place of its tensor in
  // its heap, and then the number of the message.
  std::atomic<uint64_t> target{0}, target_of{0};
  alignas(kLine) std::atomic<uint64_t> claimed{0};  // by both: how many pieces
  std::atomic<uint64_t> copied_by_sender{0};        // bytes
};

// Sizes and offsets. They are the same on all ranks, because they depend only on the sizes of the group and the board.
struct Layout {
  explicit Layout(int size, size_t board_words = 0)
      : ranks(static_cast<size_t>(size)),
        board(board_words * sizeof(uint64_t)),
        chunk(std::clamp<size_t>((size_t{256} << 10) / ranks / 4096 * 4096, size_t{16} << 10, size_t{128} << 10)),
        early(size_t{16} << 10),
        ring(ranks <= 4    ? size_t{256} << 10
             : ranks <= 16 ? size_t{64} << 10
                           : size_t{16} << 10) {}

  size_t ranks;
  size_t board;  // bytes
  size_t chunk;  // bytes of one rank's slice in one turn; whole pages, so whole elements and cache lines
  size_t early;  // largest all_reduce whose contributions are staged before the announcement
  size_t ring;   // bytes of a message ring

  size_t turn_bytes() const { return ranks * chunk; }  // of one turn buffer
  size_t staging_bytes() const { return shm::round_up(early + kTurnBuffers * turn_bytes(), 4096); }
  size_t ring_bytes() const { return shm::round_up(sizeof(RingControl) + ring, 4096); }

  size_t control_at(int rank) const { return sizeof(GroupHeader) + static_cast<size_t>(rank) * sizeof(RankControl); }
  size_t board_at() const { return control_at(static_cast<int>(ranks)); }
  size_t staging_at(int rank) const {
    return shm::round_up(board_at() + board, 4096) + static_cast<size_t>(rank) * staging_bytes();
  }
  size_t ring_at(int from, int to) const {
    return staging_at(static_cast<int>(ranks)) +
           (static_cast<size_t>(from) * ranks + static_cast<size_t>(to)) * ring_bytes();
  }
  size_t total() const { return ring_at(static_cast<int>(ranks), 0); }
};

}  // namespace muster::comm::shm_backend
