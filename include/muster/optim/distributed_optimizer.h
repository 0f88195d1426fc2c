// An optimizer of parameters that live on several workers.
//
//   // parameters: RRef<at::Tensor>, of any workers
//   optim::DistributedOptimizer<optim::SGD> sgd({.lr = 0.05}, parameters);
//   for (…) {
//     autograd::Context context;
//     autograd::backward(context, {loss(batch)});
//     sgd.step(context);                            // there are no gradients to set to zero
//   }
//
// The constructor makes one O on each owner, for the parameters that live there; its state of them (momenta) stays on
// the owner. step() calls all owners concurrently, once each; an owner takes the gradients that the context has on that
// worker, and leaves parameters without a gradient as they are. The call carries lr, so a schedule (lr_scheduler.h)
// needs no call of its own, and all owners step with the same rate.
//
// References to parameters: parameter_rrefs(model->parameters()) gives those of this worker; for those of another
// worker, call a function there that returns the same. An optimizer refers to the tensor that it was given: it no
// longer steps a parameter that a module replaces later (set_data is fine).
//
// O: any optimizer of functional_optimizer.h, or your own class that meets optim::Optimizer and whose Options can be
// sent (MSGPACK_DEFINE). Your class needs no registration: the template registers itself in every program that names
// it.
//
// step() changes parameters in place. If the backward() of another context still needs the earlier values, it throws
// libtorch's "modified by an inplace operation", on every worker, as locally; docs/optim.md says what to do.
//
// Errors: RemoteError names the worker whose optimizer threw; PeerLost, TimeoutError, Aborted as call.h. step() calls
// all owners and waits for all answers: when it throws, each owner whose call did not fail has stepped all its
// parameters. If several calls failed, step() throws the error of the first owner by rank. InvalidArgument: no
// parameters, an empty reference, one twice; bad options, before anything is sent.
//
// If an owner is lost, every step() throws, but steps the parameters of the other owners, until drop_lost(). When no
// owner is left, step() throws Aborted.
//
// Thread-safety: all functions, from any thread that may make remote calls. On the owner each optimizer has its own
// mutex: steps of one DistributedOptimizer take turns there. The optimizers of two trainers do not know each other; if
// they share parameters, this is HogWild (functional_optimizer.h).
// Source: torch.distributed.optim.DistributedOptimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/autograd/context.h"
#include "muster/base/error.h"
#include "muster/optim/functional_optimizer.h"
#include "muster/rpc/rref.h"

namespace muster::optim {

// Structs that list their fields, as the Options of functional_optimizer.h do, are sent as these fields.
template <typename T>
concept Fielded = requires {
  std::tuple_size<std::remove_cvref_t<decltype(T::kFields)>>::value;
};

using ParameterRef = rpc::RRef<at::Tensor>;
std::vector<ParameterRef> parameter_rrefs(const std::vector<at::Tensor>& parameters);  // of this worker

namespace detail {

// The parameters of one owner, and their places in the caller's list.
struct Share {
  int owner = 0;
  std::vector<ParameterRef> parameters;
  std::vector<size_t> places;
};
std::vector<Share> shares_of(const std::vector<ParameterRef>& parameters);  // by rank. InvalidArgument

// Runs several functions and keeps the first error, for rethrow() when all have run.
class Failures {
 public:
  template <typename F>
  void attempt(F&& what) {
    try {
      what();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

using State = FunctionalOptimizer::State;
State renamed(const State& state, const std::vector<size_t>& places);                // "0.step" to "<places[0]>.step"
State part_of(const State& state, const std::vector<size_t>& places, size_t count);  // the reverse. InvalidArgument
std::vector<at::Tensor> tensors_of(const std::vector<ParameterRef>& parameters);     // on their owner. InvalidArgument
// The gradients of the current context. With `lent` they are the context's own tensors, which must not be changed.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters, bool lent);

// The part of a DistributedOptimizer that lives on an owner.
template <typename O>
class OwnedOptimizer {
 public:
  OwnedOptimizer(typename O::Options options, std::vector<ParameterRef> parameters)
      : parameters_(tensors_of(parameters)), optimizer_(std::move(options)) {}

  void ready() {}
  void step(double lr) {
    const at::NoGradGuard no_grad;
    const auto gradients = gradients_of(parameters_, std::is_base_of_v<FunctionalOptimizer, O>);
    const std::lock_guard lock(mutex_);
    if (optimizer_.lr() != lr) optimizer_.set_lr(lr);
    optimizer_.step(parameters_, gradients);
  }
  State state() {
    const std::lock_guard lock(mutex_);
    return optimizer_.state(parameters_);
  }
  void load_state(State state) {
    const std::lock_guard lock(mutex_);
    optimizer_.load_state(parameters_, state);
  }

 private:
  const std::vector<at::Tensor> parameters_;
  std::mutex mutex_;
  O optimizer_;
};

}  // namespace detail

template <Optimizer O>
class DistributedOptimizer {
 public:
  using Options = typename O::Options;
  using State = FunctionalOptimizer::State;

  // Returns when all owners have made their optimizers.
  DistributedOptimizer(Options options, std::vector<ParameterRef> parameters)
      : lr_(O(options).lr()), count_(parameters.size()) {
    const at::NoGradGuard no_grad;
    const autograd::Context::Scope in_none(nullptr);  // the optimizers outlive the current context
    Owners all;
    for (detail::Share& share : detail::shares_of(parameters)) {
      auto optimizer = rpc::remote<Owned>(share.owner, options, std::move(share.parameters));
      all.push_back({std::move(optimizer), std::move(share.places)});
    }
    owners_ = std::make_shared<const Owners>(std::move(all));
    on_all(*owners_, [](const Owner& owner) { return owner.optimizer.template async<&Owned::ready>(); });
  }

  // Returns when all owners have stepped with the gradients that they have of this context.
  void step(const autograd::Context& context) {
    const at::NoGradGuard no_grad;
    const autograd::Context::Scope in(context);
    const double lr = this->lr();
    const auto owners = this->owners();
    if (owners->empty()) throw Aborted("all workers that had parameters of this optimizer are lost");
    on_all(*owners, [lr](const Owner& owner) { return owner.optimizer.template async<&Owned::step>(lr); });
  }

  // Drops the owners that are lost (rpc::is_alive): later calls go only to the others. Returns the places of the lost
  // parameters, in order; load_state() ignores their state.
  std::vector<size_t> drop_lost() {
    std::vector<size_t> gone;
    Owners living;
    std::shared_ptr<const Owners> before;  // destroyed after the lock is released
    const std::lock_guard lock(mutex_);
    for (const Owner& owner : *owners_) {
      if (rpc::is_alive(owner.optimizer.owner().id)) {
        living.push_back(owner);
      } else {
        gone.insert(gone.end(), owner.places.begin(), owner.places.end());
      }
    }
    std::sort(gone.begin(), gone.end());
    before = std::exchange(owners_, std::make_shared<const Owners>(std::move(living)));
    return gone;
  }

  double lr() const { return lr_.load(std::memory_order_relaxed); }
  // Sets the rate from the next step() on, on all owners. Errors: InvalidArgument if lr is below 0; that step() throws
  // the errors of O.
  void set_lr(double lr) {
    if (!(lr >= 0)) throw InvalidArgument("lr: expected 0 or more, got " + std::to_string(lr));
    lr_.store(lr, std::memory_order_relaxed);
  }

  // The state of all owners, under the places of the parameters in the constructor's list: "3.exp_avg". O must have
  // state() and load_state() as FunctionalOptimizer has. If load_state() throws, some owners may have the new state.
  State state() const requires requires(O& o) { o.state(at::TensorList()); }
  {
    const at::NoGradGuard no_grad;
    const autograd::Context::Scope in_none(nullptr);
    const auto owners = this->owners();
    State all;
    std::vector<rpc::Future<State>> answers;
    for (const Owner& owner : *owners) answers.push_back(owner.optimizer.template async<&Owned::state>());
    for (size_t i = 0; i < answers.size(); ++i) all.merge(detail::renamed(answers[i].get(), (*owners)[i].places));
    return all;
  }
  void load_state(const State& state) requires requires(O& o) { o.load_state(at::TensorList(), State()); }
  {
    const at::NoGradGuard no_grad;
    const autograd::Context::Scope in_none(nullptr);
    const auto owners = this->owners();
    std::vector<State> all;  // all checked before the first one is sent
    for (const Owner& owner : *owners) all.push_back(detail::part_of(state, owner.places, count_));
    auto next = all.begin();
    on_all(*owners,
           [&](const Owner& owner) { return owner.optimizer.template async<&Owned::load_state>(std::move(*next++)); });
  }

 private:
  using Owned = detail::OwnedOptimizer<O>;
  struct Owner {
    rpc::RRef<Owned> optimizer;
    std::vector<size_t> places;
  };

  using Owners = std::vector<Owner>;

  std::shared_ptr<const Owners> owners() const {
    const std::lock_guard lock(mutex_);
    return owners_;
  }
  template <typename Call>
  static void on_all(const Owners& owners, const Call& call) {
    std::vector<rpc::Future<void>> answers;
    answers.reserve(owners.size());
    detail::Failures failures;
    for (const Owner& owner : owners) failures.attempt([&] { answers.push_back(call(owner)); });
    for (auto& answer : answers) failures.attempt([&] { answer.get(); });
    failures.rethrow();
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const Owners> owners_;  // guarded by mutex_
  std::atomic<double> lr_;
  size_t count_;
};

}  // namespace muster::optim

namespace muster::rpc {
template <optim::Fielded T>
inline constexpr bool is_sendable<T> = true;
}

namespace msgpack {
MSGPACK_API_VERSION_NAMESPACE(MSGPACK_DEFAULT_API_NS) {
  namespace adaptor {

  template <typename T>
  struct pack<T, std::enable_if_t<muster::optim::Fielded<T>>> {
    template <typename Stream>
    packer<Stream>& operator()(packer<Stream>& out, const T& value) const {
      out.pack_array(static_cast<uint32_t>(std::tuple_size_v<std::remove_cvref_t<decltype(T::kFields)>>));
      std::apply([&](auto... field) { (out.pack(value.*field), ...); }, T::kFields);
      return out;
    }
  };
  template <typename T>
  struct convert<T, std::enable_if_t<muster::optim::Fielded<T>>> {
    const msgpack::object& operator()(const msgpack::object& in, T& value) const {
      constexpr size_t kCount = std::tuple_size_v<std::remove_cvref_t<decltype(T::kFields)>>;
      if (in.type != msgpack::type::ARRAY || in.via.array.size != kCount) throw msgpack::type_error();
      const msgpack::object* next = in.via.array.ptr;
      std::apply([&](auto... field) { ((next++)->convert(value.*field), ...); }, T::kFields);
      return in;
    }
  };

  }  // namespace adaptor
}
}  // namespace msgpack
