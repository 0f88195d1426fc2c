// The workers of one remote_call whose parts may go to any of them: which part goes where, and again when a worker is
// lost. For calls with any_worker (partitioner.h) or .max_retries (remote_call.h).
//
// A part for any worker goes to the worker with the fewest unanswered parts, if that has fewer than two; else it waits
// until a worker answers. So a slow worker gets fewer parts, and a fast one always has its next part with it.
//
// A part whose worker is lost is called again as a part for any worker. What was computed from its first result is not
// lost: the first result's graph then continues on the other worker (autograd/again.h).
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

  // Made in the thread that makes the call: later calls have its grad mode, its autograd context, and so on. `workers`:
  // empty: all.
  static std::shared_ptr<Team> make(std::vector<int> workers);
  virtual ~Team() = default;

  virtual void give(std::optional<int> worker, Start part) = 0;  // starts it now or later, in any thread of the agent
  virtual void over(int worker) = 0;                             // the part's call there is over
  virtual rpc::Waits* waits() const = 0;
};

// Numbers that change when a tensor is changed in place.
std::vector<int64_t> versions_of(const std::vector<at::Tensor>& tensors);
// The loss of `worker`, if the error is that.
bool is_loss_of(int worker, const std::exception_ptr& error);
// Why a call cannot be done again whose arguments have changed: the loss with a note, or only the reason.
std::exception_ptr changed_since(const std::exception_ptr& loss);

// Also those in structs that tensor_tree.h does not look into.
template <typename... T>
std::vector<at::Tensor> tensors_in(const T&... values) {
  return std::move(rpc::pack(values...).tensors);
}

template <auto F, typename... A>
class Part : public std::enable_shared_from_this<Part<F, A...>> {
 public:
  using R = rpc::result_of<F>;

  Part(std::shared_ptr<Team> team, std::tuple<A...> arguments, std::optional<std::chrono::milliseconds> timeout,
       int retries)
      : team_(std::move(team)), arguments_(std::move(arguments)), timeout_(timeout), retries_(retries) {
    if (retries_ == 0) return;
    tensors_ = std::apply([](const A&... each) { return tensors_in(each...); }, arguments_);
    versions_ = versions_of(tensors_);
  }

  // `worker`: none: any. Cancelling the future cancels the call.
  rpc::Future<R> start(std::optional<int> worker) {
    const auto done = std::make_shared<rpc::Promise<R>>(team_->waits());
    const auto result = done->future();
    call(worker, done, true);
    result.then([self = this->shared_from_this()](const rpc::Future<R>& result) {
      if (!result.state().error()) return;
      const std::lock_guard lock(self->mutex_);
      if (self->running_.valid()) self->running_.cancel();
    });
    return result;
  }

 private:
  using Done = std::shared_ptr<rpc::Promise<R>>;

  // `first`: the caller gets the result. (Else the graph of the first result takes over that of this one.)
  void call(std::optional<int> worker, Done done, bool first) {
    team_->give(worker, [self = this->shared_from_this(), done = std::move(done), first](int to) {
      try {
        if (done->cancelled()) return self->team_->over(to);
        self->call_on(to, done, first);
      } catch (...) {
        done->try_set_error(std::current_exception());
        self->team_->over(to);
      }
    });
  }

  void call_on(int to, const Done& done, bool first) {
    const auto call = std::apply(
        [&](const A&... each) { return rpc::async<F>(rpc::To(to, {.timeout = timeout_}), A(each)...); }, arguments_);
    if (std::lock_guard lock(mutex_); first) running_ = call;
    if (done->cancelled()) call.cancel();
    call.then([self = this->shared_from_this(), to, done, first](rpc::Future<R> call) {
      self->team_->over(to);
      try {
        if (const auto& error = call.state().error()) {
          self->failed(to, error, done, first);
        } else {
          self->succeeded(std::move(call), done, first);
        }
      } catch (...) {
        done->try_set_error(std::current_exception());
      }
    });
  }

  void failed(int worker, const std::exception_ptr& error, const Done& done, bool first) {
    if (!is_loss_of(worker, error) || !take_retry()) {
      done->try_set_error(error);
    } else if (versions_ != versions_of(tensors_)) {
      done->try_set_error(changed_since(error));
    } else {
      call({}, done, first);
    }
  }

  void succeeded(rpc::Future<R> call, const Done& done, bool first) {
    if constexpr (std::is_void_v<R>) {
      done->try_set_value();
    } else {
      R result = std::move(call).get();
      if (first && !versions_.empty())
        autograd::call_again_if_lost(tensors_in(result), [self = this->shared_from_this()] { return self->again(); });
      done->try_set_value(std::move(result));
    }
  }

  rpc::Future<std::vector<at::Tensor>> again() {
    if (!take_retry()) return {};
    const auto done = std::make_shared<rpc::Promise<R>>(team_->waits());
    auto tensors = done->future().then([](rpc::Future<R> result) { return tensors_in(std::move(result).get()); });
    if (versions_ != versions_of(tensors_)) {
      done->try_set_error(changed_since(nullptr));
    } else {
      team_->waits()->run([self = this->shared_from_this(), done] { self->call({}, done, false); });
    }
    return tensors;
  }

  bool take_retry() {
    const std::lock_guard lock(mutex_);
    return retries_-- > 0;
  }

  const std::shared_ptr<Team> team_;
  std::tuple<A...> arguments_;
  std::vector<at::Tensor> tensors_;  // of the arguments, if there are retries
  std::vector<int64_t> versions_;
  const std::optional<std::chrono::milliseconds> timeout_;
  std::mutex mutex_;
  int retries_;
  rpc::Future<R> running_;
};

}  // namespace muster::detail
