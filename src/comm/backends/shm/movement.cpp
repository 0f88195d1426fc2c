// Collectives that move data: broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier.
//
// All follow one scheme. Each rank *contributes* some bytes for others to read. Where every rank's contribution fits
// into its slot, it travels with the announcement. Else, if all that contribute have it on the heap, the others read it
// there. Else it goes through staging in turns: stage, say so, read what others staged, say done.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/text.h"
#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/turns.h"

namespace muster::comm::shm_backend {
namespace {

uint64_t turns_for(size_t bytes, size_t per_turn) { return (bytes + per_turn - 1) / per_turn; }

// memcpy with null pointers is undefined even for no bytes, and empty tensors have them.
void copy_bytes(Bytes to, ConstBytes from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

// One piece of `whole` bytes in turn i.
struct Piece {
  Piece(size_t whole, size_t per_turn, uint64_t i)
      : begin(std::min(whole, i * per_turn)), length(std::min(whole - begin, per_turn)) {}
  size_t begin, length;
};

// Whether all those whose contribution is read have it on the heap: the root alone, or everybody.
bool on_heap(const Channel& channel, int root = -1) {
  if (!channel.has_heaps()) return false;
  for (int r = root < 0 ? 0 : root; r < (root < 0 ? channel.size() : root + 1); ++r)
    if (channel.descriptor(r).heap_offset == kNotOnHeap) return false;
  return true;
}

// Contributions are read where they are; announcing said that they are there. `read(peer, data)` on ranks with `takes`,
// for the root or for every other rank.
template <typename Read>
void directly(Channel& channel, int root, bool takes, Read read) {
  const uint64_t mark = channel.turn() + 1;
  channel.take_turns(1);
  const auto data_of_rank = [&](int r) -> ConstBytes { return channel.heap(r) + channel.descriptor(r).heap_offset; };
  if (root >= 0) {
    if (channel.rank() != root) read(root, data_of_rank(root));
  } else {
    for (int step = 1; takes && step < channel.size(); ++step) {
      const int peer = (channel.rank() + step) % channel.size();
      read(peer, data_of_rank(peer));
    }
  }
  channel.publish(Channel::Counter::kDone, mark);
  if (root < 0 || channel.rank() == root) channel.await_all(Channel::Counter::kDone, mark);
}

// The root's `bytes` to everybody: `take(rank's data, offset, length)` for each piece on every rank but the root.
template <typename Stage, typename Take>
void from_root(Channel& channel, const Call& call, uint64_t turns, size_t other_part, Stage stage, Take take) {
  Turns pipeline(channel, turns);
  for (uint64_t i = 0; i < turns; ++i) {
    if (channel.rank() == call.root) {
      Bytes const own = pipeline.stage(i);
      stage(own, i);
      channel.corrupt({own, 1}, channel.seq());
      if (other_part > 0) channel.corrupt({own + other_part, channel.size() > 1 ? size_t{1} : 0}, channel.seq());
      pipeline.staged(i);
    } else {
      pipeline.await_staged(call.root, i);
      take(pipeline.staged_by(call.root, i), i);
    }
    pipeline.done(i);
  }
}

// Everybody's contribution to those who want it. `stage(buffer, i)` writes the own one, `take(peer, buffer, i)` reads a
// peer's; both for turn i. Ranks with `takes` false read nothing.
template <typename Stage, typename Take>
void from_all(Channel& channel, uint64_t turns, bool takes, Stage stage, Take take) {
  Turns pipeline(channel, turns);
  for (uint64_t i = 0; i < turns; ++i) {
    Bytes const own = pipeline.stage(i);
    stage(own, i);
    pipeline.staged(i);
    for (int step = 1; takes && step < channel.size(); ++step) {
      const int peer = (channel.rank() + step) % channel.size();  // not all at the same rank's memory at once
      pipeline.await_staged(peer, i);
      take(peer, pipeline.staged_by(peer, i), i);
    }
    pipeline.done(i);
  }
}

}  // namespace

void broadcast(Channel& channel, const Call& call, Bytes data) {
  const bool root = channel.rank() == call.root;
  if (call.bytes() <= kSlotPayload) {
    channel.enter(call.descriptor(),
                  root ? std::span<const std::byte>(data, call.bytes()) : std::span<const std::byte>{}, call.deadline);
    if (!root) copy_bytes(data, channel.payload(call.root), call.bytes());
  } else {
    channel.enter(call.descriptor(), {}, call.deadline);
    if (on_heap(channel, call.root)) {
      directly(channel, call.root, !root, [&](int, ConstBytes from) { copy_bytes(data, from, call.bytes()); });
      return channel.leave_op();
    }
    const size_t per_turn = channel.layout().turn_bytes();
    from_root(
        channel, call, turns_for(call.bytes(), per_turn), 0,
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          copy_bytes(buffer, data + piece.begin, piece.length);
        },
        [&](ConstBytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          copy_bytes(data + piece.begin, buffer, piece.length);
        });
  }
  channel.leave_op();
}

namespace {

// all_gather and gather: `outputs` is empty on ranks that do not take.
void gather_parts(Channel& channel, const Call& call, std::span<const Bytes> outputs, ConstBytes input) {
  const bool takes = !outputs.empty();
  if (takes) copy_bytes(outputs[static_cast<size_t>(channel.rank())], input, call.bytes());
  if (call.bytes() <= kSlotPayload) {
    channel.enter(call.descriptor(), {input, call.bytes()}, call.deadline);
    for (int peer = 0; takes && peer < channel.size(); ++peer)
      if (peer != channel.rank()) copy_bytes(outputs[static_cast<size_t>(peer)], channel.payload(peer), call.bytes());
  } else {
    channel.enter(call.descriptor(), {}, call.deadline);
    if (on_heap(channel)) {
      directly(channel, -1, takes,
               [&](int peer, ConstBytes from) { copy_bytes(outputs[static_cast<size_t>(peer)], from, call.bytes()); });
      return channel.leave_op();
    }
    const size_t per_turn = channel.layout().turn_bytes();
    from_all(
        channel, turns_for(call.bytes(), per_turn), takes,
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          copy_bytes(buffer, input + piece.begin, piece.length);
          channel.corrupt({buffer, 1}, channel.seq());
        },
        [&](int peer, ConstBytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          copy_bytes(outputs[static_cast<size_t>(peer)] + piece.begin, buffer, piece.length);
        });
  }
  channel.leave_op();
}

}  // namespace

void all_gather(Channel& channel, const Call& call, std::span<const Bytes> outputs, ConstBytes input) {
  gather_parts(channel, call, outputs, input);
}

void gather(Channel& channel, const Call& call, std::span<const Bytes> outputs, ConstBytes input) {
  gather_parts(channel, call, outputs, input);
}

void scatter(Channel& channel, const Call& call, Bytes output, std::span<const ConstBytes> inputs) {
  const bool root = channel.rank() == call.root;
  const auto n = static_cast<size_t>(channel.size());
  const auto me = static_cast<size_t>(channel.rank());
  if (root) copy_bytes(output, inputs[me], call.bytes());
  if (call.bytes() * n <= kSlotPayload) {
    if (root)
      for (size_t r = 0; r < n; ++r) copy_bytes(channel.own_payload() + r * call.bytes(), inputs[r], call.bytes());
    channel.enter(
        call.descriptor(),
        root ? std::span<const std::byte>(channel.own_payload(), call.bytes() * n) : std::span<const std::byte>{},
        call.deadline);
    if (!root) copy_bytes(output, channel.payload(call.root) + me * call.bytes(), call.bytes());
  } else {
    channel.enter(call.descriptor(), {}, call.deadline);
    if (on_heap(channel, call.root)) {
      directly(channel, call.root, !root,
               [&](int, ConstBytes from) { copy_bytes(output, from + me * call.bytes(), call.bytes()); });
      return channel.leave_op();
    }
    const size_t chunk = channel.layout().chunk;
    from_root(
        channel, call, turns_for(call.bytes(), chunk), chunk,
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), chunk, i);
          for (size_t r = 0; r < n; ++r)
            if (r != me) copy_bytes(buffer + r * chunk, inputs[r] + piece.begin, piece.length);
        },
        [&](ConstBytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), chunk, i);
          copy_bytes(output + piece.begin, buffer + me * chunk, piece.length);
        });
  }
  channel.leave_op();
}

void reduce_scatter(Channel& channel, const Call& call, Bytes output, std::span<const ConstBytes> inputs) {
  const auto n = static_cast<size_t>(channel.size());
  const auto me = static_cast<size_t>(channel.rank());
  std::array<ConstBytes, 64> few;  // the common case makes no allocation
  std::vector<ConstBytes> many(n > few.size() ? n : 0);
  const std::span<ConstBytes> sources = many.empty() ? std::span(few).first(n) : std::span(many);
  const auto reduce = [&](size_t begin, size_t bytes) {
    const std::array<Bytes, 1> destination = {output + begin};
    call.kernel(destination, sources, bytes / call.item);
  };
  if (call.bytes() * n <= kSlotPayload) {
    for (size_t r = 0; r < n; ++r) copy_bytes(channel.own_payload() + r * call.bytes(), inputs[r], call.bytes());
    channel.enter(call.descriptor(), {channel.own_payload(), call.bytes() * n}, call.deadline);
    for (size_t r = 0; r < n; ++r) sources[r] = channel.payload(static_cast<int>(r)) + me * call.bytes();
    reduce(0, call.bytes());
  } else {
    channel.enter(call.descriptor(), {}, call.deadline);
    if (on_heap(channel)) {
      for (size_t r = 0; r < n; ++r)
        sources[r] =
            channel.heap(static_cast<int>(r)) + channel.descriptor(static_cast<int>(r)).heap_offset + me * call.bytes();
      reduce(0, call.bytes());
      directly(channel, -1, false, [](int, ConstBytes) {});
      return channel.leave_op();
    }
    const size_t chunk = channel.layout().chunk;  // a multiple of every item
    const uint64_t turns = turns_for(call.bytes(), chunk);
    Turns pipeline(channel, turns);
    for (uint64_t i = 0; i < turns; ++i) {
      const Piece piece(call.bytes(), chunk, i);
      Bytes const own = pipeline.stage(i);
      for (size_t r = 0; r < n; ++r)
        if (r != me) copy_bytes(own + r * chunk, inputs[r] + piece.begin, piece.length);
      channel.corrupt({own + (me == 0 ? chunk : 0), n > 1 ? size_t{1} : 0}, channel.seq());
      pipeline.staged(i);
      for (size_t r = 0; r < n; ++r) {
        if (r != me) pipeline.await_staged(static_cast<int>(r), i);
        sources[r] = r == me ? inputs[me] + piece.begin : pipeline.staged_by(static_cast<int>(r), i) + me * chunk;
      }
      reduce(piece.begin, piece.length);
      pipeline.done(i);
    }
  }
  channel.leave_op();
}

// The announcement carries two tables, of what the rank sends to each and of what it expects from each, and everybody
// compares all of them. It carries the parts as well, where all that a rank sends fits into its slot.
void all_to_all(Channel& channel, const Call& call, const AllToAllParts& parts) {
  const auto n = static_cast<size_t>(channel.size());
  const auto me = static_cast<size_t>(channel.rank());
  const size_t table = n * sizeof(uint64_t);
  constexpr size_t kRoom = kSlotPayload + kSlotTables;
  if (2 * table > kRoom) throw InvalidArgument("all_to_all is limited to groups of 320 ranks");
  const auto fits = [&](uint64_t total) { return total <= kRoom - 2 * table; };
  Bytes const own = channel.own_payload();
  std::memcpy(own, parts.send.data(), table);
  std::memcpy(own + table, parts.receive.data(), table);
  uint64_t sent = 0;
  for (const uint64_t size : parts.send) sent += size;
  if (fits(sent))
    for (size_t r = 0, at = 2 * table; r < n; at += parts.send[r], ++r)
      copy_bytes(own + at, parts.inputs[r], parts.send[r]);
  if (fits(sent)) channel.corrupt({own + 2 * table, sent}, channel.next_seq());
  channel.enter(call.descriptor(), {own, 2 * table + (fits(sent) ? sent : 0)}, call.deadline);

  const auto entry = [&](size_t rank, size_t index) {
    uint64_t size = 0;
    std::memcpy(&size, channel.payload(static_cast<int>(rank)) + index * sizeof size, sizeof size);
    return size;
  };
  for (size_t from = 0; from < n; ++from)
    for (size_t to = 0; to < n; ++to)
      if (const uint64_t size = entry(from, to), expected = entry(to, n + from); size != expected) [[unlikely]] {
        channel.tell_sites(static_cast<int>(from), static_cast<int>(to));
        const auto side = [&](size_t rank) {
          const std::string site = channel.site_of(static_cast<int>(rank), channel.seq());
          return text("rank ", channel.shown(static_cast<int>(rank)), site.empty() ? "" : text(" (", site, ")"));
        };
        channel.fail(
            Failure::kMismatch, channel.shown(static_cast<int>(from)),
            text("all_to_all: ", side(from), " sends ", size, " bytes to ", side(to), ", which expects ", expected));
        channel.throw_failure();
      }
  struct Theirs {
    uint64_t before = 0, total = 0, longest = 0;  // before: this rank's part
  };
  const auto look = [&](size_t peer) {
    Theirs theirs;
    for (size_t r = 0; r < n; ++r) {
      const uint64_t size = entry(peer, r);
      if (r < me) theirs.before += size;
      theirs.total += size;
      theirs.longest = std::max(theirs.longest, size);
    }
    return theirs;
  };
  uint64_t longest = 0;  // of the parts that are staged
  for (size_t peer = 0; peer < n; ++peer) {
    const Theirs theirs = look(peer);
    if (!fits(theirs.total))
      longest = std::max(longest, theirs.longest);
    else if (peer != me)
      copy_bytes(parts.outputs[peer], channel.payload(static_cast<int>(peer)) + 2 * table + theirs.before,
                 parts.receive[peer]);
  }
  copy_bytes(parts.outputs[me], parts.inputs[me], parts.send[me]);
  if (n > 1 && longest > 0 && on_heap(channel)) {
    directly(channel, -1, true, [&](int peer, ConstBytes from) {
      const Theirs theirs = look(static_cast<size_t>(peer));
      if (!fits(theirs.total))
        copy_bytes(parts.outputs[static_cast<size_t>(peer)], from + theirs.before,
                   parts.receive[static_cast<size_t>(peer)]);
    });
    return channel.leave_op();
  }
  const size_t chunk = channel.layout().chunk;
  if (n > 1 && longest > 0)
    from_all(
        channel, turns_for(longest, chunk), true,
        [&](Bytes buffer, uint64_t i) {
          if (fits(sent)) return;
          for (size_t r = 0; r < n; ++r) {
            const Piece piece(parts.send[r], chunk, i);
            if (r != me) copy_bytes(buffer + r * chunk, parts.inputs[r] + piece.begin, piece.length);
          }
          channel.corrupt({buffer + (me == 0 ? chunk : 0), 1}, channel.seq());
        },
        [&](int peer, ConstBytes buffer, uint64_t i) {
          const auto from = static_cast<size_t>(peer);
          const Piece piece(fits(look(from).total) ? 0 : parts.receive[from], chunk, i);
          copy_bytes(parts.outputs[from] + piece.begin, buffer + me * chunk, piece.length);
        });
  channel.leave_op();
}

void barrier(Channel& channel, const Call& call) {
  channel.enter(call.descriptor(), {}, call.deadline);
  channel.leave_op();
}

}  // namespace muster::comm::shm_backend
