#include "autograd/sub_graph.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <utility>

#include "autograd/pass.h"
#include "muster/base/error.h"

namespace muster::autograd {

std::vector<Tensor> SubGraph::backward(std::vector<Tensor> gradients, std::vector<uint8_t> wanted, bool accumulate,
                                       bool keep_graph) {
  edge_list results;
  std::vector<PtrTo<ReceiveNode>> slots;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kEnded) throw Aborted("the context of this call has ended");
    TORCH_CHECK(state_ == State::kThere, torch::autograd::ERR_BACKWARD_TWICE);
    if (gradients.size() != results_.size() || wanted.size() != slots_.size())
      throw InvalidArgument("backward: the number of gradients or slots does not fit this call");
    // A used graph is kept here while the caller waits. The caller's node learns from the answer that it is used up,
    // and then releases it.
    results = results_;
    slots = slots_;
    if (!keep_graph) state_ = State::kUsed;
  }
  Pass pass{.leaves = accumulate ? Leaves::kAccumulate : Leaves::kNone,
            .slots = &slots,
            .keep_graph = keep_graph,
            .create_graph = at::GradMode::is_enabled()};
  enter_context_of_call(pass);
  variable_list answers = run(pass, results, gradients, &wanted);
  for (Tensor& one : answers) one = sendable(std::move(one));
  return answers;
}

void SubGraph::end() {
  edge_list results;  // destroyed without the lock
  std::vector<PtrTo<ReceiveNode>> slots;
  const std::lock_guard lock(mutex_);
  results.swap(results_);
  slots.swap(slots_);
  state_ = State::kEnded;
}

}  // namespace muster::autograd
