// Messages that have come before a receive wanted them, and receives that wait for their messages. A library that does
// no matching itself lacks this half of a Wire.
//
// Thread-safety: all members.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/copy.h"
#include "comm/wire/wire.h"
#include "muster/base/error.h"
#include "muster/comm/group.h"

namespace muster::comm {

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(size_t others) : others_(others) {}

  // Gives a message to the oldest receive that wants it, or keeps it.
  void deliver(int source, WireTag tag, const std::byte* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto it = wanted_.begin(); it != wanted_.end(); ++it)
      if ((*it)->wants(source, tag)) {
        (*it)->take(source, data, bytes);
        wanted_.erase(it);
        came_.notify_all();
        return;
      }
    kept_.push_back({source, tag, {data, data + bytes}});
  }

  // The receive takes the oldest message from `source` (or kAnySource) with this tag.
  std::unique_ptr<Wire::Transfer> receive(int source, WireTag tag, std::byte* data, size_t bytes) {
    auto receive = std::make_unique<Receive>(shared_from_this(), source, tag, data, bytes);
    const std::lock_guard lock(mutex_);
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (receive->wants(it->source, it->tag)) {
        receive->take(it->source, it->data.data(), it->data.size());
        kept_.erase(it);
        return receive;
      }
    wanted_.push_back(receive.get());
    return receive;
  }

  // Like Wire::take(). No receive waits for a message that is kept.
  int take(WireTag tag, std::byte* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (it->tag == tag) {
        const int source = it->source;
        copy_bytes(data, it->data.data(), std::min(bytes, it->data.size()));
        kept_.erase(it);
        return source;
      }
    if (const auto all = closed_.find(kAnySource); all != closed_.end()) throw WireBroken(all->second);
    return kAnySource;
  }
  std::vector<int> gone() {
    const std::lock_guard lock(mutex_);
    std::vector<int> peers;
    for (const auto& [peer, symptom] : closed_)
      if (peer != kAnySource) peers.push_back(peer);
    return peers;
  }

  // Nothing more comes from `source`, or from any rank (kAnySource). Receives from it that find no message that came
  // before get WireBroken with this symptom. A receive from any source gets it only when nothing more comes from all of
  // the `others`.
  void close(int source, const std::string& symptom) {
    const std::lock_guard lock(mutex_);
    closed_.emplace(source, symptom);
    came_.notify_all();
  }

 private:
  struct Receive final : Wire::Transfer {
    Receive(std::shared_ptr<Mailbox> mailbox, int source, WireTag tag, std::byte* data, size_t bytes)
        : mailbox(std::move(mailbox)), source(source), tag(tag), data(data), bytes(bytes) {}
    ~Receive() override {
      const std::lock_guard lock(mailbox->mutex_);
      mailbox->wanted_.remove(this);
    }
    bool wants(int from, WireTag with) const { return with == tag && (source == from || source == kAnySource); }
    void take(int from, const std::byte* message, size_t size) {
      copy_bytes(data, message, std::min(bytes, size));
      source = from;
      complete = true;
    }
    int wait(Deadline deadline) override {
      std::unique_lock lock(mailbox->mutex_);
      if (!deadline.wait(mailbox->came_, lock, [&] { return complete || mailbox->symptom(source); }))
        throw TimeoutError("");
      if (!complete) throw WireBroken(*mailbox->symptom(source));
      return source;
    }
    const std::shared_ptr<Mailbox> mailbox;
    int source;
    const WireTag tag;
    std::byte* const data;
    const size_t bytes;
    bool complete = false;
  };
  struct Message {
    int source;
    WireTag tag;
    std::vector<std::byte> data;
  };

  const std::string* symptom(int source) const {
    auto found = closed_.find(kAnySource);
    if (found == closed_.end())
      found = source == kAnySource && closed_.size() >= others_ && others_ > 0 ? closed_.begin() : closed_.find(source);
    return found == closed_.end() ? nullptr : &found->second;
  }

  const size_t others_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::list<Receive*> wanted_;
  std::list<Message> kept_;
  std::map<int, std::string> closed_;
};

}  // namespace muster::comm
