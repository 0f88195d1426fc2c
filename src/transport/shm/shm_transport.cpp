#include "transport/shm/shm_transport.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "shm/mapping.h"
#include "transport/shm/rings_transport.h"

namespace muster::transport {
namespace shm_rings {
namespace {

// Longest sleep; a limit that every kernel accepts.
constexpr nanoseconds kLongest = std::chrono::hours(1);

}  // namespace

ShmTransport::ShmTransport(ShmOptions options, Receiver& receiver) : options_(std::move(options)), receiver_(receiver) {
  const auto n = static_cast<int>(options_.workers.size());
  if (n > kMaxWorkers)
    throw InvalidArgument(text("shm transport: expected at most ", kMaxWorkers, " workers on one host, got ", n));
  capacity_ = capacity_for(n);
  const size_t bytes = inbox_bytes(n, capacity_);
  fd_ = shm::create_memfd("muster-inbox", bytes);
  shm::commit(fd_.get(), 0, bytes);
  inbox_ = shm::map_memfd(fd_.get());
  header_ = new (inbox_->data()) InboxHeader;
  header_->workers = static_cast<uint64_t>(n);
  header_->capacity = capacity_;
  for (auto& word : header_->ready) word.store(0, std::memory_order_relaxed);
  for (int from = 0; from < n; ++from) new (inbox_->data() + ring_at(from, capacity_)) RingControl;
  unread_ = std::vector<std::atomic<uint64_t>>(static_cast<size_t>(n + 63) / 64);
}

void ShmTransport::meet(const shm::NoticeBoard& directory, Deadline deadline) {
  const auto& workers = options_.workers;
  const auto n = static_cast<int>(workers.size());
  const auto mine = std::find(workers.begin(), workers.end(), options_.rank);
  if (mine == workers.end()) throw InvalidArgument("a worker is not among those of its host");
  place_ = static_cast<int>(mine - workers.begin());
  place_of_.assign(static_cast<size_t>(*std::max_element(workers.begin(), workers.end())) + 1, -1);
  auto met = shm::exchange(directory, options_.prefix, place_, n, {fd_.get(), options_.heap->fd()}, deadline,
                           {options_.pids, options_.workers});
  std::vector<pid_t> pids;
  for (int place = 0; place < n; ++place) {
    auto& participant = met[static_cast<size_t>(place)];
    if (participant.fds.size() != 2)
      throw CorruptError("a worker sent no inbox", "Run the same version of Muster in all workers");
    auto peer = std::make_unique<Peer>();
    peer->rank = workers[static_cast<size_t>(place)];
    peer->place = place;
    peer->pid = participant.pid;
    peer->inbox = shm::map_memfd(participant.fds[0].get());
    peer->heap = shm::map_memfd(participant.fds[1].get());
    auto* const header = reinterpret_cast<InboxHeader*>(peer->inbox->data());
    if (peer->inbox->size() < inbox_bytes(n, capacity_) || header->magic != kMagic ||
        header->workers != static_cast<uint64_t>(n) || header->capacity != capacity_)
      throw Mismatch(text(who(*peer), " has an inbox of another shape"),
                     "Run the same version of Muster in all workers");
    const auto ring = [&](const shm::Mapping& inbox, int from) {
      std::byte* const at = inbox.data() + ring_at(from, capacity_);
      return Ring{reinterpret_cast<RingControl*>(at), at + sizeof(RingControl), capacity_};
    };
    peer->out = ring(*peer->inbox, place_);
    peer->in = ring(*inbox_, place);
    peer->header = header;
    peer->ready = &header->ready[place_ / 64];
    peer->ready_bit = uint64_t{1} << (place_ % 64);
    if (participant.pid != process_) pids.push_back(participant.pid);
    place_of_[static_cast<size_t>(peer->rank)] = place;
    peers_.push_back(std::move(peer));
  }
  watched_ = options_.watch->subscribe({pids.begin(), pids.end()}, [this](pid_t pid) {
    for (auto& peer : peers_)
      if (peer->pid == pid) peer->died.store(true, std::memory_order_release);
    around_.store(true, std::memory_order_seq_cst);
    wake();
    wake_second();
  });
}

ShmTransport::~ShmTransport() {
  if (forked()) {
    // Everything here belongs to the parent process, the locks included.
    for (auto& peer : peers_) (void)peer.release();
    return;
  }
  if (!closed_.load()) close(Deadline::after(nanoseconds(0)));
  // Blocks that a living peer may still use are never given back to the heap.
  for (auto& peer : peers_)
    if (!peer->died.load() && !peer->lent.empty()) {
      static std::mutex mutex;
      static auto* const kept =
          new std::vector<std::unordered_map<uint64_t, LentBlock>>;  // reachable for leak checkers
      const std::lock_guard lock(mutex);
      kept->push_back(std::move(peer->lent));
    }
}

std::string ShmTransport::who(const Peer& peer) const {
  const auto rank = static_cast<size_t>(peer.rank);
  const std::string name = rank < options_.names.size() ? options_.names[rank] : text("worker ", rank);
  return peer.pid == process_ ? name : text(name, " (pid ", peer.pid, ")");
}

Peer& ShmTransport::peer_of(int rank) const {
  const int place =
      rank >= 0 && static_cast<size_t>(rank) < place_of_.size() ? place_of_[static_cast<size_t>(rank)] : -1;
  if (place < 0) throw InvalidArgument(text("worker ", rank, " is not on this host"));
  return *peers_[static_cast<size_t>(place)];
}

void ShmTransport::throw_lost(const Peer& peer) const { throw PeerLost(peer.rank, peer.pid, *peer.lost); }

bool ShmTransport::pending() const {
  if (around_.load(std::memory_order_acquire)) return true;
  for (size_t word = 0; word < unread_.size(); ++word)
    if (unread_[word].load(std::memory_order_acquire) || header_->ready[word].load(std::memory_order_acquire))
      return true;
  return false;
}

void ShmTransport::sleep(nanoseconds limit) {
  announce_waiting();
  header_->bell.sleep(std::min(limit, kLongest), [&] { return woken_.load(std::memory_order_acquire) || pending(); });
  woken_.store(false, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // this thread's next poll() sees the message that woke it
}

// Works even while hushed: it does not go through Bell::ring(), which the hush silences.
void ShmTransport::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  header_->bell.wake();
}

void ShmTransport::sleep_second(nanoseconds limit, const std::function<bool()>& unless) {
  header_->second.sleep(std::min(limit, kLongest),
                        [&] { return second_woken_.load(std::memory_order_acquire) || unless(); });
  second_woken_.exchange(false, std::memory_order_seq_cst);
}

void ShmTransport::wake_second() {
  second_woken_.store(true, std::memory_order_seq_cst);
  header_->second.wake();
}

void ShmTransport::hush(bool on) {
  // Modulo 2^32: each sleeper adds one, the hush subtracts one, in any order.
  header_->bell.waiters.fetch_add(on ? UINT32_MAX : 1, std::memory_order_seq_cst);
  header_->second.waiters.fetch_add(on ? UINT32_MAX : 1, std::memory_order_seq_cst);
  if (!on) std::atomic_thread_fence(std::memory_order_seq_cst);
}

// --- the end ---

bool ShmTransport::flushed() {
  bool all = true;
  for (auto& peer : peers_) {
    const std::lock_guard lock(peer->mutex);
    if (!peer->lost && !peer->outbox.empty()) {
      flush(*peer);
      all &= peer->outbox.empty();
    }
  }
  return all;
}

void ShmTransport::close(Deadline deadline) {
  if (peers_.empty() || closed_.exchange(true)) return;
  if (static_cast<size_t>(place_) < peers_.size()) {  // meet() may have failed before it added this worker
    Peer& self = *peers_[static_cast<size_t>(place_)];
    const std::lock_guard lock(self.mutex);
    self.outbox.clear();  // no thread polls any more
  }
  while (!flushed() && !deadline.passed()) {
    // Room is announced to the thread that polls; here it is enough to look from time to time.
    ::usleep(100);
    for (auto& peer : peers_)
      if (peer->died.load(std::memory_order_acquire)) {
        const std::lock_guard lock(peer->mutex);
        peer->outbox.clear();
      }
  }
  options_.watch->unsubscribe(watched_);
  for (auto& peer : peers_) {
    const std::lock_guard lock(peer->mutex);
    if (!peer->lost) peer->lost = kLeft;
    peer->out.control->closed.store(1, std::memory_order_release);
    announce(*peer);
    peer->room.notify_all();
  }
}

}  // namespace shm_rings

std::shared_ptr<PolledTransport> make_shm_transport(const ShmOptions& options, const shm::NoticeBoard& directory,
                                                    Receiver& receiver, Deadline deadline) {
  auto transport = std::make_shared<shm_rings::ShmTransport>(options, receiver);
  transport->meet(directory, deadline);
  return transport;
}

}  // namespace muster::transport
