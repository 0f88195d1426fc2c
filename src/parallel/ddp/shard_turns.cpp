#include "parallel/ddp/shard_turns.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/text.h"
#include "base/thread.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "parallel/batch_norm/batch_part.h"
#include "parallel/kit/group_beside.h"
#include "parallel/modules/same_module.h"

namespace muster::ddp {
namespace {

// Whose turn it is: a shard's, or the calling thread's.
class Baton {
 public:
  static constexpr size_t kCaller = ~size_t{0};

  void pass_to(size_t next) {
    const std::lock_guard lock(mutex_);
    holder_ = next;
    passed_.notify_all();
  }
  void wait_for(size_t me) {
    std::unique_lock lock(mutex_);
    passed_.wait(lock, [&] { return holder_ == me; });
  }
  bool is_with(size_t me) {
    const std::lock_guard lock(mutex_);
    return holder_ == me;
  }

 private:
  std::mutex mutex_;
  std::condition_variable passed_;
  size_t holder_ = kCaller;
};

using Numbers = std::unordered_map<const c10::TensorImpl*, int64_t>;

// What a shard gives for its batch norm, in one number: how much, and for which. 0: nothing, it has ended.
struct Given {
  static constexpr int64_t kMostValues = int64_t{1} << 32;
  int64_t norm, values;  // -1: a batch norm without tensors
  int64_t packed() const { return values == 0 ? 0 : (norm + 1) * kMostValues + values; }
  static Given unpacked(int64_t packed) { return {packed / kMostValues - 1, packed % kMostValues}; }
};

class Shard final : public parallel::BatchPart {
 public:
  // `beside`: the group in which the module's batch norms must be synchronized. `numbers`: of the module's tensors.
  Shard(size_t index, Baton& baton, const Group* beside, const Numbers& numbers)
      : index_(index), baton_(baton), beside_(beside), numbers_(numbers) {}
  ~Shard() override {
    if (thread_.joinable()) thread_.join();
  }

  void start(const std::function<void()>& compute) {
    thread_ = start_thread("muster-shard", [this, compute] {
      baton_.wait_for(index_);
      try {
        if (!is_abandoned) compute();
      } catch (...) {
        failure = std::current_exception();
      }
      given.reset();
      has_ended = true;
      baton_.pass_to(Baton::kCaller);
    });
  }
  bool is_running() const { return thread_.joinable() && !has_ended; }

  // Until the function waits or has ended.
  void take_turn() {
    const WithoutInterpreterLock released;
    baton_.pass_to(index_);
    baton_.wait_for(Baton::kCaller);
  }

  int64_t number_of(const at::Tensor& tensor) const override {
    const auto at = numbers_.find(tensor.unsafeGetTensorImpl());
    return at == numbers_.end() ? -1 : at->second;
  }

  at::Tensor gather(const at::Tensor& mine, int64_t norm, const Group& group) override {
    if (!baton_.is_with(index_))
      throw InvalidArgument(
          "the function of backward_by_shards() differentiates what it has computed for another shard",
          "Return the loss, which backward_by_shards() differentiates");
    if (norm == kOfAnotherModule) refuse_norm();
    if (&group != beside_)
      throw InvalidArgument("the group of a synchronized batch norm is not that of its DistributedDataParallel",
                            "With DdpOptions::reproducible, use one group");
    if (!is_abandoned) {
      given = mine;
      given_for = norm;
      baton_.pass_to(Baton::kCaller);
      baton_.wait_for(index_);
    }
    if (is_abandoned)
      throw Aborted("another shard has failed, while this one waited for it in a synchronized batch norm",
                    "Look at the error of backward_by_shards()");
    return std::exchange(gathered, {});
  }

  // Of whoever has the baton.
  at::Tensor given, gathered;
  int64_t given_for = -1;
  bool has_ended = false, is_abandoned = false;
  std::exception_ptr failure;

 private:
  const size_t index_;
  Baton& baton_;
  const Group* const beside_;
  const Numbers& numbers_;
  std::thread thread_;
};

class Turns {
 public:
  Turns(size_t shards, const Group& group, const ShardWork& work)
      : group_(group), work_(work), beside_(parallel::existing_group_beside(group)) {
    for (size_t i = 0; i < work.tensors.size(); ++i)
      numbers_.emplace(work.tensors[i].tensor.unsafeGetTensorImpl(), static_cast<int64_t>(i));
    for (size_t i = 0; i < shards; ++i) shards_.push_back(std::make_shared<Shard>(i, baton_, beside_.get(), numbers_));
  }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;
  ~Turns() {
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (!shards_[i]->is_running()) continue;
      shards_[i]->is_abandoned = true;
      in_try([&] { work_.begin_turn(i); });
      shards_[i]->take_turn();
      in_try([&] { work_.end_turn(i); });
    }
  }

  void run(const char* what) {
    std::exception_ptr failure = in_try([&] { start(); });
    do {
      if (!failure) failure = in_try([&] { one_round(); });
    } while (exchange(failure, what));
  }

 private:
  static std::exception_ptr in_try(const auto& fn) {
    try {
      fn();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void start() {
    World& world = World::current();
    for (size_t i = 0; i < shards_.size(); ++i)
      shards_[i]->start(
          [this, i, &world, state = at::ThreadLocalState(), caches_casts = at::autocast::is_autocast_cache_enabled()] {
            const World::Scope in_world(world);
            const at::ThreadLocalStateGuard as_caller(state);
            at::autocast::set_autocast_cache_enabled(caches_casts);
            const parallel::BatchPart::Scope is_part(shards_[i]);
            work_.compute(i);
          });
  }

  void one_round() {
    for (size_t i = 0; i < shards_.size(); ++i) {
      work_.begin_turn(i);
      shards_[i]->take_turn();
      const std::exception_ptr at_end = in_try([&] { work_.end_turn(i); });
      for (const auto& failure : {shards_[i]->failure, at_end})
        if (failure) std::rethrow_exception(failure);
    }
  }

  // Returns false if all shards have ended.
  bool exchange(const std::exception_ptr& failure, const char* what) {
    const at::NoGradGuard values_only;
    // Whether a rank has failed, the largest that a shard gives, and minus the least.
    int64_t all[3] = {failure ? 1 : 0, 0, std::numeric_limits<int64_t>::min()};
    for (const auto& shard : shards_) {
      const Given given{.norm = shard->given_for, .values = shard->given.defined() ? shard->given.numel() : 0};
      all[1] = std::max(all[1], given.packed());
      all[2] = std::max(all[2], -given.packed());
    }
    all_reduce(at::from_blob(all, {3}, at::kLong), {.op = ReduceOp::MAX, .group = group_});
    if (all[0] != 0) parallel::throw_if_any_failed(failure, group_, what);
    const Given most = Given::unpacked(all[1]), least = Given::unpacked(-all[2]);
    if (most.packed() != least.packed())
      throw InvalidArgument(
          text("one shard waits ", words_of(most), ", while another ",
               least.values == 0 ? "has computed everything" : "waits " + words_of(least)),
          "Let the function of backward_by_shards() call the same synchronized batch norms for each shard");
    if (most.values == 0) return false;
    std::vector<at::Tensor> mine;
    for (const auto& shard : shards_) mine.push_back(std::exchange(shard->given, {}));
    const at::Tensor stacked = at::stack(mine);
    const at::Tensor values = at::empty({group_.size() * stacked.size(0), most.values}, stacked.options());
    all_gather_into_tensor(values, stacked, {.group = group_});
    for (const auto& shard : shards_) shard->gathered = values;
    return true;
  }

  std::string words_of(const Given& given) const {
    if (given.norm < 0) return text("in a batch norm with ", given.values, " values");
    return text("in the batch norm of ", work_.tensors[static_cast<size_t>(given.norm)].name, " with ", given.values,
                " values");
  }

  const Group& group_;
  const ShardWork& work_;
  const std::shared_ptr<const Group> beside_;
  Numbers numbers_;
  Baton baton_;
  std::vector<std::shared_ptr<Shard>> shards_;
};

}  // namespace

void refuse_norm() {
  throw InvalidArgument("the function of backward_by_shards() calls a synchronized batch norm of another module",
                        "Register that module in the DistributedDataParallel's");
}

void compute_in_turns(size_t shards, const Group& group, const ShardWork& work, const char* what) {
  Turns(shards, group, work).run(what);
}

}  // namespace muster::ddp
