#include "parallel/ddp/shards.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros_like.h>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::ddp {

Shards::Shards(int count, const Group& group) : count_(count), group_(group.resolved()) {
  if (count < 1 || (count & (count - 1)) != 0)
    throw InvalidArgument(text("DdpOptions::reproducible has ", count, " shards"), "Use a power of two");
  const int n = group_.size();
  if (count % n != 0)
    throw InvalidArgument(text(n, " ranks cannot share ", count, " shards equally"),
                          "Start a power of two of ranks, not more than there are shards");
  for (int bit = 1; bit < n; bit *= 2) pairs_.push_back(group_.split(group_.rank() & ~bit));
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

}  // namespace muster::ddp
