#include "transport/tcp/connection.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "transport/piece.h"

namespace muster::transport {
namespace {

constexpr size_t kAtOnce = 256 * 1024;  // what a caller writes itself before it leaves the rest to the thread
constexpr size_t kTurn = 1024 * 1024;   // what the thread writes to one peer before it looks at the others
constexpr size_t kBuffer = 64 * 1024;   // for what is read and is not large
constexpr size_t kDirect = 16 * 1024;   // pieces with this much missing are read into directly
constexpr size_t kMaxParts = 64;

std::vector<std::byte>& buffer_of_thread() {
  thread_local std::vector<std::byte> buffer(kBuffer);
  return buffer;
}

}  // namespace

Connection::Connection(PeerInfo peer, std::unique_ptr<SocketStream> stream, const Limits& limits, Poller& poller,
                       Turns& turns)
    : peer_(std::move(peer)),
      limits_(limits),
      poller_(poller),
      turns_(turns),
      stream_(std::move(stream)),
      last_written_(Clock::now()),
      parser_(limits),
      last_heard_(Clock::now()) {}

Connection::Lock::~Lock() {
  std::list<Outgoing> spent;
  if (!lock_.owns_lock()) lock_.lock();
  spent.swap(connection_.spent_);
  lock_.unlock();
}

void Connection::throw_lost() const { throw PeerLost(peer_.rank, peer_.pid, cause_); }

void Connection::send(Message message) {
  if (message.body.size() > limits_.body || message.pieces.size() > limits_.pieces || message.bytes() > limits_.bytes)
    throw InvalidArgument(text("a message to ", peer_.name, ": expected at most ", limits_.bytes, " bytes (body ",
                               limits_.body, ") in ", limits_.pieces, " pieces, got ", message.bytes(), " bytes (body ",
                               message.body.size(), ") in ", message.pieces.size()),
                          "Send it in several messages");
  Outgoing frame(std::move(message));
  std::vector<Outgoing::Lent> lent;  // its owners are destroyed without the lock
  Lock lock(*this);
  if (refuses_) throw_lost();
  if (broken_) return;  // as if the message were lost on its way: the receiver will soon be told why
  append(std::move(frame), kAtOnce);
  keep_last(lock, lent);
}

// Copies the lent parts of what is left of the frame that has just been appended. It does so without the lock, because
// copying takes time. The memory does not change meanwhile, so the thread may write from it or from the copy.
void Connection::keep_last(Lock& lock, std::vector<Outgoing::Lent>& lent) {
  if (queue_.empty()) return;
  const auto frame = std::prev(queue_.end());
  lent = frame->lent();
  size_t bytes = 0;
  for (const auto& one : lent) bytes += one.where.iov_len;
  if (bytes == 0) return;
  const uint64_t number = added_;
  lock.unlock();
  Piece copy;
  try {
    copy = make_piece(bytes);
  } catch (const std::bad_alloc&) {
    // A part of the frame is written and the rest cannot be kept, so nothing can follow it.
    lock.lock();
    if (!broken_) stream_->no_more();
    stop_writing();
    update_backlog();
    throw;
  }
  std::byte* at = copy.data;
  for (const auto& one : lent) {
    std::memcpy(at, one.where.iov_base, one.where.iov_len);
    at += one.where.iov_len;
  }
  lock.lock();
  const uint64_t behind = added_ - number;
  if (behind < queue_.size()) frame->keep(lent, copy);
}

// mutex_ held.
void Connection::append(Outgoing frame, size_t enough) {
  const bool was_empty = queue_.empty() && stream_->unsent() == 0;
  queued_ += frame.bytes();
  queue_.push_back(std::move(frame));
  ++added_;
  if (was_empty) write_some(enough);
  update_backlog();
}

bool Connection::write_some(size_t enough) {
  if (!stream_->flush()) {
    stop_writing();
    return false;
  }
  size_t taken = 0;
  while (!queue_.empty() && stream_->unsent() == 0 && taken < enough) {
    std::array<iovec, kMaxParts> parts;
    size_t n = 0, offered = 0;
    for (auto frame = queue_.begin(); frame != queue_.end() && n < parts.size(); ++frame)
      for (const iovec& part : frame->rest()) {
        if (n == parts.size()) break;
        offered += part.iov_len;
        parts[n++] = part;
      }
    const ssize_t result = stream_->write({parts.data(), n}, enough - taken);
    if (result == SocketStream::kGone) {
      stop_writing();
      return false;
    }
    if (result == 0) break;
    last_written_ = Clock::now();
    auto written = static_cast<size_t>(result);
    taken += written;
    queued_ -= written;
    while (written > 0) {
      const size_t part = std::min(written, queue_.front().bytes());
      queue_.front().taken(part);
      written -= part;
      if (queue_.front().bytes() == 0) spent_.splice(spent_.end(), queue_, queue_.begin());
    }
    if (static_cast<size_t>(result) < offered && taken < enough) break;  // the socket is full
  }
  return true;
}

void Connection::stop_writing() {
  broken_ = true;
  spent_.splice(spent_.end(), queue_);
  queued_ = 0;
}

// After a change of what is left to write: updates the backlog, wakes threads that wait for room, and sets whether the
// transport's thread watches the socket for room.
void Connection::update_backlog() {
  const size_t left = broken_ ? 0 : queued_ + stream_->unsent();
  const bool less = left < backlog_.exchange(left, std::memory_order_acq_rel);
  if (less && waiting_ > 0) room_.notify_all();
  if (left == 0 && leaving_ && !said_ && !ended_) {
    said_ = true;
    stream_->no_more();
  }
  if (watched_ && (left > 0) != wants_room_) {
    wants_room_ = left > 0;
    poller_.change(stream_->fd(), wants_room_ ? EPOLLIN | EPOLLOUT : EPOLLIN, static_cast<uint64_t>(peer_.rank));
  }
}

void Connection::wait_below(size_t bytes, Deadline deadline) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  const bool in_time =
      deadline.wait(room_, lock, [&] { return refuses_ || backlog_.load(std::memory_order_relaxed) <= bytes; });
  --waiting_;
  if (refuses_) throw_lost();
  if (!in_time)
    throw TimeoutError(text(peer_.name, " has not taken what was sent to it in time: ", backlog(),
                            " bytes wait, and at most ", bytes, " should"),
                       {peer_.rank}, "It may be stopped or overloaded, or the network between may be slow");
}

void Connection::stop_sending() {
  const std::lock_guard lock(mutex_);
  if (refuses_) return;
  refuses_ = true;
  cause_ = text("this worker has closed its connection with ", peer_.name);
  room_.notify_all();
}

void Connection::say_goodbye() {
  const Lock lock(*this);
  if (ended_ || leaving_) return;
  leaving_ = true;
  if (!broken_) append(Outgoing(FrameKind::kGoodbye), kAtOnce);
}

void Connection::start(Receiver& receiver) {
  {
    const std::lock_guard lock(mutex_);
    last_heard_ = Clock::now();
    watched_ = true;
    wants_room_ = backlog() > 0;
    poller_.add(stream_->fd(), wants_room_ ? EPOLLIN | EPOLLOUT : EPOLLIN, static_cast<uint64_t>(peer_.rank));
  }
  read_some(receiver);  // reads what came in one record with the greeting: the socket no longer reports it
}

void Connection::on_ready(uint32_t events, Receiver& receiver) {
  if (ended_) return;
  if (events & EPOLLOUT) {
    const Lock lock(*this);
    if (!broken_) write_some(kTurn);
    update_backlog();
  }
  if (events & ~static_cast<uint32_t>(EPOLLOUT)) read_some(receiver);
}

void Connection::read_some(Receiver& receiver) {
  auto& buffer = buffer_of_thread();
  bool fetch = true;
  for (;;) {
    auto room = parser_.room();
    if (room.size() < kDirect) room = {};
    ssize_t n = stream_->read(room, buffer, fetch);
    fetch = false;
    if (n == 0) return;
    if (n == SocketStream::kGone) return end(text("its connection ", stream_->why()), receiver);
    last_heard_ = Clock::now();
    try {
      const size_t direct = std::min(static_cast<size_t>(n), room.size());
      if (direct > 0 && parser_.filled(direct) && !on_frame(receiver)) return;
      if (!take(std::span<const std::byte>(buffer).first(static_cast<size_t>(n) - direct), receiver)) return;
    } catch (const std::bad_alloc&) {
      return end("it sent a message for which this worker has not enough memory", receiver);
    } catch (const Error& error) {
      return end(text("it broke the protocol: ", error.message()), receiver);
    }
  }
}

// Returns whether the connection goes on.
bool Connection::take(std::span<const std::byte> bytes, Receiver& receiver) {
  while (!bytes.empty() && parser_.take(bytes))
    if (!on_frame(receiver)) return false;
  return true;
}

bool Connection::on_frame(Receiver& receiver) {
  switch (parser_.kind()) {
    case FrameKind::kMessage:
      turns_.another();
      try {
        receiver.on_message(peer_.rank, parser_.body(), parser_.pieces());
      } catch (const std::exception& error) {  // against its contract
        MUSTER_LOG(kError) << "transport: the receiver of a message of " << peer_.name << " threw: " << error.what();
      }
      break;
    case FrameKind::kHeartbeat:
      break;
    case FrameKind::kGoodbye:
      end(text(peer_.name, " left"), receiver, true);
      return false;
  }
  return !ended_;
}

void Connection::beat(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  beat_locked(now);
}

void Connection::beat_locked(Clock::time_point now) {
  if (broken_ || now - last_written_ < peer_.beat) return;
  if (backlog() > 0) {
    write_some(kAtOnce);
    update_backlog();
  } else if (!leaving_) {
    append(Outgoing(FrameKind::kHeartbeat), kAtOnce);
  }
}

void Connection::tick(Clock::time_point now, bool all_read, Receiver& receiver) {
  if (ended_) return;
  {
    const Lock lock(*this);
    beat_locked(now);
  }
  if (watched_ && all_read && now - last_heard_ >= peer_.heartbeat)
    end(text("nothing was heard of it for ",
             std::chrono::duration_cast<std::chrono::milliseconds>(now - last_heard_).count(),
             " ms: it, its host or the network between is stopped or overloaded"),
        receiver);
}

void Connection::end(const std::string& cause, Receiver& receiver, bool said_goodbye) {
  if (ended_) return;
  // An end that answers our own good-bye is not reported; a good-bye that crossed ours is.
  bool answer = false;
  {
    const std::lock_guard lock(mutex_);
    answer = leaving_ && !said_goodbye;
  }
  const std::string whole = said_goodbye ? cause : text(peer_.name, " is lost: ", cause);
  close(whole);
  if (answer) return;
  try {
    receiver.on_lost(peer_.rank, whole);
  } catch (const std::exception& error) {
    MUSTER_LOG(kError) << "transport: the receiver of the end of " << peer_.name << " threw: " << error.what();
  }
}

void Connection::close(const std::string& cause) {
  const Lock lock(*this);
  if (ended_) return;
  ended_ = true;
  if (!refuses_) cause_ = cause;
  refuses_ = true;
  stop_writing();
  backlog_.store(0, std::memory_order_release);
  if (watched_) poller_.remove(stream_->fd());
  watched_ = false;
  stream_->end();
  room_.notify_all();
}

}  // namespace muster::transport
