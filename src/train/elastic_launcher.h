// A rank's side of what it and its launcher say to each other while ranks come and go (launch/elastic_words.h), and
// what that does to the World of an epoch that is over.
//
// Thread-safety: a Launcher, one thread, which is that of run(); it has another one, which listens. An EpochStore, as
// every Store.
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

#include "launch/elastic_words.h"
#include "muster/base/deadline.h"
#include "muster/comm/world.h"
#include "muster/store/store.h"
#include "store/outage.h"

namespace muster::elastic {

class Launcher {
 public:
  // `store`: the launcher's own. Null where there is no launcher that has words: then every rank stays, and none comes.
  Launcher(std::shared_ptr<Store> store, int local_rank);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher();

  // Marks this rank as one that stays, in `epoch`. False where that epoch is over.
  bool enter(int64_t epoch);
  // It needs nobody any more. False where it has been called away, so that others count on it.
  bool finish();
  // The word about an epoch after `epoch`; waits for it as long as the launcher lives where that has called, else until
  // the deadline. Nothing where none comes, or the job is to stop: then this rank is done, as after finish().
  std::optional<launch::ElasticWord> next(int64_t epoch, Deadline patience);

  // Whether a word about a later epoch has come.
  bool is_over(int64_t epoch) const { return latest_epoch_ > epoch; }
  // Whether the job is to stop, so that no epoch comes any more; and whether that ends this rank's way into one.
  bool stops() const { return stops_; }
  bool stops_joining() const { return stops_ && !in_world_; }

  // While it lives, `world`, of `epoch`, is aborted when that is over.
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
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<launch::ElasticWord> latest_;
  bool gone_ = false;  // the launcher
  bool stop_ = false;
  World* world_ = nullptr;
  int64_t epoch_of_world_ = 0;

  std::thread thread_;
};

// The part of the job's store that belongs to one epoch. Waits and looks end, with Aborted, when it is over, or the job
// stops before there is a World: whom they wait for may have been lost meanwhile. Where the store is away and may come
// again (etcd), a wait goes on until its deadline, and what may be done twice for as long as a call takes otherwise,
// unless the caller has said how long it bears that (store::CallsBy).
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
