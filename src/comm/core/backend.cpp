// What a backend does that does not say otherwise.
#include "comm/core/backend.h"

#include "base/log.h"
#include "base/text.h"
#include "comm/core/stragglers.h"

namespace muster::comm {

std::string Backend::straggler_report(std::chrono::nanoseconds at_least) const {
  const auto* const known = stragglers();
  return known ? known->report(group_name(), at_least) : std::string();
}

void Backend::warn_of_straggler() const {
  if (getRank() != 0) return;
  const std::string report = straggler_report(std::chrono::seconds(1));
  if (!report.empty()) {
    MUSTER_LOG(kWarning) << report;
  }
}

std::vector<c10::intrusive_ptr<c10d::Work>> Backend::submit_messages(std::vector<Operation> messages) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (Operation& message : messages) works.push_back(submit(std::move(message)));
  return works;
}

Backend::Taken Backend::take_message(const Operation& receive, int) {
  throw InvalidArgument(
      text(to_string(receive.kind), ": backend '", getBackendName(), "' cannot receive from any source"),
      "Name the source, or use backend gloo or mpi");
}

}  // namespace muster::comm
