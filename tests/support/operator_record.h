// Which operators compute, and the dtype of what each returns: what Python's TorchDispatchMode sees, in C++.
//
// An operator that libtorch makes of others (linear, to) is not recorded, but those are. What an operator's kernel
// calls inside is not recorded. Views, copies without a conversion, and new empty tensors are left out: they compute
// nothing.
//
// Thread-safety: it records its thread, while it lives.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace muster::test {

class OperatorRecord {
 public:
  struct Operator {
    std::string name;   // "aten::addmm"
    std::string dtype;  // "BFloat16": of the first tensor that it returns
    bool operator==(const Operator&) const = default;
  };

  OperatorRecord() {
    recording() = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&begin, &end).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  OperatorRecord(const OperatorRecord&) = delete;
  OperatorRecord& operator=(const OperatorRecord&) = delete;
  ~OperatorRecord() {
    at::removeCallback(handle_);
    recording() = nullptr;
  }

  const std::vector<Operator>& operators() const { return operators_; }
  size_t count(const std::string& name) const {
    size_t n = 0;
    for (const Operator& one : operators_) n += one.name == name ? 1 : 0;
    return n;
  }

 private:
  struct Depth : at::ObserverContext {
    bool computes = false;
  };

  static OperatorRecord*& recording() {
    thread_local OperatorRecord* record = nullptr;
    return record;
  }

  // Whether libtorch makes it of others here: because it is defined so, or because autocast converts its arguments.
  static bool is_made_of_others(const c10::OperatorHandle& op) {
    if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return true;
    return at::autocast::is_autocast_enabled(at::kCPU) && op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU) &&
           !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
  }

  static bool makes_numbers(const c10::FunctionSchema& schema) {
    static const std::vector<std::string> kNone = {"aten::clone",      "aten::copy_",         "aten::empty",
                                                   "aten::empty_like", "aten::empty_strided", "aten::_unsafe_view"};
    for (const std::string& name : kNone)
      if (schema.name() == name) return false;
    const auto& returns = schema.returns();
    return !returns.empty() && (schema.is_mutable() || !returns[0].alias_info());
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto depth = std::make_unique<Depth>();
    OperatorRecord* const record = recording();
    const auto name = function.operator_name();
    if (!record || !name) return depth;
    const auto op = c10::Dispatcher::singleton().findOp(*name);
    depth->computes = op && !is_made_of_others(*op);
    if (depth->computes) ++record->inside_;
    return depth;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    OperatorRecord* const record = recording();
    if (!record || !static_cast<Depth*>(context)->computes) return;
    if (--record->inside_ > 0) return;
    const auto op = c10::Dispatcher::singleton().findOp(*function.operator_name());
    if (!makes_numbers(op->schema())) return;
    for (const c10::IValue& value : function.outputs())
      if (value.isTensor() && value.toTensor().defined()) {
        record->operators_.push_back({op->schema().name(), c10::toString(value.toTensor().scalar_type())});
        return;
      }
  }

  std::vector<Operator> operators_;
  int inside_ = 0;
  at::CallbackHandle handle_;
};

inline void PrintTo(const OperatorRecord::Operator& one, std::ostream* out) { *out << one.name << ' ' << one.dtype; }

}  // namespace muster::test
