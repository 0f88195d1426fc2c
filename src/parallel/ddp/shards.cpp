#include "parallel/ddp/shards.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/base/random.h"
#include "muster/comm/collectives.h"
#include "parallel/batch_norm/batch_part.h"
#include "parallel/batch_norm/whole_batch_norm.h"
#include "parallel/ddp/replica.h"
#include "parallel/ddp/shard_states.h"
#include "parallel/ddp/shard_turns.h"
#include "parallel/kit/coalesced.h"
#include "parallel/kit/random_numbers.h"

namespace muster::ddp {
namespace {

// Libtorch's number of threads, which is as before when the guard has ended.
class WithThreads {
 public:
  explicit WithThreads(int threads) : threads_(threads), before_(at::get_num_threads()) {
    if (threads_ != before_) at::set_num_threads(threads_);
  }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;
  ~WithThreads() {
    if (threads_ != before_) at::set_num_threads(before_);
  }

 private:
  const int threads_, before_;
};

// In a module without synchronized batch norms.
class NoOtherParts final : public parallel::BatchPart {
 public:
  int64_t number_of(const at::Tensor& /*tensor*/) const override { return -1; }
  at::Tensor gather(const at::Tensor& /*mine*/, int64_t /*norm*/, const Group& /*group*/) override { refuse_norm(); }
};

// Undefined for parameters that the value does not depend on, or that have been frozen.
TreeSum::Leaf gradients_of(const at::Tensor& value, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : parameters)
    if (parameter.requires_grad()) trained.push_back(parameter);
  const auto found = trained.empty() ? std::vector<at::Tensor>()
                                     : torch::autograd::grad({value}, trained, {}, {}, false, /*allow_unused=*/true);
  TreeSum::Leaf all;
  size_t next = 0;
  for (const at::Tensor& parameter : parameters)
    all.push_back(parameter.requires_grad() ? found[next++] : at::Tensor());
  return all;
}

}  // namespace

at::Tensor Replica::Impl::with_copies(const std::function<at::Tensor()>& fn) const {
  std::optional<parallel::ForwardWithCopies> guard;
  if (copies) guard.emplace(copies->phase());
  return fn();
}

Shards::Shards(int count, const Group& group) : count_(count), group_(group.resolved()) {
  if (count < 1 || (count & (count - 1)) != 0)
    throw InvalidArgument(text("DdpOptions::reproducible.shards: expected a power of two, got ", count),
                          "Use a power of two");
  const int n = group_.size();
  if (count % n != 0)
    throw InvalidArgument(text(n, " ranks cannot share ", count, " shards equally"),
                          "Start a power of two of ranks, not more than there are shards");
  for (int bit = 1; bit < n; bit *= 2) pairs_.push_back(group_.split(group_.rank() & ~bit, 0, {.parents_ranks = true}));
}

std::vector<int> Shards::mine() const {
  const int each = count_ / group_.size();
  std::vector<int> list;
  for (int i = 0; i < each; ++i) list.push_back(group_.rank() * each + i);
  return list;
}

void Shards::add_other_ranks(const at::Tensor& sum) const {
  for (const Group& pair : pairs_) all_reduce(sum, {.group = pair});
}

void TreeSum::add(Leaf leaf) {
  const at::NoGradGuard no_grad;
  size_t leaves = 1;
  while (!unfinished_.empty() && unfinished_.back().first == leaves) {
    Leaf& left = unfinished_.back().second;
    for (size_t i = 0; i < leaf.size(); ++i) {
      at::Tensor &a = left[i], &b = leaf[i];
      if (!a.defined() && !b.defined()) continue;
      b = at::add(a.defined() ? a : at::zeros_like(b), b.defined() ? b : at::zeros_like(a));
      a = at::Tensor();
    }
    unfinished_.pop_back();
    leaves *= 2;
  }
  unfinished_.emplace_back(leaves, std::move(leaf));
}

TreeSum::Leaf TreeSum::total() && { return std::move(unfinished_.front().second); }

std::vector<int> Replica::shards() const { return impl_->shards ? impl_->shards->mine() : std::vector<int>(); }

at::Tensor Replica::backward_by_shards(uint64_t step, const std::function<at::Tensor(int shard)>& loss) {
  Impl& s = *impl_;
  if (!s.shards)
    throw InvalidArgument("backward_by_shards() is called, but DdpOptions::reproducible has no shards",
                          "Set DdpOptions::reproducible.shards");
  if (s.meetings)
    throw InvalidArgument("backward_by_shards() is called within join()", "Give each shard as many batches");
  s.gradients->end_failed_backward();
  s.check_parameters();
  const WithThreads with_threads(s.options.reproducible.threads);
  const parallel::RandomNumbersGuard random_numbers(parallel::RandomState::of_cpu());
  const BuffersBefore buffers_before(s.buffers);
  const auto is_averaged = [](const parallel::NamedTensor& buffer) {
    return buffer.tensor.is_floating_point() || buffer.tensor.is_complex();
  };
  if (s.copies) s.copies->make();
  const std::vector<int> mine = s.shards->mine();
  std::vector<float> shares(s.trainable.size());  // of the shards that use each parameter
  const auto compute = [&](int shard) {
    buffers_before.restore();
    parallel::set_cpu_seed(mixed_seed({s.options.reproducible.seed, step, static_cast<uint64_t>(shard)}));
    const at::Tensor value = s.with_copies([&] { return loss(shard); });
    if (!value.defined() || value.numel() != 1 || !value.requires_grad())
      throw InvalidArgument("the function of backward_by_shards() returned something that is not a loss",
                            "Return a tensor with one element that depends on the parameters");
    TreeSum::Leaf leaf = gradients_of(value, s.trainable);
    for (size_t i = 0; i < leaf.size(); ++i)
      shares[i] += leaf[i].defined() ? 1.0F / static_cast<float>(mine.size()) : 0;
    buffers_before.require_same_memory();
    for (const auto& buffer : s.buffers)
      if (is_averaged(buffer)) leaf.push_back(buffer.tensor);
    leaf.push_back(value.detach().reshape({}));
    // Before sums, which might be infinite; exact, because the number of shards is a power of two.
    for (at::Tensor& tensor : leaf)
      if (tensor.defined()) tensor = at::mul(tensor.detach(), 1.0 / s.shards->count());
    return leaf;
  };
  constexpr const char* kFailed = "could not run the function of backward_by_shards()";
  TreeSum sum;
  try {
    if (parallel::has_synchronized_norm(*s.module)) {
      std::vector<TreeSum::Leaf> leaves(mine.size());
      ShardStates states(s.buffers, buffers_before, s.copies ? s.copies->phase() : nullptr, mine.size());
      const auto in_thread = [&](size_t i) {
        const WithThreads of_operators(s.options.reproducible.threads);
        leaves[i] = compute(mine[i]);
      };
      compute_in_turns(mine.size(), s.group,
                       {.compute = in_thread,
                        .begin_turn = [&](size_t i) { states.begin_turn(i); },
                        .end_turn = [&](size_t i) { states.end_turn(i); },
                        .tensors = s.everything},
                       kFailed);
      for (TreeSum::Leaf& leaf : leaves) sum.add(std::move(leaf));
    } else {
      std::exception_ptr failure;
      const parallel::BatchPart::Scope is_only_part(std::make_shared<NoOtherParts>());
      try {
        for (const int shard : mine) sum.add(compute(shard));
      } catch (...) {
        failure = std::current_exception();
      }
      parallel::throw_if_any_failed(failure, s.group, kFailed);
    }
  } catch (...) {
    buffers_before.restore();
    throw;
  }

  const at::NoGradGuard no_grad;
  TreeSum::Leaf total = std::move(sum).total();
  const auto rest = total.begin() + static_cast<std::ptrdiff_t>(s.trainable.size());
  const std::vector<at::Tensor> averages(rest, total.end());
  total.erase(rest, total.end());
  const auto average = [&](const at::Tensor& part) { s.shards->add_other_ranks(part); };
  parallel::change_coalesced(averages, average);
  size_t next = 0;
  std::vector<parallel::NamedTensor> others;
  for (const auto& buffer : s.buffers) {
    if (is_averaged(buffer))
      buffer.tensor.copy_(averages[next++]);
    else
      others.push_back(buffer);
  }
  parallel::broadcast_together(others, s.group, s.group.size() - 1);  // as after the last shard
  s.gradients->add_gradients(total, std::move(shares), average);
  return averages.back();
}

}  // namespace muster::ddp
