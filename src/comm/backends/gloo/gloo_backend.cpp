#include "comm/backends/gloo/gloo_backend.h"

#ifdef MUSTER_HAS_GLOO

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/env.h"
#include "base/signals_blocked.h"
#include "base/text.h"
#include "base/thread.h"
#include "comm/wire/mailbox.h"
#include "comm/wire/wire_backend.h"
#include "muster/store/c10d_store.h"
#include "store/address/host_address.h"

namespace muster::comm::gloo_backend {
namespace {

using std::chrono::milliseconds;
using Gloo = c10d::ProcessGroupGloo;

// The group of connections, and the transfers that wait for them. Gloo has no call that closes connections. They end
// with their last owner, and every transfer is an owner, so close() drops the group and aborts the transfers. When a
// connection ends, Gloo tells most of its transfers, but forgets one that is half written or half read, which would
// wait until its deadline. So end_with() aborts those of that peer.
struct Connections {
  std::mutex mutex;
  c10::intrusive_ptr<Gloo> gloo;       // null when closed
  std::map<c10d::Work*, int> waiting;  // and the peer
  std::set<int> ended;                 // peers

  void close() {
    c10::intrusive_ptr<Gloo> gone;  // destroyed without the lock
    const std::lock_guard lock(mutex);
    gone = std::move(gloo);
    for (const auto& [work, peer] : waiting) work->abort();
  }
  void end_with(int gone) {
    const std::lock_guard lock(mutex);
    ended.insert(gone);
    for (const auto& [work, peer] : waiting)
      if (peer == gone) work->abort();
  }
  bool has_ended_with(int peer) {
    const std::lock_guard lock(mutex);
    return gloo && ended.contains(peer);
  }
};

// When Gloo writes to a connection that the peer has closed, it gets SIGPIPE, which by default ends the process without
// a message. (Python ignores it.) So SIGPIPE is blocked while Gloo runs on the caller's thread, and in the threads that
// Gloo starts meanwhile.
using NoBrokenPipe = WriteSignalsBlocked;

// A short message, as Gloo sends it.
struct Frame {
  WireTag tag;
  uint16_t bytes = 0;
  std::byte data[kShortMessage] = {};
};

class GlooTransfer final : public Wire::Transfer {
 public:
  // Called with the lock of `connections` held.
  GlooTransfer(std::shared_ptr<Connections> connections, c10::intrusive_ptr<c10d::Work> work, int peer,
               std::unique_ptr<Frame> frame)
      : frame_(std::move(frame)), connections_(std::move(connections)), work_(std::move(work)), peer_(peer) {
    connections_->waiting.emplace(work_.get(), peer);
  }
  ~GlooTransfer() override {
    const std::lock_guard lock(connections_->mutex);
    connections_->waiting.erase(work_.get());
  }

  // If this wait times out, Gloo breaks all connections of the group.
  int wait(Deadline deadline) override {
    // A year, because Gloo takes "no timeout" for the group's timeout.
    const milliseconds left = deadline.is_never()
                                  ? milliseconds(std::chrono::hours(24 * 365))
                                  : milliseconds(std::max(1, deadline.poll_ms(milliseconds(1'000'000'000))));
    bool completed = false;
    try {
      completed = work_->wait(left);
      if (!completed && connections_->has_ended_with(peer_)) completed = had_completed();
    } catch (const std::exception& error) {
      if (deadline.passed()) throw TimeoutError("");
      throw WireBroken(error.what());
    }
    if (!completed) throw WireBroken("the group is closed");
    return peer_;
  }

 private:
  // A transfer that had completed before it was aborted says so when it is asked again.
  bool had_completed() {
    try {
      return work_->wait(milliseconds(1));
    } catch (const std::exception&) {
      throw WireBroken("the connection has ended");
    }
  }

  const std::unique_ptr<Frame> frame_;  // the memory that is sent, if it is not the caller's
  const std::shared_ptr<Connections> connections_;
  const c10::intrusive_ptr<c10d::Work> work_;
  const int peer_;
};

// Notes the keys that Gloo sets.
class NotingStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    note(key);
    PrefixStore::set(key, value);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override {
    for (const auto& key : keys) note(key);
    PrefixStore::multiSet(keys, values);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    note(key);
    PrefixStore::append(key, value);
  }
  int64_t add(const std::string& key, int64_t value) override {
    note(key);
    return PrefixStore::add(key, value);
  }
  std::vector<std::string> keys() const {
    const std::lock_guard lock(mutex_);
    return {keys_.begin(), keys_.end()};
  }

 private:
  void note(const std::string& key) {
    const std::lock_guard lock(mutex_);
    keys_.insert(prefix_ + "/" + key);
  }
  mutable std::mutex mutex_;
  std::set<std::string> keys_;
};

// A receive of Gloo's cannot be asked whether it is complete, and its timeout breaks connections. So one thread per
// peer receives the short messages and puts them into a mailbox, where the rest of the wire waits for them. It also
// notices when the connection ends.
class GlooWire final : public Wire {
 public:
  GlooWire(c10::intrusive_ptr<Gloo> gloo, c10::intrusive_ptr<NotingStore> store, std::vector<std::string> connected,
           int rank, int size)
      : rank_(rank),
        store_(std::move(store)),
        connected_(std::move(connected)),
        mailbox_(std::make_shared<Mailbox>(static_cast<size_t>(size - 1))) {
    connections_->gloo = std::move(gloo);
    try {
      for (int peer = 0; peer < size; ++peer)
        if (peer != rank)
          threads_.push_back(start_thread("muster-mail", [this, peer] { receive_short_messages(peer); }));
    } catch (...) {
      end();
      throw;
    }
  }
  ~GlooWire() override { end(); }

  std::unique_ptr<Transfer> send(int peer, WireTag tag, const std::byte* data, size_t bytes) override {
    if (peer == rank_) {
      mailbox_->deliver(rank_, tag, data, bytes);
      return std::make_unique<Delivered>(rank_);
    }
    if (is_short(tag)) {
      auto frame = std::make_unique<Frame>();
      frame->tag = tag;
      frame->bytes = static_cast<uint16_t>(bytes);
      std::memcpy(frame->data, data, bytes);
      std::byte* const bytes_of_frame = reinterpret_cast<std::byte*>(frame.get());
      return post(peer, bytes_of_frame, sizeof(Frame), std::move(frame),
                  [&](Gloo& gloo, auto& tensors) { return gloo.send(tensors, peer, kShort); });
    }
    return post(peer, const_cast<std::byte*>(data), bytes, nullptr,
                [&](Gloo& gloo, auto& tensors) { return gloo.send(tensors, peer, number(tag)); });
  }
  std::unique_ptr<Transfer> receive(int peer, WireTag tag, std::byte* data, size_t bytes) override {
    if (is_short(tag) || peer == rank_) return mailbox_->receive(peer, tag, data, bytes);
    return post(peer, data, bytes, nullptr,
                [&](Gloo& gloo, auto& tensors) { return gloo.recv(tensors, peer, number(tag)); });
  }
  void on_gone(std::function<void(int)> fn) override {
    const std::lock_guard lock(gone_mutex_);
    on_gone_ = std::move(fn);
    for (const int peer : gone_) tell_gone(peer);
  }
  int take(WireTag tag, std::byte* data, size_t bytes) override { return mailbox_->take(tag, data, bytes); }
  std::vector<int> gone() override { return mailbox_->gone(); }
  Keys keys() const override { return {.own = store_->keys(), .of_all = connected_}; }
  void close() override {
    {
      const std::lock_guard lock(gone_mutex_);
      on_gone_ = {};
    }
    connections_->close();
    mailbox_->close(kAnySource, "the group is closed");
  }

 private:
  void end() {
    close();
    for (auto& thread : threads_) thread.join();
  }

  struct Delivered final : Transfer {
    explicit Delivered(int rank) : rank(rank) {}
    int wait(Deadline) override { return rank; }
    const int rank;
  };

  static constexpr int kShort = std::numeric_limits<int>::max();  // the tag of all short messages
  static bool is_short(WireTag tag) { return tag.kind == WireKind::kMessage || tag.kind == WireKind::kReady; }
  static int number(WireTag tag) { return static_cast<int>(static_cast<uint32_t>(tag.kind) * kWireTags + tag.value); }

  template <typename Call>
  std::unique_ptr<GlooTransfer> post(int peer, std::byte* data, size_t bytes, std::unique_ptr<Frame> frame, Call call) {
    const at::NoGradGuard no_grad;
    const NoBrokenPipe no_broken_pipe;
    std::vector<at::Tensor> tensors = {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
    const std::lock_guard lock(connections_->mutex);
    if (!connections_->gloo) throw WireBroken("the group is closed");
    if (connections_->ended.contains(peer)) throw WireBroken("the connection has ended");
    try {
      return std::make_unique<GlooTransfer>(connections_, call(*connections_->gloo, tensors), peer, std::move(frame));
    } catch (const std::exception& error) {
      throw WireBroken(error.what());
    }
  }

  // With the mutex held: close() returns when nothing is being told any more.
  void tell_gone(int peer) {
    if (on_gone_) on_gone_(peer);
  }

  void receive_short_messages(int peer) {
    try {
      for (;;) {
        Frame frame;
        post(peer, reinterpret_cast<std::byte*>(&frame), sizeof frame, nullptr, [&](Gloo& gloo, auto& tensors) {
          return gloo.recv(tensors, peer, kShort);
        })->wait(Deadline::never());
        mailbox_->deliver(peer, frame.tag, frame.data, std::min<size_t>(frame.bytes, sizeof frame.data));
      }
    } catch (const std::exception& error) {
      mailbox_->close(peer, error.what());
    }
    {
      const std::lock_guard lock(gone_mutex_);
      gone_.push_back(peer);
      tell_gone(peer);
    }
    connections_->end_with(peer);  // last: a transfer that ends now finds the peer in gone_
  }

  const int rank_;
  const c10::intrusive_ptr<NotingStore> store_;
  const std::vector<std::string> connected_;  // keys that all ranks have waited for
  const std::shared_ptr<Connections> connections_ = std::make_shared<Connections>();
  const std::shared_ptr<Mailbox> mailbox_;
  std::mutex gone_mutex_;
  std::vector<int> gone_;
  std::function<void(int)> on_gone_;
  std::vector<std::thread> threads_;
};

std::shared_ptr<::gloo::transport::Device> device_for(const BackendContext& context) {
  if (const auto interface = env_string("GLOO_SOCKET_IFNAME")) return Gloo::createDeviceForInterface(*interface);
  // If MUSTER_HOST is set, the hosts are containers or tests on one machine, and a loopback address may connect them.
  const bool may_be_far = !on_one_host(context.group.members) && !env_string("MUSTER_HOST");
  std::vector<std::string> towards;
  if (const auto master = env_string("MASTER_ADDR")) towards.push_back(store::address_towards(*master));
  if (const auto address = env_string("MUSTER_STORE")) towards.push_back(store::address_towards_store(*address));
  return Gloo::createDeviceForHostname(store::address_for_peers(towards, store::own_addresses(), may_be_far));
}

}  // namespace

c10::intrusive_ptr<Backend> create(const BackendContext& context) {
  const auto options = Gloo::Options::create(context.group.timeout);
  options->threads = 1;  // these threads are for Gloo's collectives, which are not used
  const NoBrokenPipe no_broken_pipe;
  try {
    options->devices = {device_for(context)};
    const auto store =
        c10::make_intrusive<NotingStore>(context.group.store_prefix + "/gloo", to_c10d(context.group.store));
    store->setTimeout(context.group.timeout);
    auto gloo = c10::make_intrusive<Gloo>(store, context.group.rank, context.group.size, options);
    // Wait until all ranks are connected. Otherwise one could leave while another still connects, and that would look
    // like a broken connection.
    std::vector<std::string> connected;
    for (int r = 0; r < context.group.size; ++r)
      connected.push_back(text(context.group.store_prefix, "/gloo connected/", r));
    context.group.store->set(connected[static_cast<size_t>(context.group.rank)], "1");
    context.group.store->wait(connected, Deadline::after(context.group.timeout));
    return c10::make_intrusive<WireBackend>(
        context, "gloo",
        std::make_unique<GlooWire>(std::move(gloo), store, connected, context.group.rank, context.group.size));
  } catch (const c10::Error& error) {
    throw Unavailable(
        text("Gloo could not connect the ranks of group '", context.group.name, "': ", error.what_without_backtrace()),
        "Look at the other ranks, or name the interface in GLOO_SOCKET_IFNAME");
  } catch (const ::gloo::Exception& error) {
    throw Unavailable(text("Gloo could not connect the ranks of group '", context.group.name, "': ", error.what()),
                      "Look at the other ranks, or name the interface in GLOO_SOCKET_IFNAME");
  }
}

std::string unavailable_reason() { return {}; }

}  // namespace muster::comm::gloo_backend

#else

namespace muster::comm::gloo_backend {

c10::intrusive_ptr<Backend> create(const BackendContext&) { throw Unavailable(unavailable_reason()); }
std::string unavailable_reason() {
  return "Muster was built without Gloo's headers: apt-get install libgloo-dev, and build again";
}

}  // namespace muster::comm::gloo_backend

#endif
