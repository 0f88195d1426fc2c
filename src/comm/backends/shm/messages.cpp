#include "comm/backends/shm/messages.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/copy.h"
#include "base/text.h"
#include "base/thread.h"
#include "comm/backends/shm/take.h"

namespace muster::comm::shm_backend {
namespace {

// A message moves in pieces, so that its receiver reads one while its sender writes the next: at least four, if they are
// not shorter than 2 KiB, of at most half a core's first-level cache.
constexpr uint64_t piece_of(uint64_t bytes) {
  return std::clamp<uint64_t>(bytes / 4 / kRecordLine * kRecordLine, 2 << 10, 16 << 10);
}
// After so many bytes from or to one peer, it is the others' turn.
constexpr uint64_t kTurn = uint64_t{256} << 10;
// Messages on the heap go by reference if they have so many bytes. For smaller ones two copies through the ring are
// faster than one from the sender's heap: the receiver may not write to the lines that it reads there
// (docs/decisions/0009).
constexpr uint64_t kLeastByReference = uint64_t{4} << 20;

constexpr uint64_t whole_lines(uint64_t bytes) { return (bytes + kRecordLine - 1) / kRecordLine * kRecordLine; }
// The bytes of the data that follow the line.
constexpr uint64_t behind_line(uint64_t bytes) { return bytes <= RecordLine::kData ? 0 : whole_lines(bytes); }

// A receiver keeps larger messages out of its caches, where they have no room.
constexpr uint64_t kStreamed = uint64_t{24} << 20;

// "10 x Float".
std::string show(const MessageHeader& header) {
  const auto dtype = static_cast<c10::ScalarType>(header.dtype);
  return text(header.bytes / c10::elementSize(dtype), " x ", c10::toString(dtype));
}

}  // namespace

Messages::Ring::Ring(Channel& channel, int from, int to)
    : control(*reinterpret_cast<RingControl*>(channel.ring(from, to))),
      data(channel.ring(from, to) + sizeof(RingControl)),
      size(channel.layout().ring) {}

// Positions are multiples of a line.
void Messages::Ring::write_data(uint64_t position, const std::byte* from, size_t bytes) const {
  const size_t first = std::min<size_t>(bytes, size - (position & (size - 1)));
  copy_bytes(at(position), from, first);
  copy_bytes(data, from + first, bytes - first);
}
void Messages::Ring::read_data(uint64_t position, std::byte* to, size_t bytes, bool stream) const {
  const size_t first = std::min<size_t>(bytes, size - (position & (size - 1)));
  take_and_clear(to, at(position), first, stream);
  take_and_clear(to + first, data, bytes - first, stream);
}

Messages::Messages(Channel& channel, std::function<std::shared_ptr<void>()> owner)
    : channel_(channel),
      owner_(std::move(owner)),
      sends_(channel.size()),
      wanted_(channel.size()),
      referenced_(channel.size()),
      read_seen_(channel.size()),
      incoming_(channel.size()),
      aside_(channel.size()) {
  for (int peer = 0; peer < channel.size(); ++peer) {
    in_.emplace_back(channel, peer, channel.rank());
    out_.emplace_back(channel, channel.rank(), peer);
  }
}

Messages::~Messages() { stop(); }

void Messages::run(const std::shared_ptr<Message>& message) {
  const int peer = message->peer;  // from now on, any thread's progress() may change that of a receive from any source
  post(message);
  await(*message, peer);
}

template <typename Condition>
bool Messages::spin(int peer, Condition condition) const {
  constexpr std::chrono::nanoseconds kFirst = std::chrono::microseconds(3);
  const auto limit = channel_.spin();
  if (limit <= kFirst || peer == kAnySource || peer == channel_.rank()) return shm::spin_until(limit, condition);
  return shm::spin_until(kFirst, condition) ||
         (!channel_.shares_core(peer) && shm::spin_until(limit - kFirst, condition));
}

void Messages::await(Message& message, int peer) {
  while (!message.complete.load(std::memory_order_acquire)) {
    if (progress()) continue;
    if (spin(peer, [&] { return progress() || message.complete.load(std::memory_order_acquire); })) continue;
    sleep_until_moved(message);
  }
  if (message.error) std::rethrow_exception(message.error);
}

bool Messages::send_now(int peer, MessageHeader header, const std::byte* data, const std::source_location& site) {
  const std::lock_guard lock(mutex_);
  channel_.check();
  if (!sends_[peer].empty()) return false;
  channel_.commit_ring(peer);
  const uint64_t bytes = kRecordLine + behind_line(header.bytes);
  if (room(peer, bytes) < bytes) return false;
  note_site(header, site);
  bool whole = false;
  begin(peer, header, data, whole);
  shm::Bell& bell = channel_.control(peer).inbox;
  if (!whole) {
    bell.ring();  // a peer that sleeps wakes up while the rest is written
    const uint64_t piece = piece_of(header.bytes);
    for (uint64_t sent = 0; sent < header.bytes; sent += piece)
      put_piece(peer, data + sent, std::min(piece, header.bytes - sent));
  }
  bell.ring();
  return true;
}

bool Messages::receive_now(int peer, const MessageHeader& wanted, std::byte* data, std::chrono::nanoseconds timeout,
                           const std::source_location& site) {
  channel_.check();
  const Ring& ring = in_[peer];
  if (!spin(peer, [&] { return ring.has_line(); })) return false;
  std::shared_ptr<Message> rest;
  {
    const std::lock_guard lock(mutex_);
    channel_.check();
    if (!receives_.empty() || !aside_[peer].empty() || incoming_[peer].begun || !ring.has_line()) return false;
    uint64_t position = ring.read();
    const MessageHeader& header = ring.line(position).header;
    if (header.tag != wanted.tag || header.bytes != wanted.bytes || header.dtype != wanted.dtype ||
        header.place != kNotOnHeap)
      return false;
    Incoming in;
    if (!read_line(peer, in, position)) return false;
    bool complete = in.in_line();
    if (complete) copy_bytes(data, in.data, in.header.bytes);
    while (!complete && !(complete = copy_from_ring(peer, in, data, position))) {
      const auto more = [&] { return ring.control.written.load(std::memory_order_acquire) != position; };
      if (!spin(peer, [&] { return more() || channel_.failed(); }) || !more()) break;
    }
    if (!complete) {
      rest = std::make_shared<Message>();
      rest->op = OpKind::kRecv;
      rest->peer = peer;
      rest->header = in.header;
      rest->data = data;
      rest->deadline = Deadline::after(timeout);
      rest->site = site;
      in.target = rest;
      incoming_[peer] = in;
    }
    ring.control.read.store(position, std::memory_order_release);
    channel_.control(peer).inbox.ring();
    if (complete) return true;
  }
  await(*rest, peer);
  return true;
}

void Messages::submit(const std::shared_ptr<Message>& message) {
  post(message);
  work_on(message);
}

void Messages::work_on(const std::shared_ptr<Message>& message) {
  progress();
  if (message->complete.load(std::memory_order_acquire)) return;
  try {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable() && !stop_) thread_ = start_thread("muster-messages", [this, alive = owner_()] { work(); });
    work_.notify_one();
  } catch (const std::exception& error) {
    // A part of the message may be in a ring, so the peer may read the tensor as long as the group has not failed.
    channel_.fail(Failure::kUnavailable, shown(channel_.rank()),
                  text("rank ", shown(channel_.rank()), " cannot start a thread for its messages: ", error.what()));
    progress();
  }
}

void Messages::post(const std::shared_ptr<Message>& message) {
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    channel_.check();
    if (message->op == OpKind::kSend) {
      channel_.commit_ring(message->peer);
      note_site(message->header, message->site);
      if (message->header.bytes < kLeastByReference) message->header.place = kNotOnHeap;
      sends_[message->peer].push_back(message);
    } else if (!match_aside(message, completed)) {
      receives_.push_back(message);
      add_wanted(message->peer, 1);
    }
  }
  report(completed);
}

int Messages::find(int tag, int first) {
  Completed completed;
  int source = kAnySource;
  {
    const std::lock_guard lock(mutex_);
    channel_.check();
    source = find_here(tag, first, completed);
  }
  report(completed);
  return source;
}

int Messages::submit_if_here(const std::shared_ptr<Message>& receive, int first) {
  Completed completed;
  int source = kAnySource;
  {
    const std::lock_guard lock(mutex_);
    channel_.check();
    source = find_here(receive->header.tag, first, completed);
    // No other receive wants the message, and none can be posted before the lock is free.
    if (source != kAnySource && !match_aside_of(source, receive, completed)) {
      receive->peer = source;
      receives_.push_back(receive);
      add_wanted(source, 1);
      pull(source, completed);
    }
  }
  report(completed);
  if (source != kAnySource) work_on(receive);
  return source;
}

int Messages::find_here(int tag, int first, Completed& completed) {
  const int n = channel_.size();
  for (int step = 0; step < n; ++step) {
    const int peer = (first + step) % n;
    // No receive wants a message that has been put aside completely; such a receive would have taken it.
    for (const auto& aside : aside_[peer])
      if (aside.header.tag == tag && &aside.data != incoming_[peer].aside) return peer;
    // A message with another tag that has begun to arrive, and that no receive wants, is put aside: another may follow.
    const Incoming& in = incoming_[peer];
    if (receiving(peer) || (in.begun ? in.header.tag != tag : in_[peer].has_line())) pull(peer, completed, &tag);
    if (!in.begun || in.target || in.header.tag != tag) continue;
    // The message has begun to arrive, and waits or is being put aside. A receive may have been posted for it since.
    const bool wanted = std::any_of(receives_.begin(), receives_.end(), [&](const auto& receive) {
      return receive->header.tag == tag && (receive->peer == peer || receive->peer == kAnySource);
    });
    if (!wanted) return peer;
  }
  return kAnySource;
}

bool Messages::all_left() const {
  for (int peer = 0; peer < channel_.size(); ++peer)
    if (peer != channel_.rank() && !channel_.left(peer)) return false;
  return true;
}

bool Messages::progress(bool before_sleep) {
  Completed completed;
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    const int n = channel_.size(), first = first_;
    for (int step = 0; step < n; ++step) {
      const int peer = (first + step) % n;
      moved = (!sends_[peer].empty() && push(peer, completed)) || moved;
      moved = (receiving(peer) && pull(peer, completed)) || moved;
    }
    if (pending()) {
      try {
        channel_.check();
        if (before_sleep || ((moved || !completed.empty()) && Clock::now() >= next_check_)) check_peers();
      } catch (...) {
        fail_all(completed, std::current_exception());
      }
    }
  }
  report(completed);
  return moved || !completed.empty();
}

// Called without the lock. Runs the callbacks, and wakes threads of this rank that sleep until one of these messages is
// complete.
void Messages::report(const Completed& completed) {
  if (completed.empty()) return;
  for (const auto& message : completed)
    if (message->on_complete) message->on_complete(*message);
  channel_.control(channel_.rank()).inbox.ring();
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
  const uint64_t space = room(peer, kRecordLine + std::min(behind, piece_of(header.bytes)));
  if (space < kRecordLine) return false;
  whole = behind <= std::min(piece_of(header.bytes), space - kRecordLine);
  // The receiver looks at the line all the time, so all that is written to it is written together, last.
  if (behind > 0 && whole) ring.write_data(end, data, header.bytes);
  RecordLine& line = ring.line(written);
  line.header = header;
  if (behind == 0 && header.place == kNotOnHeap) copy_bytes(line.data, data, header.bytes);
  ring.control.written.store(end + (whole ? behind : 0), std::memory_order_release);
  line.stamp.store(end | (whole ? RecordLine::kWhole : 0), std::memory_order_release);
  return true;
}

void Messages::put_piece(int peer, const std::byte* data, uint64_t bytes) {
  const Ring& ring = out_[peer];
  const uint64_t written = ring.written();
  ring.write_data(written, data, bytes);
  ring.control.written.store(written + whole_lines(bytes), std::memory_order_release);
}

bool Messages::push(int peer, Completed& completed) {
  shm::Bell& bell = channel_.control(peer).inbox;
  uint64_t bytes = 0;  // in this turn
  while (!sends_[peer].empty() && bytes < kTurn) {
    Message& message = *sends_[peer].front();
    const bool by_reference = message.header.place != kNotOnHeap;
    const uint64_t before = bytes;
    if (!message.begun) {
      bool whole = false;
      if (!begin(peer, message.header, message.data, whole)) break;
      message.begun = true;
      if (by_reference) message.number = ++referenced_[peer];
      message.moved = whole ? message.header.bytes : 0;
      bytes += kRecordLine + (by_reference ? 0 : message.moved);
    } else if (!by_reference && message.moved < message.header.bytes) {
      const uint64_t piece = std::min(message.header.bytes - message.moved, piece_of(message.header.bytes));
      const uint64_t now = std::min(piece, room(peer, whole_lines(piece)));
      if (now == 0) break;
      put_piece(peer, message.data + message.moved, now);
      message.moved += now;
      bytes += now;
    }
    if (before == 0 && bytes > 0) bell.ring();  // a peer that sleeps wakes up while the rest is written
    if (by_reference ? !is_copied(message) : message.moved < message.header.bytes) {
      if (by_reference) break;
      continue;
    }
    bytes += kRecordLine;  // something moved, also if it was the peer
    finish(sends_[peer].front(), completed);
    sends_[peer].pop_front();
  }
  if (bytes > 0) bell.ring();
  return bytes > 0;
}

bool Messages::is_copied(const Message& message) const {
  return message.number != 0 && out_[message.peer].control.copied.load(std::memory_order_acquire) >= message.number;
}

// Reads the line at `position`, where has_line() has seen one, and moves `position` behind it. Returns false if no
// message can have such a header; then the group has failed.
bool Messages::read_line(int peer, Incoming& in, uint64_t& position) {
  RecordLine& line = in_[peer].line(position);
  in.begun = true;
  in.whole = (line.stamp.load(std::memory_order_relaxed) & RecordLine::kWhole) != 0;
  in.header = line.header;
  if (in.in_line()) std::memcpy(in.data, line.data, sizeof in.data);
  line.stamp.store(0, std::memory_order_relaxed);
  position += kRecordLine;
  const uint64_t heap = channel_.heap_bytes(peer);
  if (in.header.dtype < static_cast<uint8_t>(c10::ScalarType::Undefined) &&
      (!in.by_reference() || (in.header.place < heap && in.header.bytes <= heap - in.header.place)))
    return true;
  channel_.fail(Failure::kUnavailable, shown(peer),
                text("rank ", shown(peer), " sent a message of ", in.header.bytes,
                     " bytes whose header is damaged: it has the dtype ", int{in.header.dtype}, " and the place ",
                     in.header.place, " on a heap of ", heap, " bytes"));
  return false;
}

// Copies the next part of a message that came by reference; returns whether the message is complete. False also if its
// sender may have changed the data meanwhile. Then check() or check_peers() fails the receive. The sender writes to the
// data only after it has ended its send, which the looks after the copy find out: as in a seqlock, what was copied is
// only used if no write can have come before them.
bool Messages::copy_reference(int peer, Incoming& in, std::byte* to) {
  const uint64_t now = std::min(in.header.bytes - in.data_bytes, kTurn);
  std::byte* const from = channel_.heap(peer) + in.header.place + in.data_bytes;
  if (reinterpret_cast<uintptr_t>(from) % kCacheLine == 0)
    look_at_bytes(to + in.data_bytes, from, now, in.header.bytes >= kStreamed);
  else
    copy_bytes(to + in.data_bytes, from, now);
  in.data_bytes += now;
  if (in.data_bytes < in.header.bytes) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  if (channel_.failed() || channel_.left(peer)) return false;
  auto& copied = in_[peer].control.copied;
  copied.store(copied.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  channel_.control(peer).inbox.ring();
  return true;
}

// Copies what the ring has of a message's data, at most a piece, and moves `position` behind it. Returns whether the
// message is complete.
bool Messages::copy_from_ring(int peer, Incoming& in, std::byte* to, uint64_t& position) {
  const uint64_t rest = in.header.bytes - in.data_bytes;
  const uint64_t there = in.whole ? rest : in_[peer].control.written.load(std::memory_order_acquire) - position;
  const uint64_t now = std::min({rest, there, piece_of(in.header.bytes)});
  in_[peer].read_data(position, to + in.data_bytes, now, in.header.bytes >= kStreamed);
  position += whole_lines(now);
  in.data_bytes += now;
  return in.data_bytes == in.header.bytes;
}

// Finds the receive that gets a message that has begun to arrive, or puts it aside. Returns false if the message stays
// where it is: it is `sought`, or the group has failed (then progress() fails the messages that wait).
bool Messages::match(int peer, Incoming& in, const int* sought) {
  if (in.target || in.aside) return true;
  if (const auto receive = take_receive(peer, in.header.tag)) {
    if (fits(*receive, peer, in.header)) {
      receive->peer = peer;
      in.target = receive;
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
  if (match != receives_.end()) receives_.erase(match);
}

bool Messages::pull(int peer, Completed& completed, const int* sought) {
  const Ring& ring = in_[peer];
  shm::Bell& bell = channel_.control(peer).inbox;
  Incoming& in = incoming_[peer];
  uint64_t bytes = 0;  // in this turn
  bool stays = false, freed = false;
  while (!stays && bytes < kTurn && (receiving(peer) || sought)) {
    const uint64_t start = ring.read();
    uint64_t position = start;
    if (!in.begun) {
      if (!ring.has_line()) break;
      bytes += kRecordLine;
      if (!read_line(peer, in, position)) return true;
    }
    const uint64_t before = in.data_bytes;
    bool complete = false;
    if (!match(peer, in, sought)) {
      stays = true;
    } else if (std::byte* const to = in.target ? in.target->data : in.aside->data(); in.in_line()) {
      copy_bytes(to, in.data, in.header.bytes);
      complete = true;
    } else {
      complete = in.by_reference() ? copy_reference(peer, in, to) : copy_from_ring(peer, in, to, position);
    }
    const uint64_t now = in.data_bytes - before;
    bytes += now;
    if (position != start) {
      ring.control.read.store(position, std::memory_order_release);
      if (!freed) bell.ring();  // a sender that sleeps because the ring is full writes while the rest is read
      freed = true;
    }
    if (complete) {
      bytes += kRecordLine;
      deliver(peer, in, completed);
    } else if (now == 0) {
      break;
    }
  }
  if (freed) bell.ring();
  return bytes > 0;
}

bool Messages::put_aside(int peer) {
  Incoming& in = incoming_[peer];
  try {
    in.aside = &aside_[peer].emplace_back(Aside{in.header, std::vector<std::byte>(in.header.bytes)}).data;
    return true;
  } catch (const std::exception&) {
    channel_.fail(Failure::kUnavailable, shown(channel_.rank()),
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
  if (receive->peer == kAnySource) first_ = peer + 1;
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
    return aside.header.tag == receive->header.tag && &aside.data != incoming_[peer].aside;
  });
  if (match == waiting.end()) return false;
  if (!fits(*receive, peer, match->header)) return false;
  receive->peer = peer;
  copy_bytes(receive->data, match->data.data(), match->data.size());
  waiting.erase(match);
  finish(receive, completed);
  return true;
}

// A message that does not fit its receive fails the group: the data cannot be delivered, and dropping it would hide the
// error.
bool Messages::fits(const Message& receive, int peer, const MessageHeader& header) {
  if (header.bytes == receive.header.bytes && header.dtype == receive.header.dtype) return true;
  const auto in_brackets = [](const std::string& site) { return site.empty() ? std::string() : text(" (", site, ")"); };
  channel_.fail(
      Failure::kMismatch, shown(peer),
      text("recv on rank ", shown(channel_.rank()), in_brackets(find_site(receive.site)), " expects ",
           show(receive.header), " (", receive.header.bytes, " bytes) with tag ", header.tag, ", but rank ",
           shown(peer), in_brackets(site_of(peer, header)), " sent ", show(header), " (", header.bytes, " bytes)"));
  return false;
}

// The receiver may need the site long after the sender has gone on, so the header carries it. A file's name is written
// to shared memory only once.
void Messages::note_site(MessageHeader& header, const std::source_location& site) {
  const char* const file = site.file_name();
  if (*file == '\0' || site.line() > std::numeric_limits<uint16_t>::max()) return;
  size_t index = std::find(files_.begin(), files_.end(), file) - files_.begin();
  if (index == files_.size()) {
    if (index + 1 == kSourceFiles) return;
    std::string_view name(file);
    name.remove_prefix(name.find_last_of('/') + 1);
    auto& place = channel_.control(channel_.rank()).files[index + 1];  // all zero until now
    name.copy(place, sizeof place - 1);
    files_.push_back(file);
  }
  header.file = static_cast<uint8_t>(index + 1);
  header.line = static_cast<uint16_t>(site.line());
}

std::string Messages::site_of(int peer, const MessageHeader& header) const {
  if (header.file == 0 || header.file >= kSourceFiles) return {};
  const auto& name = channel_.control(peer).files[header.file];
  return text(std::string(name, ::strnlen(name, sizeof name)), ':', header.line);
}

void Messages::finish(const std::shared_ptr<Message>& message, Completed& completed, std::exception_ptr error) {
  message->error = std::move(error);
  message->complete.store(true, std::memory_order_release);
  completed.push_back(message);
}

void Messages::fail_all(Completed& completed, std::exception_ptr error) {
  for (int peer = 0; peer < channel_.size(); ++peer) {
    for (const auto& message : sends_[peer]) finish(message, completed, error);
    if (incoming_[peer].target) finish(incoming_[peer].target, completed, error);
    if (incoming_[peer].aside)  // a half message, which no receive may get
      aside_[peer].remove_if([&](const Aside& aside) { return &aside.data == incoming_[peer].aside; });
    sends_[peer].clear();
    incoming_[peer] = Incoming{};
    wanted_[peer] = 0;
  }
  for (const auto& message : receives_) finish(message, completed, error);
  receives_.clear();
  wanted_of_any_ = 0;
}

// Fails the group if a peer that messages wait for has left, or if a deadline has passed.
void Messages::check_peers() {
  next_check_ = Clock::now() + kNap;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    std::vector<const Message*> waiting;
    for (const auto& message : sends_[peer]) waiting.push_back(message.get());
    if (wanted_[peer] > 0)
      for (const auto& message : receives_)
        if (message->peer == peer) waiting.push_back(message.get());
    if (incoming_[peer].target) waiting.push_back(incoming_[peer].target.get());
    if (waiting.empty()) continue;

    // What the peer sent before it left can still be received.
    const bool left = channel_.left(peer);
    if (left && !sends_[peer].empty() && is_copied(*sends_[peer].front())) continue;  // before it left
    const bool drained = in_[peer].drained();
    if (left && (drained || !receiving(peer))) {
      channel_.lose(
          peer, text("rank ", shown(peer), " left group '", channel_.name(), "' while rank ", shown(channel_.rank()),
                     " waited to ", waiting.front()->op == OpKind::kSend ? "send to it" : "receive from it"));
      channel_.throw_failure();
    }
    for (const Message* message : waiting) {
      if (!message->deadline.passed()) continue;
      channel_.fail(
          Failure::kTimeout, shown(peer),
          text(to_string(message->op), " of ", show(message->header), " with tag ", message->header.tag,
               message->op == OpKind::kSend ? " to rank " : " from rank ", shown(peer), " on rank ",
               shown(channel_.rank()), " timed out (that rank's last collective: ", channel_.where(peer), ")"),
          {shown(peer)});
      channel_.throw_failure();
    }
  }
  if (wanted_of_any_ > 0) check_receives_of_any();
}

// Fails the group if receives from any source wait but all other ranks have left and have nothing under way, or if a
// deadline has passed.
void Messages::check_receives_of_any() {
  bool somebody = channel_.size() == 1;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    const bool left = channel_.left(peer);  // first: what the peer sent before it left is in the ring then
    somebody = somebody || (peer != channel_.rank() && (!left || !in_[peer].drained()));
  }
  for (const auto& message : receives_) {
    if (message->peer != kAnySource) continue;
    if (!somebody) {
      channel_.lose(channel_.rank() == 0 ? 1 : 0, text("all other ranks left group '", channel_.name(), "' while rank ",
                                                       shown(channel_.rank()), " waited to receive from any of them"));
      channel_.throw_failure();
    }
    if (!message->deadline.passed()) continue;
    channel_.fail(Failure::kTimeout, shown(channel_.rank() == 0 ? 1 : 0),
                  text("recv of ", show(message->header), " with tag ", message->header.tag, " from any rank on rank ",
                       shown(channel_.rank()), " timed out"));
    channel_.throw_failure();
  }
}

bool Messages::nothing_pending() {
  const std::lock_guard lock(mutex_);
  return !pending();
}

bool Messages::pending() const {
  for (int peer = 0; peer < channel_.size(); ++peer)
    if (!sends_[peer].empty() || incoming_[peer].target) return true;
  return !receives_.empty();
}

void Messages::sleep_until_moved(const Message& message) {
  channel_.control(channel_.rank()).inbox.sleep(std::min(kNap, message.deadline.left()), [&] {
    return progress(true) || message.complete.load(std::memory_order_acquire);
  });
}

void Messages::work() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] { return pending() || stop_; });
      if (stop_ && !pending()) return;
    }
    if (progress()) continue;
    // Another thread may complete all that is pending before this one sleeps. Then no peer rings for it.
    channel_.control(channel_.rank()).inbox.sleep(kNap, [&] { return progress(true) || nothing_pending(); });
  }
}

void Messages::stop() {
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    work_.notify_one();
    if (pending())
      fail_all(completed, std::make_exception_ptr(Aborted(text("group '", channel_.name(), "' is closing"))));
  }
  report(completed);
  join_or_detach(thread_);
}

}  // namespace muster::comm::shm_backend
