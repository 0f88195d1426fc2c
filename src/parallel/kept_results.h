// Results of some operators of a function, kept in its first call for its second one, which computes the others again.
//
// While a Call lives, a dispatch key of the thread brings every operator here, below autograd: autograd
// records an operator of the second call as always, and gets the kept result instead of a computed one. Operators are
// known by their number in the call, and compared by their names.
//
// Only operators that have no effect but their results, which are new tensors and not random, are numbered and may be
// kept. What a kernel calls inside does not come here.
//
// libtorch calls the key Fake; no part of libtorch registers anything for it. Only this file uses it.
//
// Thread-safety: a Call is its thread's; two do not use the same results at a time.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/saved_tensors.h"

namespace muster::parallel {

class KeptResults {
 public:
  using Policy = std::function<bool(std::string_view operation)>;

  // While it lives, operators come here.
  class Call {
   public:
    // The first call: keeps what `keep` says, as `keeper` (that of an outer call, or null) lets tensors be kept.
    Call(KeptResults& results, const Policy& keep, Keeper* keeper) : Call(results, &keep, keeper) {}
    // The second call: InvalidArgument in an operator if another one was kept under its number, or if what was kept has
    // been changed in place.
    explicit Call(KeptResults& results) : Call(results, nullptr, nullptr) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call();

   private:
    friend class KeptResults;
    Call(KeptResults& results, const Policy* keep, Keeper* keeper);

    KeptResults& results_;
    const Policy* const keep_;
    Keeper* const keeper_;
    size_t next_ = 0;
    Call* const before_;
    const c10::impl::IncludeDispatchKeyGuard include_;
  };

 private:
  struct Result {
    std::string operation;
    std::vector<torch::autograd::SavedVariable> tensors;
  };
  static void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* stack);
  void keep(size_t number, const std::string& operation, const std::vector<c10::IValue>& stack, size_t results,
            Keeper* keeper);
  bool give(size_t number, const std::string& operation, std::vector<c10::IValue>& stack, size_t arguments) const;

  std::map<size_t, Result> by_number_;
};

}  // namespace muster::parallel
