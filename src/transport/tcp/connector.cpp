#include "transport/tcp/connector.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "transport/peers.h"

namespace muster::transport {
namespace {

constexpr std::chrono::seconds kPatience{3};  // for one address, if there are others to try
constexpr std::chrono::milliseconds kBetweenRounds{50};

}  // namespace

Connector::Connector(const TcpOptions& options, Poller& poller, const TlsPair* tls, UniqueFd listening,
                     const HelloKey& own, std::vector<Other> others, OnMet on_met)
    : options_(options),
      poller_(poller),
      tls_(tls),
      listening_(std::move(listening)),
      own_(own),
      on_met_(std::move(on_met)) {
  for (Other& other : others) {
    missing_.insert(other.rank);
    if (other.rank > options.rank) {
      keys_[other.rank] = other.key;
    } else {
      dials_.push_back(std::make_unique<Dial>());
      dials_.back()->other = std::move(other);
    }
  }
}

Connector::~Connector() { finish(); }

void Connector::finish() {
  while (!entrants_.empty()) leave(entrants_.begin()->first);
  if (listening_) poller_.remove(listening_.get());
  listening_.reset();
}

std::string Connector::name_of(int rank) const { return worker_name(options_.names, rank); }

void Connector::begin() {
  if (listening_) {
    poller_.add(listening_.get(), EPOLLIN, kIds);
    listens_ = true;
  }
  for (const auto& dial : dials_) try_next(*dial);
}

Hello Connector::hello_to(int rank) const {
  Hello hello;
  hello.rank = static_cast<uint32_t>(options_.rank);
  hello.to = static_cast<uint32_t>(rank);
  hello.size = static_cast<uint32_t>(options_.size);
  hello.pid = static_cast<uint32_t>(::getpid());
  hello.heartbeat_ms = static_cast<uint32_t>(options_.heartbeat.count());
  return hello;
}

void Connector::try_next(Dial& dial) {
  const auto& where = dial.other.addresses[dial.next];
  UniqueFd socket(::socket(where.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return failed(dial, std::generic_category().message(errno), nullptr);
  store::set_tcp_options(socket.get());
  if (::connect(socket.get(), where.get(), where.size()) != 0 && errno != EINPROGRESS && errno != EINTR)
    return failed(dial, std::generic_category().message(errno), nullptr);
  auto stream = tls_ ? make_tls_stream(std::move(socket), tls_->client, store::TlsContext::Side::kClient)
                     : make_plain_stream(std::move(socket));
  Hello mine = hello_to(dial.other.rank);
  mine.key = dial.other.key;
  Entrant entrant;
  entrant.handshake = std::make_unique<Handshake>(std::move(stream), mine, own_);
  entrant.dial = &dial;
  entrant.host = where.host();
  entrant.limit = dial.other.addresses.size() > 1 ? Clock::now() + kPatience : Clock::time_point::max();
  dial.handshake = enter(std::move(entrant));
}

void Connector::failed(Dial& dial, const std::string& reason, std::exception_ptr refusal) {
  dial.reason = reason;
  dial.handshake = 0;
  if (refusal) dial.refusal = refusal;
  dial.next = (dial.next + 1) % dial.other.addresses.size();
  dial.again = Clock::now();
  if (dial.next != 0) return;
  // A round is over. One of several addresses may belong to another host, which refuses us, so a refusal counts only if
  // the whole round has failed.
  if (dial.refusal && !failure_) failure_ = dial.refusal;
  dial.again += kBetweenRounds;
}

uint64_t Connector::enter(Entrant entrant) {
  const uint64_t id = next_id_++;
  entrant.events = entrant.handshake->events();
  poller_.add(entrant.handshake->fd(), entrant.events, id);
  if (!entrant.dial) ++accepted_;
  entrants_.emplace(id, std::move(entrant));
  return id;
}

void Connector::leave(uint64_t id) {
  const auto found = entrants_.find(id);
  if (found == entrants_.end()) return;
  Entrant entrant = std::move(found->second);
  entrants_.erase(found);
  poller_.remove(entrant.handshake->fd());
  if (entrant.dial) return;
  if (accepted_-- == kMaxHandshakes) listen(true);
}

void Connector::listen(bool on) {
  if (!listening_ || listens_ == on) return;
  listens_ = on;
  poller_.change(listening_.get(), on ? uint32_t{EPOLLIN} : 0, kIds);
}

void Connector::accept_some() {
  while (accepted_ < kMaxHandshakes) {
    UniqueFd socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EAGAIN) return;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Out of descriptors or memory: further connections wait in the backlog until the next tick.
      MUSTER_LOG(kError) << "transport: cannot accept a connection: " << std::generic_category().message(errno);
      return listen(false);
    }
    const auto peer = store::SocketAddress::of_peer(socket.get());
    if (peer.family() == AF_UNSPEC) continue;  // gone already
    store::set_tcp_options(socket.get());
    Entrant entrant;
    auto stream = tls_ ? make_tls_stream(std::move(socket), tls_->server, store::TlsContext::Side::kServer)
                       : make_plain_stream(std::move(socket));
    entrant.handshake =
        std::make_unique<Handshake>(std::move(stream), [this](const Hello& other) { return judge(other); });
    entrant.host = peer.host();
    entrant.limit = Clock::now() + kHandshakeLimit;
    enter(std::move(entrant));
  }
  listen(false);
}

Hello Connector::judge(const Hello& other) const {
  if (!same_key(other.key, own_)) throw Unauthorized("it wants a worker of another job");
  const auto known = keys_.find(static_cast<int>(other.rank));
  Hello answer = hello_to(static_cast<int>(other.rank));
  if (other.version != kProtocolVersion) {
    answer.answer = HelloAnswer::kOtherVersion;
  } else if (other.size != static_cast<uint32_t>(options_.size)) {
    answer.answer = HelloAnswer::kOtherSize;
  } else if (other.to != static_cast<uint32_t>(options_.rank) || known == keys_.end()) {
    answer.answer = HelloAnswer::kNotExpected;
  }
  if (known != keys_.end()) answer.key = known->second;
  return answer;
}

void Connector::refuse(const std::string& host, const std::string& why) {
  if (!is_first_refusal_(host)) return;
  MUSTER_LOG(kWarning) << "transport: " << name_of(options_.rank) << " refused a connection from " << host << " ("
                       << why << "). Further ones from there are refused silently";
}

void Connector::step(uint64_t id) {
  const auto found = entrants_.find(id);
  if (found == entrants_.end()) return;
  Entrant& entrant = found->second;
  Handshake& handshake = *entrant.handshake;
  Dial* const dial = entrant.dial;
  const std::string host = entrant.host;
  std::string reason;
  std::exception_ptr refusal;
  bool done = false;
  try {
    done = handshake.step();
    if (done && dial)
      if (const Hello& other = handshake.other(); other.rank != static_cast<uint32_t>(dial->other.rank) ||
                                                  other.to != static_cast<uint32_t>(options_.rank) ||
                                                  other.size != static_cast<uint32_t>(options_.size))
        throw Mismatch("its answer is that of another worker", "Look what listens at this address");
  } catch (const Unauthorized& error) {
    reason = error.message();
    refusal = std::make_exception_ptr(
        Unauthorized(text(dial ? name_of(dial->other.rank) : host, " at ", host,
                          " and this worker do not belong to the same job: ", reason),
                     "Give all workers of a job the same secret, and check whether that is their address"));
  } catch (const Mismatch& error) {
    reason = error.message();
    refusal = std::make_exception_ptr(Mismatch(
        text(dial ? name_of(dial->other.rank) : host, " at ", host, " refuses this worker: ", reason), error.advice()));
  } catch (const Error& error) {
    reason = error.message();
  }
  if (!reason.empty()) {
    leave(id);
    if (dial) {
      failed(*dial, reason, refusal);
    } else {
      refuse(host, reason);
    }
    return;
  }
  if (!done) {
    if (const uint32_t events = handshake.events(); events != entrant.events)
      poller_.change(handshake.fd(), entrant.events = events, id);
    return;
  }
  poller_.remove(handshake.fd());
  const int rank = dial ? dial->other.rank : static_cast<int>(handshake.other().rank);
  on_met_(handshake.other(), handshake.take_stream());
  if (dial) {
    dial->handshake = id;  // for ever: it is not tried again
  } else if (accepted_-- == kMaxHandshakes) {
    listen(true);
  }
  entrants_.erase(id);
  missing_.erase(rank);
}

void Connector::on_ready(uint64_t id) { id == kIds ? accept_some() : step(id); }

void Connector::tick(Clock::time_point now) {
  std::vector<uint64_t> late;
  for (const auto& [id, entrant] : entrants_)
    if (now >= entrant.limit) late.push_back(id);
  for (const uint64_t id : late) {
    const Entrant& entrant = entrants_.at(id);
    Dial* const dial = entrant.dial;
    const std::string host = entrant.host;
    leave(id);
    if (dial) {
      failed(*dial, "it did not answer", nullptr);
    } else {
      refuse(host, "it took too long to prove who it is");
    }
  }
  for (const auto& dial : dials_)
    if (dial->handshake == 0 && now >= dial->again) {
      if (dial->next == 0) dial->refusal = nullptr;
      try_next(*dial);
    }
  if (accepted_ < kMaxHandshakes) listen(true);
}

std::string Connector::describe_missing() const {
  std::vector<std::string> words;
  for (const int rank : missing_) {
    std::string why;
    for (const auto& dial : dials_)
      if (dial->other.rank == rank && !dial->reason.empty()) why = text(" (", dial->reason, ")");
    words.push_back(name_of(rank) + why);
  }
  return join(words);
}

}  // namespace muster::transport
