// The place of a call among all calls of a context: the rank that began, the number of the call there, the number of
// the call that its handler made, and so on. It is the same in every run of a program in which each rank makes its
// calls in a fixed order. So sums in the order of paths have the same bits, in whatever order the parts arrive.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace muster::autograd {

using Path = std::vector<uint32_t>;  // compared lexicographically

// The parts of a leaf's gradient: by the path of the call that brought it, and the leaf's number in that call's graph.
using Place = std::pair<Path, size_t>;
using Parts = std::map<Place, at::Tensor>;

// `before`, if it is defined, plus all parts (at least one), in their order: a tensor that nobody else has.
at::Tensor sum_of(const Parts& parts, const at::Tensor& before = {});

}  // namespace muster::autograd
