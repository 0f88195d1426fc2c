#include "parallel/ddp/divergence.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <utility>

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

void DivergenceWatch::after_backward(bool is_complete,
                                     const std::function<std::vector<parallel::NamedTensor>()>& buffers) {
  if (++calls_ % every_ != 0) return;
  const at::NoGradGuard no_grad;
  std::vector<std::string> names;
  std::vector<int64_t> hashes;
  const auto add = [&](std::string name, uint64_t hash) {
    names.push_back(std::move(name));
    hashes.push_back(static_cast<int64_t>(hash));
  };
  for (const auto& [name, tensor] : parameters_) add("parameter " + name, hash_of(tensor, 0));
  for (const auto& [name, tensor] : parameters_)
    add("the gradient of parameter " + name, !is_complete              ? kUnknown
                                             : tensor.grad().defined() ? hash_of(tensor.grad(), 0)
                                                                       : 1);
  for (const auto& [name, tensor] : buffers()) add("buffer " + name, tensor.defined() ? hash_of(tensor, 0) : kUnknown);

  const auto n = static_cast<int64_t>(hashes.size());
  const at::Tensor all = at::empty({group_.size(), n}, at::kLong);
  all_gather_into_tensor(all, at::from_blob(hashes.data(), {n}, at::kLong), {.group = group_});
  const int64_t* const theirs = all.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    std::vector<uint64_t> of_ranks;
    for (int64_t r = 0; r < group_.size(); ++r) of_ranks.push_back(static_cast<uint64_t>(theirs[r * n + i]));
    const std::vector<size_t> odd = odd_ones(of_ranks);
    if (odd.empty()) continue;
    throw Mismatch(text("ranks have diverged: ", names[static_cast<size_t>(i)], " of rank", odd.size() > 1 ? "s " : " ",
                        join(odd), " differs from that of the others after backward() number ", calls_),
                   "Look for what this rank does differently: a step that others do not take, random numbers, another "
                   "initial value, memory that fails");
  }
}

}  // namespace muster::ddp
