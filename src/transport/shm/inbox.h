// A worker's inbox: one segment of shared memory into which the other workers of its host write, each into its own
// ring.
//
//   bell        rung for this worker: messages have come, a ring that was full has room, a worker has left
//   second      rung instead while no thread waits for `bell`: the thread that reads messages is busy, perhaps for a
//               long time, and another one sleeps behind it
//   ready       one bit for each sender whose ring may hold something, so that one of 64 workers looks at one cache
//               line, not at 63
//   ring[from]  RingControl, then `capacity` bytes: records, one after another, each contiguous
//
// A sender writes a record, publishes it by `tail`, and then says so:
//
//   sender                                        receiver
//   1 record; tail.store(release)                 a bits = ready.exchange(0)            (seq_cst)
//   2 fence(seq_cst)                              b fence(seq_cst)
//   3 if !(ready & bit): ready |= bit             c tail.load(acquire); read until head == tail
//   4 bell.ring() || second.ring()                d head.store(release)
//                                                 e fence; if wants_room: clear it, ring the sender's Bell
//
// No record is overlooked. If (3) sees the bit set, an exchange (a) that takes this bit is still to come; (1) is before
// (3) and (a) is before (c), so (c) sees the record. The same holds for wants_room, which a sender sets before it looks
// at `head` once more, and for Bell (bell.h).
//
// `closed` is stored by the sender after its last record. A receiver loads it before it reads the ring for the last
// time.
//
// Thread-safety: a ring has one writing thread at a time (its sender's lock) and one reading thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/bell.h"

namespace muster::transport::shm_rings {

inline constexpr uint64_t kMagic = 0x786f626e69'6d02;  // includes the version of this layout
inline constexpr int kMaxWorkers = 1024;               // of one host
inline constexpr size_t kLine = 128;

struct InboxHeader {
  uint64_t magic = kMagic;
  uint64_t workers = 0, capacity = 0;
  alignas(kLine) shm::Bell bell;
  shm::Bell second;
  alignas(kLine) std::atomic<uint64_t> ready[kMaxWorkers / 64];
};

struct RingControl {
  alignas(kLine) std::atomic<uint64_t> tail{0};  // the sender's: bytes ever written
  std::atomic<uint32_t> closed{0};
  alignas(kLine) std::atomic<uint64_t> head{0};  // the receiver's: bytes ever read
  std::atomic<uint64_t> taken{0};                // bytes of messages ever taken, pieces included
  alignas(kLine) std::atomic<uint32_t> wants_room{0};
};

enum class RecordKind : uint8_t { kSkip = 1, kMessage, kRelease };

// At the start of each record. Records are multiples of kRecordAlign bytes; a kSkip ends at the end of the ring.
inline constexpr size_t kRecordAlign = 16;
struct RecordHeader {
  uint32_t bytes = 0;  // of the record, with this header
  RecordKind kind = RecordKind::kSkip;
  uint8_t in_block = 0;  // the rest was too long for the ring: one PieceRecord follows, of a block that holds it
  uint16_t reserved = 0;
  uint32_t body = 0, pieces = 0;
};
static_assert(sizeof(RecordHeader) == kRecordAlign);

// After the header of a kMessage come one PieceRecord per piece, then the body, then the inline pieces, each aligned.
// Offsets of inline pieces count from the header, even if all of this lies in a block of the heap.
enum class Where : uint32_t {
  kInline,  // in this record (or its block), at `offset` from the header's place
  kMine,    // in the sender's heap at `offset`; the receiver gives it back by `token`
  kYours,   // in the receiver's own heap at `offset`: the block that it lent as `token` comes back
};
struct PieceRecord {
  uint64_t bytes = 0, offset = 0, token = 0;
  Where where = Where::kInline;
  uint32_t reserved = 0;
};

// Small enough that a record of this size always fits an empty ring, at any position of its head.
constexpr size_t largest_record(size_t capacity) { return capacity / 4; }

constexpr size_t capacity_for(int workers) {
  return workers <= 16 ? size_t{256} << 10 : workers <= 64 ? size_t{64} << 10 : size_t{16} << 10;
}
constexpr size_t ring_at(int from, size_t capacity) {
  return sizeof(InboxHeader) + static_cast<size_t>(from) * (sizeof(RingControl) + capacity);
}
constexpr size_t inbox_bytes(int workers, size_t capacity) { return ring_at(workers, capacity); }

}  // namespace muster::transport::shm_rings
