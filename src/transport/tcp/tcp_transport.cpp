#include "transport/tcp/tcp_transport.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "muster/base/error.h"
#include "store/address/host_address.h"
#include "transport/heart.h"
#include "transport/peers.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/connector.h"

namespace muster::transport {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kFlush{2};  // the destructor's limit for flushing
constexpr milliseconds kConnectTick{20}, kLongestTick{250};

std::string entry_key(const TcpOptions& options, int rank) { return text(options.prefix, "tcp/", rank); }

TcpOptions checked(TcpOptions options) {
  options.peers = checked_peers(options.rank, options.size, std::move(options.peers), options.heartbeat);
  return options;
}

class TcpTransport final : public Transport {
 public:
  TcpTransport(const TcpOptions& options, Receiver& receiver)
      : options_(checked(options)), receiver_(receiver), connections_(static_cast<size_t>(options.size)) {
    if (options.secret) tls_ = std::make_unique<TlsPair>(options.secret->derive("muster rpc"));
  }
  ~TcpTransport() override { is_mine() ? close(Deadline::after(kFlush)) : leak(); }

  void meet(const Directory& directory, Deadline deadline);

  std::string_view name() const override { return "tcp"; }
  void send(int peer, Message message) override { to(peer).send(std::move(message)); }
  size_t backlog(int peer) const override { return to(peer).backlog(); }
  void wait_below(int peer, size_t bytes, Deadline deadline) override { to(peer).wait_below(bytes, deadline); }
  void close(Deadline flush) override;

 private:
  bool is_mine() const { return ::getpid() == pid_; }
  void leak();
  Connection& to(int peer) const;

  UniqueFd listen(Entry& own) const;
  std::vector<Connector::Other> look_up(const Directory& directory, Deadline deadline) const;
  std::vector<store::SocketAddress> resolve(const Entry& entry, int rank, Deadline deadline) const;
  void wait_for_all(Deadline deadline);

  void run();
  void dispatch(const epoll_event& event);
  void carry_out_requests();
  void tick(Clock::time_point now, bool all_read);
  void on_met(const Hello& other, std::unique_ptr<SocketStream> stream);
  milliseconds tick_every() const;

  const pid_t pid_ = ::getpid();
  const TcpOptions options_;
  Receiver& receiver_;
  std::unique_ptr<TlsPair> tls_;  // declared before the connections, which use it
  Poller poller_;
  Turns turns_;                                           // of the thread
  std::vector<std::unique_ptr<Connection>> connections_;  // by rank; changed by the thread until all have come
  std::unique_ptr<Connector> connector_;                  // until then; used by the thread

  // What the thread is asked to do, and what it has done.
  std::atomic<bool> want_start_{false}, want_close_{false}, want_stop_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool complete_ = false, all_ended_ = false;
  bool started_ = false;  // all have come, so there are peers to say good-bye to
  std::exception_ptr failure_;
  std::vector<int> missing_;
  std::string missing_words_;

  std::mutex closing_;  // one close() at a time
  std::thread thread_;
  std::unique_ptr<Heart> heart_;  // from the start on
};

// In a forked child the thread and the connections belong to the parent and must not be touched.
void TcpTransport::leak() {
  if (thread_.joinable()) thread_.detach();
  static_cast<void>(heart_.release());
  for (auto& connection : connections_) static_cast<void>(connection.release());
  static_cast<void>(connector_.release());
  static_cast<void>(tls_.release());
}

Connection& TcpTransport::to(int peer) const {
  if (peer < 0 || peer >= options_.size || !connections_[static_cast<size_t>(peer)])
    throw InvalidArgument(text("worker ", peer, " is not a peer of ", worker_name(options_.names, options_.rank)));
  return *connections_[static_cast<size_t>(peer)];
}

UniqueFd TcpTransport::listen(Entry& own) const {
  if (options_.peers.empty() || options_.peers.back() < options_.rank) return {};
  UniqueFd socket;
  if (!options_.secret) {
    own.addresses = {"127.0.0.1"};
    socket = store::listen_tcp({"127.0.0.1", 0});
  } else {
    own.addresses = options_.host.empty() ? store::own_addresses() : std::vector{options_.host};
    if (own.addresses.size() > kMaxAddresses) own.addresses.resize(kMaxAddresses);
    try {
      socket = store::listen_tcp({"::", 0});
    } catch (const Unavailable&) {  // a host without IPv6
      socket = store::listen_tcp({"0.0.0.0", 0});
    }
  }
  own.port = store::SocketAddress::of(socket.get()).port();
  return socket;
}

std::vector<Connector::Other> TcpTransport::look_up(const Directory& directory, Deadline deadline) const {
  std::vector<Connector::Other> others;
  const auto key_of = [&](int rank) { return entry_key(options_, rank); };
  const auto take = [&](int rank, const std::string& written) {
    const Entry entry = Entry::parse(written);
    Connector::Other other;
    other.rank = rank;
    other.key = entry.key;
    if (rank < options_.rank) other.addresses = resolve(entry, rank, deadline);
    others.push_back(std::move(other));
  };
  read_entries(directory, options_.peers, options_.names, key_of, take, deadline);
  return others;
}

std::vector<store::SocketAddress> TcpTransport::resolve(const Entry& entry, int rank, Deadline deadline) const {
  std::vector<store::SocketAddress> all;
  std::string reason = "it has no address";
  for (const std::string& host : entry.addresses) {
    const auto found = store::resolve({host, entry.port}, deadline);
    all.insert(all.end(), found.addresses.begin(), found.addresses.end());
    if (!found.reason.empty()) reason = found.reason;
  }
  if (all.empty())
    throw Unavailable(
        text("cannot connect with ", worker_name(options_.names, rank), " at ", join(entry.addresses), ": ", reason),
        "Set the address at which its host can be reached");
  return all;
}

void TcpTransport::meet(const Directory& directory, Deadline deadline) {
  Entry own;
  own.key = make_hello_key();
  UniqueFd listening = listen(own);
  directory.post(entry_key(options_, options_.rank), own.text());
  auto others = look_up(directory, deadline);
  connector_ = std::make_unique<Connector>(
      options_, poller_, tls_.get(), std::move(listening), own.key, std::move(others),
      [this](const Hello& other, std::unique_ptr<SocketStream> stream) { on_met(other, std::move(stream)); });
  thread_ = start_thread("muster-tcp", [this] { run(); });
  wait_for_all(deadline);
}

void TcpTransport::wait_for_all(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const bool in_time = deadline.wait(changed_, lock, [this] { return complete_ || failure_; });
  if (failure_) std::rethrow_exception(failure_);
  if (!in_time)
    throw TimeoutError(text("workers have not connected in time: ", missing_words_), missing_,
                       "Check whether they have failed, and whether a firewall is in between");
  // This does not wait for the start, because a receiver's first call may wait for this function to return.
  heart_ = std::make_unique<Heart>(turns_, tick_every(), kLongestTurn, [this] {
    for (const auto& connection : connections_)
      if (connection) connection->beat(Clock::now());
  });
  started_ = true;
  want_start_ = true;
  poller_.wake();
}

void TcpTransport::on_met(const Hello& other, std::unique_ptr<SocketStream> stream) {
  PeerInfo peer;
  peer.rank = static_cast<int>(other.rank);
  peer.pid = static_cast<int>(other.pid);
  peer.name = text(worker_name(options_.names, peer.rank), " (pid ", peer.pid, ")");
  peer.heartbeat = options_.heartbeat;
  peer.beat = std::min(options_.heartbeat, milliseconds(std::max<uint32_t>(other.heartbeat_ms, 1))) / 4;
  connections_[other.rank] =
      std::make_unique<Connection>(std::move(peer), std::move(stream), options_.limits, poller_, turns_);
}

// Rare enough to cost nothing while idle, often enough that heartbeats are in time.
milliseconds TcpTransport::tick_every() const {
  milliseconds shortest = options_.heartbeat;
  for (const auto& connection : connections_)
    if (connection) shortest = std::min(shortest, connection->beat_every() * 4);
  return std::clamp(shortest / 8, milliseconds(1), kLongestTick);
}

void TcpTransport::dispatch(const epoll_event& event) {
  const uint64_t id = event.data.u64;
  if (id == Poller::kWoken) return;
  if (id < Connector::kIds) return connections_[id]->on_ready(event.events, receiver_);
  if (connector_) connector_->on_ready(id);
}

void TcpTransport::tick(Clock::time_point now, bool all_read) {
  for (const auto& connection : connections_)
    if (connection) connection->tick(now, all_read, receiver_);
  if (connector_) connector_->tick(now);
}

// Does what other threads have asked for, and reports progress to them.
void TcpTransport::carry_out_requests() {
  if (connector_ && want_start_) {
    connector_.reset();
    for (const auto& connection : connections_)
      if (connection) connection->start(receiver_);
  } else if (connector_) {
    const std::lock_guard lock(mutex_);
    complete_ = connector_->is_complete();
    failure_ = connector_->failure();
    missing_ = connector_->missing();
    missing_words_ = connector_->describe_missing();
    if (complete_) connector_->finish();  // other threads use the connections from now on: none may be replaced
    if (complete_ || failure_) changed_.notify_all();
  }
  if (!want_close_) return;
  bool ended = true;
  for (const auto& connection : connections_) {
    if (!connection) continue;
    connection->say_goodbye();
    ended = ended && connection->has_ended();
  }
  if (!ended) return;
  const std::lock_guard lock(mutex_);
  all_ended_ = true;
  changed_.notify_all();
}

void TcpTransport::run() {
  auto next_tick = Clock::now();
  if (connector_) connector_->begin();
  while (!want_stop_) {
    try {
      const auto before = Clock::now();
      const bool is_due = before >= next_tick;
      const auto left = std::chrono::ceil<milliseconds>(next_tick - before);
      std::span<const epoll_event> events;
      {
        const Turns::Rest rest(turns_);
        events = poller_.wait(is_due ? milliseconds(0) : left);
      }
      for (const epoll_event& event : events) dispatch(event);
      carry_out_requests();
      // Silence is measured up to `before`, and the sockets were looked at after that time. So if this process itself
      // was stopped or had no core, what came meanwhile has been read by now; but not all of it if there were as many
      // events as one look can return.
      if (is_due) {
        tick(before, events.size() < Poller::kMostEvents);
        carry_out_requests();
        next_tick = before + (connector_ ? kConnectTick : tick_every());
      }
    } catch (const std::exception& error) {
      MUSTER_LOG(kError) << "transport: " << error.what();
    }
  }
  connector_.reset();
  for (const auto& connection : connections_)
    if (connection) connection->close("this worker has closed its connections");
}

void TcpTransport::close(Deadline flush) {
  if (!is_mine()) return;
  const bool from_receiver = std::this_thread::get_id() == thread_.get_id();
  if (from_receiver) {  // the thread cannot wait for itself: it says the good-byes, and the destructor does the rest
    for (const auto& connection : connections_)
      if (connection) connection->stop_sending();
    want_close_ = true;
    return poller_.wake();
  }
  const std::lock_guard one(closing_);
  if (!thread_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    if (started_) {
      for (const auto& connection : connections_)
        if (connection) connection->stop_sending();
      want_close_ = true;
      poller_.wake();
      flush.wait(changed_, lock, [this] { return all_ended_; });
    }
  }
  want_stop_ = true;
  poller_.wake();
  thread_.join();
  heart_.reset();
}

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options, const Directory& directory, Receiver& receiver,
                                              Deadline deadline) {
  auto transport = std::make_unique<TcpTransport>(options, receiver);
  transport->meet(directory, deadline);
  return transport;
}

}  // namespace muster::transport
