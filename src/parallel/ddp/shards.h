// Sums over the shards of a global batch whose bits do not depend on the number of ranks.
//
// The sums form a tree over 2^k shards: (0 + 1) + (2 + 3), and so on. Each rank has as many shards, one after another,
// which are a subtree: it adds them up alone, in place of a stack of unfinished sums (`TreeSum`). Then ranks that
// differ in one bit add their sums, bit by bit from the lowest: the rest of the tree. Each such sum has two terms, so
// both ranks get the same bits, whoever adds.
//
// Errors: InvalidArgument if the number of shards is not a power of two, or the number of ranks does not divide it.
// Thread-safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "muster/comm/group.h"

namespace muster::ddp {

class Shards {
 public:
  Shards(int count, const Group& group);  // collective

  int count() const { return count_; }
  std::vector<int> mine() const;
  // From the sum over this rank's shards to that over all, in place. Collective.
  void add_other_ranks(const at::Tensor& sum) const;

 private:
  int count_;
  Group group_;
  std::vector<Group> pairs_;  // by level, the leaves' first
};

// Lists of tensors, added up as the leaves of a tree. An undefined tensor counts as zero.
class TreeSum {
 public:
  using Leaf = std::vector<at::Tensor>;
  void add(Leaf leaf);
  Leaf total() &&;  // of a power of two of leaves

 private:
  std::vector<std::pair<size_t, Leaf>> unfinished_;  // with the number of leaves that each is a sum of
};

}  // namespace muster::ddp
