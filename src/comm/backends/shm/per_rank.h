// A pointer for each rank of a group. The common case does not allocate.
//
// Thread-safety: none.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace muster::comm::shm_backend {

template <typename Pointer>
class PerRank {
 public:
  explicit PerRank(size_t ranks) : ranks_(ranks), many_(ranks > few_.size() ? ranks : 0) {}
  std::span<Pointer> span() { return many_.empty() ? std::span(few_).first(ranks_) : std::span(many_); }
  Pointer& operator[](size_t rank) { return span()[rank]; }

 private:
  size_t ranks_;
  std::array<Pointer, 64> few_;
  std::vector<Pointer> many_;
};

}  // namespace muster::comm::shm_backend
