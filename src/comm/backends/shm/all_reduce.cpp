// all_reduce and reduce. See collectives.h for the tiers; docs/algorithms.md for steps, bytes and measurements.
//
// The two-step scheme (reduce-scatter, then all-gather) is Rabenseifner's, "Optimization of Collective Reduction
// Operations", ICCS 2004, with shared memory for messages.
#include <array>
#include <cstring>

#include "comm/backends/shm/collectives.h"
#include "comm/backends/shm/turns.h"

namespace muster::comm::shm_backend {
namespace {

bool wants_result(const Channel& channel, const Call& call) {
  return call.op != OpKind::kReduce || channel.rank() == call.root;
}

// Everybody reduces everybody's contribution, which `contribution(rank)` finds.
template <typename Contribution>
void reduce_everything(Channel& channel, const Call& call, Bytes data, Contribution contribution) {
  if (!wants_result(channel, call)) return;
  const auto n = static_cast<size_t>(channel.size());
  std::array<ConstBytes, 64> few;  // the common case makes no allocation
  std::vector<ConstBytes> many(n > few.size() ? n : 0);
  const std::span<ConstBytes> sources = many.empty() ? std::span(few).first(n) : std::span(many);
  for (size_t r = 0; r < n; ++r) sources[r] = contribution(static_cast<int>(r));
  const std::array<Bytes, 1> destination = {data};
  call.kernel(destination, sources, call.count);
}

void slot_tier(Channel& channel, const Call& call, Bytes data) {
  channel.enter(call.descriptor(), {data, call.bytes()}, call.deadline);
  reduce_everything(channel, call, data, [&](int r) { return channel.payload(r); });
}

void one_shot_tier(Channel& channel, const Call& call, Bytes data) {
  channel.commit_staging();
  const uint64_t seq = channel.next_seq();
  const Bytes own = channel.own_one_shot();
  std::memcpy(own, data, call.bytes());
  channel.corrupt({own, call.bytes()}, seq);
  channel.enter(call.descriptor(), {}, call.deadline);
  reduce_everything(channel, call, data, [&](int r) { return channel.one_shot(r, seq); });
}

bool all_on_heap(const Channel& channel) {
  for (int r = 0; r < channel.size(); ++r)
    if (channel.descriptor(r).heap_offset == kNotOnHeap) return false;
  return channel.has_heaps();
}

// Announcing was the barrier before: everybody's tensor is ready. Publishing `reduced` is the one after.
void direct_tier(Channel& channel, const Call& call) {
  const auto n = static_cast<size_t>(channel.size());
  const Slices slices(call.count, call.item, channel.size());
  const size_t offset = slices.begin(channel.rank()) * call.item;
  std::vector<Bytes> destinations;
  std::vector<ConstBytes> sources(n);
  for (size_t r = 0; r < n; ++r) {
    const Bytes slice =
        channel.heap(static_cast<int>(r)) + channel.descriptor(static_cast<int>(r)).heap_offset + offset;
    sources[r] = slice;
    if (call.op != OpKind::kReduce || static_cast<int>(r) == call.root) destinations.push_back(slice);
  }
  const uint64_t mark = channel.turn() + 1;
  channel.take_turns(1);
  call.kernel(destinations, sources, slices.length(channel.rank()));
  channel.publish(Channel::Counter::kReduced, mark);
  channel.await_all(Channel::Counter::kReduced, mark);
}

// The pipeline of the staged tier. A turn covers up to N slices of Layout::chunk bytes; in turn i this rank
//   copies in   its part of every other rank's slice                      (staged)
//   reduces     its own slice from all contributions, into staging        (reduced)
//   copies out  the other ranks' reduced slices                           (done)
// The three steps of successive turns overlap, so a rank that waits has usually been overtaken by what it waits for.
// Three turns are under way at once, so with two buffers every rank would wait for the others (tests/model/turns.pml).
static_assert(kTurnBuffers >= 3);
class StagedPipeline {
 public:
  StagedPipeline(Channel& channel, const Call& call, Bytes data)
      : channel_(channel),
        call_(call),
        data_(data),
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
    return data_ + (start_of(i) + slices.begin(slice)) * call_.item;
  }
  // A slice's place in a turn buffer.
  size_t staged_at(int slice) const { return static_cast<size_t>(slice) * channel_.layout().chunk; }

  void copy_in(uint64_t i) {
    const Slices slices = slices_of(i);
    Bytes const own = turns_.stage(i);
    for (int r = 0; r < channel_.size(); ++r)
      if (r != channel_.rank()) std::memcpy(own + staged_at(r), place(i, slices, r), slices.length(r) * call_.item);
    // A tensor on the heap was corrupted as a whole before.
    if (call_.heap_offset == kNotOnHeap)
      channel_.corrupt({own + staged_at(channel_.rank() == 0 ? 1 : 0), 1}, channel_.seq());
    turns_.staged(i);
  }

  void reduce(uint64_t i) {
    const int me = channel_.rank();
    const Slices slices = slices_of(i);
    sources_.resize(static_cast<size_t>(channel_.size()));
    for (int r = 0; r < channel_.size(); ++r) {
      if (r != me) turns_.await_staged(r, i);
      sources_[static_cast<size_t>(r)] = r == me ? place(i, slices, me) : turns_.staged_by(r, i) + staged_at(me);
    }
    Bytes const staged = channel_.turn_buffer(me, first_turn() + i) + staged_at(me);
    // The own slice's place in the own buffer is free: contributions to it come from the others.
    const std::array<Bytes, 2> destinations = {staged, place(i, slices, me)};
    call_.kernel(std::span(destinations).first(wants_result(channel_, call_) ? 2 : 1), sources_, slices.length(me));
    turns_.reduced(i);
  }

  void copy_out(uint64_t i) {
    const Slices slices = slices_of(i);
    for (int r = 0; r < channel_.size(); ++r) {
      if (r == channel_.rank()) continue;
      turns_.await_reduced(r, i);
      if (wants_result(channel_, call_))
        std::memcpy(place(i, slices, r), turns_.staged_by(r, i) + staged_at(r), slices.length(r) * call_.item);
    }
    turns_.done(i);
  }

  uint64_t first_turn() const { return channel_.turn() - turns_.count(); }

  Channel& channel_;
  const Call& call_;
  Bytes const data_;
  const size_t per_turn_;  // elements
  Turns turns_;
  std::vector<ConstBytes> sources_;
};

}  // namespace

void all_reduce(Channel& channel, const Call& call, Bytes data) {
  // The first two tiers are chosen before the descriptors are known, so by size alone.
  if (channel.size() == 1) {
    channel.enter(call.descriptor(), {}, call.deadline);
  } else if (call.bytes() <= kSlotPayload) {
    slot_tier(channel, call, data);
  } else if (call.bytes() <= channel.layout().one_shot) {
    one_shot_tier(channel, call, data);
  } else {
    if (call.heap_offset != kNotOnHeap)
      channel.corrupt({data, 1}, channel.next_seq());  // the tensor itself is the contribution
    channel.enter(call.descriptor(), {}, call.deadline);
    if (all_on_heap(channel))
      direct_tier(channel, call);
    else
      StagedPipeline(channel, call, data).run();
  }
  channel.leave_op();
}

}  // namespace muster::comm::shm_backend
