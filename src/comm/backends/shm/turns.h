// Turns: a pipeline through staging for one operation.
//
// An operation that does not fit into a slot is cut into turns. In a turn a rank may write its turn buffer (stage), say
// so (staged), read the peers' buffers (after await_staged), and say that it is finished with the turn (done). Buffers
// are reused after kTurnBuffers turns, when all peers are done with their contents. In a two-step reduction, a rank
// says `reduced` when it has written its slice of the result back to the peers' buffers.
//
// Turn numbers continue through the group's life, so counters never decrease. Every rank takes the same number of
// turns, because that number follows from the compared descriptors. At an operation's start no buffer is in use: all
// ranks have announced the operation, so they have ended the previous one.
#pragma once

#include "comm/backends/shm/channel.h"

namespace muster::comm::shm_backend {

class Turns {
 public:
  Turns(Channel& channel, uint64_t count) : channel_(channel), first_(channel.turn()), count_(count) {
    channel.take_turns(count);
    channel.commit_staging();
  }

  uint64_t count() const { return count_; }

  // This rank's buffer of turn i (of this operation, from 0). Waits until no rank reads its old contents any more.
  std::byte* stage(uint64_t i) {
    if (i >= kTurnBuffers) channel_.await_all(Channel::Counter::kDone, mark(i - kTurnBuffers));
    return buffer(channel_.rank(), i);
  }
  std::byte* buffer(int rank, uint64_t i) const { return channel_.turn_buffer(rank, first_ + i); }

  void staged(uint64_t i) { channel_.publish(Channel::Counter::kStaged, mark(i)); }
  void reduced(uint64_t i) { channel_.publish(Channel::Counter::kReduced, mark(i)); }
  void done(uint64_t i) { channel_.publish(Channel::Counter::kDone, mark(i)); }
  void await_staged(int peer, uint64_t i) { channel_.await(peer, Channel::Counter::kStaged, mark(i)); }
  void await_reduced(int peer, uint64_t i) { channel_.await(peer, Channel::Counter::kReduced, mark(i)); }

 private:
  uint64_t mark(uint64_t i) const { return first_ + i + 1; }

  Channel& channel_;
  const uint64_t first_, count_;
};

// Splits `count` elements among `ranks`, in whole cache lines as far as possible: part r is [begin(r), begin(r + 1)).
class Slices {
 public:
  Slices(size_t count, size_t item, int ranks) : count_(count) {
    const size_t line = kLine % item == 0 ? kLine / item : 1;  // elements
    const auto n = static_cast<size_t>(ranks);
    each_ = shm::round_up((count + n - 1) / n, line);
  }
  size_t begin(int rank) const { return std::min(count_, static_cast<size_t>(rank) * each_); }
  size_t length(int rank) const { return begin(rank + 1) - begin(rank); }

 private:
  size_t count_, each_;
};

}  // namespace muster::comm::shm_backend
