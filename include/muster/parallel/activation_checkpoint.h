// Activation checkpointing: memory for time. What the operators of a function keep for backward() is not kept;
// backward() calls the function again when it needs it.
//
//   for (auto& block : blocks) x = muster::activation_checkpoint([&](Tensor y) { return block->forward(y); }, x);
//
// Between forward and backward only the tensors among the arguments are kept, and what the function itself refers to.
// Results and gradients are those of an ordinary call, to the bit, if the function computes the same both times:
//   - It does not depend on what changes in between, and parameters that it uses are not changed in between.
//   - Its random numbers come from libtorch's default generators: the CPU's, and those of the CUDA devices of the
//     tensors among the arguments. Their states are set back for the second call. No other thread draws from them
//     meanwhile: mind ranks that are threads.
//   - It changes no argument in place. What it does besides computing happens twice: remote calls, the running
//     statistics of BatchNorm, a hook that it registers.
//
// Calls may be nested; gradients may have gradients (create_graph); the function may compute gradients itself;
// backward() may run twice (retain_graph), which calls the function once more each time. It goes together with
// DistributedDataParallel, FullyShardedDataParallel, no_sync(), hooks on tensors and autocast, because no backward()
// runs inside of another one. Without GradMode it only calls the function.
//
// The first call puts Muster's engine in the place of libtorch's (docs/decisions/0015), because C++ has no other way.
//
// With `reentrant` it is PyTorch's use_reentrant=True: the function runs without gradients, and backward() calls it
// again and runs another backward() inside. That needs no engine of Muster's, so it is the way in a process with
// Python's engine. It goes together with DistributedDataParallel; and with FullyShardedDataParallel, if no parameter is
// used in several calls. It offers less:
//   - Gradients have no gradients; backward() has no inputs; autograd::grad(), and so backward_by_shards(), does not go
//     through it.
//   - What the function computes with is a leaf, such as a parameter, or a tensor among the arguments, of which at
//     least one requires grad. A tensor that was computed before the call and comes in another way is differentiated
//     twice.
//   - All floating-point results require grad. `early_stop` and `keep` are not used.
//
// Errors: InvalidArgument, from the call if the function has changed an argument in place, and from backward() if the
// second call keeps other tensors than the first, in number, shape or dtype (a reentrant one: returns others, in number
// or shape), or if a tensor that backward() needs was changed in place; of what a reentrant call does not offer.
// Unavailable in a process in which another engine runs, such as Python's, unless it is reentrant. What the function
// throws in its second call comes out of backward(). Thread-safety: any thread, with the exception above. Source:
// torch.utils.checkpoint; Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <memory>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/comm/tensor_tree.h"

namespace muster {

struct ActivationCheckpointOptions {
  bool preserve_rng_state = true;  // of the default generators; false: the function draws no random numbers
  // Ends the second call, by an exception, as soon as all is there that backward() needs: the last operators of the
  // function are not computed again. The function must be safe to leave at any operator, and the last operator that
  // keeps something must not be a torch::autograd::Function that saves its own result, which libtorch would leak.
  bool early_stop = false;
  // Operators whose results are kept instead of being computed again, by name: "aten::addmm". Those that are expensive
  // to compute and whose results are small are worth it, such as matrix products and attention. It is asked in the
  // first call, for each operator that autograd knows as one (a Linear is an aten::addmm, or over more dimensions an
  // aten::mm; attention is an aten::_scaled_dot_product_flash_attention_for_cpu); never for conversions, for those that
  // are random, and those that change or give out an argument. A result that is changed in place afterwards is computed
  // again all the same.
  std::function<bool(std::string_view operation)> keep;
  // Runs backward() inside of backward(). What the function returns must have a tensor (tensor_tree.h).
  bool reentrant = false;
};

namespace parallel {

// One call of a function whose saved tensors are not kept.
class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  // again(tensors) is the second call, with the tensors among the first one's arguments.
  using Again = std::function<void(const std::vector<at::Tensor>& tensors)>;
  static std::shared_ptr<Recomputation> start(const ActivationCheckpointOptions& options,
                                              const std::vector<at::Tensor>& tensors, Again again);
  virtual ~Recomputation() = default;

  // The first call. While it lives, what operators save in this thread is left out.
  class Scope {
   public:
    explicit Scope(Recomputation& of);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();
    void end();  // when the function has returned; throws if it has changed an argument

   private:
    Recomputation& of_;
    std::shared_ptr<void> keeping_;
    void* const before_;
  };
};

template <typename T>
inline constexpr bool kIsTensor = std::is_same_v<std::decay_t<T>, at::Tensor>;

// The same for a call that is reentrant: its results. `function` is what is called both times.
using ReentrantFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& arguments)>;
std::vector<at::Tensor> checkpoint_reentrantly(bool preserve_rng_state, const std::vector<at::Tensor>& arguments,
                                               ReentrantFunction function);
[[noreturn]] void throw_no_tensor();

// Whether a copy of a T refers to memory that may be gone in the second call.
template <typename T>
inline constexpr bool kRefersToOthers = std::is_same_v<T, std::string_view>;
template <typename T>
inline constexpr bool kRefersToOthers<c10::ArrayRef<T>> = true;

// The tensors of `arguments`, in their places.
template <typename... Arguments>
std::vector<at::Tensor> tensors_among(const std::tuple<Arguments...>& arguments) {
  std::vector<at::Tensor> tensors;
  std::apply(
      [&](const auto&... each) {
        const auto add = [&](const auto& argument) {
          if constexpr (kIsTensor<decltype(argument)>) tensors.push_back(argument);
        };
        (add(each), ...);
      },
      arguments);
  return tensors;
}
template <typename... Arguments>
void put_tensors(std::tuple<Arguments...>& arguments, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  std::apply(
      [&](auto&... each) {
        const auto put = [&](auto& argument) {
          if constexpr (kIsTensor<decltype(argument)>)
            argument = next < tensors.size() ? tensors[next++] : at::Tensor();
        };
        (put(each), ...);
      },
      arguments);
}

// Calls function(all…), where the tensors among `all` are `tensors`, and sets the tensors in its result to those that
// backward() comes to.
template <typename Function, typename... Arguments>
auto checkpoint_reentrantly(bool preserve_rng_state, const Function& function, const std::tuple<Arguments...>& all,
                            const std::vector<at::Tensor>& tensors) {
  using Result = std::decay_t<std::invoke_result_t<Function&, Arguments&...>>;
  const auto first = std::make_shared<std::optional<Result>>();
  const auto run = [function, all, first = std::weak_ptr(first)](const std::vector<at::Tensor>& given) {
    auto its_own = function;
    auto with = all;
    put_tensors(with, given);
    Result result = std::apply(its_own, with);
    std::vector<at::Tensor> leaves;
    detail::for_each_tensor(result, [&](const at::Tensor& leaf) { leaves.push_back(leaf); });
    if (const auto to = first.lock()) to->emplace(std::move(result));
    return leaves;
  };
  const auto results = checkpoint_reentrantly(preserve_rng_state, tensors, ReentrantFunction(run));
  Result result = std::move(**first);
  size_t next = 0;
  detail::for_each_tensor(result, [&](at::Tensor& leaf) { leaf = results[next++]; });
  return result;
}

}  // namespace parallel

// Returns function(arguments…). The function and the arguments are copied; tensors among these (not inside of other
// arguments) are kept for backward(), or, in a nested call, by the outer call's rule.
template <typename Function, typename... Arguments>
auto activation_checkpoint(const ActivationCheckpointOptions& options, Function function, Arguments... arguments) {
  static_assert(
      !(parallel::kRefersToOthers<Arguments> || ...),
      "Pass a std::vector or std::string: the second call comes when what this argument refers to may be gone");
  if (!at::GradMode::is_enabled()) return function(arguments...);
  std::tuple<Arguments...> all(arguments...);
  const auto tensors = parallel::tensors_among(all);
  parallel::put_tensors(all, {});
  using Result = std::invoke_result_t<Function&, Arguments&...>;
  if (options.reentrant) {
    if constexpr (detail::HasTensors<std::decay_t<Result>>::value)
      return parallel::checkpoint_reentrantly(options.preserve_rng_state, function, all, tensors);
    else
      parallel::throw_no_tensor();
  }
  const auto call =
      parallel::Recomputation::start(options, tensors, [function, all](const std::vector<at::Tensor>& again) {
        auto its_own = function;
        auto with = all;
        parallel::put_tensors(with, again);
        std::apply(its_own, with);
      });
  parallel::Recomputation::Scope scope(*call);
  if constexpr (std::is_void_v<Result>) {
    function(arguments...);
    scope.end();
  } else {
    auto result = function(arguments...);
    scope.end();
    return result;
  }
}
template <typename Function, typename... Arguments>
requires(!std::is_same_v<std::decay_t<Function>, ActivationCheckpointOptions>) auto activation_checkpoint(
    Function function, Arguments... arguments) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::move(function), std::move(arguments)...);
}

}  // namespace muster
