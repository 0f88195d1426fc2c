#include "muster/remote/reducer.h"

#include <ATen/ops/mean.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <sstream>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::detail {
namespace {

const char* name_of(Combine how) { return how == Combine::kMean ? "mean_reducer" : "sum_reducer"; }

}  // namespace

void require_results(size_t count) {
  if (count == 0)
    throw InvalidArgument("mean_reducer or sum_reducer got no results: the call had no parts",
                          "A batch without rows has no parts: do not call with one, or give a reducer that accepts it");
}

void results_differ(size_t part, std::string_view what) {
  throw InvalidArgument(
      text("mean_reducer or sum_reducer: in ", what, ", the result of part ", part, " differs from that of part 0"),
      "Give a reducer of your own for results of different shapes");
}

at::Tensor combine_tensors(const std::vector<at::Tensor>& results, Combine how) {
  const at::Tensor& first = results.front();
  for (size_t part = 1; part < results.size(); ++part) {
    const at::Tensor& other = results[part];
    if (other.defined() != first.defined()) results_differ(part, "whether a tensor is defined");
    if (!first.defined()) continue;
    if (other.scalar_type() != first.scalar_type())
      results_differ(part, text("a tensor's dtype (", toString(other.scalar_type()), " instead of ",
                                toString(first.scalar_type()), ')'));
    if (other.sizes() != first.sizes())
      results_differ(part, text("a tensor's sizes (", other.sizes(), " instead of ", first.sizes(), ')'));
  }
  if (!first.defined()) return {};
  const at::Tensor stacked = at::stack(results);
  // A sum of bools counts; every other keeps its dtype.
  if (how == Combine::kSum && first.scalar_type() == at::kBool) return at::sum(stacked, 0);
  if (how == Combine::kSum) return at::sum(stacked, 0, false, first.scalar_type());
  if (!at::isFloatingType(first.scalar_type()) && !at::isComplexType(first.scalar_type()))
    throw InvalidArgument(
        text(name_of(how), ": the results are integers (", toString(first.scalar_type()), "), which have no mean"),
        "Return floating-point numbers, or use sum_reducer");
  return at::mean(stacked, 0);
}

}  // namespace muster::detail
