// The thread of the ucx transport.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "shm/spin.h"
#include "transport/peers.h"
#include "transport/ucx/fabric_transport.h"

namespace muster::transport::ucx {
namespace {

constexpr milliseconds kMeetingTick{20}, kLongestTick{250};
constexpr milliseconds kLastWords{50};  // to send kGone, if the deadline of close() has passed
constexpr int kMostLogged = 16;         // warnings about packets that belong to no peer
constexpr int kMostProgress = 64;       // of one turn

}  // namespace

// --- events of the fabric, with the lock ---

Peer* UcxTransport::sender_of(const Header& header) {
  if (header.from >= peers_.size() || !peers_[header.from] || header.key != key_) return nullptr;
  return peers_[header.from].get();
}

// Returns whether the packet is from a peer and has been taken.
template <typename Take>
bool UcxTransport::accept(std::span<const std::byte> bytes, const Take& take) {
  Peer* peer = nullptr;
  try {
    const Header header = Header::parse(bytes);
    peer = sender_of(header);
    if (!peer) throw CorruptError("it is for a worker of another job, or from an unknown worker");
    peer->last_heard = Clock::now();
    if (peer->ended || !peer->broken.empty()) return false;
    peer->out.on_taken(header.taken);
    take(*peer, header);
    return true;
  } catch (const std::bad_alloc&) {
    if (peer) peer->fail("it sent a message for which this worker has not enough memory");
  } catch (const std::exception& error) {
    const auto* const ours = dynamic_cast<const Error*>(&error);
    const std::string what = ours ? ours->message() : error.what();
    if (peer) {
      peer->fail(text("it broke the protocol: ", what));
    } else if (dropped_++ < kMostLogged) {
      MUSTER_LOG(kWarning) << "transport: " << worker_name(options_.names, options_.rank)
                           << " dropped a packet that came over UCX: " << what;
    }
  }
  return false;
}

void UcxTransport::on_arrival(std::span<const std::byte> header, std::span<const std::byte> data) {
  accept(header, [&](Peer& peer, const Header& head) {
    if (head.kind == Kind::kHello) {
      if (!std::exchange(peer.hello, true)) peer.out.push_note(Kind::kWelcome);
    } else if (head.kind == Kind::kWelcome) {
      peer.welcome = true;
    } else if (head.kind == Kind::kReady) {
      peer.ready = true;
    } else if (head.kind == Kind::kGone) {
      peer.fail("it closed its connections");
    } else if (head.kind != Kind::kAck) {
      peer.in.on_arrival(head, data);
    }
  });
}

void UcxTransport::on_offer(std::span<const std::byte> header, size_t bytes, Offer* offer) {
  bool is_held = false;
  accept(header, [&](Peer& peer, const Header& head) {
    is_held = true;  // by the flow, even if on_offer() throws
    peer.in.on_offer(head, bytes, offer);
  });
  if (!is_held) strays_.push_back(offer);
}

void UcxTransport::on_broken(int rank, const char* error) {
  peers_[static_cast<size_t>(rank)]->fail(text("the way to it broke: ", error));
}

// --- the thread ---

milliseconds UcxTransport::tick_every() const {
  milliseconds shortest = options_.heartbeat;
  for (const auto& peer : peers_)
    if (peer) shortest = std::min(shortest, peer->beat * 4);
  return std::clamp(shortest / 8, milliseconds(1), kLongestTick);
}

// With the lock: handles what has come from a peer. `quiet`: nothing is left unread.
void UcxTransport::take_arrivals(Peer& peer, bool quiet) {
  if (!peer.ended) {
    if (peer.broken.empty()) peer.in.fetch(*fabric_);
    if (!peer.in.failure().empty()) peer.fail(peer.in.failure());
    while (started_ && !peer.left) {
      auto taken = peer.in.take();
      if (!taken) break;
      peer.left = taken->goodbye;
      news_.push_back({&peer, std::move(*taken)});
    }
    if (quiet && peer.died) peer.fail("its process died");
    if (started_ && !peer.left && !peer.broken.empty()) news_.push_back({&peer, {}, true});
  } else if (!peer.broken.empty()) {
    fabric_->disconnect(peer.rank);
  }
  pump(peer);
  if (peer.waiting > 0) peer.room.notify_all();
}

// With the lock: moves what is no longer needed to `spent`, which is destroyed without the lock.
void collect(Peer& peer, std::vector<Outflow::Spent>& spent) {
  auto some = peer.out.spent();
  if (!some.first.empty() || !some.second.empty()) spent.push_back(std::move(some));
}

// The steps before the start: all peers have said hello and been answered; everything that UCX itself sent to set up
// connections is flushed; then this worker tells all peers that it is ready. So no worker leaves while another one's
// connections are still being set up, which UCX 1.13 does not survive.
void UcxTransport::connect_on() {
  const auto is_here = [](const auto& peer) { return !peer || peer->is_here(); };
  if (!flush_.begun && std::all_of(peers_.begin(), peers_.end(), is_here)) {
    flush_.begun = true;
    State state = State::kUnderWay;
    const char* const error = fabric_->flush(flush_, state);
    flush_.done = error || state == State::kDone;
  }
  if (flush_.done && !std::exchange(said_ready_, true))
    for (const auto& peer : peers_) {
      if (!peer) continue;
      peer->out.push_note(Kind::kReady);
      pump(*peer);
    }
  changed_.notify_all();
}

// Looks at the fabric once, and delivers what came; returns whether there was anything.
bool UcxTransport::turn() {
  std::vector<News> news;
  std::vector<Outflow::Spent> spent;
  int found = 0;
  {
    const std::lock_guard lock(mutex_);
    while (found < kMostProgress && fabric_->progress()) ++found;
    saturated_ = found == kMostProgress;
    for (Offer* stray : std::exchange(strays_, {})) fabric_->refuse(stray);
    for (const auto& peer : peers_) {
      if (!peer) continue;
      take_arrivals(*peer, found == 0);
      collect(*peer, spent);
    }
    if (!started_) connect_on();
    news.swap(news_);
  }
  for (News& one : news) deliver(one);
  return found > 0 || !news.empty();
}

void UcxTransport::deliver(News& news) {
  turns_.another();
  Peer& peer = *news.peer;
  if (news.lost) return lose(peer);
  if (!news.message.goodbye) {
    try {
      receiver_.on_message(peer.rank, news.message.body, news.message.pieces);
    } catch (const std::exception& error) {  // against its contract
      MUSTER_LOG(kError) << "transport: the receiver of a message of " << peer.name << " threw: " << error.what();
    }
  }
  {
    const std::lock_guard lock(mutex_);
    peer.delivered = news.message.number;
    peer.owed += news.message.cost;
    if (peer.owed >= kAcknowledged || news.message.goodbye) peer.out.push_note(Kind::kAck);
  }
  if (news.message.goodbye) lose(peer);
}

// Ends a peer: it left, or is lost.
void UcxTransport::lose(Peer& peer) {
  std::vector<Outflow::Spent> spent;
  bool answer = false;
  {
    const std::lock_guard lock(mutex_);
    if (peer.ended) return;
    peer.ended = true;
    // An end that answers our own goodbye is not reported; a goodbye that crossed ours is.
    answer = want_close_ && !peer.left;
    const std::string cause = peer.left ? text(peer.name, " left") : text(peer.name, " is lost: ", peer.broken);
    if (!peer.refuses) peer.cause = cause;
    peer.refuses = true;
    peer.in.close(*fabric_);
    peer.out.close();
    // A peer that left is still to get the acknowledgement.
    if (!peer.left) fabric_->disconnect(peer.rank);
    pump(peer);
    collect(peer, spent);
    peer.room.notify_all();
  }
  if (answer) return;
  try {
    receiver_.on_lost(peer.rank, peer.cause);
  } catch (const std::exception& error) {
    MUSTER_LOG(kError) << "transport: the receiver of the end of " << peer.name << " threw: " << error.what();
  }
}

// With the lock: sends heartbeats to peers that have heard nothing for long.
void UcxTransport::send_beats(Clock::time_point now) {
  for (const auto& peer : peers_) {
    if (!peer || peer->ended || !peer->broken.empty() || now - peer->last_sent < peer->beat || !peer->is_here())
      continue;
    peer->out.push_note(Kind::kAck);
    pump(*peer);
  }
}

// By the heart, while the thread is busy. What progress() finds is left to the thread, which must not sleep before it
// has looked: hence the bell.
void UcxTransport::beat_while_busy() {
  {
    const std::lock_guard lock(mutex_);
    if (!fabric_) return;
    send_beats(Clock::now());
    for (int i = 0; i < kMostProgress && fabric_->progress(); ++i) {
    }
  }
  ring();
}

// Sends heartbeats, and finds peers that are silent.
void UcxTransport::tick(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  send_beats(now);
  for (const auto& peer : peers_) {
    if (!peer || peer->ended || !peer->broken.empty()) continue;
    const auto silence = now - peer->last_heard;
    if (started_ && !saturated_ && silence >= options_.heartbeat)
      peer->fail(text("nothing was heard of it for ", std::chrono::duration_cast<milliseconds>(silence).count(),
                      " ms: it, its host or the fabric between is stopped or overloaded"));
  }
}

// If close() was called: says goodbye, and reports when all peers have received it.
void UcxTransport::carry_out_requests() {
  if (!want_close_) return;
  const std::lock_guard lock(mutex_);
  const bool first = !std::exchange(said_goodbye_, true);
  bool ended = true;
  for (const auto& peer : peers_) {
    if (!peer) continue;
    if (first && !peer->ended) {
      peer->out.push_goodbye();
      pump(*peer);
    }
    ended = ended && (peer->out.is_done() || (peer->ended && !peer->left) || !peer->broken.empty());
  }
  if (!ended) return;
  all_ended_ = true;
  changed_.notify_all();
}

void UcxTransport::sleep(std::chrono::nanoseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    if (!fabric_->arm()) return;
    sleeping_ = true;  // from now on, threads that send ring the bell
  }
  pollfd wait[2] = {{fabric_->event_fd(), POLLIN, 0}, {bell_.get(), POLLIN, 0}};
  const auto left = std::chrono::ceil<milliseconds>(limit);
  const Turns::Rest rest(turns_);
  ::poll(wait, 2, static_cast<int>(std::max<int64_t>(left.count(), 0)));
  uint64_t count = 0;
  if (wait[1].revents) [[maybe_unused]]
    const auto n = ::read(bell_.get(), &count, sizeof count);
  const std::lock_guard lock(mutex_);
  sleeping_ = false;
}

// Spins for at most options_.spin; returns whether there was anything to do.
bool UcxTransport::spin() {
  if (options_.spin <= options_.spin.zero()) return false;
  for (const auto end = Clock::now() + options_.spin; Clock::now() < end; shm::cpu_relax())
    if (want_close_ || want_stop_ || turn()) return true;
  return false;
}

void UcxTransport::run() {
  auto next_tick = Clock::now();
  while (!want_stop_) {
    try {
      turns_.another();
      const auto before = Clock::now();
      const bool busy = turn();
      carry_out_requests();
      // Silence is measured up to `before`, and the fabric was looked at after that time. So if this process itself was
      // stopped or had no core, what came meanwhile has been read by now.
      if (before >= next_tick) {
        tick(before);
        next_tick = before + (started_ ? tick_every() : kMeetingTick);
        continue;
      }
      if (!busy && !spin()) sleep(next_tick - before);
    } catch (const std::exception& error) {
      MUSTER_LOG(kError) << "transport: " << error.what();
    }
  }
  finish();
}

// --- the end ---

// Tells peers that have not received everything that nothing more comes. Then destroys the fabric, or abandons it if a
// peer has not said goodbye or has not received ours.
void UcxTransport::finish() {
  std::vector<Outflow::Spent> spent;
  const std::lock_guard lock(mutex_);
  const auto has_parted = [&](const auto& peer) {
    return !peer || (peer->out.is_done() && (peer->left || (said_goodbye_ && peer->broken.empty())));
  };
  const bool all_parted = started_ && std::all_of(peers_.begin(), peers_.end(), has_parted);
  for (const auto& peer : peers_) {
    if (!peer) continue;
    peer->in.close(*fabric_);
    const bool had_all = peer->ended || peer->out.is_done();
    peer->out.close();
    if (!had_all && peer->is_here()) peer->out.push_note(Kind::kGone);
    pump(*peer);
    peer->ended = true;
    if (!peer->refuses) peer->cause = "this worker has closed its connections";
    peer->refuses = true;
    peer->room.notify_all();
  }
  const auto is_waiting = [](const auto& peer) { return peer && peer->broken.empty() && peer->out.has_packets(); };
  for (const auto limit = Clock::now() + kLastWords;
       Clock::now() < limit && std::any_of(peers_.begin(), peers_.end(), is_waiting);)
    fabric_->progress();
  for (Offer* stray : std::exchange(strays_, {})) fabric_->refuse(stray);
  if (!all_parted) return abandon();
  fabric_.reset();
  for (const auto& peer : peers_)
    if (peer) collect(*peer, spent);
}

}  // namespace muster::transport::ucx
