// A rank's side of the messages between it and its launcher while ranks come and go (launch/kit/elastic_words.h). When
// an epoch is over, this aborts the epoch's World.
//
// Thread-safety: a Launcher belongs to the thread of run(); it has its own thread, which listens to the launcher. An
// EpochStore is as thread-safe as every Store.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "launch/kit/elastic_words.h"
#include "muster/base/deadline.h"
#include "muster/comm/world.h"
#include "muster/store/store.h"
#include "store/kit/outage.h"

namespace muster::elastic {

class Launcher {
 public:
  // `store` is the launcher's own. It is null if there is no launcher that sends words: then every rank stays, and no
  // new rank comes.
  Launcher(std::shared_ptr<Store> store, int local_rank);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher();

  // Marks this rank as one that stays, in `epoch`. Returns false if that epoch is over.
  bool enter(int64_t epoch);
  // Marks this rank as one that needs no other rank any more. Returns false if the launcher has called it away, so that
  // other ranks count on it.
  bool finish();
  // Waits for the word about an epoch after `epoch`, and returns it. Waits until the deadline, or, if the launcher has
  // called this rank away by then, as long as the launcher lives. Returns nothing if no word comes or if the job is to
  // stop: then this rank is done, as after finish().
  std::optional<launch::ElasticWord> next(int64_t epoch, Deadline patience);

  // True if a word about a later epoch has come.
  bool is_over(int64_t epoch) const { return latest_epoch_ > epoch; }
  // stops(): true if the job is to stop, so that no later epoch will come. stops_joining(): true if, moreover, this
  // rank is not in a World, so that it must give up joining one.
  bool stops() const { return stops_; }
  bool stops_joining() const { return stops_ && !in_world_; }

  // Aborts `world`, the World of `epoch`, when that epoch is over. Acts until it is destroyed.
  class Guard {
   public:
    Guard(Launcher& launcher, World& world, int64_t epoch);
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard();

   private:
    Launcher& launcher_;
  };

 private:
  void listen();

  const std::shared_ptr<Store> store_;
  const std::string mark_, word_;  // keys

  std::atomic<int64_t> latest_epoch_{-1};
  std::atomic<bool> stops_{false}, in_world_{false};
  std::mutex mutex_;  // guards the members below, except thread_
  std::condition_variable changed_;
  std::optional<launch::ElasticWord> latest_;
  bool gone_ = false;  // the launcher
  bool stop_ = false;
  World* world_ = nullptr;
  int64_t epoch_of_world_ = 0;

  std::thread thread_;
};

// The part of the job's store that belongs to one epoch. get(), wait(), watch() and try_get() throw Aborted when the
// epoch is over, or when the job stops before there is a World: the rank that they wait for may be lost. If the store
// is unreachable but may come back (etcd), a wait goes on until its deadline. set() and try_get(), which may be done
// twice, are tried again for a minute, unless the caller limits its calls by store::CallsBy.
class EpochStore final : public Store, public store::Outage {
 public:
  // The launcher must outlive it.
  EpochStore(std::shared_ptr<Store> job, const Launcher& launcher, int64_t epoch);

  void set(std::string_view key, std::string_view value) override;
  std::optional<std::string> try_get(std::string_view key) override;
  int64_t add(std::string_view key, int64_t delta) override { return part_->add(key, delta); }
  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    return part_->compare_set(key, expected, desired);
  }
  bool erase(std::string_view key) override { return part_->erase(key); }
  int64_t num_keys() override { return part_->num_keys(); }

  bool comes_again() const override { return comes_again_; }
  void set_call_timeout(std::chrono::milliseconds timeout) override { store::set_call_timeout(*part_, timeout); }

  std::string get(std::string_view key, Deadline deadline) override;
  void wait(const std::vector<std::string>& keys, Deadline deadline) override;
  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override;

 private:
  void check() const;
  template <typename Wait>
  auto in_slices(Deadline deadline, Wait wait) -> decltype(wait(deadline));
  template <typename Call>
  auto insist(Call call) -> decltype(call());

  const std::shared_ptr<Store> part_;
  const bool comes_again_;
  const Launcher& launcher_;
  const int64_t epoch_;
};

}  // namespace muster::elastic
