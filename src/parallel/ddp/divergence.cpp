#include "parallel/ddp/divergence.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "base/hash.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::ddp {
namespace {

constexpr uint64_t kUnknown = 0;

uint64_t hash_of(const at::Tensor& tensor, uint64_t seed) {
  if (tensor.layout() == at::kSparse) return hash_of(tensor._values(), hash_of(tensor._indices(), seed));
  // Memory without gaps has the same order on all ranks, because strides are the same.
  const at::Tensor plain =
      (tensor.is_non_overlapping_and_dense() ? tensor.detach() : tensor.detach().contiguous()).cpu();
  const uint64_t hash = hash_of_bytes(plain.const_data_ptr(), plain.nbytes(), seed);
  return hash == kUnknown ? 1 : hash;
}

// The ranks that differ from most others; with as many on both sides, those that differ from the first.
std::vector<size_t> odd_ones(const std::vector<uint64_t>& of_ranks) {
  std::map<uint64_t, size_t> count;
  for (const uint64_t hash : of_ranks) ++count[hash];
  const auto known = std::find_if(of_ranks.begin(), of_ranks.end(), [](uint64_t hash) { return hash != kUnknown; });
  if (known == of_ranks.end()) return {};
  uint64_t usual = *known;
  for (const auto& [hash, times] : count)
    if (hash != kUnknown && times > count[usual]) usual = hash;
  std::vector<size_t> odd;
  for (size_t r = 0; r < of_ranks.size(); ++r)
    if (of_ranks[r] != kUnknown && of_ranks[r] != usual) odd.push_back(r);
  return odd;
}

}  // namespace

void DivergenceWatch::after_backward(bool is_complete) {
  if (++calls_ % every_ != 0) return;
  const at::NoGradGuard no_grad;
  const auto n = static_cast<int64_t>(parameters_.size());
  const at::Tensor mine = at::empty({2 * n}, at::kLong), all = at::empty({group_.size(), 2 * n}, at::kLong);
  int64_t* const hashes = mine.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    const at::Tensor& tensor = parameters_[static_cast<size_t>(i)].tensor;
    const at::Tensor& grad = tensor.grad();
    hashes[i] = static_cast<int64_t>(hash_of(tensor, 0));
    hashes[n + i] = static_cast<int64_t>(!is_complete ? kUnknown : grad.defined() ? hash_of(grad, 0) : 1);
  }
  all_gather_into_tensor(all, mine, {.group = group_});
  const int64_t* const theirs = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < 2 * n; ++i) {
    std::vector<uint64_t> of_ranks;
    for (int64_t r = 0; r < group_.size(); ++r) of_ranks.push_back(static_cast<uint64_t>(theirs[r * 2 * n + i]));
    const std::vector<size_t> odd = odd_ones(of_ranks);
    if (odd.empty()) continue;
    const std::string& name = parameters_[static_cast<size_t>(i % n)].name;
    throw Mismatch(text("ranks have diverged: ", i < n ? "parameter " : "the gradient of parameter ", name, " of rank",
                        odd.size() > 1 ? "s " : " ", join(odd),
                        " differs from that of the others after backward() number ", calls_),
                   "Look for what this rank does differently: a step that others do not take, random numbers, another "
                   "initial value, memory that fails");
  }
}

}  // namespace muster::ddp
