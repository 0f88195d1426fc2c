// The receiving side of the shm transport.
#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <utility>

#include "base/cycles.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "transport/shm/rings_transport.h"

namespace muster::transport::shm_rings {
namespace {

// Records of one ring that are delivered before the next ring has its turn.
constexpr int kBatch = 64;
// How long messages that can wait do wait.
constexpr nanoseconds kPatience = std::chrono::milliseconds(1);

}  // namespace

Lease::~Lease() {
  if (const auto alive = transport.lock()) alive->give_back(*this);
}

bool ShmTransport::poll() {
  bool any = false;
  const int64_t waiting_since = waiting_since_.load(std::memory_order_relaxed);
  if (waiting_since != 0 && FastClock::now().time_since_epoch().count() - waiting_since > kPatience.count())
    announce_waiting();
  for (size_t word = 0; word < unread_.size(); ++word) {
    uint64_t bits = unread_[word].load(std::memory_order_relaxed);
    if (bits) unread_[word].store(0, std::memory_order_relaxed);
    if (header_->ready[word].load(std::memory_order_relaxed)) {
      bits |= header_->ready[word].exchange(0, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    for (; bits; bits &= bits - 1) {
      const auto place = word * 64 + static_cast<size_t>(std::countr_zero(bits));
      if (place < peers_.size()) any |= drain(*peers_[place], false);
    }
  }
  if (around_.load(std::memory_order_relaxed)) any |= look_around();
  return any;
}

// Delivers what the ring holds, a batch or (`to_the_end`) all of it.
bool ShmTransport::drain(Peer& peer, bool to_the_end) {
  RingControl& control = *peer.in.control;
  uint64_t head = peer.head;
  bool any = false;
  const uint32_t closed = control.closed.load(std::memory_order_acquire);
  for (int i = 0; to_the_end || i < kBatch; ++i) {
    const uint64_t tail = control.tail.load(std::memory_order_acquire);
    if (tail == head || peer.told) break;
    if (tail - head > capacity_ || (tail - head) % kRecordAlign) {
      lose(peer, text(who(peer), " wrote outside of its ring"));
      break;
    }
    const std::byte* const record = peer.in.at(head);
    RecordHeader header;
    std::memcpy(&header, record, sizeof header);
    const uint64_t there = std::min<uint64_t>(tail - head, capacity_ - head % capacity_);
    if (header.bytes < sizeof header || header.bytes % kRecordAlign || header.bytes > there) {
      lose(peer, text(who(peer), " wrote a record of ", header.bytes, " bytes where there are ", there));
      break;
    }
    if (header.kind < RecordKind::kSkip || header.kind > RecordKind::kRelease) {
      lose(peer, text(who(peer), " wrote a record of unknown kind ", static_cast<int>(header.kind)));
      break;
    }
    if (header.kind == RecordKind::kMessage) deliver(peer, record, header);
    if (header.kind == RecordKind::kRelease && header.bytes >= sizeof header + sizeof(uint64_t)) {
      uint64_t token = 0;
      std::memcpy(&token, record + sizeof header, sizeof token);
      std::shared_ptr<void> done;  // destroyed without the lock
      const std::lock_guard lock(peer.mutex);
      if (auto node = peer.lent.extract(token)) done = std::move(node.mapped().owner);
    }
    head += header.bytes;
    peer.head = head;
    control.head.store(head, std::memory_order_release);
    any = true;
  }
  if (any) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (control.wants_room.load(std::memory_order_relaxed) && control.wants_room.exchange(0)) {
      // The peer's ring has room again: the bit makes the peer drain(), which flushes its outbox.
      peer.ready->fetch_or(peer.ready_bit, std::memory_order_seq_cst);
      ring(peer);
    }
  }
  if (control.tail.load(std::memory_order_acquire) != head) {
    if (!peer.told) unread_[static_cast<size_t>(peer.place) / 64].fetch_or(uint64_t{1} << (peer.place % 64));
  } else if (closed && !peer.told && control.closed.load(std::memory_order_relaxed)) {
    lose(peer, text(who(peer), " left"));
  }
  if (!peer.told) {
    // The bit may mean that the peer has read, so what waits for room can go on.
    const std::lock_guard lock(peer.mutex);
    if (!peer.outbox.empty()) flush(peer);
    if (peer.waiters) peer.room.notify_all();
  }
  return any;
}

void ShmTransport::deliver(Peer& peer, const std::byte* record, const RecordHeader& header) {
  size_t record_bytes = header.bytes;
  size_t bytes = header.body;
  Piece block;
  pieces_.clear();
  try {
    if (header.in_block) {
      PieceRecord told;
      if (record_bytes < sizeof header + sizeof told) throw CorruptError("a record without its block");
      std::memcpy(&told, record + sizeof header, sizeof told);
      if (told.where != Where::kMine) throw CorruptError("a record in a block that is not its sender's");
      block = incoming(peer, record, record_bytes, told);
      record = block.data;
      record_bytes = block.bytes;
    }
    const size_t table = align(sizeof header + size_t{header.pieces} * sizeof(PieceRecord));
    if (header.pieces > options_.limits.pieces || header.body > options_.limits.body || table > record_bytes ||
        header.body > record_bytes - table)
      throw CorruptError("a message does not fit its record");
    message_.assign(reinterpret_cast<const char*>(record), table + header.body);
    for (uint32_t i = 0; i < header.pieces; ++i) {
      PieceRecord told;
      std::memcpy(&told, message_.data() + sizeof header + i * sizeof told, sizeof told);
      pieces_.push_back(incoming(peer, record, record_bytes, told));
      if (bytes > options_.limits.bytes || told.bytes > options_.limits.bytes - bytes)
        throw CorruptError(text("a message has more than ", options_.limits.bytes, " bytes"));
      bytes += told.bytes;
    }
    receiver_.on_message(peer.rank, std::string_view(message_).substr(table), pieces_);
  } catch (const std::exception& error) {
    pieces_.clear();
    return lose(peer, text(who(peer), ": ", error.what()));
  }
  pieces_.clear();
  if (message_.capacity() > size_t{1} << 20) std::string().swap(message_);
  peer.in.control->taken.fetch_add(bytes, std::memory_order_release);
}

Piece ShmTransport::incoming(Peer& peer, const std::byte* record, size_t record_bytes, const PieceRecord& told) {
  Piece piece{.bytes = told.bytes};
  switch (told.where) {
    case Where::kInline:
      if (told.offset > record_bytes || told.bytes > record_bytes - told.offset)
        throw CorruptError("a piece of a message does not lie inside it");
      piece.data = const_cast<std::byte*>(record) + told.offset;
      return piece;
    case Where::kMine: {
      if (told.offset > peer.heap->size() || told.bytes > peer.heap->size() - told.offset)
        throw CorruptError("a piece of a message does not lie inside its sender's heap");
      piece.data = peer.heap->data() + told.offset;
      auto lease = std::make_shared<Lease>();
      lease->transport = weak_from_this();
      lease->heap = peer.heap;
      lease->peer = peer.place;
      lease->token = told.token;
      lease->data = piece.data;
      lease->bytes = piece.bytes;
      const std::lock_guard lock(peer.mutex);
      peer.leases[piece.data] = lease.get();
      piece.owner = std::move(lease);
      return piece;
    }
    case Where::kYours: {
      std::unordered_map<uint64_t, LentBlock>::node_type node;  // destroyed without the lock
      const std::lock_guard lock(peer.mutex);
      const auto found = peer.lent.find(told.token);
      if (found == peer.lent.end()) throw CorruptError("it returns a block that it does not have");
      LentBlock& lent = found->second;
      piece.data = options_.heap->base() + told.offset;
      if (told.offset > options_.heap->capacity() || piece.data < lent.data || told.bytes > lent.bytes ||
          piece.data + told.bytes > lent.data + lent.bytes)
        throw CorruptError("it returns a block with other bounds");
      piece.owner = std::move(lent.owner);
      node = peer.lent.extract(found);
      return piece;
    }
  }
  throw CorruptError("a piece of a message is nowhere");
}

// Handles deaths of peers.
bool ShmTransport::look_around() {
  around_.store(false, std::memory_order_seq_cst);
  bool any = false;
  for (auto& peer : peers_) {
    if (!peer->died.load(std::memory_order_acquire)) continue;
    if (!peer->told) {
      any |= drain(*peer, true);
      if (!peer->told) lose(*peer, text(who(*peer), " died"));
    }
    std::unordered_map<uint64_t, LentBlock> lent;  // the dead peer no longer reads it; destroyed without the lock
    const std::lock_guard lock(peer->mutex);
    lent.swap(peer->lent);
  }
  return any;
}

// What was lent stays lent unless the peer is dead: a peer that broke the protocol or has left may still use it.
void ShmTransport::lose(Peer& peer, const std::string& cause) {
  peer.told = true;
  {
    const std::lock_guard lock(peer.mutex);
    peer.lost = cause;
    peer.outbox.clear();
    peer.room.notify_all();
    peer.out.control->closed.store(1, std::memory_order_release);  // tells the peer, in case it is alive
  }
  announce(peer);
  receiver_.on_lost(peer.rank, cause);
}

}  // namespace muster::transport::shm_rings
