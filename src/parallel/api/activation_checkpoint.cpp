#include "muster/parallel/activation_checkpoint.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/tape/first_call.h"
#include "parallel/tape/kept_results.h"
#include "parallel/tape/saved_tensors.h"

namespace muster::parallel {
namespace {

namespace engine = torch::autograd;

// Thrown in a second call when all is there. Not an exception that others would catch.
struct Enough {};

struct Form {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool operator==(const Form&) const = default;
};
Form form_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.is_nested() ? std::vector<int64_t>{} : tensor.sizes().vec()};
}

InvalidArgument different(const std::string& how) {
  return InvalidArgument(text("the function of activation_checkpoint() is called again in backward(), and ", how),
                         "It must compute the same both times");
}

// A tensor that the second call has saved, as it was then.
struct Found {
  at::Tensor tensor;
  uint32_t version = 0;
};

// The second call: takes what its operators save.
class SecondCall final : public Keeper {
 public:
  SecondCall(const std::vector<Form>& forms, bool early_stop) : forms_(forms), early_stop_(early_stop) {}

  // The tensor is kept too, for gradients that the function computes itself.
  std::unique_ptr<engine::SavedVariableHooks> hooks() override {
    return std::make_unique<Shown>([this](const at::Tensor& tensor) { add(tensor); });
  }
  // `exactly`: the second call has come to the end of what the first has done.
  std::vector<Found> take(bool exactly) {
    if (saved_ < forms_.size() || (exactly && saved_ > forms_.size()))
      throw different(text("keeps ", saved_, " tensors, and kept ", forms_.size(), " the first time"));
    return std::move(found_);
  }

 private:
  void add(const at::Tensor& tensor) {
    if (saved_ < forms_.size()) {
      if (const Form& wanted = forms_[saved_], form = form_of(tensor); form != wanted)
        throw different(text("keeps a tensor ", c10::toString(form.dtype), " [", join(form.sizes), "] where it kept ",
                             c10::toString(wanted.dtype), " [", join(wanted.sizes), "] the first time"));
      found_.push_back({tensor, tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version())});
    }
    ++saved_;
    // Not out of an engine that the function itself runs.
    if (early_stop_ && saved_ >= forms_.size() && engine::get_current_graph_task_id() == task_) throw Enough();
  }

  const std::vector<Form>& forms_;
  const bool early_stop_;
  const int task_ = engine::get_current_graph_task_id();
  std::vector<Found> found_;
  size_t saved_ = 0;
};

// The call of a function: numbers the tensors that its operators save, and finds them again.
class Call final : public Recomputation, public Keeper {
 public:
  // The arguments are saved as an operator would save them: for an outer call, so that it may leave them out.
  Call(const ActivationCheckpointOptions& options, const std::vector<at::Tensor>& arguments, Again again)
      : options_(options), again_(std::move(again)), first_(options.preserve_rng_state, arguments) {
    for (const at::Tensor& tensor : arguments) arguments_.emplace_back(tensor, /*is_output=*/false);
  }

  // The function has returned, for the first time.
  void end() {
    has_ended_ = true;
    try {
      first_.end();
    } catch (...) {
      arguments_.clear();  // an argument that was changed refers to what refers to this call
      throw;
    }
  }

  std::unique_ptr<engine::SavedVariableHooks> hooks() override;
  std::shared_ptr<void> first_call(Keeper* outer);  // to be destroyed when the function has returned

  // Numbers a tensor of the first call.
  size_t leave_out(const at::Tensor& tensor) {
    forms_.push_back(form_of(tensor));
    return forms_.size() - 1;
  }

  // Each tensor is given once; another backward() computes all again.
  at::Tensor find(size_t number) {
    const std::lock_guard lock(mutex_);
    if (number >= found_.size() || !found_[number].tensor.defined()) recompute();
    const Found found = std::exchange(found_[number], Found());
    if (!found.tensor.is_inference() && version_of(found.tensor) != found.version)
      throw InvalidArgument(
          "a tensor that backward() needs was changed in place in the function of activation_checkpoint()",
          "Use an operator that returns a new tensor");
    return found.tensor;
  }

 private:
  void recompute();

  const ActivationCheckpointOptions options_;
  const Again again_;
  FirstCall first_;
  std::vector<engine::SavedVariable> arguments_;
  bool has_ended_ = false;      // the first call; if the function runs backward() itself, the second comes before
  std::vector<Form> forms_;     // of what the first call saved
  KeptResults kept_;            // of the first call
  std::recursive_mutex mutex_;  // the function may run backward() itself
  std::vector<Found> found_;
};

class LeftOut final : public engine::SavedVariableHooks {
 public:
  explicit LeftOut(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  void call_pack_hook(const at::Tensor& tensor) override { number_ = call_->leave_out(tensor); }
  at::Tensor call_unpack_hook() override {
    const std::shared_ptr<Call> call = call_;  // another backward() may release the node meanwhile
    return call->find(number_);
  }

 private:
  const std::shared_ptr<Call> call_;
  size_t number_ = 0;
};

std::unique_ptr<engine::SavedVariableHooks> Call::hooks() {
  return std::make_unique<LeftOut>(std::static_pointer_cast<Call>(shared_from_this()));
}

std::shared_ptr<void> Call::first_call(Keeper* outer) {
  return options_.keep ? std::make_shared<KeptResults::Call>(kept_, options_.keep, outer) : nullptr;
}

void Call::recompute() {
  require_keepers();
  SecondCall second(forms_, options_.early_stop);
  std::vector<at::Tensor> arguments;
  for (const auto& argument : arguments_) arguments.push_back(argument.unpack());
  const FirstCall::Again as_then(first_);
  const Keeping keeping(&second);
  std::optional<KeptResults::Call> with_kept;
  if (options_.keep) with_kept.emplace(kept_);
  bool is_complete = false;
  try {
    again_(arguments);
    is_complete = true;
  } catch (const Enough&) {
  } catch (const std::exception&) {
    throw;
  } catch (...) {  // libtorch's engine cannot carry others
    throw InvalidArgument("the function of activation_checkpoint() threw something that is not a std::exception",
                          "Throw a std::exception");
  }
  if (with_kept && is_complete && !with_kept->has_come_to_all())
    throw different("does not come to all results that were kept the first time");
  found_ = second.take(is_complete && has_ended_);
}

}  // namespace

std::shared_ptr<Recomputation> Recomputation::start(const ActivationCheckpointOptions& options,
                                                    const std::vector<at::Tensor>& tensors, Again again) {
  require_keepers();
  return std::make_shared<Call>(options, tensors, std::move(again));
}

Recomputation::Scope::Scope(Recomputation& of)
    : of_(of),
      keeping_(static_cast<Call&>(of).first_call(current_keeper())),
      before_(exchange_keeper(&static_cast<Call&>(of))) {}
Recomputation::Scope::~Scope() { exchange_keeper(static_cast<Keeper*>(before_)); }
void Recomputation::Scope::end() {
  keeping_.reset();
  exchange_keeper(static_cast<Keeper*>(before_));
  static_cast<Call&>(of_).end();
}

}  // namespace muster::parallel
