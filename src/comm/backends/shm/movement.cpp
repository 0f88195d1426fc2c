// Collectives that move data: broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier.
//
// All follow one scheme. Each rank *contributes* some bytes for others to read. Where every rank's contribution fits
// into its slot, it travels with the announcement. Else it goes through staging in turns: stage, say so, read what
// others staged, say done.
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

// The root's `bytes` to everybody: `take(rank's data, offset, length)` for each piece on every rank but the root.
template <typename Stage, typename Take>
void from_root(Channel& channel, const Call& call, uint64_t turns, Stage stage, Take take) {
  Turns pipeline(channel, turns);
  for (uint64_t i = 0; i < turns; ++i) {
    if (channel.rank() == call.root) {
      Bytes const own = pipeline.stage(i);
      stage(own, i);
      channel.corrupt({own, 1}, channel.seq());
      channel.corrupt({own + channel.layout().chunk, channel.size() > 1 ? size_t{1} : 0},
                      channel.seq());  // another rank's part of a scatter
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
    const size_t per_turn = channel.layout().turn_bytes();
    from_root(
        channel, call, turns_for(call.bytes(), per_turn),
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
    const size_t chunk = channel.layout().chunk;
    from_root(
        channel, call, turns_for(call.bytes(), chunk),
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
  std::vector<ConstBytes> sources(n);
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

// The parts' sizes travel with the announcement, and both ends compare them.
void all_to_all(Channel& channel, const Call& call, const AllToAllParts& parts) {
  const auto n = static_cast<size_t>(channel.size());
  const auto me = static_cast<size_t>(channel.rank());
  const size_t table = n * sizeof(uint64_t);
  if (table > kSlotPayload) throw InvalidArgument("all_to_all is limited to groups of 512 ranks");
  std::memcpy(channel.own_payload(), parts.send.data(), table);
  channel.tell_site(channel.next_seq());
  channel.enter(call.descriptor(), {channel.own_payload(), table}, call.deadline);
  uint64_t longest = 0;
  std::vector<uint64_t> theirs(n);
  for (size_t peer = 0; peer < n; ++peer) {
    std::memcpy(theirs.data(), channel.payload(static_cast<int>(peer)), table);
    longest = std::max(longest, *std::max_element(theirs.begin(), theirs.end()));
    if (theirs[me] != parts.receive[peer]) {
      const auto side = [&](size_t rank) {
        const std::string site = channel.site_of(static_cast<int>(rank), channel.seq());
        return text("rank ", channel.shown(static_cast<int>(rank)), site.empty() ? "" : text(" (", site, ")"));
      };
      channel.fail(Failure::kMismatch, channel.shown(static_cast<int>(peer)),
                   text("all_to_all: ", side(peer), " sends ", theirs[me], " bytes to ", side(me), ", which expects ",
                        parts.receive[peer]));
      channel.throw_failure();
    }
  }
  copy_bytes(parts.outputs[me], parts.inputs[me], parts.send[me]);
  const size_t chunk = channel.layout().chunk;
  if (n > 1)
    from_all(
        channel, turns_for(longest, chunk), true,
        [&](Bytes buffer, uint64_t i) {
          for (size_t r = 0; r < n; ++r) {
            const Piece piece(parts.send[r], chunk, i);
            if (r != me) copy_bytes(buffer + r * chunk, parts.inputs[r] + piece.begin, piece.length);
          }
          channel.corrupt({buffer + (me == 0 ? chunk : 0), 1}, channel.seq());
        },
        [&](int peer, ConstBytes buffer, uint64_t i) {
          const Piece piece(parts.receive[static_cast<size_t>(peer)], chunk, i);
          copy_bytes(parts.outputs[static_cast<size_t>(peer)] + piece.begin, buffer + me * chunk, piece.length);
        });
  channel.leave_op();
}

void barrier(Channel& channel, const Call& call) {
  channel.enter(call.descriptor(), {}, call.deadline);
  channel.leave_op();
}

}  // namespace muster::comm::shm_backend
