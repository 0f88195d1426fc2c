// Collectives that move data: broadcast, all_gather, gather, scatter, reduce_scatter, scan, all_to_all, barrier.
//
// All follow one scheme. Each rank *contributes* some bytes for others to read. If every rank's contribution fits into
// its slot, it travels with the announcement. Else, if all contributions are on the heap, the others read them there.
// Else they go through staging in turns: a rank stages its data, says so, reads what others staged, and says done.
#include <algorithm>
#include <array>
#include <cstring>

#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/part_tables.h"
#include "comm/backends/shm/per_rank.h"
#include "comm/backends/shm/take.h"
#include "comm/backends/shm/turns.h"

namespace muster::comm::shm_backend {
namespace {

uint64_t turns_for(size_t bytes, size_t per_turn) { return (bytes + per_turn - 1) / per_turn; }

// How much of `bytes` goes in one turn: so little that ranks read one turn while they write the next, but not less than
// is copied in the time of a turn's synchronisation. The same on all ranks, and whole cache lines.
size_t bytes_per_turn(size_t bytes, size_t most) {
  constexpr size_t kLeast = size_t{16} << 10;
  if (bytes <= 2 * kLeast) return std::min(most, 2 * kLeast);
  return std::min(most, std::max(kLeast, (bytes / 4 + kLine - 1) / kLine * kLine));
}

// One piece of `whole` bytes in turn i.
struct Piece {
  Piece(size_t whole, size_t per_turn, uint64_t i)
      : begin(std::min(whole, i * per_turn)), length(std::min(whole - begin, per_turn)) {}
  size_t begin, length;
};

constexpr auto kNothing = [] {};

// Ends an operation whose contributions were read where they lie. Afterwards the owners may change them: no rank still
// reads the root's contribution or, if `root` is -1, any contribution. `meanwhile` is called before the wait for that.
template <typename Meanwhile = decltype(kNothing)>
void all_have_read(Channel& channel, int root, Meanwhile meanwhile = {}) {
  if (channel.rank() != root) channel.check_what_was_read(root);
  const uint64_t mark = channel.turn() + 1;
  channel.take_turns(1);
  channel.publish(Channel::Counter::kDone, mark);
  meanwhile();
  if (root < 0 || channel.rank() == root) channel.await_all(Channel::Counter::kDone, mark);
}

// Reads the contributions of all other ranks where they lie. They are ready since their announcements.
template <typename Read>
void read_all(Channel& channel, Read read) {
  for (int step = 1; step < channel.size(); ++step) {
    const int peer = (channel.rank() + step) % channel.size();
    read(peer, channel.announced_data(peer));
  }
}

// Copies what a peer has on its heap.
void read_heap(Bytes to, Bytes from, size_t bytes) {
  if (streams(bytes) && reinterpret_cast<uintptr_t>(from) % kCacheLine == 0)
    look_at_bytes(to, from, bytes, true);
  else
    copy_bytes(to, from, bytes);
}

// Copies what a peer put into its slot or staging, a part of `whole` bytes. `alone`: no other rank reads it.
void fetch(Bytes to, Bytes from, size_t bytes, size_t whole, bool alone) {
  if (alone)
    take_bytes(to, from, bytes, streams(whole));
  else if (streams(whole))
    look_at_bytes(to, from, bytes, true);
  else
    copy_bytes(to, from, bytes);
}

// `parts` holds `bytes` for each rank, one after another. Returns the first byte that is for another rank, if there is
// one. An injected fault corrupts it.
std::span<std::byte> first_of_others(Channel& channel, Bytes parts, size_t bytes) {
  return {parts + (channel.rank() == 0 ? bytes : 0), channel.size() > 1 ? std::min<size_t>(bytes, 1) : 0};
}

// Moves the root's data to all ranks in `turns` turns. In turn i the root calls `stage(buffer, i)`, and all other ranks
// call `take(buffer, i)` with the root's buffer.
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
      take(pipeline.buffer(call.root, i), i);
    }
    pipeline.done(i);
  }
}

// Moves all ranks' contributions to the ranks that want them. In turn i `stage(buffer, i)` writes this rank's
// contribution, and `take(peer, buffer, i)` reads a peer's. If `takes` is false, this rank reads nothing. `meanwhile`
// is called once, before the first wait for a peer.
template <typename Stage, typename Take, typename Meanwhile>
void from_all(Channel& channel, uint64_t turns, bool takes, Stage stage, Take take, Meanwhile meanwhile) {
  Turns pipeline(channel, turns);
  for (uint64_t i = 0; i < turns; ++i) {
    Bytes const own = pipeline.stage(i);
    stage(own, i);
    pipeline.staged(i);
    if (i == 0) meanwhile();
    for (int step = 1; takes && step < channel.size(); ++step) {
      const int peer = (channel.rank() + step) % channel.size();  // not all read the same rank's memory
      pipeline.await_staged(peer, i);
      take(peer, pipeline.buffer(peer, i), i);
    }
    pipeline.done(i);
  }
}

}  // namespace

void broadcast(Channel& channel, const Call& call) {
  Bytes const data = call.data;
  const bool root = channel.rank() == call.root;
  if (call.bytes() <= kSlotPayload) {
    channel.begin_operation(descriptor_of(call),
                            root ? std::span<const std::byte>(data, call.bytes()) : std::span<const std::byte>{},
                            call.deadline);
    if (!root) fetch(data, channel.payload(call.root), call.bytes(), call.bytes(), channel.size() == 2);
  } else {
    channel.begin_operation(descriptor_of(call), {}, call.deadline);
    if (channel.on_heap(call.root, call.bytes())) {
      if (!root) read_heap(data, channel.announced_data(call.root), call.bytes());
      all_have_read(channel, call.root);
      return channel.end_operation();
    }
    const size_t per_turn = bytes_per_turn(call.bytes(), channel.layout().turn_bytes());
    from_root(
        channel, call, turns_for(call.bytes(), per_turn), 0,
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          copy_bytes(buffer, data + piece.begin, piece.length);
        },
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          fetch(data + piece.begin, buffer, piece.length, call.bytes(), channel.size() == 2);
        });
  }
  channel.end_operation();
}

void all_gather(Channel& channel, const Call& call) {
  const std::span<const Bytes> outputs = call.outputs;  // empty on ranks that only give
  ConstBytes const input = call.data;
  const bool takes = !outputs.empty();
  const bool alone = channel.size() == 2 || call.kind == OpKind::kGather;
  const auto copy_own = [&] {
    if (Bytes const own = takes ? outputs[static_cast<size_t>(channel.rank())] : nullptr; own && own != input)
      copy_bytes(own, input, call.bytes());
  };
  if (call.bytes() <= kSlotPayload) {
    copy_own();
    channel.begin_operation(descriptor_of(call), {input, call.bytes()}, call.deadline);
    for (int peer = 0; takes && peer < channel.size(); ++peer)
      if (peer != channel.rank())
        fetch(outputs[static_cast<size_t>(peer)], channel.payload(peer), call.bytes(), call.bytes(), alone);
  } else {
    channel.begin_operation(descriptor_of(call), {}, call.deadline);
    if (channel.all_on_heap(call.bytes())) {
      if (takes)
        read_all(channel,
                 [&](int peer, Bytes from) { read_heap(outputs[static_cast<size_t>(peer)], from, call.bytes()); });
      all_have_read(channel, -1, copy_own);
      return channel.end_operation();
    }
    const size_t per_turn = bytes_per_turn(call.bytes(), channel.layout().turn_bytes());
    from_all(
        channel, turns_for(call.bytes(), per_turn), takes,
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          copy_bytes(buffer, input + piece.begin, piece.length);
          channel.corrupt({buffer, 1}, channel.seq());
        },
        [&](int peer, Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), per_turn, i);
          fetch(outputs[static_cast<size_t>(peer)] + piece.begin, buffer, piece.length, call.bytes(), alone);
        },
        copy_own);
  }
  channel.end_operation();
}

void scatter(Channel& channel, const Call& call) {
  Bytes const output = call.data;
  const std::span<const ConstBytes> inputs = call.inputs;
  const bool root = channel.rank() == call.root;
  const auto n = static_cast<size_t>(channel.size());
  const auto me = static_cast<size_t>(channel.rank());
  if (root) copy_bytes(output, inputs[me], call.bytes());
  if (call.bytes() * n <= kSlotPayload) {
    if (root)
      for (size_t r = 0; r < n; ++r) copy_bytes(channel.own_payload() + r * call.bytes(), inputs[r], call.bytes());
    if (root) channel.corrupt(first_of_others(channel, channel.own_payload(), call.bytes()), channel.next_seq());
    channel.begin_operation(
        descriptor_of(call),
        root ? std::span<const std::byte>(channel.own_payload(), call.bytes() * n) : std::span<const std::byte>{},
        call.deadline);
    if (!root) take_bytes(output, channel.payload(call.root) + me * call.bytes(), call.bytes());
  } else {
    channel.begin_operation(descriptor_of(call), {}, call.deadline);
    if (channel.on_heap(call.root, call.bytes() * n)) {
      if (!root) read_heap(output, channel.announced_data(call.root) + me * call.bytes(), call.bytes());
      all_have_read(channel, call.root);
      return channel.end_operation();
    }
    const size_t chunk = bytes_per_turn(call.bytes(), channel.layout().chunk);
    from_root(
        channel, call, turns_for(call.bytes(), chunk), chunk,
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), chunk, i);
          for (size_t r = 0; r < n; ++r)
            if (r != me) copy_bytes(buffer + r * chunk, inputs[r] + piece.begin, piece.length);
        },
        [&](Bytes buffer, uint64_t i) {
          const Piece piece(call.bytes(), chunk, i);
          take_bytes(output + piece.begin, buffer + me * chunk, piece.length, streams(call.bytes()));
        });
  }
  channel.end_operation();
}

void reduce_scatter(Channel& channel, const Call& call) {
  Bytes const output = call.data;
  const std::span<const ConstBytes> inputs = call.inputs;
  const auto n = static_cast<size_t>(channel.size());
  const auto me = static_cast<size_t>(channel.rank());
  PerRank<ConstBytes> sources(n);
  // This is only read: the kernel's sources are constant, and take() is called only for the peers' contributions.
  Bytes const own_part = const_cast<Bytes>(inputs[me]);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  // Reduces the contributions that `contribution(rank)` finds to `begin` of the output. If `taking`, no other rank
  // reads the peers' contributions.
  const auto reduce = [&](size_t begin, size_t bytes, bool taking, auto contribution) {
    const size_t at_once = taking ? kTakenAtOnce : std::max<size_t>(bytes, 1);  // a multiple of every item
    for (size_t at = 0; at < bytes; at += at_once) {
      const size_t now = std::min(at_once, bytes - at);
      for (size_t r = 0; r < n; ++r) sources[r] = contribution(r) + at;
      const std::array<Bytes, 1> destination = {output + begin + at};
      call.kernel(destination, sources.span(), now / call.item);
      for (size_t r = 0; taking && r < n; ++r)
        if (r != me) take(contribution(r) + at, now);
    }
  };
  if (call.bytes() * n <= kSlotPayload) {
    for (size_t r = 0; r < n; ++r) copy_bytes(channel.own_payload() + r * call.bytes(), inputs[r], call.bytes());
    channel.corrupt(first_of_others(channel, channel.own_payload(), call.bytes()), channel.next_seq());
    channel.begin_operation(descriptor_of(call), {channel.own_payload(), call.bytes() * n}, call.deadline);
    reduce(0, call.bytes(), true,
           [&](size_t r) { return r == me ? own_part : channel.payload(static_cast<int>(r)) + me * call.bytes(); });
  } else {
    channel.begin_operation(descriptor_of(call), {}, call.deadline);
    if (channel.all_on_heap(call.bytes() * n)) {
      reduce(0, call.bytes(), false,
             [&](size_t r) { return channel.announced_data(static_cast<int>(r)) + me * call.bytes(); });
      all_have_read(channel, -1);
      return channel.end_operation();
    }
    const size_t chunk = bytes_per_turn(call.bytes(), channel.layout().chunk);  // a multiple of every item
    const uint64_t turns = turns_for(call.bytes(), chunk);
    Turns pipeline(channel, turns);
    for (uint64_t i = 0; i < turns; ++i) {
      const Piece piece(call.bytes(), chunk, i);
      Bytes const own = pipeline.stage(i);
      for (size_t r = 0; r < n; ++r)
        if (r != me) copy_bytes(own + r * chunk, inputs[r] + piece.begin, piece.length);
      channel.corrupt({own + (me == 0 ? chunk : 0), n > 1 ? size_t{1} : 0}, channel.seq());
      pipeline.staged(i);
      for (size_t r = 0; r < n; ++r)
        if (r != me) pipeline.await_staged(static_cast<int>(r), i);
      reduce(piece.begin, piece.length, true, [&](size_t r) {
        return r == me ? own_part + piece.begin : pipeline.buffer(static_cast<int>(r), i) + me * chunk;
      });
      pipeline.done(i);
    }
  }
  channel.end_operation();
}

// Rank r reduces the contributions of the ranks 0 … r.
void scan(Channel& channel, const Call& call) {
  const auto me = static_cast<size_t>(channel.rank());
  PerRank<ConstBytes> sources(me + 1);
  const auto reduce = [&](size_t begin, size_t bytes, auto contribution) {
    for (size_t r = 0; r <= me; ++r) sources[r] = contribution(static_cast<int>(r));
    const std::array<Bytes, 1> destination = {call.data + begin};
    call.kernel(destination, sources.span(), bytes / call.item);
  };
  if (call.bytes() <= kSlotPayload) {
    channel.begin_operation(descriptor_of(call), {call.data, call.bytes()}, call.deadline);
    reduce(0, call.bytes(), [&](int r) { return channel.payload(r); });
    return channel.end_operation();
  }
  channel.begin_operation(descriptor_of(call), {}, call.deadline);
  const size_t per_turn = bytes_per_turn(call.bytes(), channel.layout().turn_bytes());  // a multiple of every item
  const uint64_t turns = turns_for(call.bytes(), per_turn);
  Turns pipeline(channel, turns);
  for (uint64_t i = 0; i < turns; ++i) {
    const Piece piece(call.bytes(), per_turn, i);
    Bytes const own = pipeline.stage(i);
    copy_bytes(own, call.data + piece.begin, piece.length);
    channel.corrupt({own, 1}, channel.seq());
    pipeline.staged(i);
    for (int r = 0; r < channel.rank(); ++r) pipeline.await_staged(r, i);
    reduce(piece.begin, piece.length, [&](int r) { return pipeline.buffer(r, i); });
    pipeline.done(i);
  }
  channel.end_operation();
}

void all_to_all(Channel& channel, const Call& call) {
  const auto n = static_cast<size_t>(channel.size());
  const auto me = static_cast<size_t>(channel.rank());
  PartTables tables(channel);
  tables.begin_operation(call);
  const auto copy_own = [&] { copy_bytes(call.outputs[me], call.inputs[me], call.send[me]); };
  if (tables.uniform()) {
    copy_own();
    for (size_t peer = 0; peer < n; ++peer)
      if (peer != me) take_bytes(call.outputs[peer], tables.uniform_part(peer), call.receive[peer]);
    return channel.end_operation();
  }
  uint64_t longest = 0;  // of the parts that have not come
  bool readable = true;  // the parts that have not come are on the heaps
  for (size_t peer = 0; peer < n; ++peer) {
    const PartTables::Sent sent = tables.sent_by(peer);
    readable = readable && (tables.came(peer, sent) || channel.on_heap(static_cast<int>(peer), sent.total));
    if (!tables.came(peer, sent))
      longest = std::max(longest, sent.longest);
    else if (peer != me)
      take_bytes(call.outputs[peer], tables.part(peer, sent), call.receive[peer]);
  }
  if (n == 1 || longest == 0) {
    copy_own();
    return channel.end_operation();
  }
  const auto staged_bytes = [&](size_t peer) {  // of the part from this rank's view; 0 if it came already
    return tables.came(peer, tables.sent_by(peer)) ? 0 : call.receive[peer];
  };
  if (readable) {
    for (size_t step = 1; step < n; ++step) {
      const size_t peer = (me + step) % n;
      if (const uint64_t bytes = staged_bytes(peer); bytes > 0)
        read_heap(call.outputs[peer], channel.announced_data(static_cast<int>(peer)) + tables.sent_by(peer).before,
                  bytes);
    }
    all_have_read(channel, -1, copy_own);
    return channel.end_operation();
  }
  const size_t chunk = bytes_per_turn(longest, channel.layout().chunk);
  const bool staging = !tables.came(me, tables.sent_by(me));
  from_all(
      channel, turns_for(longest, chunk), true,
      [&](Bytes buffer, uint64_t i) {
        if (!staging) return;
        for (size_t r = 0; r < n; ++r) {
          const Piece piece(call.send[r], chunk, i);
          if (r != me) copy_bytes(buffer + r * chunk, call.inputs[r] + piece.begin, piece.length);
        }
        channel.corrupt({buffer + (me == 0 ? chunk : 0), 1}, channel.seq());
      },
      [&](int peer, Bytes buffer, uint64_t i) {
        const auto from = static_cast<size_t>(peer);
        const Piece piece(staged_bytes(from), chunk, i);
        take_bytes(call.outputs[from] + piece.begin, buffer + me * chunk, piece.length, streams(longest));
      },
      copy_own);
  channel.end_operation();
}

void barrier(Channel& channel, const Call& call) {
  channel.begin_operation(descriptor_of(call), {}, call.deadline);
  channel.end_operation();
}

}  // namespace muster::comm::shm_backend
