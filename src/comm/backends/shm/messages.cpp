#include "comm/backends/shm/messages.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "base/copy.h"
#include "base/text.h"
#include "comm/backends/shm/message_sizes.h"
#include "comm/kit/callbacks_elsewhere.h"

namespace muster::comm::shm_backend {

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
  move_until(*message, peer);
  if (message->error) std::rethrow_exception(message->error);
}

template <typename Condition>
bool Messages::look(int peer, Condition condition) const {
  using std::chrono::nanoseconds;
  constexpr nanoseconds kFirst = std::chrono::microseconds(3), kFirstInACrowd = std::chrono::nanoseconds(500);
  const auto limit = channel_.spin();
  if (peer == kAnySource || peer == channel_.rank()) return shm::spin_until(limit, condition);
  if (limit > kFirst)
    return shm::spin_until(kFirst, condition) ||
           (!channel_.shares_core(peer) && shm::spin_until(limit - kFirst, condition));
  // The ranks share cores, but most of them may sleep while two exchange messages. If the peer has just been woken on
  // this rank's core, it cannot answer before this one sleeps, so it does not yield for long.
  return shm::spin_until(kFirstInACrowd, condition) ||
         (!channel_.shares_core(peer) && shm::yield_until(shm::kSpin, condition));
}

void Messages::move_until(Message& message, int peer) {
  const Awaiting awaiting(*this);
  while (!message.complete.load(std::memory_order_acquire)) {
    if (progress()) continue;
    if (look(peer, [&] { return progress() || message.complete.load(std::memory_order_acquire); })) continue;
    sleep_until_moved(message);
  }
}

bool Messages::send_now(int peer, MessageHeader header, const std::byte* data, const std::source_location& site,
                        Told ends) {
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
    bell.hint();  // a peer that sleeps wakes up while the rest is written
    const uint64_t piece = piece_of(header.bytes, out_[peer].size);
    for (uint64_t sent = 0; sent < header.bytes; sent += piece)
      put_piece(peer, data + sent, std::min(piece, header.bytes - sent));
  }
  ends();
  bell.ring();
  return true;
}

bool Messages::receive_now(int peer, const MessageHeader& wanted, std::byte* data, std::chrono::nanoseconds timeout,
                           const std::source_location& site, Told before_wait, Told ends) {
  channel_.check();
  const Ring& ring = in_[peer];
  if (!look(peer, [&] { return ring.has_line(); })) return false;
  std::shared_ptr<Message> rest;
  {
    const std::lock_guard lock(mutex_);
    channel_.check();
    if (!receives_.empty() || !aside_[peer].empty() || incoming_[peer].begun || !ring.has_line()) return false;
    uint64_t position = ring.read();
    Incoming in;
    look_at_line(peer, in, position);
    if (in.header.tag != wanted.tag || in.header.bytes != wanted.bytes || in.header.dtype != wanted.dtype ||
        in.header.place != kNotOnHeap)
      return false;
    position += kRecordLine;
    bool complete = in.in_line();
    if (complete) copy_bytes(data, in.data, in.header.bytes);
    const auto more = [&] { return ring.control.written.load(std::memory_order_acquire) != position; };
    while (!complete && !(complete = copy_from_ring(peer, in, data, position))) {
      ring.control.read.store(position, std::memory_order_release);  // the sender may wait for room
      if (more()) continue;
      channel_.control(peer).inbox.hint();
      if (!look(peer, [&] { return more() || channel_.failed(); }) || !more()) break;
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
    if (complete) ends();
    channel_.control(peer).inbox.ring();
    if (complete) return true;
  }
  before_wait();
  move_until(*rest, peer);
  if (rest->error) std::rethrow_exception(rest->error);
  const std::lock_guard lock(mutex_);
  ends();
  return true;
}

void Messages::submit(const std::shared_ptr<Message>& message) {
  message->submitted = true;
  post(message);
  work_on(message);
}

void Messages::work_on(const std::shared_ptr<Message>& message) {
  const bool moved = progress();
  if (message->complete.load(std::memory_order_acquire)) return;
  try {
    const std::lock_guard lock(mutex_);
    let_work();
    // A turn may have moved a part. Whoever moves messages and sleeps now goes on with the rest, for which no peer
    // rings.
    if (moved) channel_.control(channel_.rank()).inbox.ring();
  } catch (const std::exception& error) {
    // A part of the message may be in a ring, so the peer may read the tensor as long as the group has not failed.
    channel_.fail(ErrorCode::kUnavailable, shown(channel_.rank()),
                  text("rank ", shown(channel_.rank()), " cannot move its messages: ", error.what()));
    progress();
  }
}

void Messages::post(const std::shared_ptr<Message>& message) {
  Completed completed;
  {
    const std::lock_guard lock(mutex_);
    channel_.check();
    if (message->op == OpKind::kSend) channel_.commit_ring(message->peer);  // first, because it may throw
    submitted_ += message->submitted ? 1 : 0;
    if (message->op == OpKind::kSend) {
      note_site(message->header, message->site);
      if (message->header.bytes < kLeastByReference) message->header.place = kNotOnHeap;
      sends_[message->peer].push_back(message);
    } else if (!match_aside(message, completed)) {
      receives_.push_back(message);
      add_wanted(message->peer, 1);
      if (message->header.place != kNotOnHeap && message->peer != kAnySource) post_receive(message->peer);
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
    receive->submitted = source != kAnySource;
    submitted_ += receive->submitted ? 1 : 0;
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
      if (aside.header.tag == tag && &aside != incoming_[peer].aside) return peer;
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
  const bool moved = move(completed, before_sleep);
  report(completed);
  return moved;
}

bool Messages::move(Completed& completed, bool before_sleep) {
  bool moved = false;
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
  return moved || !completed.empty();
}

// Called without the lock.
void Messages::report(const Completed& completed) {
  Completed with_callbacks = tell(completed);
  if (with_callbacks.empty()) return;
  std::unique_lock lock(mutex_);
  if (callbacks_run_elsewhere && !stop_) {
    const size_t before = callbacks_.size();
    try {
      callbacks_.insert(callbacks_.end(), with_callbacks.begin(), with_callbacks.end());
      let_work();
      if (idle_ > 0 || threads_.size() > static_cast<size_t>(in_callbacks_)) return;  // one comes to them
    } catch (const std::exception&) {                                                 // no thread can start
    }
    callbacks_.resize(before);
  }
  run_callbacks(std::move(with_callbacks), lock);
}

// Wakes threads of this rank that sleep until one of these messages is complete. Returns those whose callbacks are to
// be called.
Messages::Completed Messages::tell(const Completed& completed) {
  Completed with_callbacks;
  if (completed.empty()) return with_callbacks;
  for (const auto& message : completed)
    if (message->on_complete && message->on_complete(*message, Message::Call::kComplete))
      with_callbacks.push_back(message);
  channel_.control(channel_.rank()).inbox.ring();
  return with_callbacks;
}

// A message that does not fit its receive fails the group: the data cannot be delivered, and dropping it would hide the
// error.
bool Messages::fits(const Message& receive, int peer, const MessageHeader& header) {
  if (header.bytes == receive.header.bytes && header.dtype == receive.header.dtype) return true;
  const std::string here = find_site(receive.site), there = site_of(peer, header);
  channel_.fail(ErrorCode::kMismatch, shown(peer),
                describe_mismatch({shown(channel_.rank()), here}, {receive.header.bytes, receive.header.dtype},
                                  header.tag, {shown(peer), there}, {header.bytes, header.dtype}));
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
  submitted_ -= message->submitted ? 1 : 0;
  message->complete.store(true, std::memory_order_release);
  completed.push_back(message);
}

void Messages::fail_all(Completed& completed, std::exception_ptr error) {
  for (int peer = 0; peer < channel_.size(); ++peer) {
    for (const auto& message : sends_[peer]) finish(message, completed, error);
    if (incoming_[peer].target) finish(incoming_[peer].target, completed, error);
    if (incoming_[peer].aside)  // a half message, which no receive may get
      aside_[peer].remove_if([&](const Aside& aside) { return &aside == incoming_[peer].aside; });
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
          ErrorCode::kTimeout, shown(peer),
          text(to_string(message->op), " of ", describe(Payload{message->header.bytes, message->header.dtype}),
               " with tag ", message->header.tag, message->op == OpKind::kSend ? " to rank " : " from rank ",
               shown(peer), " on rank ", shown(channel_.rank()),
               " timed out (that rank's last collective: ", channel_.where(peer), ")"),
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
    channel_.fail(ErrorCode::kTimeout, 0,
                  text("recv of ", describe(Payload{message->header.bytes, message->header.dtype}), " with tag ",
                       message->header.tag, " from any rank on rank ", shown(channel_.rank()), " timed out"));
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

}  // namespace muster::comm::shm_backend
