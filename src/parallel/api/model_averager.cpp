#include "muster/parallel/model_averager.h"

#include <ranges>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/kit/coalesced.h"

namespace muster {

ModelAverager::ModelAverager(ModelAveragerOptions options) : options_(std::move(options)) {
  if (options_.periods.empty()) throw InvalidArgument("ModelAverager has no period", "Give one, as {{16, {}}}");
  for (auto& [period, group] : options_.periods) {
    if (period < 1)
      throw InvalidArgument(text("a period of ModelAverager: expected 1 or more, got ", period), "Use 1 or more");
    group = group.resolved();
    if (!group.is_member())
      throw InvalidArgument(text("this rank is not a member of the group with period ", period, " of ModelAverager"));
  }
}

bool ModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const int64_t step = step_++;
  if (step < options_.warmup_steps) return false;
  for (const auto& [period, group] : options_.periods | std::views::reverse) {
    if (step % period != 0) continue;
    parallel::change_coalesced(
        parameters, [&of = group](const at::Tensor& flat) { all_reduce(flat, {.op = ReduceOp::AVG, .group = of}); });
    return true;
  }
  return false;
}

void ModelAverager::save(torch::serialize::OutputArchive& archive) const { archive.write("step", c10::IValue(step_)); }
void ModelAverager::load(torch::serialize::InputArchive& archive) {
  c10::IValue step;
  archive.read("step", step);
  step_ = step.toInt();
}

}  // namespace muster
