#include "parallel/ddp/logging.h"

#include <array>
#include <chrono>
#include <ostream>
#include <utility>

#include "base/text.h"

namespace muster {
namespace {

using Times = DdpLoggingData::Times;
constexpr std::array<std::pair<const char*, std::chrono::nanoseconds Times::*>, 4> kTimes = {
    {{"forward", &Times::forward},
     {"backward", &Times::backward},
     {"communication", &Times::communication},
     {"exposed", &Times::exposed}}};

}  // namespace

std::ostream& operator<<(std::ostream& stream, const DdpLoggingData& data) {
  stream << "world_size: " << data.world_size << "\nrank: " << data.rank << "\nmodule_name: " << data.module_name
         << "\nparameters: " << data.parameters << "\nparameter_bytes: " << data.parameter_bytes
         << "\nbucket_cap_mb: " << data.bucket_cap_mb << "\nbucket_bytes: " << join(data.bucket_bytes)
         << "\nhas_rebuilt_buckets: " << data.has_rebuilt_buckets << "\nhas_comm_hook: " << data.has_comm_hook
         << "\nsteps: " << data.steps << "\n";
  for (const auto& [which, times] : {std::pair("last.", &data.last), std::pair("average.", &data.average)})
    for (const auto& [name, member] : kTimes)
      stream << which << name << ": " << std::chrono::duration<double, std::milli>(times->*member).count() << " ms\n";
  return stream;
}

namespace ddp {

void StepTimes::end_step(const parallel::BackwardTimes& backward) {
  constexpr Clock::time_point kUnset;
  const auto began = std::exchange(forward_began_, kUnset), ended = std::exchange(forward_ended_, kUnset);
  for (const auto time : {began, ended, backward.first_bucket, backward.all_gradients, backward.averaged})
    if (time == kUnset) return;
  last_ = {.forward = ended - began,
           .backward = backward.averaged - ended,
           .communication = backward.averaged - backward.first_bucket,
           .exposed = backward.averaged - backward.all_gradients};
  for (const auto& [name, member] : kTimes) sum_.*member += last_.*member;
  ++steps_;
}

void StepTimes::write(DdpLoggingData& data) const {
  data.steps = steps_;
  data.last = last_;
  for (const auto& [name, member] : kTimes)
    if (steps_ > 0) data.average.*member = sum_.*member / steps_;
}

}  // namespace ddp
}  // namespace muster
