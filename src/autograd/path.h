// The place of a call among all calls of a context: the rank that began, the number of the call there, the number of
// the call that its handler made, and so on. It is the same in every run of a program in which each rank makes its
// calls in a fixed order. So sums in the order of paths have the same bits, in whatever order the parts arrive.
#pragma once

#include <cstdint>
#include <vector>

namespace muster::autograd {

using Path = std::vector<uint32_t>;  // compared lexicographically

}  // namespace muster::autograd
