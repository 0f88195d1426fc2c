#include "transport/ucx/ucx_transport.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "base/fd.h"
#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "muster/base/error.h"
#include "transport/peers.h"
#include "transport/ucx/fabric_library.h"
#include "transport/ucx/fabric_transport.h"

namespace muster::transport {
namespace ucx {
namespace {

constexpr std::chrono::seconds kFlush{2};  // the destructor's limit for flushing

std::string entry_key(const UcxOptions& options, int rank) { return text(options.prefix, "ucx/", rank); }

UcxOptions checked(UcxOptions options) {
  options.peers = checked_peers(options.rank, options.size, std::move(options.peers), options.heartbeat);
  return options;
}

}  // namespace

UcxTransport::UcxTransport(const UcxOptions& options, Receiver& receiver)
    : options_(checked(options)),
      receiver_(receiver),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(static_cast<size_t>(options_.size)) {
  if (!bell_) throw_errno("cannot make an eventfd");
  FabricEvents& events = *this;
  fabric_ = options_.fabric ? options_.fabric(events) : make_ucx_fabric(options_.settings, events);
  MUSTER_LOG(kInfo) << "transport: " << worker_name(options_.names, options_.rank) << " uses " << fabric_->version()
                    << ", without authentication or encryption";
}

UcxTransport::~UcxTransport() { is_mine() ? close(Deadline::after(kFlush)) : leak(); }

// In a forked child the thread and the fabric belong to the parent and must not be touched.
void UcxTransport::leak() {
  if (thread_.joinable()) thread_.detach();
  static_cast<void>(heart_.release());
  abandon();
}

// Keeps the fabric, and what it may still touch, for ever, in a list, so that it stays reachable for a leak checker.
// UCX 1.13 aborts the program (by an assertion) if a worker is destroyed while it still has a message to send that sets
// up connections. It is known to have none only after all peers have exchanged their goodbyes.
void UcxTransport::abandon() {
  struct Kept {
    std::unique_ptr<Fabric> fabric;
    std::vector<std::shared_ptr<Peer>> peers;
    Kept* next;
  };
  static std::atomic<Kept*> all{nullptr};  // no lock: a forked child may be here
  auto* const kept = new Kept{std::move(fabric_), peers_, all.load()};
  while (!all.compare_exchange_weak(kept->next, kept)) {
  }
}

Peer& UcxTransport::to(int peer) const {
  if (peer < 0 || peer >= options_.size || !peers_[static_cast<size_t>(peer)])
    throw InvalidArgument(text("worker ", peer, " is not a peer of ", worker_name(options_.names, options_.rank)));
  return *peers_[static_cast<size_t>(peer)];
}

void UcxTransport::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(bell_.get(), &one, sizeof one);  // full: it is awake anyway
}

// --- connecting ---

void UcxTransport::look_up(const Directory& directory, Deadline deadline) {
  const auto key_of = [&](int rank) { return entry_key(options_, rank); };
  const auto take = [&](int rank, const std::string& written) {
    auto entry = Entry::parse(written);
    const std::string name = worker_name(options_.names, rank);
    if (entry.size != options_.size)
      throw Mismatch(
          text(name, " belongs to a job of ", entry.size, " workers, this worker to a job of ", options_.size));
    auto peer = std::make_shared<Peer>(rank, options_.rank, entry.key, options_.limits);
    peer->pid = entry.pid;
    peer->name = text(name, " (pid ", entry.pid, ")");
    peer->beat = std::min(options_.heartbeat, milliseconds(entry.heartbeat_ms)) / 4;
    peer->address = std::move(entry.address);
    peers_[static_cast<size_t>(rank)] = std::move(peer);
  };
  read_entries(directory, options_.peers, options_.names, key_of, take, deadline);
}

void UcxTransport::watch() {
  if (!options_.watch) return;
  std::vector<pid_t> pids;
  for (const int rank : options_.local) pids.push_back(to(rank).pid);
  watched_ = options_.watch->subscribe({pids.begin(), pids.end()}, [this](pid_t pid) {
    for (const int rank : options_.local)
      if (Peer& peer = to(rank); peer.pid == pid) peer.died = true;
    ring();
  });
  watches_ = true;
}

void UcxTransport::meet(const Directory& directory, Deadline deadline) {
  directory.post(
      entry_key(options_, options_.rank),
      Entry{key_, options_.size, static_cast<int>(pid_), options_.heartbeat.count(), fabric_->address()}.text());
  look_up(directory, deadline);
  for (const auto& peer : peers_) {
    if (!peer) continue;
    peer->last_heard = peer->last_sent = Clock::now();
    if (const char* error = fabric_->connect(peer->rank, peer->address)) {
      const std::string name = peer->name;
      abandon();
      throw Unavailable(text("UCX finds no way to ", name, ": ", error),
                        "Check UCX_TLS and UCX_NET_DEVICES on both hosts; UCX_LOG_LEVEL=info tells more");
    }
    peer->out.push_note(Kind::kHello);
  }
  watch();
  thread_ = start_thread("muster-ucx", [this] { run(); });
  wait_for_all(deadline);
}

std::string UcxTransport::describe_missing(std::vector<int>& missing) const {
  std::vector<std::string> words;
  for (const auto& peer : peers_) {
    if (!peer || peer->ready) continue;
    missing.push_back(peer->rank);
    words.push_back(peer->name);
  }
  return join(words);
}

void UcxTransport::wait_for_all(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto is_ready = [](const auto& peer) { return !peer || peer->ready; };
  const auto has_failed = [](const auto& peer) { return peer && !peer->ready && !peer->broken.empty(); };
  const auto over = [&] {
    return (flush_.done && std::all_of(peers_.begin(), peers_.end(), is_ready)) ||
           std::any_of(peers_.begin(), peers_.end(), has_failed);
  };
  const bool in_time = deadline.wait(changed_, lock, over);
  const auto failed = std::find_if(peers_.begin(), peers_.end(), has_failed);
  if (failed != peers_.end())
    throw Unavailable(text("UCX cannot connect with ", (*failed)->name, ": ", (*failed)->broken),
                      "Check whether it still runs, and UCX_TLS and UCX_NET_DEVICES on both hosts");
  if (!in_time) {
    std::vector<int> missing;
    const std::string names = describe_missing(missing);
    throw TimeoutError(text("workers have not connected in time: ", names), missing,
                       "Check whether they have failed, and whether the fabric reaches them");
  }
  // This does not wait for the start, because a receiver's first call may wait for this function to return.
  heart_ = std::make_unique<Heart>(turns_, tick_every(), kLongestTurn, [this] { beat_while_busy(); });
  started_ = true;
  ring();
}

// --- sending ---

void UcxTransport::send(int rank, Message message) {
  Peer& peer = to(rank);
  const Limits& limits = options_.limits;
  if (message.body.size() > limits.body || message.pieces.size() > limits.pieces || message.bytes() > limits.bytes)
    throw InvalidArgument(text("a message to ", peer.name, ": expected at most ", limits.bytes, " bytes (body ",
                               limits.body, ") in ", limits.pieces, " pieces, got ", message.bytes(), " bytes (body ",
                               message.body.size(), ") in ", message.pieces.size()),
                          "Send it in several messages");
  Frame frame = pack(message);  // without the lock, because copying takes time
  Outflow::Spent spent;         // destroyed without the lock
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (peer.refuses) throw_lost(peer);
    if (!peer.broken.empty()) return;  // as if it were lost on its way: the receiver will soon be told why
    peer.out.push(std::move(message), std::move(frame));
    pump(peer);
    spent = peer.out.spent();
    wake = sleeping_ && (peer.out.has_packets() || !peer.broken.empty());
  }
  if (wake) ring();
}

// Sends what may go now; with the lock.
void UcxTransport::pump(Peer& peer) {
  if (!peer.broken.empty()) return;
  const uint64_t before = peer.out.posted();
  const char* const error = peer.out.pump(*fabric_, peer.delivered);
  if (error) peer.fail(text("the way to it broke: ", error));
  if (peer.out.posted() == before) return;
  peer.last_sent = Clock::now();
  peer.told = peer.delivered;
  peer.owed = 0;
}

void UcxTransport::wait_below(int rank, size_t bytes, Deadline deadline) {
  Peer& peer = to(rank);
  std::unique_lock lock(mutex_);
  ++peer.waiting;
  const bool in_time = deadline.wait(peer.room, lock, [&] { return peer.refuses || peer.out.backlog() <= bytes; });
  --peer.waiting;
  if (peer.refuses) throw_lost(peer);
  if (!in_time)
    throw TimeoutError(
        text(peer.name, " has not taken what was sent to it in time: ", peer.out.backlog(), " bytes wait"), {rank},
        "Check whether it is busy or stopped");
}

// --- the end ---

void UcxTransport::close(Deadline flush) {
  if (!is_mine()) return;
  const auto stop_sending = [this] {
    for (const auto& peer : peers_) {
      if (!peer) continue;
      if (!peer->refuses) peer->cause = "this worker has left";
      peer->refuses = true;
    }
    want_close_ = true;
  };
  if (std::this_thread::get_id() == thread_.get_id()) {
    // The thread cannot wait for itself: it says the goodbyes, and the destructor does the rest.
    const std::lock_guard lock(mutex_);
    return stop_sending();
  }
  const std::lock_guard one(closing_);
  if (thread_.joinable()) {
    {
      std::unique_lock lock(mutex_);
      if (started_) {
        stop_sending();
        ring();
        flush.wait(changed_, lock, [this] { return all_ended_; });
      }
    }
    want_stop_ = true;
    ring();
    thread_.join();
    heart_.reset();
  }
  if (std::exchange(watches_, false)) options_.watch->unsubscribe(watched_);
}

}  // namespace ucx

std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options, const Directory& directory, Receiver& receiver,
                                              Deadline deadline) {
  auto transport = std::make_unique<ucx::UcxTransport>(options, receiver);
  transport->meet(directory, deadline);
  return transport;
}

}  // namespace muster::transport
