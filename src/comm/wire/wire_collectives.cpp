// Collectives over a Wire, on bytes. docs/algorithms.md has their steps and what each rank sends.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "base/copy.h"
#include "base/text.h"
#include "comm/kit/flatten.h"
#include "comm/wire/announcement.h"
#include "comm/wire/wire_backend.h"

namespace muster::comm {
namespace {

// The largest scratch memory of a reduce_scatter or a scan.
constexpr size_t kScratch = size_t{32} << 20;
// What moves while the blocks before and after it are reduced: kSlice for each rank, but at least kBlock.
constexpr size_t kBlock = size_t{4} << 20, kSlice = size_t{256} << 10;

// The blocks of a call, in elements: the caller's (Operation::blocks), or of so many bytes.
class CallBlocks {
 public:
  CallBlocks(const ByteCall& call, size_t bytes)
      : call_(call), length_(call.blocks ? call.blocks->length : std::max<size_t>(1, bytes / call.item)) {}
  size_t number() const { return (call_.count + length_ - 1) / length_; }
  size_t begin(size_t block) const { return std::min(call_.count, block * length_); }
  size_t length(size_t block) const { return begin(block + 1) - begin(block); }
  size_t longest() const { return std::min(length_, call_.count); }
  Bytes data(size_t block) const { return call_.data + begin(block) * call_.item; }
  size_t bytes(size_t block) const { return length(block) * call_.item; }
  void ready(size_t block) const {
    if (call_.blocks) call_.blocks->ready(begin(block), length(block));
  }
  void done(size_t block) const {
    if (call_.blocks) call_.blocks->done(begin(block), length(block));
  }

 private:
  const ByteCall& call_;
  const size_t length_;
};

}  // namespace

void WireBackend::execute_call(const ByteCall& call) {
  switch (call.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return all_reduce(call);
    case OpKind::kBroadcast:
      return broadcast(call);
    case OpKind::kAllGather:
      return all_gather(call);
    case OpKind::kGather:
      return gather(call);
    case OpKind::kScatter:
      return scatter(call);
    case OpKind::kReduceScatter:
      return reduce_scatter(call);
    case OpKind::kScan:
      return scan(call);
    case OpKind::kAllToAll:
      return all_to_all(call);
    default:
      return announce(call, {});
  }
}

void WireBackend::announce(const ByteCall& call, std::span<const std::byte> payload) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  const bool counts = !arrivals_ || std::exchange(arrivals_->counts_next, false);
  Announcement mine{.number = sequence_++, .call = call.descriptor()};
  set_last_operation(mine.call.op, mine.number);
  if (counts) {
    mine.before = arrival_;
    if (arrivals_) {
      mine.before.last = arrivals_->last;
      mine.before.late = std::chrono::duration<float>(arrivals_->late).count();
    }
  }
  describe(call.site, mine.site);
  copy_bytes(mine.payload.data(), payload.data(), payload.size());
  std::vector<Announcement> sent(n, mine);
  for (size_t r = 0; r < call.send.size(); ++r) sent[r].part = call.send[r];
  announcements_[me] = sent[me];
  const auto arrived = FastClock::now();
  Transfers transfers(*wire_, call.deadline);
  for (size_t step = 1; step < n; ++step) {
    const size_t to = (me + step) % n, from = (me + n - step) % n;
    transfers.receive(static_cast<int>(from), kAnnounce, &announcements_[from], sizeof(Announcement));
    transfers.send(static_cast<int>(to), kAnnounce, &sent[to], sizeof(Announcement));
  }
  try {
    faults().at(FaultPhase::kPosted, mine.number, call.deadline);
  } catch (...) {
    wire_->close();  // the transfers are not finished
    throw;
  }
  transfers.wait();
  for (size_t r = 0; r < n; ++r) last_calls_[r].store(LastCall(announcements_[r]).word(), std::memory_order_relaxed);
  if (counts) {
    arrival_.waited = std::max(std::chrono::duration<float>(FastClock::now() - arrived).count(), 0.0F);
    count_arrivals();
  }
  // All ranks see the same announcements, so all find the same pair and report the same error.
  for (size_t r = 1; r < n; ++r)
    if (announcements_[r].call != announcements_[0].call) {
      if (announcements_[0].where().empty() || announcements_[r].where().empty()) tell_sites(call);
      const Announcement &a = announcements_[0], &b = announcements_[r];
      throw Mismatch(describe_mismatch(mine.number, group_name(), {shown(0), a.where()}, a.call,
                                       {shown(static_cast<int>(r)), b.where()}, b.call),
                     kMismatchAdvice);
    }
  faults().at(FaultPhase::kMiddle, mine.number, call.deadline);
}

bool WireBackend::announce_data(const ByteCall& call) {
  const bool fits = call.bytes() <= kAnnouncedBytes;
  announce(call, {call.data, fits ? call.bytes() : 0});
  return fits;
}

// Python is asked only here for the line that called. It takes half a microsecond, and 5 ms more while another of its
// threads computes. If the wire ends meanwhile, the lines remain unknown, or another rank has written the cause with
// them.
void WireBackend::tell_sites(const ByteCall& call) {
  auto& mine = announcements_[static_cast<size_t>(getRank())].site;
  const std::string site = find_site(call.site);
  mine[site.copy(mine, sizeof mine - 1)] = '\0';
  Transfers transfers(*wire_, call.deadline);
  try {
    for (const int peer : others_) {
      auto& theirs = announcements_[static_cast<size_t>(peer)].site;
      transfers.receive(peer, kAnnounce, theirs, sizeof theirs);
      transfers.send(peer, kAnnounce, mine, sizeof mine);
    }
    transfers.wait();
  } catch (const WireBroken&) {
  } catch (const TimeoutError&) {
  }
}

// All ranks count the same, because all get the same announcements.
void WireBackend::count_arrivals() {
  if (getSize() < 2) return;
  float least = std::numeric_limits<float>::max(), next = least;  // of the times that ranks waited
  int who = 0;
  for (int r = 0; r < getSize(); ++r) {
    const float waited = announcements_[static_cast<size_t>(r)].before.waited;
    if (!(waited >= 0)) return;
    if (waited < least) {
      next = std::exchange(least, waited);
      who = r;
    } else {
      next = std::min(next, waited);
    }
  }
  // Peers said these numbers: they may be infinite, and their difference none.
  const auto nanoseconds = [](float seconds) {
    return seconds > 0 ? static_cast<uint64_t>(std::min(seconds, 1e9F) * 1e9F) : 0;
  };
  (arrivals_ ? arrivals_->hosts : stragglers_).add({who, nanoseconds(next - least)});
  if (!arrivals_) return;
  const Arrival& theirs = announcements_[static_cast<size_t>(who)].before;
  if (theirs.last >= 0 && theirs.last < arrivals_->ranks.size())
    arrivals_->ranks.add({theirs.last, nanoseconds(std::min(next - least, theirs.late))});
}

const std::byte* WireBackend::payload_of(int rank) const {
  return announcements_[static_cast<size_t>(rank)].payload.data();
}

void WireBackend::all_reduce(const ByteCall& call) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  const size_t item = call.item;
  const bool wanted = call.kind == OpKind::kAllReduce || getRank() == call.root;
  std::vector<ConstBytes> sources(n);
  if (announce_data(call)) {
    for (size_t r = 0; r < n; ++r) sources[r] = payload_of(static_cast<int>(r));
    const std::array<Bytes, 1> destination = {call.data};
    if (wanted) call.kernel(destination, sources, call.count);
    return;
  }
  if (call.kind == OpKind::kReduce && n == 2) return reduce_of_two(call);
  // Each block has n slices; rank r reduces slice r. Two blocks are under way at a time, each in its half of the
  // scratch memory.
  const CallBlocks blocks(call, std::clamp(n * kSlice, kBlock, kScratch / 2));
  const size_t longest = (blocks.longest() + n - 1) / n;
  const at::Tensor scratch = at::empty({static_cast<int64_t>(2 * n * longest * item)}, at::kByte);
  struct Slice {
    Bytes data;
    size_t bytes;
  };
  const auto slice = [&](size_t block, size_t r) {
    const size_t length = (blocks.length(block) + n - 1) / n, begin = std::min(blocks.length(block), r * length);
    return Slice{blocks.data(block) + begin * item, (std::min(blocks.length(block), begin + length) - begin) * item};
  };
  const auto scratch_of = [&](size_t block, size_t r) {
    return data_of(scratch) + (block % 2 * n + r) * longest * item;
  };
  std::array<std::optional<Transfers>, 2> slices, results;
  const auto send_slices = [&](size_t block) {
    blocks.ready(block);
    auto& transfers = slices[block % 2].emplace(*wire_, call.deadline);
    for (const int peer : others_) {
      const auto r = static_cast<size_t>(peer);
      transfers.receive(peer, kData, scratch_of(block, r), slice(block, me).bytes);
      transfers.send(peer, kData, slice(block, r).data, slice(block, r).bytes);
    }
  };
  const auto reduce = [&](size_t block) {
    slices[block % 2]->wait();
    const Slice mine = slice(block, me);
    for (size_t r = 0; r < n; ++r) sources[r] = r == me ? mine.data : scratch_of(block, r);
    const std::array<Bytes, 1> destination = {wanted ? mine.data : scratch_of(block, me)};
    call.kernel(destination, sources, mine.bytes / item);
    auto& transfers = results[block % 2].emplace(*wire_, call.deadline);
    for (const int peer : others_) {
      const Slice theirs = slice(block, static_cast<size_t>(peer));
      if (wanted) transfers.receive(peer, kData, theirs.data, theirs.bytes);
      if (call.kind == OpKind::kAllReduce || peer == call.root) transfers.send(peer, kData, destination[0], mine.bytes);
    }
  };
  const auto take_results = [&](size_t block) {
    results[block % 2]->wait();
    if (wanted) blocks.done(block);
  };
  in_turns(blocks.number(), send_slices, reduce, take_results);
}

// One of two ranks sends all it has, which it would have to send in any case, and gets nothing.
void WireBackend::reduce_of_two(const ByteCall& call) {
  const CallBlocks blocks(call, kBlock / 2);
  const bool is_root = getRank() == call.root;
  const at::Tensor scratch =
      at::empty({is_root ? static_cast<int64_t>(2 * blocks.longest() * call.item) : 0}, at::kByte);
  const auto half = [&](size_t block) { return data_of(scratch) + block % 2 * blocks.longest() * call.item; };
  const int peer = 1 - getRank();
  Transfers transfers(*wire_, call.deadline);
  const auto move = [&](size_t block) {
    blocks.ready(block);
    if (is_root)
      transfers.receive(peer, kData, half(block), blocks.bytes(block));
    else
      transfers.send(peer, kData, blocks.data(block), blocks.bytes(block));
  };
  const auto reduce = [&](size_t block) {
    transfers.wait_for_oldest();
    if (!is_root) return;
    const std::array<Bytes, 1> destination = {blocks.data(block)};
    std::array<ConstBytes, 2> sources = {destination[0], destination[0]};
    sources[static_cast<size_t>(peer)] = half(block);
    call.kernel(destination, sources, blocks.length(block));
  };
  in_turns(blocks.number(), move, reduce, [&](size_t block) {
    if (is_root) blocks.done(block);
  });
}

// Down a binomial tree: rank v (counted from the root) receives the data from rank v without its highest bit.
void WireBackend::broadcast(const ByteCall& call) {
  const int n = getSize(), root = call.root, v = (getRank() - root + n) % n;
  const bool small = call.bytes() <= kAnnouncedBytes;
  announce(call, small && v == 0 ? std::span<const std::byte>(call.data, call.bytes()) : std::span<const std::byte>{});
  if (small) {
    copy_bytes(call.data, payload_of(root), v == 0 ? 0 : call.bytes());
    return;
  }
  const auto rank = [&](int u) { return (u + root) % n; };
  int highest = 1;
  while (highest * 2 <= v) highest *= 2;
  const CallBlocks blocks(call, kBlock / 2);
  Transfers from(*wire_, call.deadline), to(*wire_, call.deadline);
  const auto receive = [&](size_t block) {
    blocks.ready(block);
    if (v > 0) from.receive(rank(v - highest), kData, blocks.data(block), blocks.bytes(block));
  };
  const auto pass_on = [&](size_t block) {
    if (v > 0) from.wait_for_oldest();
    for (int bit = v == 0 ? 1 : highest * 2; v + bit < n; bit *= 2)
      to.send(rank(v + bit), kData, blocks.data(block), blocks.bytes(block));
  };
  in_turns(blocks.number(), receive, pass_on, [&](size_t block) { blocks.done(block); });
  to.wait();
}

void WireBackend::all_gather(const ByteCall& call) {
  const bool small = announce_data(call);
  Bytes const own = call.outputs[static_cast<size_t>(getRank())];
  if (own != call.data) copy_bytes(own, call.data, call.bytes());
  Transfers transfers(*wire_, call.deadline);
  for (const int peer : others_) {
    Bytes const output = call.outputs[static_cast<size_t>(peer)];
    if (small) {
      copy_bytes(output, payload_of(peer), call.bytes());
    } else {
      transfers.receive(peer, kData, output, call.bytes());
      transfers.send(peer, kData, call.data, call.bytes());
    }
  }
  transfers.wait();
}

void WireBackend::gather(const ByteCall& call) {
  const bool small = announce_data(call), root = getRank() == call.root;
  Transfers transfers(*wire_, call.deadline);
  if (!root) {
    if (!small) transfers.send(call.root, kData, call.data, call.bytes());
  } else {
    copy_bytes(call.outputs[static_cast<size_t>(getRank())], call.data, call.bytes());
    for (const int peer : others_)
      if (small)
        copy_bytes(call.outputs[static_cast<size_t>(peer)], payload_of(peer), call.bytes());
      else
        transfers.receive(peer, kData, call.outputs[static_cast<size_t>(peer)], call.bytes());
  }
  transfers.wait();
}

void WireBackend::scatter(const ByteCall& call) {
  announce(call, {});
  Transfers transfers(*wire_, call.deadline);
  if (getRank() != call.root) {
    transfers.receive(call.root, kData, call.data, call.bytes());
  } else {
    copy_bytes(call.data, call.inputs[static_cast<size_t>(getRank())], call.bytes());
    for (const int peer : others_) transfers.send(peer, kData, call.inputs[static_cast<size_t>(peer)], call.bytes());
  }
  transfers.wait();
}

// Two blocks are under way at a time, each in its half of the scratch memory.
void WireBackend::reduce_scatter(const ByteCall& call) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  announce(call, {});
  const CallBlocks blocks(call, std::min(std::max(kBlock / n, kSlice), kScratch / 2 / n));
  const at::Tensor scratch = at::empty({static_cast<int64_t>(2 * n * blocks.longest() * call.item)}, at::kByte);
  const auto scratch_of = [&](size_t block, size_t r) {
    return data_of(scratch) + (block % 2 * n + r) * blocks.longest() * call.item;
  };
  const auto input = [&](size_t block, size_t r) { return call.inputs[r] + blocks.begin(block) * call.item; };
  std::array<std::optional<Transfers>, 2> transfers;
  const auto exchange = [&](size_t block) {
    auto& under_way = transfers[block % 2].emplace(*wire_, call.deadline);
    for (const int peer : others_) {
      const auto r = static_cast<size_t>(peer);
      under_way.receive(peer, kData, scratch_of(block, r), blocks.bytes(block));
      under_way.send(peer, kData, input(block, r), blocks.bytes(block));
    }
  };
  std::vector<ConstBytes> sources(n);
  const auto reduce = [&](size_t block) {
    transfers[block % 2]->wait();
    for (size_t r = 0; r < n; ++r) sources[r] = r == me ? input(block, r) : scratch_of(block, r);
    const std::array<Bytes, 1> destination = {blocks.data(block)};
    call.kernel(destination, sources, blocks.length(block));
  };
  in_turns(blocks.number(), exchange, reduce, [](size_t) {});
}

// Each rank sends its data to all later ranks, and reduces what it gets from all earlier ones.
void WireBackend::scan(const ByteCall& call) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  const size_t count = call.count, item = call.item;
  const bool small = announce_data(call);
  std::vector<ConstBytes> sources(me + 1);
  if (small) {
    for (size_t r = 0; r <= me; ++r) sources[r] = payload_of(static_cast<int>(r));
    const std::array<Bytes, 1> destination = {call.data};
    return call.kernel(destination, sources, count);
  }
  const size_t slice = std::min(count, std::max<size_t>(kScratch / n / item, 1));
  const at::Tensor scratch = at::empty({static_cast<int64_t>(me * slice * item)}, at::kByte);
  for (size_t begin = 0; begin < count; begin += slice) {
    const size_t length = std::min(slice, count - begin);
    Transfers transfers(*wire_, call.deadline);
    for (size_t r = 0; r < n; ++r) {
      if (r < me) {
        sources[r] = data_of(scratch) + r * slice * item;
        transfers.receive(static_cast<int>(r), kData, data_of(scratch) + r * slice * item, length * item);
      } else if (r > me) {
        transfers.send(static_cast<int>(r), kData, call.data + begin * item, length * item);
      }
    }
    sources[me] = call.data + begin * item;
    transfers.wait();
    const std::array<Bytes, 1> destination = {call.data + begin * item};
    call.kernel(destination, sources, length);
  }
}

// The parts' sizes travel with the announcement, and both ends compare them.
void WireBackend::all_to_all(const ByteCall& call) {
  const auto n = static_cast<size_t>(getSize()), me = static_cast<size_t>(getRank());
  announce(call, {});
  for (size_t r = 0; r < n; ++r)
    if (announcements_[r].part != call.receive[r])
      throw Mismatch(describe_mismatch({shown(static_cast<int>(r)), announcements_[r].where()}, announcements_[r].part,
                                       {shown(getRank()), announcements_[me].where()}, call.receive[r]),
                     kMismatchAdvice);
  copy_bytes(call.outputs[me], call.inputs[me], call.send[me]);
  Transfers transfers(*wire_, call.deadline);
  for (const int peer : others_) {
    const auto r = static_cast<size_t>(peer);
    transfers.receive(peer, kData, call.outputs[r], call.receive[r]);
    transfers.send(peer, kData, call.inputs[r], call.send[r]);
  }
  transfers.wait();
}

}  // namespace muster::comm
