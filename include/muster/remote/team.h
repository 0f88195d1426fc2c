// The workers of one remote_call whose parts may go to any of them: which part goes where, and again when a worker is
// lost. For calls with any_worker (partitioner.h) or .max_retries (remote_call.h).
//
// A part for any worker goes to the worker with the fewest unanswered parts, if that has fewer than two; else it waits
// until a worker answers. So a slow worker gets fewer parts, and a fast one always has its next part with it.
//
// A part whose worker is lost is called again as a part for any worker. What was computed from its first result is not
// lost: the first result's graph then continues on the other worker (autograd/again.h).
//
// A part is packed when the call is made, but its tensors are sent later, perhaps twice. So it notes what would change
// if they changed, and is not sent if they have.
//
// Thread-safety: all methods of Team; Part::start() is called once.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/autograd/again.h"
#include "muster/remote/partitioner.h"
#include "muster/rpc/call.h"

namespace muster::detail {

class Team {
 public:
  using Start = std::function<void(int worker)>;  // must not throw
  using Workers = std::shared_ptr<const std::vector<int>>;

  // Made in the thread that makes the call: later calls have its grad mode, its autograd context, and so on. `named`:
  // by the call's parts; empty: all.
  static std::shared_ptr<Team> make(std::vector<int> named);
  virtual ~Team() = default;

  // Start `part` now or later, in any thread of the agent: on that worker; on one of these (null: of all); or, again,
  // on a living one of these (null: of those that are named), or of all if none of these lives.
  virtual void give_to(int worker, Start part) = 0;
  virtual void give_to_any(Workers among, Start part) = 0;
  virtual void give_again(Workers among, Start part) = 0;
  virtual void over(int worker) = 0;  // the part's call there is over
  virtual Workers all() const = 0;
  virtual rpc::Waits* waits() const = 0;
};

// The tensors of a part, and what they contained.
class PartTensors {
 public:
  // `keep`: for long. Then the payload gets aliases of its tensors: a tensor that is changed in place later may depend
  // on the part's own result, and would be kept by it for ever.
  PartTensors(rpc::Payload& payload, bool keep);
  void check_unchanged(const rpc::Payload& payload) const;  // InvalidArgument

 private:
  struct Seen {
    int64_t version;
    const void* storage;
    std::vector<int64_t> sizes;
    bool operator==(const Seen&) const = default;
  };
  static std::vector<Seen> seen_in(const rpc::Payload& payload);
  std::vector<Seen> seen_;
};

// The loss of `worker`, if the error is that.
bool is_loss_of(int worker, const std::exception_ptr& error);

template <auto F>
class Part : public std::enable_shared_from_this<Part<F>> {
 public:
  using R = rpc::result_of<F>;

  Part(std::shared_ptr<Team> team, rpc::Payload arguments, std::optional<std::chrono::milliseconds> timeout,
       int retries)
      : team_(std::move(team)),
        arguments_(std::move(arguments)),
        tensors_(arguments_, retries > 0),
        timeout_(timeout),
        kept_(retries > 0),
        retries_(retries) {}

  // Cancelling the future cancels the call. Throws what the call throws, if it is made now.
  rpc::Future<R> start(int worker) {
    return started([&](Team::Start part) { team_->give_to(worker, std::move(part)); });
  }
  rpc::Future<R> start_on_any(Team::Workers among) {
    among_ = among ? among : team_->all();
    return started([&](Team::Start part) { team_->give_to_any(std::move(among), std::move(part)); });
  }

 private:
  using Done = std::shared_ptr<rpc::Promise<R>>;

  template <typename Give>
  rpc::Future<R> started(Give&& give) {
    const auto done = std::make_shared<rpc::Promise<R>>(team_->waits());
    const auto result = done->future();
    give(to_call(done, true));
    result.then([self = this->shared_from_this()](const rpc::Future<R>& result) {
      if (!result.state().error()) return;
      const std::lock_guard lock(self->mutex_);
      if (self->running_.valid()) self->running_.cancel();
    });
    const std::lock_guard lock(mutex_);
    if (refused_) std::rethrow_exception(refused_);
    return result;
  }

  // `first`: the caller gets the result. (Else the graph of the first result takes over that of this one.)
  Team::Start to_call(Done done, bool first) {
    return [self = this->shared_from_this(), done = std::move(done), first](int worker) {
      try {
        if (done->cancelled()) return self->team_->over(worker);
        self->call_on(worker, done, first);
      } catch (...) {
        {
          const std::lock_guard lock(self->mutex_);
          self->refused_ = std::current_exception();
        }
        done->try_set_error(std::current_exception());
        self->team_->over(worker);
      }
    };
  }

  void call_on(int worker, const Done& done, bool first) {
    tensors_.check_unchanged(arguments_);
    const auto call = rpc::detail::call<R>(worker, {.function = &rpc::function_of<F>(), .timeout = timeout_},
                                           kept_ ? rpc::Payload(arguments_) : std::move(arguments_));
    if (const std::lock_guard lock(mutex_); first) running_ = call;
    if (done->cancelled()) call.cancel();
    call.then([self = this->shared_from_this(), worker, done, first](rpc::Future<R> call) {
      self->team_->over(worker);
      try {
        self->ended(worker, std::move(call), done, first);
      } catch (...) {
        done->try_set_error(std::current_exception());
      }
    });
  }

  void ended(int worker, rpc::Future<R> call, const Done& done, bool first) {
    if (const auto& error = call.state().error()) {
      if (!is_loss_of(worker, error) || !take_retry()) {
        done->try_set_error(error);
      } else {
        team_->give_again(among_, to_call(done, first));
      }
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      running_ = {};
    }
    if constexpr (std::is_void_v<R>) {
      done->try_set_value();
    } else {
      R result = std::move(call).get();
      if (first && kept_)
        autograd::call_again_if_lost(tensors_in(result), [self = this->shared_from_this()] { return self->again(); });
      done->try_set_value(std::move(result));
    }
  }

  rpc::Future<std::vector<at::Tensor>> again() {
    if (!take_retry()) return {};
    const auto done = std::make_shared<rpc::Promise<R>>(team_->waits());
    auto tensors = done->future().then([](rpc::Future<R> result) { return tensors_in(std::move(result).get()); });
    team_->waits()->run(
        [self = this->shared_from_this(), done] { self->team_->give_again(self->among_, self->to_call(done, false)); });
    return tensors;
  }

  // Also those in structs that tensor_tree.h does not look into.
  template <typename T>
  static std::vector<at::Tensor> tensors_in(const T& value) {
    return std::move(rpc::pack(value).tensors);
  }

  bool take_retry() {
    const std::lock_guard lock(mutex_);
    return retries_-- > 0;
  }

  const std::shared_ptr<Team> team_;
  rpc::Payload arguments_;
  const PartTensors tensors_;
  const std::optional<std::chrono::milliseconds> timeout_;
  const bool kept_;      // the arguments, for another call
  Team::Workers among_;  // may do the part; null: it is a certain worker's, and then those that the call names may
  std::mutex mutex_;
  int retries_;
  rpc::Future<R> running_;
  std::exception_ptr refused_;
};

}  // namespace muster::detail
