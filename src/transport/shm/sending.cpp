// The sending side of the shm transport.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/copy.h"
#include "base/cycles.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "transport/shm/rings_transport.h"

namespace muster::transport::shm_rings {
namespace {

// Longest wait for room before the condition is checked again; wake-ups do not depend on it.
constexpr nanoseconds kNap = std::chrono::milliseconds(50);
// At most so many messages that may wait are sent between two rings of the bell.
constexpr int kUnrung = 64;

}  // namespace

// What send() has decided about a message before it takes the lock.
struct ShmTransport::Plan {
  std::vector<PieceRecord> records;
  std::vector<std::shared_ptr<std::byte>> copies;  // by piece: a block of this worker's heap with its bytes; or null
  size_t bytes = 0;                                // of the record, if it were in the ring
  std::shared_ptr<std::byte> block;                // holds the record, if it is too long for the ring
  size_t ring_bytes = 0;                           // of what is written to the ring
};

std::shared_ptr<std::byte> ShmTransport::block(size_t bytes) {
  auto* const data = static_cast<std::byte*>(options_.heap->allocate(bytes));
  return {data, [heap = options_.heap](std::byte* gone) { heap->free(gone); }};
}

// Decides which way each piece goes, and copies what must be copied. Without the peer's lock, because this takes time.
void ShmTransport::plan_pieces(Peer& peer, const Message& message, Plan& plan) {
  if (message.pieces.size() > options_.limits.pieces || message.body.size() > options_.limits.body ||
      message.bytes() > options_.limits.bytes)
    throw InvalidArgument(
        text("a message to the worker of rank ", peer.rank, ": expected at most ", options_.limits.bytes,
             " bytes (body ", options_.limits.body, ") in ", options_.limits.pieces, " pieces, got ", message.bytes(),
             " bytes (body ", message.body.size(), ") in ", message.pieces.size()),
        "Send it in several messages");
  const size_t largest = shm_rings::largest_record(capacity_);
  size_t used = align(sizeof(RecordHeader) + message.pieces.size() * sizeof(PieceRecord)) + align(message.body.size());
  const size_t room = used <= largest ? largest : SIZE_MAX;  // in a block there is room for all small pieces
  plan.records.resize(message.pieces.size());
  plan.copies.resize(message.pieces.size());
  for (size_t i = 0; i < message.pieces.size(); ++i) {
    const Piece& piece = message.pieces[i];
    PieceRecord& record = plan.records[i];
    record.bytes = piece.bytes;
    if (piece.bytes <= kInline && used + align(piece.bytes) <= room) {
      record.offset = used;
      used += align(piece.bytes);
    } else if (piece.unique && options_.heap->contains(piece.data)) {
      record.where = Where::kMine;
      record.offset = options_.heap->offset_of(piece.data);
    } else if (piece.unique && is_leased(peer, piece)) {
      record.where = Where::kYours;
      record.offset = static_cast<uint64_t>(piece.data - peer.heap->data());
    } else {
      plan.copies[i] = block(piece.bytes);
      copy_bytes(plan.copies[i].get(), piece.data, piece.bytes);
      record.where = Where::kMine;
      record.offset = options_.heap->offset_of(plan.copies[i].get());
    }
  }
  plan.bytes = plan.ring_bytes = used;
  if (used > largest) {
    plan.block = block(used);
    plan.ring_bytes = sizeof(RecordHeader) + align(sizeof(PieceRecord));
  }
}

// With the lock: records what is lent and what goes back to its owner.
void ShmTransport::take_records_of(Peer& peer, Message& message, Plan& plan) {
  for (size_t i = 0; i < plan.records.size(); ++i) {
    PieceRecord& record = plan.records[i];
    Piece& piece = message.pieces[i];
    if (record.where == Where::kYours) record.token = end_lease(peer, piece);
    if (record.where != Where::kMine) continue;
    record.token = peer.next_token++;
    peer.lent[record.token] = {plan.copies[i] ? std::move(plan.copies[i]) : std::move(piece.owner),
                               options_.heap->base() + record.offset, record.bytes};
  }
}

// With the lock: the block that the peer lent and that contains the piece; null if there is none.
Lease* ShmTransport::lease_of(Peer& peer, const Piece& piece) {
  const auto after = peer.leases.upper_bound(piece.data);
  if (after == peer.leases.begin()) return nullptr;
  Lease* const lease = std::prev(after)->second;
  return piece.data + piece.bytes <= lease->data + lease->bytes ? lease : nullptr;
}

// Whether the piece is in a block that the peer lent.
bool ShmTransport::is_leased(Peer& peer, const Piece& piece) {
  if (piece.data < peer.heap->data() || piece.data >= peer.heap->data() + peer.heap->size()) return false;
  const std::lock_guard lock(peer.mutex);
  const Lease* const lease = lease_of(peer, piece);
  return lease && lease->token != 0;
}

// With the lock: the block with the piece becomes the peer's again. Returns its token, 0 if there is no such block.
uint64_t ShmTransport::end_lease(Peer& peer, const Piece& piece) {
  Lease* const lease = lease_of(peer, piece);
  if (!lease) return 0;
  lease->home = true;
  peer.leases.erase(lease->data);
  return lease->token;
}

// Writes the record to `at`. If there is a block, the record goes into the block, and `at` gets the block's place.
void ShmTransport::fill(std::byte* at, const Message& message, const Plan& plan, uint64_t block_token) const {
  const RecordHeader header{.bytes = static_cast<uint32_t>(plan.ring_bytes),
                            .kind = RecordKind::kMessage,
                            .in_block = plan.block != nullptr,
                            .body = static_cast<uint32_t>(message.body.size()),
                            .pieces = static_cast<uint32_t>(plan.records.size())};
  std::memcpy(at, &header, sizeof header);
  if (plan.block) {
    const PieceRecord place{.bytes = plan.bytes,
                            .offset = options_.heap->offset_of(plan.block.get()),
                            .token = block_token,
                            .where = Where::kMine};
    std::memcpy(at + sizeof header, &place, sizeof place);
    at = plan.block.get();
  }
  size_t used = sizeof header;
  if (!plan.records.empty()) std::memcpy(at + used, plan.records.data(), plan.records.size() * sizeof(PieceRecord));
  used = align(used + plan.records.size() * sizeof(PieceRecord));
  copy_bytes(at + used, message.body.data(), header.body);
  for (size_t i = 0; i < plan.records.size(); ++i)
    if (plan.records[i].where == Where::kInline)
      copy_bytes(at + plan.records[i].offset, message.pieces[i].data, plan.records[i].bytes);
}

// Contiguous room for a record, or null.
std::byte* ShmTransport::reserve(Peer& peer, size_t bytes) {
  const uint64_t head = peer.out.control->head.load(std::memory_order_acquire);
  const size_t to_end = capacity_ - peer.tail % capacity_;
  const size_t skip = to_end < bytes ? to_end : 0;
  if (peer.tail + skip + bytes - head > capacity_) return nullptr;
  if (skip) {
    const RecordHeader header{.bytes = static_cast<uint32_t>(skip), .kind = RecordKind::kSkip};
    std::memcpy(peer.out.at(peer.tail), &header, sizeof header);
    peer.tail += skip;
  }
  return peer.out.at(peer.tail);
}

void ShmTransport::publish(Peer& peer, size_t bytes) {
  peer.tail += bytes;
  peer.out.control->tail.store(peer.tail, std::memory_order_release);
}

void ShmTransport::announce(Peer& peer, bool can_wait) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!(peer.ready->load(std::memory_order_relaxed) & peer.ready_bit))
    peer.ready->fetch_or(peer.ready_bit, std::memory_order_seq_cst);
  if (!can_wait) return ring(peer);
  int64_t none = 0;
  waiting_since_.compare_exchange_strong(none, FastClock::now().time_since_epoch().count(), std::memory_order_seq_cst);
}

void ShmTransport::announce_waiting() {
  if (waiting_since_.load(std::memory_order_relaxed) == 0) return;
  waiting_since_.exchange(0, std::memory_order_seq_cst);  // before the look at `ready`, as announce() is after it
  for (auto& peer : peers_)
    if (peer->ready->load(std::memory_order_seq_cst) & peer->ready_bit) ring(*peer);  // the peer has not looked yet
}

void ShmTransport::send(int rank, Message message) {
  if (forked()) throw Aborted("this process is a fork of the worker");
  Peer& peer = peer_of(rank);
  Plan plan;
  plan_pieces(peer, message, plan);
  bool can_wait = message.can_wait;
  {
    const std::lock_guard lock(peer.mutex);
    if (peer.lost) throw_lost(peer);
    if (closed_.load(std::memory_order_relaxed)) throw PeerLost(peer.rank, peer.pid, kLeft);
    take_records_of(peer, message, plan);
    uint64_t block_token = 0;
    if (plan.block) {
      block_token = peer.next_token++;
      peer.lent[block_token] = {plan.block, plan.block.get(), plan.bytes};
    }
    peer.sent += message.bytes();
    if (!can_wait || ++peer.unrung > kUnrung) {
      can_wait = false;
      peer.unrung = 0;
    }
    if (std::byte* const at = peer.outbox.empty() ? reserve(peer, plan.ring_bytes) : nullptr) {
      fill(at, message, plan, block_token);
      publish(peer, plan.ring_bytes);
    } else {
      std::string record(plan.ring_bytes, '\0');
      fill(reinterpret_cast<std::byte*>(record.data()), message, plan, block_token);
      peer.outbox.push_back(std::move(record));
      if (!flush(peer) && !can_wait) ring(peer);  // the peer may not have been told of the records before this one
      return;
    }
  }
  announce(peer, can_wait);
}

// With the lock: writes queued records while there is room. If there is none, asks the peer to report room.
bool ShmTransport::flush(Peer& peer) {
  bool wrote = false;
  while (!peer.outbox.empty()) {
    std::string& record = peer.outbox.front();
    std::byte* at = reserve(peer, record.size());
    if (!at) {
      peer.out.control->wants_room.store(1, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      at = reserve(peer, record.size());
      if (!at) break;
    }
    copy_bytes(at, record.data(), record.size());
    publish(peer, record.size());
    peer.outbox.pop_front();
    wrote = true;
  }
  if (wrote) announce(peer);
  return wrote;
}

void ShmTransport::put_release(Peer& peer, uint64_t token) {
  std::string record(sizeof(RecordHeader) + kRecordAlign, '\0');
  const RecordHeader header{.bytes = static_cast<uint32_t>(record.size()), .kind = RecordKind::kRelease};
  std::memcpy(record.data(), &header, sizeof header);
  std::memcpy(record.data() + sizeof header, &token, sizeof token);
  if (std::byte* const at = peer.outbox.empty() ? reserve(peer, record.size()) : nullptr) {
    copy_bytes(at, record.data(), record.size());
    publish(peer, record.size());
    announce(peer);
  } else {
    peer.outbox.push_back(std::move(record));
    flush(peer);
  }
}

void ShmTransport::give_back(Lease& lease) {
  if (forked()) return;
  Peer& peer = *peers_[static_cast<size_t>(lease.peer)];
  const std::lock_guard lock(peer.mutex);
  if (lease.home) return;
  peer.leases.erase(lease.data);
  if (!peer.lost && !closed_.load(std::memory_order_relaxed)) put_release(peer, lease.token);
}

size_t ShmTransport::backlog(int rank) const {
  Peer& peer = peer_of(rank);
  const std::lock_guard lock(peer.mutex);
  return peer.lost ? 0 : peer.sent - peer.out.control->taken.load(std::memory_order_acquire);
}

void ShmTransport::wait_below(int rank, size_t bytes, Deadline deadline) {
  Peer& peer = peer_of(rank);
  std::unique_lock lock(peer.mutex);
  const auto below = [&] {
    return peer.lost || peer.sent - peer.out.control->taken.load(std::memory_order_acquire) <= bytes;
  };
  ++peer.waiters;
  while (!below()) {
    if (deadline.passed()) {
      --peer.waiters;
      throw TimeoutError(text(who(peer), " does not take what was sent to it: ",
                              peer.sent - peer.out.control->taken.load(std::memory_order_acquire), " bytes wait"),
                         {peer.rank});
    }
    peer.out.control->wants_room.store(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (below()) break;
    peer.room.wait_for(lock, std::min(deadline.left(), kNap));
  }
  --peer.waiters;
  if (peer.lost) throw_lost(peer);
}

}  // namespace muster::transport::shm_rings
