// Messages through the rings (messages.h): what one side writes and the other reads, and which receive gets it.
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "base/copy.h"
#include "base/text.h"
#include "comm/backends/shm/message_sizes.h"
#include "comm/backends/shm/messages.h"
#include "comm/backends/shm/take.h"

namespace muster::comm::shm_backend {
namespace {

// Claims a piece of a message by reference and copies it; returns its bytes, 0 if all are claimed. The receiver's
// pieces are the first ones, the sender's the last ones: then each copies about the same lines in each message of a
// size, and these stay where they are. `before`: how many pieces this rank has copied.
uint64_t copy_claimed(RingControl& control, uint64_t before, bool is_sender, uint64_t bytes, std::byte* to,
                      std::byte* from) {
  const uint64_t pieces = pieces_by_reference(bytes);
  if (before >= pieces || control.claimed.load(std::memory_order_relaxed) >= pieces ||
      control.claimed.fetch_add(1, std::memory_order_relaxed) >= pieces)
    return 0;
  const uint64_t at = (is_sender ? pieces - 1 - before : before) * kPieceByReference;
  const uint64_t now = std::min(bytes - at, kPieceByReference);
  if (reinterpret_cast<uintptr_t>(from) % kCacheLine == 0)
    look_at_bytes(to + at, from + at, now, streams(bytes));
  else
    copy_bytes(to + at, from + at, now);
  return now;
}

// Whether it waits for the record at this position, which has this header.
bool is_for(const PostedReceive& posted, uint64_t position, const MessageHeader& header) {
  return posted.position.load(std::memory_order_acquire) == position + 1 && posted.tag == header.tag &&
         posted.bytes == header.bytes && posted.dtype == header.dtype;
}

}  // namespace

Messages::Ring::Ring(Channel& channel, int from, int to)
    : control(*reinterpret_cast<RingControl*>(channel.ring(from, to))),
      data(channel.ring(from, to) + sizeof(RingControl)),
      size(channel.layout().ring),
      key(channel.stamp_key()) {}

// Positions are multiples of a line.
void Messages::Ring::write_data(uint64_t position, const std::byte* from, size_t bytes) const {
  const size_t first = std::min<size_t>(bytes, size - (position & (size - 1)));
  copy_bytes(at(position), from, first);
  copy_bytes(data, from + first, bytes - first);
}
// `whole`: bytes of the message.
void Messages::Ring::read_data(uint64_t position, std::byte* to, size_t bytes, size_t whole) const {
  const size_t first = std::min<size_t>(bytes, size - (position & (size - 1)));
  if (memcpy_takes(whole)) {
    copy_bytes(to, at(position), first);
    copy_bytes(to + first, data, bytes - first);
  } else {
    take_bytes(to, at(position), first, streams(whole));
    take_bytes(to + first, data, bytes - first, streams(whole));
  }
}

uint64_t Messages::room(int peer, uint64_t wanted) {
  const Ring& ring = out_[peer];
  // The receiver writes `read`, so a look at it costs a cache miss.
  if (ring.size - (ring.written() - read_seen_[peer]) < wanted)
    read_seen_[peer] = ring.control.read.load(std::memory_order_acquire);
  return ring.size - (ring.written() - read_seen_[peer]);
}

bool Messages::begin(int peer, const MessageHeader& header, const std::byte* data, bool& whole) {
  const Ring& ring = out_[peer];
  const uint64_t written = ring.written(), end = written + kRecordLine;
  const uint64_t behind = header.place == kNotOnHeap ? behind_line(header.bytes) : 0;
  const uint64_t space = room(peer, kRecordLine + std::min(behind, piece_of(header.bytes, ring.size)));
  if (space < kRecordLine) return false;
  whole = behind <= std::min(piece_of(header.bytes, ring.size), space - kRecordLine);
  // The receiver looks at the line all the time, so all that is written to it is written together, last.
  if (behind > 0 && whole) ring.write_data(end, data, header.bytes);
  RecordLine& line = ring.line(written);
  line.header = header;
  if (behind == 0 && header.place == kNotOnHeap) copy_bytes(line.data, data, header.bytes);
  ring.control.written.store(end + (whole ? behind : 0), std::memory_order_release);
  if (header.place < kPosted) {
    // No one else uses these: the message by reference before this one is complete.
    ring.control.claimed.store(0, std::memory_order_relaxed);
    ring.control.copied_by_sender.store(0, std::memory_order_relaxed);
    ++referenced_[peer];
  }
  line.stamp.store(ring.stamp_of(end) | (whole ? RecordLine::kWhole : 0), std::memory_order_release);
  return true;
}

void Messages::put_piece(int peer, const std::byte* data, uint64_t bytes) {
  const Ring& ring = out_[peer];
  const uint64_t written = ring.written();
  ring.write_data(written, data, bytes);
  ring.control.written.store(written + whole_lines(bytes), std::memory_order_release);
}

uint64_t Messages::posted_place(int peer, const MessageHeader& header) const {
  if (header.bytes < kLeastByReference) return kNotOnHeap;
  const PostedReceive& posted = out_[peer].control.posted;
  if (!is_for(posted, out_[peer].written(), header)) return kNotOnHeap;
  const uint64_t place = posted.place.load(std::memory_order_relaxed);  // once: what was checked is what counts
  return channel_.lies_on_heap(peer, place, header.bytes) ? place : kNotOnHeap;
}

uint64_t Messages::write_to_posted(Message& message) {
  const uint64_t rest = message.header.bytes - message.moved, now = std::min(rest, kTurn);
  std::byte* const to = channel_.heap(message.peer) + message.target;
  if (now == rest) channel_.control(message.peer).inbox.hint();  // a peer that sleeps wakes up while these are written
  copy_bytes(to + message.moved, message.data + message.moved, now);
  message.moved += now;
  return now;
}

bool Messages::push(int peer, Completed& completed) {
  shm::Bell& bell = channel_.control(peer).inbox;
  uint64_t bytes = 0;    // in this turn
  bool visible = false;  // the peer sees some of them
  while (!sends_[peer].empty() && bytes < kTurn) {
    Message& message = *sends_[peer].front();
    if (!message.begun && message.target == kNotOnHeap) {
      message.target = posted_place(peer, message.header);
      if (message.target != kNotOnHeap && message.header.place == kNotOnHeap) message.header.place = kPosted;
    }
    if (message.header.place == kPosted && message.moved < message.header.bytes) {
      bytes += write_to_posted(message);
      if (message.moved < message.header.bytes) continue;
    }
    const bool by_reference = message.header.place < kPosted;
    const bool first = !visible;
    if (!message.begun) {
      bool whole = false;
      if (!begin(peer, message.header, message.data, whole)) break;
      message.begun = true;
      if (by_reference) message.number = referenced_[peer];
      message.moved = whole ? message.header.bytes : 0;
      bytes += kRecordLine + (message.header.place == kNotOnHeap ? message.moved : 0);
      visible = true;
    } else if (!by_reference && message.moved < message.header.bytes) {
      const uint64_t piece =
          std::min(message.header.bytes - message.moved, piece_of(message.header.bytes, out_[peer].size));
      const uint64_t now = std::min(piece, room(peer, whole_lines(piece)));
      if (now == 0) break;
      put_piece(peer, message.data + message.moved, now);
      message.moved += now;
      bytes += now;
      visible = true;
    }
    if (first && visible) bell.hint();  // a peer that sleeps wakes up while the rest is written
    if (by_reference && !is_copied(message)) {
      const uint64_t now = help(message);
      if (now == 0) break;
      bytes += now;
      continue;
    }
    if (!by_reference && message.moved < message.header.bytes) continue;
    bytes += kRecordLine;  // something moved, also if it was the peer
    finish(sends_[peer].front(), completed);
    sends_[peer].pop_front();
  }
  if (visible) bell.ring();
  return bytes > 0;
}

void Messages::post_receive(int peer) {
  if (channel_.heap_bytes(channel_.rank()) == 0) return;
  if (peer == kAnySource) {
    for (int source = 0; source < channel_.size(); ++source)
      if (wanted_[source] > 0) post_receive(source);
    return;
  }
  if (incoming_[peer].begun) return;
  const auto oldest = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return receive->peer == peer || receive->peer == kAnySource;
  });
  if (oldest == receives_.end()) return;
  Message& receive = **oldest;
  if (receive.peer == kAnySource || receive.header.place == kNotOnHeap || receive.header.bytes < kLeastByReference)
    return;
  PostedReceive& posted = in_[peer].control.posted;
  const uint64_t position = in_[peer].read() + 1;
  if (posted.position.load(std::memory_order_relaxed) == position) return;  // it is this one
  posted.place.store(receive.header.place, std::memory_order_relaxed);
  posted.bytes = receive.header.bytes;
  posted.tag = receive.header.tag;
  posted.dtype = receive.header.dtype;
  posted.position.store(position, std::memory_order_release);
  receive.posted = true;
}

bool Messages::is_copied(const Message& message) const {
  return message.number != 0 && out_[message.peer].control.copied.load(std::memory_order_acquire) >= message.number;
}

// Moves `position` behind that line. Returns false if no message can have such a header; then the group has failed.
bool Messages::take_line(int peer, const Incoming& in, uint64_t& position) {
  const bool may_be_there = in.in_place()
                                ? is_for(in_[peer].control.posted, position, in.header)
                                : !in.by_reference() || channel_.lies_on_heap(peer, in.header.place, in.header.bytes);
  position += kRecordLine;
  if (in.header.dtype < static_cast<uint8_t>(c10::ScalarType::Undefined) && may_be_there) return true;
  channel_.fail(
      ErrorCode::kUnavailable, shown(peer),
      text("rank ", shown(peer), " sent a message of ", in.header.bytes,
           " bytes whose header is damaged: it has the dtype ", int{in.header.dtype}, " and ",
           in.in_place() ? text("is for a receive that was not posted")
                         : text("the place ", in.header.place, " on a heap of ", channel_.heap_bytes(peer), " bytes")));
  return false;
}

// Copies the next piece of a message that came by reference, unless all are claimed; returns whether the message is
// complete. False also if its sender may have changed the data meanwhile. Then check() or check_peers() fails the
// receive. The sender writes to the data only after it has ended its send, which the looks after the copy find out: as
// in a seqlock, what was copied is only used if no write can have come before them.
bool Messages::copy_reference(int peer, Incoming& in, std::byte* to) {
  RingControl& control = in_[peer].control;
  in.data_bytes += copy_claimed(control, in.data_bytes / kPieceByReference, false, in.header.bytes, to,
                                channel_.heap(peer) + in.header.place);
  if (control.copied_by_sender.load(std::memory_order_acquire) < in.header.bytes - in.data_bytes) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  if (channel_.failed() || channel_.left(peer)) return false;
  auto& copied = control.copied;
  copied.store(copied.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  channel_.control(peer).inbox.ring();
  return true;
}

// Copies what the ring has of a message's data, at most a piece, and moves `position` behind it. Returns whether the
// message is complete.
bool Messages::copy_from_ring(int peer, Incoming& in, std::byte* to, uint64_t& position) {
  const uint64_t rest = in.header.bytes - in.data_bytes;
  const uint64_t there = in.whole ? rest : in_[peer].control.written.load(std::memory_order_acquire) - position;
  const uint64_t now = std::min({rest, there, piece_of(in.header.bytes, in_[peer].size)});
  in_[peer].read_data(position, to + in.data_bytes, now, in.header.bytes);
  position += whole_lines(now);
  in.data_bytes += now;
  return in.data_bytes == in.header.bytes;
}

void Messages::say_target(int peer, const Incoming& in) {
  if (in.target->header.place == kNotOnHeap) return;
  RingControl& control = in_[peer].control;
  in.target->posted = true;
  control.target.store(in.target->header.place, std::memory_order_relaxed);
  control.target_of.store(control.copied.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  channel_.control(peer).inbox.ring();
}

uint64_t Messages::help(Message& message) {
  RingControl& control = out_[message.peer].control;
  if (message.target == kNotOnHeap && control.target_of.load(std::memory_order_acquire) == message.number) {
    const uint64_t place = control.target.load(std::memory_order_relaxed);
    if (channel_.lies_on_heap(message.peer, place, message.header.bytes)) message.target = place;
  }
  if (message.target == kNotOnHeap) return 0;
  const uint64_t now = copy_claimed(control, message.helped, true, message.header.bytes,
                                    channel_.heap(message.peer) + message.target, message.data);
  if (now > 0) {
    ++message.helped;
    control.copied_by_sender.store(control.copied_by_sender.load(std::memory_order_relaxed) + now,
                                   std::memory_order_release);
    channel_.control(message.peer).inbox.ring();
  }
  return now;
}

// Finds the receive that gets a message that has begun to arrive, or puts it aside. Returns false if the message stays
// where it is: it is `sought`, or the group has failed (then progress() fails the messages that wait).
bool Messages::match(int peer, Incoming& in, const int* sought) {
  if (in.target || in.aside) return true;
  if (const auto receive = take_receive(peer, in.header.tag)) {
    if (fits(*receive, peer, in.header)) {
      receive->peer = peer;
      in.target = receive;
      if (in.by_reference()) say_target(peer, in);
      return true;
    }
    receives_.push_front(receive);
    add_wanted(receive->peer, 1);
    return false;
  }
  return !(sought && in.header.tag == *sought) && put_aside(peer);
}

// Completes the receive of a message that is whole, or the receive that has come for it while it was put aside.
void Messages::deliver(int peer, Incoming& in, Completed& completed) {
  const std::shared_ptr<Message> target = std::move(in.target);
  in = Incoming{};
  if (target) return finish(target, completed);
  const auto match = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
    const int wanted = receive->peer;
    if ((wanted != peer && wanted != kAnySource) || !match_aside_of(peer, receive, completed)) return false;
    add_wanted(wanted, -1);
    return true;
  });
  if (match == receives_.end()) return;
  receives_.erase(match);
  post_receive(kAnySource);
}

bool Messages::pull(int peer, Completed& completed, const int* sought) {
  const Ring& ring = in_[peer];
  shm::Bell& bell = channel_.control(peer).inbox;
  Incoming& in = incoming_[peer];
  uint64_t bytes = 0;  // in this turn
  bool stays = false, freed = false, ended = false;
  while (!stays && bytes < kTurn && (receiving(peer) || sought)) {
    const uint64_t start = ring.read();
    uint64_t position = start;
    if (!in.begun) {
      if (!ring.has_line()) break;
      bytes += kRecordLine;
      look_at_line(peer, in, position);
      if (!take_line(peer, in, position)) {
        in = Incoming{};  // the group has failed, and nothing may be made of such a header
        return true;
      }
    }
    const uint64_t before = in.data_bytes;
    bool complete = false;
    if (!match(peer, in, sought)) {
      stays = true;
    } else if (std::byte* const to = in.target ? in.target->data : in.aside->data.get(); in.in_line()) {
      copy_bytes(to, in.data, in.header.bytes);
      complete = true;
    } else if (in.in_place()) {
      complete = true;
    } else {
      complete = in.by_reference() ? copy_reference(peer, in, to) : copy_from_ring(peer, in, to, position);
    }
    const uint64_t now = in.data_bytes - before;
    bytes += now;
    if (position != start) {
      ring.control.read.store(position, std::memory_order_release);
      if (!freed) bell.hint();  // a sender that sleeps because the ring is full writes while the rest is read
      freed = true;
    }
    if (complete) {
      ended = true;
      bytes += kRecordLine;
      deliver(peer, in, completed);
    } else if (now == 0) {
      break;
    }
  }
  if (freed) bell.ring();
  if ((freed || ended) && wanted_[peer] > 0) post_receive(peer);
  return bytes > 0;
}

bool Messages::put_aside(int peer) {
  Incoming& in = incoming_[peer];
  try {
    in.aside =
        &aside_[peer].emplace_back(Aside{in.header, std::make_unique_for_overwrite<std::byte[]>(in.header.bytes)});
    return true;
  } catch (const std::exception&) {
    channel_.fail(ErrorCode::kUnavailable, shown(channel_.rank()),
                  text("rank ", shown(channel_.rank()), " has no memory to put aside a message of ", in.header.bytes,
                       " bytes from rank ", shown(peer), " with tag ", in.header.tag, ", for which it has no receive"));
    return false;
  }
}

std::shared_ptr<Message> Messages::take_receive(int peer, int tag) {
  const auto match = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return (receive->peer == peer || receive->peer == kAnySource) && receive->header.tag == tag;
  });
  if (match == receives_.end()) return nullptr;
  const std::shared_ptr<Message> receive = *match;
  receives_.erase(match);
  add_wanted(receive->peer, -1);
  if (receive->peer == kAnySource) {
    first_ = peer + 1;
    post_receive(kAnySource);
  }
  return receive;
}

bool Messages::match_aside(const std::shared_ptr<Message>& receive, Completed& completed) {
  if (receive->peer != kAnySource) return match_aside_of(receive->peer, receive, completed);
  const int n = channel_.size(), first = first_;
  for (int step = 0; step < n; ++step)
    if (const int peer = (first + step) % n; match_aside_of(peer, receive, completed)) {
      first_ = peer + 1;
      return true;
    }
  return false;
}

bool Messages::match_aside_of(int peer, const std::shared_ptr<Message>& receive, Completed& completed) {
  auto& waiting = aside_[peer];
  const auto match = std::find_if(waiting.begin(), waiting.end(), [&](const Aside& aside) {
    return aside.header.tag == receive->header.tag && &aside != incoming_[peer].aside;
  });
  if (match == waiting.end()) return false;
  if (!fits(*receive, peer, match->header)) return false;
  receive->peer = peer;
  copy_bytes(receive->data, match->data.get(), match->header.bytes);
  waiting.erase(match);
  finish(receive, completed);
  return true;
}

}  // namespace muster::comm::shm_backend
