// all_reduce and reduce. See collectives.h for the tiers; docs/algorithms.md for steps, bytes and measurements.
//
// The two-step scheme (reduce-scatter, then all-gather) is Rabenseifner's, "Optimization of Collective Reduction
// Operations", ICCS 2004, with shared memory in place of messages.
#include <array>

#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/per_rank.h"
#include "comm/backends/shm/take.h"
#include "comm/backends/shm/turns.h"

namespace muster::comm::shm_backend {
namespace {

bool wants_result(const Channel& channel, const Call& call) {
  return call.kind != OpKind::kReduce || channel.rank() == call.root;
}

// Each rank that wants the result reduces all ranks' contributions, which `contribution(rank)` finds.
template <typename Contribution>
void reduce_everything(Channel& channel, const Call& call, Contribution contribution) {
  if (!wants_result(channel, call)) return;
  const auto n = static_cast<size_t>(channel.size());
  PerRank<ConstBytes> sources(n);
  for (size_t r = 0; r < n; ++r) sources[r] = contribution(static_cast<int>(r));
  const std::array<Bytes, 1> destination = {call.data};
  call.kernel(destination, sources.span(), call.count);
}

// Reduces one slice of all ranks' contributions, which `slice(rank)` finds, and writes the result to the same places:
// of all ranks, or only of a reduce's root.
template <typename Slice>
void reduce_in_place(Channel& channel, const Call& call, size_t count, Slice slice) {
  const auto n = static_cast<size_t>(channel.size());
  PerRank<Bytes> places(n), destinations(n);
  PerRank<ConstBytes> sources(n);
  size_t written = 0;
  for (size_t r = 0; r < n; ++r) {
    places[r] = slice(static_cast<int>(r));
    sources[r] = places[r];
    if (call.kind != OpKind::kReduce || static_cast<int>(r) == call.root) destinations[written++] = places[r];
  }
  call.kernel(destinations.span().first(written), sources.span(), count);
}

void slot_tier(Channel& channel, const Call& call) {
  Bytes const data = call.data;
  channel.begin_operation(descriptor_of(call), {data, call.bytes()}, call.deadline);
  if (!wants_result(channel, call)) return;
  channel.corrupt({data, std::min<size_t>(call.bytes(), 1)}, channel.seq());  // like begin_operation() did in the slot
  reduce_everything(channel, call,
                    [&](int r) -> ConstBytes { return r == channel.rank() ? data : channel.payload(r); });
  if (channel.size() == 2) take(channel.payload(1 - channel.rank()), call.bytes());
}

// Contributions lie in staging before the announcement. Rank r reduces slice r, and writes it to where the
// contributions were.
void in_place_tier(Channel& channel, const Call& call) {
  Bytes const data = call.data;
  channel.commit_staging();
  const int n = channel.size(), me = channel.rank();
  const Bytes own = channel.own_early();
  const Slices slices(call.count, call.item, n);
  const auto at = [&](int slice) { return slices.begin(slice) * call.item; };
  const auto bytes = [&](int slice) { return slices.length(slice) * call.item; };
  for (int r = 0; r < n; ++r)
    if (r != me) copy_bytes(own + at(r), data + at(r), bytes(r));
  channel.corrupt({own + at(me == 0 ? 1 : 0), std::min<size_t>(bytes(me == 0 ? 1 : 0), 1)}, channel.next_seq());
  channel.begin_operation(descriptor_of(call), {}, call.deadline);
  const uint64_t mark = channel.turn() + 1;
  channel.take_turns(1);
  reduce_in_place(channel, call, slices.length(me),
                  [&](int r) { return (r == me ? data : channel.early(r)) + at(me); });
  channel.publish(Channel::Counter::kReduced, mark);
  channel.await_all(Channel::Counter::kReduced, mark);
  if (wants_result(channel, call))
    for (int r = 0; r < n; ++r)
      if (r != me) copy_bytes(data + at(r), own + at(r), bytes(r));
}

// The announcement was the barrier before the reduction: all tensors are ready. `reduced` is the barrier after it.
void direct_tier(Channel& channel, const Call& call) {
  const Slices slices(call.count, call.item, channel.size());
  const size_t offset = slices.begin(channel.rank()) * call.item;
  const uint64_t mark = channel.turn() + 1;
  channel.take_turns(1);
  reduce_in_place(channel, call, slices.length(channel.rank()),
                  [&](int r) { return channel.announced_data(r) + offset; });
  channel.check_what_was_read(-1);
  channel.publish(Channel::Counter::kReduced, mark);
  channel.await_all(Channel::Counter::kReduced, mark);
}

// The pipeline of the staged tier. A turn covers up to N slices of Layout::chunk bytes; in turn i this rank
//   copies in   its part of every other rank's slice, into its own buffer             (staged)
//   reduces     its own slice from all contributions, in place in the peers' buffers  (reduced)
//   copies out  the other ranks' slices, from its own buffer
// The three steps of successive turns overlap, so what a rank waits for has usually happened already. Three turns are
// under way at the same time, so the pipeline needs three buffers. No rank needs to say `done`: when all ranks have
// reduced a buffer's turn, only the buffer's owner reads it.
static_assert(kTurnBuffers >= 3);
class StagedPipeline {
 public:
  StagedPipeline(Channel& channel, const Call& call)
      : channel_(channel),
        call_(call),
        per_turn_(channel.layout().chunk / call.item * static_cast<size_t>(channel.size())),
        turns_(channel, (call.count + per_turn_ - 1) / per_turn_) {}

  void run() {
    for (uint64_t i = 0; i < turns_.count() + 2; ++i) {
      if (i < turns_.count()) copy_in(i);
      if (i >= 1 && i - 1 < turns_.count()) reduce(i - 1);
      if (i >= 2) copy_out(i - 2);
    }
  }

 private:
  size_t start_of(uint64_t i) const { return i * per_turn_; }
  Slices slices_of(uint64_t i) const {
    return Slices(std::min(per_turn_, call_.count - start_of(i)), call_.item, channel_.size());
  }
  Bytes place(uint64_t i, const Slices& slices, int slice) const {
    return call_.data + (start_of(i) + slices.begin(slice)) * call_.item;
  }
  // A slice's place in a turn buffer.
  size_t staged_at(int slice) const { return static_cast<size_t>(slice) * channel_.layout().chunk; }

  void copy_in(uint64_t i) {
    const Slices slices = slices_of(i);
    Bytes const own = turns_.buffer(channel_.rank(), i);
    for (int r = 0; r < channel_.size(); ++r)
      if (r != channel_.rank()) copy_bytes(own + staged_at(r), place(i, slices, r), slices.length(r) * call_.item);
    // If the tensor is on the heap, all_reduce() has corrupted the tensor itself.
    if (call_.heap_offset == kNotOnHeap)
      channel_.corrupt({own + staged_at(channel_.rank() == 0 ? 1 : 0), 1}, channel_.seq());
    turns_.staged(i);
  }

  void reduce(uint64_t i) {
    const int me = channel_.rank();
    const Slices slices = slices_of(i);
    for (int r = 0; r < channel_.size(); ++r)
      if (r != me) turns_.await_staged(r, i);
    reduce_in_place(channel_, call_, slices.length(me),
                    [&](int r) { return r == me ? place(i, slices, me) : turns_.buffer(r, i) + staged_at(me); });
    turns_.reduced(i);
  }

  void copy_out(uint64_t i) {
    const Slices slices = slices_of(i);
    ConstBytes const own = turns_.buffer(channel_.rank(), i);
    for (int r = 0; r < channel_.size(); ++r) {
      if (r == channel_.rank()) continue;
      turns_.await_reduced(r, i);
      if (wants_result(channel_, call_))
        copy_bytes(place(i, slices, r), own + staged_at(r), slices.length(r) * call_.item);
    }
  }

  Channel& channel_;
  const Call& call_;
  const size_t per_turn_;  // elements
  Turns turns_;
};

}  // namespace

void all_reduce(Channel& channel, const Call& call) {
  // The first two tiers are chosen before the peers' descriptors are known, so only by size.
  if (channel.size() == 1) {
    channel.begin_operation(descriptor_of(call), {}, call.deadline);
  } else if (call.bytes() <= kSlotPayload) {
    slot_tier(channel, call);
  } else if (call.bytes() <= channel.layout().early) {
    in_place_tier(channel, call);
  } else {
    if (call.heap_offset != kNotOnHeap)
      channel.corrupt({call.data, 1}, channel.next_seq());  // the tensor itself is the contribution
    channel.begin_operation(descriptor_of(call), {}, call.deadline);
    if (channel.all_on_heap(call.bytes()))
      direct_tier(channel, call);
    else
      StagedPipeline(channel, call).run();
  }
  channel.end_operation();
}

}  // namespace muster::comm::shm_backend
