// The sizes of an all_to_all's parts, as the ranks tell each other.
//
// Thread-safety: one thread per object.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>

#include "base/copy.h"
#include "base/text.h"
#include "comm/backends/shm/channel.h"
#include "comm/backends/shm/collectives.h"
#include "muster/base/error.h"

namespace muster::comm::shm_backend {

// What the ranks announce about an all_to_all's parts. A rank whose parts all have one size, and are small, announces
// that size in place of a heap offset. Any other rank puts two tables into its slot: the bytes that it sends to each
// rank, and the bytes that it expects from each. The data that it sends follows in the slot if it fits.
class PartTables {
 public:
  // The tables fit: ShmBackend::require_possible().
  explicit PartTables(Channel& channel) : channel_(channel), n_(static_cast<size_t>(channel.size())) {}

  // Announces the call's parts, with the data if it fits.
  void begin_operation(const Call& call) {
    uint64_t sent = 0;
    bool even = true;
    for (size_t r = 0; r < n_; ++r) {
      sent += call.send[r];
      even = even && call.send[r] == call.send[0] && call.receive[r] == call.send[0];
    }
    even = even && sent <= kRoom;
    Descriptor descriptor = descriptor_of(call);
    Bytes const own = channel_.own_payload();
    if (even) {
      descriptor.heap_offset = kEvenParts | call.send[0];
    } else {
      std::memcpy(own, call.send.data(), table());
      std::memcpy(own + table(), call.receive.data(), table());
    }
    Bytes end = own + (even ? 0 : 2 * table());
    if (even || sent <= kRoom - 2 * table()) {
      for (size_t r = 0; r < n_; end += call.send[r], ++r) copy_bytes(end, call.inputs[r], call.send[r]);
      const uint64_t own_part = channel_.rank() == 0 ? call.send[0] : 0;
      channel_.corrupt({end - sent + own_part, sent - own_part}, channel_.next_seq());
    }
    channel_.begin_operation(descriptor, {own, static_cast<size_t>(end - own)}, call.deadline);
    compare();
  }

  // Whether all parts of all ranks have one size and came with the announcements. If so, uniform_part() is this rank's
  // part of what rank `from` sent.
  bool uniform() const { return uniform_; }
  Bytes uniform_part(size_t from) const {
    return payload(from) + static_cast<size_t>(channel_.rank()) * (said(from) & ~kEvenParts);
  }

  // The bytes that rank `from` sends before this rank's part, all that it sends, and its longest part for another rank.
  struct Sent {
    uint64_t before = 0, total = 0, longest = 0;
  };
  Sent sent_by(size_t from) const {
    Sent sent;
    for (size_t to = 0; to < n_; ++to) {
      const uint64_t size = entry(from, to);
      if (to < static_cast<size_t>(channel_.rank())) sent.before += size;
      sent.total += size;
      if (to != from) sent.longest = std::max(sent.longest, size);
    }
    return sent;
  }
  // Whether the data of `from` came with its announcement. If so, part() is this rank's part of it.
  bool came(size_t from, const Sent& sent) const { return even(from) || sent.total <= kRoom - 2 * table(); }
  Bytes part(size_t from, const Sent& sent) const {
    return payload(from) + (even(from) ? 0 : 2 * table()) + sent.before;
  }

 private:
  static constexpr size_t kRoom = kSlotPayload + kSlotTables;

  size_t table() const { return n_ * sizeof(uint64_t); }
  Bytes payload(size_t rank) const { return channel_.payload(static_cast<int>(rank)); }
  uint64_t said(size_t rank) const { return channel_.descriptor(static_cast<int>(rank)).heap_offset; }
  bool even(size_t rank) const { return says_even_parts(said(rank)); }
  uint64_t entry(size_t rank, size_t index) const {
    return even(rank) ? said(rank) & ~kEvenParts : entries_[rank * 2 * n_ + index];
  }

  void compare() {
    uniform_ = even(0);
    for (size_t r = 0; r < n_; ++r) uniform_ = uniform_ && said(r) == said(0);
    if (uniform_) [[likely]]
      return;
    compare_tables();
  }

  [[gnu::noinline]] void compare_tables() {
    // A copy: what was compared is what counts, whatever a defective peer writes.
    if (const size_t words = 2 * n_ * n_; words > std::size(few_)) {
      many_ = std::make_unique_for_overwrite<uint64_t[]>(words);
      entries_ = many_.get();
    }
    for (size_t r = 0; r < n_; ++r)
      if (!even(r)) std::memcpy(entries_ + r * 2 * n_, payload(r), 2 * table());
    for (size_t from = 0; from < n_; ++from) {
      uint64_t sent = 0;
      for (size_t to = 0; to < n_; ++to)
        if (__builtin_add_overflow(sent, entry(from, to), &sent) || sent > INT64_MAX) [[unlikely]] {
          const int rank = channel_.shown(static_cast<int>(from));
          channel_.fail(ErrorCode::kUnavailable, rank,
                        text("rank ", rank, " has announced more bytes for an all_to_all than there can be"));
          channel_.throw_failure();
        }
    }
    for (size_t from = 0; from < n_; ++from)
      for (size_t to = 0; to < n_; ++to)
        if (entry(from, to) != entry(to, n_ + from)) [[unlikely]]
          differ(from, to);
  }

  [[noreturn]] void differ(size_t from, size_t to) const {
    channel_.tell_sites(static_cast<int>(from), static_cast<int>(to));
    const int sender = channel_.shown(static_cast<int>(from)), receiver = channel_.shown(static_cast<int>(to));
    const std::string sent_at = channel_.site_of(static_cast<int>(from), channel_.seq());
    const std::string received_at = channel_.site_of(static_cast<int>(to), channel_.seq());
    channel_.fail(ErrorCode::kMismatch, sender,
                  describe_mismatch({sender, sent_at}, entry(from, to), {receiver, received_at}, entry(to, n_ + from)));
    channel_.throw_failure();
  }

  Channel& channel_;
  const size_t n_;
  bool uniform_ = false;
  // The tables of ranks whose parts are not even.
  uint64_t few_[2 * 8 * 8];
  std::unique_ptr<uint64_t[]> many_;
  uint64_t* entries_ = few_;
};

}  // namespace muster::comm::shm_backend
