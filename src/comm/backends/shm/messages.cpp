#include "comm/backends/shm/messages.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/text.h"
#include "base/thread.h"
#include "comm/backends/shm/take.h"

namespace muster::comm::shm_backend {
namespace {

// A message moves in pieces, so that its receiver reads one while its sender writes the next. A piece and its copy fit
// into a core's first-level cache.
constexpr size_t kPiece = size_t{8} << 10;
// After so many bytes from or to one peer, it is the others' turn.
constexpr uint64_t kTurn = uint64_t{256} << 10;
// Messages on the heap go by reference if they have so many bytes. For smaller ones two copies through the ring are
// faster than one from the sender's heap: the receiver may not write to the lines that it reads there
// (docs/decisions/0009).
constexpr uint64_t kLeastByReference = uint64_t{4} << 20;

// Copies between a ring (at `position`, wrapping) and flat memory.
void ring_write(std::byte* ring, size_t size, uint64_t position, const std::byte* from, size_t bytes) {
  if (bytes == 0) return;  // `from` may be null
  const size_t at = position % size;
  const size_t first = std::min(bytes, size - at);
  std::memcpy(ring + at, from, first);
  std::memcpy(ring, from + first, bytes - first);
}
void ring_read(std::byte* ring, size_t size, uint64_t position, std::byte* to, size_t bytes) {
  if (bytes == 0) return;
  const size_t at = position % size;
  const size_t first = std::min(bytes, size - at);
  take_bytes(to, ring + at, first);
  take_bytes(to + first, ring, bytes - first);
}

// "10 x Float".
std::string show(const MessageHeader& header) {
  const auto dtype = static_cast<c10::ScalarType>(header.dtype);
  return text(header.bytes / c10::elementSize(dtype), " x ", c10::toString(dtype));
}

}  // namespace

Messages::Messages(Channel& channel, std::function<std::shared_ptr<void>()> owner)
    : channel_(channel),
      owner_(std::move(owner)),
      sends_(channel.size()),
      wanted_(channel.size()),
      referenced_(channel.size()),
      incoming_(channel.size()),
      aside_(channel.size()) {}

Messages::~Messages() { stop(); }

void Messages::run(const std::shared_ptr<Message>& message) {
  channel_.check();
  post(message);
  while (!message->complete.load(std::memory_order_acquire)) {
    if (progress()) continue;
    if (shm::spin_until(channel_.spin(),
                        [&] { return progress() || message->complete.load(std::memory_order_acquire); }))
      continue;
    sleep_until_moved(message->deadline, *message);
  }
  if (message->error) std::rethrow_exception(message->error);
}

bool Messages::send_now(int peer, MessageHeader header, const std::byte* data, const std::source_location& site) {
  channel_.check();
  const std::lock_guard lock(mutex_);
  if (!sends_[peer].empty()) return false;
  channel_.commit_ring(peer);
  RingControl& control = ring(channel_.rank(), peer);
  const size_t size = channel_.layout().ring;
  const uint64_t written = control.written.load(std::memory_order_relaxed),
                 end = written + sizeof header + header.bytes;
  if (end - control.read.load(std::memory_order_acquire) > size) return false;
  note_site(header, site);
  std::byte* const to = ring_data(channel_.rank(), peer);
  ring_write(to, size, written, reinterpret_cast<const std::byte*>(&header), sizeof header);
  ring_write(to, size, written + sizeof header, data, header.bytes);
  control.written.store(end, std::memory_order_release);
  channel_.control(peer).inbox.ring();
  return true;
}

bool Messages::receive_now(int peer, const MessageHeader& wanted, std::byte* data) {
  channel_.check();
  RingControl& control = ring(peer, channel_.rank());
  const auto there = [&] {
    return control.written.load(std::memory_order_acquire) != control.read.load(std::memory_order_relaxed);
  };
  if (!shm::spin_until(channel_.spin(), there)) return false;
  const std::lock_guard lock(mutex_);
  if (!receives_.empty() || !aside_[peer].empty() || incoming_[peer].header_bytes > 0 || incoming_[peer].target)
    return false;
  const uint64_t position = control.read.load(std::memory_order_relaxed);
  const uint64_t bytes = control.written.load(std::memory_order_acquire) - position;
  std::byte* const from = ring_data(peer, channel_.rank());
  const size_t size = channel_.layout().ring;
  MessageHeader header;
  if (bytes < sizeof header) return false;
  ring_read(from, size, position, reinterpret_cast<std::byte*>(&header), sizeof header);
  if (header.tag != wanted.tag || header.bytes != wanted.bytes || header.dtype != wanted.dtype ||
      bytes < sizeof header + header.bytes)
    return false;
  ring_read(from, size, position + sizeof header, data, header.bytes);
  control.read.store(position + sizeof header + header.bytes, std::memory_order_release);
  channel_.control(peer).inbox.ring();
  return true;
}

void Messages::submit(const std::shared_ptr<Message>& message) {
  channel_.check();
  post(message);
  work_on(message);
}

void Messages::work_on(const std::shared_ptr<Message>& message) {
  progress();
  if (message->complete.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable() && !stop_) thread_ = start_thread("muster-messages", [this, alive = owner_()] { work(); });
  work_.notify_one();
}

void Messages::post(const std::shared_ptr<Message>& message) {
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
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
  channel_.check();
  Completed completed;
  int source = kAnySource;
  {
    const std::lock_guard lock(mutex_);
    source = find_here(tag, first, completed);
  }
  report(completed);
  return source;
}

int Messages::submit_if_here(const std::shared_ptr<Message>& receive, int first) {
  channel_.check();
  Completed completed;
  int source = kAnySource;
  {
    const std::lock_guard lock(mutex_);
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
    const RingControl& control = ring(peer, channel_.rank());
    const bool more = control.written.load(std::memory_order_acquire) != control.read.load(std::memory_order_relaxed);
    if (more || receiving(peer)) pull(peer, completed, &tag);
    const Incoming& in = incoming_[peer];
    if (in.header_bytes < sizeof(MessageHeader) || in.target || in.header.tag != tag) continue;
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

bool Messages::progress() {
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
    if (completed.empty() && pending()) {
      try {
        channel_.check();
        if (!moved || Clock::now() >= next_check_) check_peers();
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

bool Messages::push(int peer, Completed& completed) {
  RingControl& control = ring(channel_.rank(), peer);
  std::byte* const data = ring_data(channel_.rank(), peer);
  const size_t size = channel_.layout().ring;
  const uint64_t limit = control.written.load(std::memory_order_relaxed) + kTurn;
  bool moved = false;
  while (!sends_[peer].empty()) {
    Message& message = *sends_[peer].front();
    if (message.number != 0) {
      if (!is_copied(message)) break;
      finish(sends_[peer].front(), completed);
      sends_[peer].pop_front();
      moved = true;
      continue;
    }
    const bool by_reference = message.header.place != kNotOnHeap;
    const uint64_t in_ring = sizeof(MessageHeader) + (by_reference ? 0 : message.header.bytes);
    const uint64_t written = control.written.load(std::memory_order_relaxed);
    size_t room = size - (written - control.read.load(std::memory_order_acquire));
    uint64_t position = written;
    const auto put = [&](const std::byte* from, size_t bytes) {
      const size_t now = std::min({bytes, room, kPiece});
      ring_write(data, size, position, from, now);
      position += now;
      room -= now;
      message.moved += now;
    };
    if (message.moved < sizeof(MessageHeader))
      put(reinterpret_cast<const std::byte*>(&message.header) + message.moved, sizeof(MessageHeader) - message.moved);
    const uint64_t sent = message.moved - std::min<uint64_t>(message.moved, sizeof(MessageHeader));
    if (message.moved >= sizeof(MessageHeader) && message.moved < in_ring)
      put(message.data + sent, message.header.bytes - sent);
    if (position == written) break;
    if (by_reference && message.moved == in_ring) message.number = ++referenced_[peer];
    control.written.store(position, std::memory_order_release);
    channel_.control(peer).inbox.ring();
    moved = true;
    if (message.number != 0) continue;
    if (message.moved < in_ring) {
      if (position >= limit) break;
      continue;
    }
    finish(sends_[peer].front(), completed);
    sends_[peer].pop_front();
  }
  return moved;
}

bool Messages::is_copied(const Message& message) const {
  return message.number != 0 &&
         ring(channel_.rank(), message.peer).copied.load(std::memory_order_acquire) >= message.number;
}

// Copies the next part of a message that came by reference; returns whether the message is complete. False also if its
// sender may have changed the data meanwhile. Then check() or check_peers() fails the receive.
bool Messages::copy_reference(int peer, Incoming& in, std::byte* to) {
  const uint64_t place = in.header.place, bytes = in.header.bytes, heap = channel_.heap_bytes(peer);
  if (bytes > heap || place > heap - bytes) {
    channel_.fail(Failure::kUnavailable, shown(peer),
                  text("rank ", shown(peer), " sent a message of ", bytes, " bytes that is not on its heap"));
    return false;
  }
  const uint64_t now = std::min(bytes - in.data_bytes, kTurn);
  copy_bytes(to + in.data_bytes, channel_.heap(peer) + place + in.data_bytes, now);
  in.data_bytes += now;
  if (in.data_bytes < bytes) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  if (channel_.failed() || channel_.left(peer)) return false;
  RingControl& control = ring(peer, channel_.rank());
  control.copied.store(control.copied.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  channel_.control(peer).inbox.ring();
  return true;
}

bool Messages::pull(int peer, Completed& completed, const int* sought) {
  RingControl& control = ring(peer, channel_.rank());
  std::byte* const data = ring_data(peer, channel_.rank());
  const size_t size = channel_.layout().ring;
  Incoming& in = incoming_[peer];
  const uint64_t limit = control.read.load(std::memory_order_relaxed) + kTurn;
  bool moved = false;
  while (receiving(peer) || sought) {
    uint64_t position = control.read.load(std::memory_order_relaxed);
    const uint64_t start = position;
    size_t there = control.written.load(std::memory_order_acquire) - position;
    const auto take = [&](std::byte* to, size_t bytes) {
      const size_t now = std::min({bytes, there, kPiece});
      ring_read(data, size, position, to, now);
      position += now;
      there -= now;
      return now;
    };
    if (in.header_bytes < sizeof(MessageHeader))
      in.header_bytes +=
          take(reinterpret_cast<std::byte*>(&in.header) + in.header_bytes, sizeof(MessageHeader) - in.header_bytes);
    bool complete = false;
    if (in.header_bytes == sizeof(MessageHeader)) {
      if (!in.target && !in.aside) {
        if (const auto receive = take_receive(peer, in.header.tag)) {
          if (!fits(*receive, peer, in.header)) {  // then the group has failed, and progress() fails the receive
            receives_.push_front(receive);
            add_wanted(receive->peer, 1);
            return true;
          }
          receive->peer = peer;
          in.target = receive;
        } else if (sought && in.header.tag == *sought) {
          if (position != start) {
            control.read.store(position, std::memory_order_release);
            channel_.control(peer).inbox.ring();
          }
          return moved || position != start;
        } else if (!put_aside(peer)) {
          return true;  // the group has failed, and progress() fails the messages that wait
        }
      }
      std::byte* const to = in.target ? in.target->data : in.aside->data();
      if (in.by_reference()) {
        const uint64_t before = in.data_bytes;
        complete = copy_reference(peer, in, to);
        moved = moved || in.data_bytes != before;
      } else {
        in.data_bytes += take(to + in.data_bytes, in.header.bytes - in.data_bytes);
        complete = in.data_bytes == in.header.bytes;
      }
    }
    if (position != start) {
      control.read.store(position, std::memory_order_release);
      channel_.control(peer).inbox.ring();
      moved = true;
    }
    if (!complete) {
      if (position == start || position >= limit) break;
      continue;
    }
    if (in.target) {
      finish(in.target, completed);
      in = Incoming{};
    } else {
      in = Incoming{};
      // A receive for it may have come while it was put aside.
      const auto match = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
        const int wanted = receive->peer;
        if ((wanted != peer && wanted != kAnySource) || !match_aside_of(peer, receive, completed)) return false;
        add_wanted(wanted, -1);
        return true;
      });
      if (match != receives_.end()) receives_.erase(match);
    }
    moved = true;
  }
  return moved;
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
  if (!match->data.empty()) std::memcpy(receive->data, match->data.data(), match->data.size());
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
    const RingControl& from = ring(peer, channel_.rank());
    const bool drained = from.written.load(std::memory_order_acquire) == from.read.load(std::memory_order_relaxed);
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
    const RingControl& from = ring(peer, channel_.rank());
    const bool drained = from.written.load(std::memory_order_acquire) == from.read.load(std::memory_order_relaxed);
    somebody = somebody || (peer != channel_.rank() && (!left || !drained));
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

void Messages::sleep_until_moved(Deadline deadline, const Message& message) {
  channel_.control(channel_.rank()).inbox.sleep(std::min(kNap, deadline.left()), [&] {
    return progress() || message.complete.load(std::memory_order_acquire);
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
    channel_.control(channel_.rank()).inbox.sleep(kNap, [&] { return progress() || nothing_pending(); });
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
