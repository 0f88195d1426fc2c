// The table of backends. A new backend needs a folder here and a row below.
#include "base/log.h"
#include "base/text.h"
#include "comm/backend.h"
#include "comm/backends/fake/fake_backend.h"
#include "comm/backends/gloo/gloo_backend.h"
#include "comm/backends/hierarchical/hierarchical_backend.h"
#include "comm/backends/mpi/mpi_backend.h"
#include "comm/backends/nccl/nccl_backend.h"
#include "comm/backends/shm/shm_backend.h"
#include "comm/stragglers.h"
#include "muster/base/error.h"

namespace muster::comm {

const std::vector<BackendEntry>& backends() {
  static const std::vector<BackendEntry> table = {
      {.name = "shm",
       .create = &shm_backend::create,
       .why_not = &shm_backend::why_not,
       .maps_heaps = true,
       .injects = Injects::kEverything},
      {.name = "hierarchical",
       .create = &hierarchical_backend::create,
       .why_not = &hierarchical_backend::why_not,
       .maps_heaps = true,
       .injects = Injects::kAllButCorrupt},
      {.name = "gloo", .create = &gloo_backend::create, .why_not = &gloo_backend::why_not},
      {.name = "mpi", .create = &mpi_backend::create, .why_not = &mpi_backend::why_not, .needs_launcher = true},
      {.name = "nccl", .create = &nccl_backend::create, .why_not = &nccl_backend::why_not},
      {.name = "fake", .create = &fake_backend::create, .why_not = &fake_backend::why_not, .needs_peers = false},
  };
  return table;
}

std::string Backend::straggler_verdict(std::chrono::nanoseconds at_least) const {
  const auto* const known = stragglers();
  return known ? known->verdict(group_name(), at_least) : std::string();
}

void Backend::warn_of_straggler() const {
  if (getRank() != 0) return;
  const std::string verdict = straggler_verdict(std::chrono::seconds(1));
  if (!verdict.empty()) {
    MUSTER_LOG(kWarning) << verdict;
  }
}

Backend::Taken Backend::take_message(const Operation& receive, int) {
  throw InvalidArgument(
      text(to_string(receive.kind), ": backend '", getBackendName(), "' cannot receive from any source"),
      "Name the source, or use backend gloo or mpi");
}

namespace {

std::string base_name(const std::string& name, bool one_host) {
  if (name == "auto") return one_host ? "shm" : "hierarchical";
  return name.substr(0, name.find(':'));
}

// If a fault were silently left out, a user's test would pass without testing anything.
void check_faults(const BackendEntry& entry, const BackendContext& context) {
  for (const Fault& fault : context.faults.faults()) {
    if (fault.group != context.group_name || entry.injects == Injects::kEverything) continue;
    const bool corrupts = fault.action == FaultAction::kCorrupt;
    if (entry.injects == Injects::kAllButCorrupt && !corrupts) continue;
    throw Unavailable(text("backend '", entry.name, "' cannot inject ",
                           entry.injects == Injects::kAllButCorrupt ? "the fault 'corrupt'" : "faults", " in group '",
                           context.group_name, "'"),
                      "Use backend shm, or leave the fault out of the FaultPlan (MUSTER_FAULTS)");
  }
}

}  // namespace

const BackendEntry& find_backend(const std::string& name, bool one_host) {
  const std::string wanted = base_name(name, one_host);
  for (const auto& entry : backends())
    if (entry.name == wanted) return entry;
  std::vector<std::string_view> names;
  for (const auto& entry : backends()) names.push_back(entry.name);
  throw InvalidArgument(text("there is no backend '", name, "'"), text("Use auto or one of: ", join(names)));
}

c10::intrusive_ptr<Backend> create_backend(const std::string& name, BackendContext context) {
  const BackendEntry& entry = find_backend(name, on_one_host(context.members));
  if (const std::string reason = entry.why_not(); !reason.empty())
    throw Unavailable(text("backend '", entry.name, "' does not work here: ", reason));
  check_faults(entry, context);
  if (const auto colon = name.find(':'); colon != std::string::npos) context.inner = name.substr(colon + 1);
  return entry.create(context);
}

}  // namespace muster::comm
