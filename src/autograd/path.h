// Where a call stands among all calls of a context: the rank that began, the number of the call there, the number of
// the call that its handler made, and so on. The same in every run of a program whose ranks make their calls in one
// order each; so sums in the order of paths have the same bits, whenever the parts came.
#pragma once

#include <cstdint>
#include <vector>

namespace muster::autograd {

using Path = std::vector<uint32_t>;  // compared as a dictionary does

}  // namespace muster::autograd
