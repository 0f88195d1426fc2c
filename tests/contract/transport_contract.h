// The contract of every transport (transport/transport.h). To test a transport, write a TransportKind and
//
//   INSTANTIATE_TEST_SUITE_P(Name, TransportContract, testing::Values(TransportKind{…}), transport_kind_name);
//
// Ranks are threads of the test. Each transport that its owner has to drive gets a thread that drives it.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/store/store.h"
#include "support/patience.h"
#include "support/sanitized.h"
#include "transport/directory.h"
#include "transport/transport.h"

namespace muster::test {

struct TransportKind {
  // Makes transports that are connected with each other: transport i is rank i's, with receivers[i].
  using Make = std::function<std::vector<std::unique_ptr<transport::Transport>>(
      const std::vector<transport::Receiver*>& receivers, const transport::Limits& limits)>;
  std::string name;
  Make make;
  bool is_driven = false;  // by poll() and sleep()
  bool to_itself = false;  // a worker may send to itself
  // Why this machine does not have the transport; empty if it has it.
  std::function<std::string()> unavailable_reason = [] { return std::string(); };
};

inline void PrintTo(const TransportKind& kind, std::ostream* out) { *out << kind.name; }
inline std::string transport_kind_name(const testing::TestParamInfo<TransportKind>& info) { return info.param.name; }

inline Deadline in_time() { return patience(); }

inline transport::Directory directory_of(const std::shared_ptr<Store>& store) {
  return {[store](const std::string& key, const std::string& value) { store->set(key, value); },
          [store](const std::string& key, Deadline deadline) { return store->get(key, deadline); }};
}

// A receiver that keeps what arrives, or passes it to `on`.
class Recorder final : public transport::Receiver {
 public:
  struct Got {
    int peer = 0;
    std::string body;
    std::vector<transport::Piece> pieces;
  };

  void on_message(int peer, std::string_view body, std::vector<transport::Piece>& pieces) override {
    EXPECT_FALSE(is_lost(peer)) << "a message after on_lost()";
    if (on) return on(peer, body, pieces);
    const std::lock_guard lock(mutex_);
    got_.push_back({peer, std::string(body), std::move(pieces)});
    changed_.notify_all();
  }
  void on_lost(int peer, const std::string& cause) override {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(lost_.emplace(peer, cause).second) << "on_lost() twice";
    changed_.notify_all();
  }

  // Takes the first `count` messages; fewer only after a failure.
  std::vector<Got> take(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(lock, in_time().when(), [&] { return got_.size() >= count; }))
        << got_.size() << " of " << count << " messages came";
    std::vector<Got> taken(std::make_move_iterator(got_.begin()),
                           std::make_move_iterator(got_.begin() + static_cast<long>(std::min(count, got_.size()))));
    got_.erase(got_.begin(), got_.begin() + static_cast<long>(taken.size()));
    return taken;
  }
  size_t num_got() const {
    const std::lock_guard lock(mutex_);
    return got_.size();
  }
  // The reason for which `peer` was lost.
  std::string cause(int peer) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(lock, in_time().when(), [&] { return lost_.count(peer) > 0; })) << "it is not lost";
    return lost_.count(peer) ? lost_[peer] : "";
  }
  bool is_lost(int peer) const {
    const std::lock_guard lock(mutex_);
    return lost_.count(peer) > 0;
  }

  void forget() {
    const std::lock_guard lock(mutex_);
    got_.clear();
    lost_.clear();
  }

  // Set it before the transports are made, or while no message arrives.
  std::function<void(int peer, std::string_view body, std::vector<transport::Piece>& pieces)> on;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Got> got_;
  std::map<int, std::string> lost_;
};

// A gate at which receivers block until it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_until(lock, in_time().when(), [&] { return open_; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

class TransportContract : public testing::TestWithParam<TransportKind> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().unavailable_reason(); !why.empty()) GTEST_SKIP() << why;
  }
  ~TransportContract() override { end_all(); }

  // Makes n ranks that are connected with each other.
  void open(size_t n, const transport::Limits& limits = {});
  transport::Transport& at(size_t rank) { return *transports_[rank]; }
  Recorder& receiver(size_t rank) {
    while (receivers_.size() <= rank) receivers_.push_back(std::make_unique<Recorder>());
    return *receivers_[rank];
  }
  // Destroys a rank's transport.
  void end(size_t rank);
  void end_all() {
    for (size_t rank = 0; rank < transports_.size(); ++rank) end(rank);
  }
  // Call it after end_all(). Forgets all ranks and what they received.
  void forget_all() {
    transports_.clear();
    pumps_.clear();
    receivers_.clear();
  }

 private:
  struct Pump {
    std::atomic<bool> stop{false};
    std::thread thread;
  };
  std::vector<std::unique_ptr<Recorder>> receivers_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::vector<std::unique_ptr<Pump>> pumps_;
};

}  // namespace muster::test
