// A fabric (transport/ucx/fabric.h) within the process: packets arrive in any order, transfers end immediately or
// later, and a test cuts connections when it likes. It tests what the ucx transport does on top of UCX, on machines
// without UCX too, and under the sanitizers, which do not see into UCX.
//
// Thread-safety: a Hub's methods; each fabric as Fabric says.
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/fd.h"
#include "transport/ucx/fabric.h"

namespace muster::test {

class Hub;

class FakeFabric final : public transport::ucx::Fabric {
 public:
  using State = transport::ucx::State;
  using Transfer = transport::ucx::Transfer;
  using Offer = transport::ucx::Offer;

  FakeFabric(Hub& hub, transport::ucx::FabricEvents& events);
  ~FakeFabric() override;

  std::string address() const override { return std::to_string(id_); }
  const char* connect(int peer, const std::string& address) override;
  void disconnect(int peer) override;
  const char* send(int peer, std::span<const std::byte> header, std::span<const std::byte> data, bool offered,
                   Transfer& transfer, State& state) override;
  const char* fetch(Offer* offer, std::span<std::byte> into, Transfer& transfer, State& state) override;
  void refuse(Offer* offer) override;
  const char* flush(Transfer& transfer, State& state) override;
  bool progress() override;
  int event_fd() const override { return bell_.get(); }
  bool arm() override;
  std::string version() const override { return "a fabric of the tests"; }

 private:
  friend class Hub;
  // What is to happen in progress().
  struct Event {
    int from = -1;  // the fabric that sent the packet; -1: no packet
    std::string header, data;
    size_t bytes = 0;
    Offer* offer = nullptr;
    Transfer* done = nullptr;
    const char* error = nullptr;
    int broken = -1;  // a peer
  };

  void post(Event event);
  Event next();

  Hub& hub_;
  transport::ucx::FabricEvents& events_;
  int id_ = 0;
  UniqueFd bell_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::map<int, int> ids_;    // of peers
  std::deque<Event> coming_;  // under the hub's lock, as all that others touch
};

class Hub {
 public:
  explicit Hub(uint32_t seed) : random_(seed) {}

  // Both sides find the way between two fabrics broken.
  void cut(int one, int other) {
    const std::lock_guard lock(mutex_);
    cut_locked(one, other);
    cut_locked(other, one);
  }
  size_t offers() const {
    const std::lock_guard lock(mutex_);
    return offers_.size();
  }
  // Bytes that have been fetched, ever.
  size_t fetched() const {
    const std::lock_guard lock(mutex_);
    return fetched_;
  }

 private:
  friend class FakeFabric;
  struct Offered {
    FakeFabric* sender = nullptr;
    int to = 0;
    const std::byte* data = nullptr;
    size_t bytes = 0;
    transport::ucx::Transfer* transfer = nullptr;
  };

  bool chance(int of) { return random_() % static_cast<unsigned>(of) == 0; }
  // The fabric `at` finds no way to `to`: what it has on offer there is cancelled.
  void cut_locked(int at, int to) {
    FakeFabric* const fabric = fabrics_.contains(at) ? fabrics_[at] : nullptr;
    for (auto& [offer, offered] : offers_)
      if (offered.sender && offered.sender == fabric && offered.to == to) {
        fabric->post({.done = offered.transfer, .error = "cancelled"});
        offered.sender = nullptr;
      }
    if (!fabric) return;
    for (const auto& [peer, id] : fabric->ids_)
      if (id == to) fabric->post({.error = "cut", .broken = peer});
  }

  mutable std::mutex mutex_;
  std::mt19937 random_;
  int next_id_ = 0;
  uint64_t next_offer_ = 1;
  size_t fetched_ = 0;
  std::map<int, FakeFabric*> fabrics_;
  std::map<uint64_t, Offered> offers_;
};

inline FakeFabric::FakeFabric(Hub& hub, transport::ucx::FabricEvents& events) : hub_(hub), events_(events) {
  const std::lock_guard lock(hub_.mutex_);
  id_ = hub_.next_id_++;
  hub_.fabrics_[id_] = this;
}

inline FakeFabric::~FakeFabric() {
  const auto peers = ids_;
  for (const auto& [peer, id] : peers) disconnect(peer);
  const std::lock_guard lock(hub_.mutex_);
  hub_.fabrics_.erase(id_);
}

inline const char* FakeFabric::connect(int peer, const std::string& address) {
  const std::lock_guard lock(hub_.mutex_);
  ids_[peer] = std::stoi(address);
  return hub_.fabrics_.contains(ids_[peer]) ? nullptr : "there is no such fabric";
}

// The peer hears of it, as one does of a connection that is closed, after what is under way.
inline void FakeFabric::disconnect(int peer) {
  std::vector<Event> done;
  {
    const std::lock_guard lock(hub_.mutex_);
    if (!ids_.contains(peer)) return;
    const int id = ids_[peer];
    ids_.erase(peer);
    hub_.cut_locked(id_, id);
    if (hub_.fabrics_.contains(id)) hub_.cut_locked(id, id_);
    for (auto at = coming_.begin(); at != coming_.end();)
      if (at->done && at->error) {
        done.push_back(*at);
        at = coming_.erase(at);
      } else {
        ++at;
      }
  }
  for (const Event& event : done) event.done->on_done(event.error);
}

inline void FakeFabric::post(Event event) {
  coming_.push_back(std::move(event));
  const uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(bell_.get(), &one, sizeof one);
}

inline const char* FakeFabric::send(int peer, std::span<const std::byte> header, std::span<const std::byte> data,
                                    bool offered, Transfer& transfer, State& state) {
  const std::lock_guard lock(hub_.mutex_);
  if (!ids_.contains(peer)) return "not connected";
  const auto there = hub_.fabrics_.find(ids_[peer]);
  if (there == hub_.fabrics_.end()) return "it is gone";
  Event event;
  event.from = id_;
  event.header.assign(reinterpret_cast<const char*>(header.data()), header.size());
  event.bytes = data.size();
  state = State::kUnderWay;
  if (offered) {
    const uint64_t id = hub_.next_offer_++;
    hub_.offers_[id] = {this, ids_[peer], data.data(), data.size(), &transfer};
    event.offer = reinterpret_cast<Offer*>(id);
  } else {
    event.data.assign(reinterpret_cast<const char*>(data.data()), data.size());
    if (hub_.chance(2)) {
      state = State::kDone;
    } else {
      post({.done = &transfer});
    }
  }
  there->second->post(std::move(event));
  return nullptr;
}

inline const char* FakeFabric::fetch(Offer* offer, std::span<std::byte> into, Transfer& transfer, State& state) {
  const std::lock_guard lock(hub_.mutex_);
  const auto found = hub_.offers_.find(reinterpret_cast<uint64_t>(offer));
  if (found == hub_.offers_.end()) std::abort();  // fetched or refused twice
  const auto offered = found->second;
  hub_.offers_.erase(found);
  state = State::kUnderWay;
  if (!offered.sender) {
    if (hub_.chance(2)) return "cancelled";
    post({.done = &transfer, .error = "cancelled"});
    return nullptr;
  }
  if (into.size() != offered.bytes) std::abort();
  std::memcpy(into.data(), offered.data, into.size());
  hub_.fetched_ += into.size();
  offered.sender->post({.done = offered.transfer});
  if (hub_.chance(2)) {
    state = State::kDone;
  } else {
    post({.done = &transfer});
  }
  return nullptr;
}

inline void FakeFabric::refuse(Offer* offer) {
  const std::lock_guard lock(hub_.mutex_);
  const auto found = hub_.offers_.find(reinterpret_cast<uint64_t>(offer));
  if (found == hub_.offers_.end()) std::abort();
  if (found->second.sender) found->second.sender->post({.done = found->second.transfer, .error = "refused"});
  hub_.offers_.erase(found);
}

inline const char* FakeFabric::flush(Transfer& transfer, State& state) {
  const std::lock_guard lock(hub_.mutex_);
  state = hub_.chance(2) ? State::kDone : State::kUnderWay;
  if (state == State::kUnderWay) post({.done = &transfer});
  return nullptr;
}

// One of the first few, by chance; a way is found broken after what came over it.
inline FakeFabric::Event FakeFabric::next() {
  const std::lock_guard lock(hub_.mutex_);
  if (coming_.empty()) return {};
  size_t i = hub_.random_() % std::min<size_t>(coming_.size(), 8);
  if (coming_[i].broken >= 0) i = 0;
  Event event = std::move(coming_[i]);
  coming_.erase(coming_.begin() + static_cast<long>(i));
  return event;
}

inline bool FakeFabric::progress() {
  const Event event = next();
  const auto bytes = [](const std::string& from) { return std::as_bytes(std::span(from)); };
  if (event.offer) {
    events_.on_offer(bytes(event.header), event.bytes, event.offer);
  } else if (event.from >= 0) {
    events_.on_arrival(bytes(event.header), bytes(event.data));
  } else if (event.done) {
    event.done->on_done(event.error);
  } else if (event.broken >= 0) {
    events_.on_broken(event.broken, event.error);
  } else {
    return false;
  }
  return true;
}

inline bool FakeFabric::arm() {
  const std::lock_guard lock(hub_.mutex_);
  if (!coming_.empty()) return false;
  uint64_t count = 0;
  [[maybe_unused]] const auto n = ::read(bell_.get(), &count, sizeof count);
  return true;
}

}  // namespace muster::test
