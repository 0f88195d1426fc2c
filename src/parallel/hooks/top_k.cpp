#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/parallel/comm_hooks.h"
#include "parallel/hooks/hook_state.h"

namespace muster::comm_hooks {

struct TopK::State {
  TopKOptions options;
  int64_t iter = 0;
  StateTensors errors;  // by parameter: what this rank has not sent yet
};

TopK::TopK(TopKOptions options) : state_(std::make_shared<State>(State{.options = options})) {
  if (!(options.ratio > 0 && options.ratio <= 1))
    throw InvalidArgument(text("TopKOptions::ratio: expected a number above 0 and at most 1, got ", options.ratio),
                          "Use a ratio above 0, and at most 1");
}

HookFuture TopK::operator()(GradBucket& bucket) const {
  State& state = *state_;
  const bool sends_all = state.iter < state.options.start_iter;
  count(state.iter, bucket);
  if (sends_all) return all_reduce(bucket);

  const at::NoGradGuard no_grad;
  const at::Tensor to = bucket.buffer();
  if (to.numel() == 0) return to;
  const at::Tensor all = to.clone();  // and what was not sent before
  bucket.set_buffer(all);
  const std::vector<at::Tensor> gradients = bucket.gradients();
  int64_t elements = 0;
  std::vector<std::pair<std::string, at::Tensor>> before;  // the errors
  for (size_t i = 0; i < gradients.size(); ++i) {
    elements += gradients[i].numel();
    if (!state.options.use_error_feedback) continue;
    at::Tensor& error = state.errors[bucket.places()[i].name];
    if (error.defined()) gradients[i].add_(error.to(gradients[i].device()));  // it may come from a snapshot
    before.emplace_back(bucket.places()[i].name, std::exchange(error, gradients[i]));
  }
  const auto k = std::clamp<int64_t>(std::llround(state.options.ratio * static_cast<double>(elements)), 1, to.numel());
  const at::Tensor largest = std::get<1>(at::topk(all.abs(), k, 0, /*largest=*/true, /*sorted=*/false));
  const at::Tensor indices = bucket.empty(k, at::kLong).copy_(largest);
  const at::Tensor values = bucket.empty(k, all.scalar_type()).copy_(all.index_select(0, largest));
  all.index_fill_(0, largest, 0);

  const int n = bucket.group().size();
  const at::Tensor all_indices = bucket.empty(n * k, at::kLong), all_values = bucket.empty(n * k, all.scalar_type());
  std::vector<Work> works = {all_gather_into_tensor_async(all_indices, indices, {.group = bucket.group()}),
                             all_gather_into_tensor_async(all_values, values, {.group = bucket.group()})};
  return HookFuture(std::move(works), all_values).then([=, kept = state_](const at::Tensor& all_values) {
    const at::NoGradGuard no_grad;
    if (!all_values.isfinite().all().item<bool>())  // a step that a GradScaler will skip: the state stays as it was
      for (const auto& [name, error] : before) {
        if (error.defined())
          kept->errors[name] = error;
        else
          kept->errors.erase(name);
      }
    // Rank by rank: so the order of the sum is the same on all ranks, also on a device whose index_add_() adds what
    // belongs to one element in any order. A sum in 16 bits might overflow where the average does not.
    const bool is_short = c10::elementSize(to.scalar_type()) == 2;
    const at::Tensor sum = is_short ? at::zeros(to.sizes(), to.options().dtype(at::kFloat)) : to.zero_();
    for (int64_t rank = 0; rank < n; ++rank)
      sum.index_add_(0, all_indices.narrow(0, rank * k, k), all_values.narrow(0, rank * k, k).to(sum.scalar_type()));
    sum.div_(n);
    return is_short ? at::Tensor(to).copy_(sum) : sum;
  });
}

int64_t TopK::iter() const { return state_->iter; }

void TopK::save(torch::serialize::OutputArchive& archive) const {
  comm_hooks::save(archive, state_->iter);
  comm_hooks::save(archive, "error", state_->errors);
}
void TopK::load(torch::serialize::InputArchive& archive) {
  state_->iter = load_iter(archive);
  state_->errors = comm_hooks::load(archive, "error");
}

}  // namespace muster::comm_hooks
