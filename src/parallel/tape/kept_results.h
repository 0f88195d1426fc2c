// Results of some operators of a function, kept in its first call for its second one, which computes the others again.
//
// While a Call lives, a dispatch key of the thread brings every operator here, below autograd: autograd records an
// operator of the second call as always, and gets the kept result instead of a computed one. Operators are known by
// their names and numbers: the third aten::addmm of the first call is that of the second one.
//
// Only operators whose results are new tensors and not random may be kept. What a kernel calls inside does not come
// here. If the function changes one in place, by whatever shares its memory (as a Linear over more than two dimensions
// does), a copy is kept. One that was changed after the first call is computed again.
//
// libtorch calls the key Fake; no part of libtorch registers anything for it. Only this file uses it.
//
// Thread-safety: a Call is its thread's; two do not use the same results at a time.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/auto_reset.h"
#include "parallel/tape/saved_tensors.h"

namespace muster::parallel {

class KeptResults {
 public:
  using Policy = std::function<bool(std::string_view operation)>;

  // While it lives, operators come here.
  class Call {
   public:
    // The first call: keeps what `keep` says, as `keeper` (that of an outer call, or null) lets tensors be kept.
    Call(KeptResults& results, const Policy& keep, Keeper* keeper) : Call(results, &keep, keeper) {}
    explicit Call(KeptResults& results) : Call(results, nullptr, nullptr) {}  // the second call
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call();

    // Of the second call: whether it has come to everything that is kept.
    bool has_come_to_all() const { return found_ == results_.kept_.size(); }

   private:
    friend class KeptResults;
    Call(KeptResults& results, const Policy* keep, Keeper* keeper);

    KeptResults& results_;
    const Policy* const keep_;
    Keeper* const keeper_;
    std::map<std::string, size_t> numbers_;  // of the next operator of each name
    size_t found_ = 0;
    const c10::impl::IncludeDispatchKeyGuard include_;
    const AutoReset<Call*> set_;
  };

  // While it lives, operators are not the function's, and do not count.
  class Pause {
   public:
    Pause();

   private:
    const AutoReset<Call*> set_;
  };

 private:
  struct Version {
    c10::VariableVersion counter;
    uint32_t then = 0;
  };
  struct Result {
    std::vector<torch::autograd::SavedVariable> tensors;
    std::vector<Version> versions;  // of the tensors, and of others with their memory that count by themselves
    bool is_copy = false;           // which the second call may not change either
  };
  struct New {
    Result* result;
    std::vector<at::Tensor> tensors;
  };
  static void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  void keep(std::pair<std::string, size_t> which, const torch::jit::Stack& stack, size_t results, Keeper* keeper);
  void note_aliases(const torch::jit::Stack& stack, size_t results);
  void before_write(const at::Tensor& tensor, Keeper* keeper);
  bool give(const Result& result, torch::jit::Stack& stack, size_t arguments) const;

  std::map<std::pair<std::string, size_t>, Result> kept_;
  std::map<const void*, std::shared_ptr<New>> by_memory_;  // during the first call
};

}  // namespace muster::parallel
