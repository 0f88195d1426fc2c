#include "comm/backends/registry.h"

#include "base/log.h"
#include "base/text.h"
#include "comm/backends/fake/fake_backend.h"
#include "comm/backends/gloo/gloo_backend.h"
#include "comm/backends/hierarchical/hierarchical_backend.h"
#include "comm/backends/mpi/mpi_backend.h"
#include "comm/backends/nccl/nccl_backend.h"
#include "comm/backends/shm/shm_backend.h"
#include "muster/base/error.h"

namespace muster::comm {

const std::vector<BackendEntry>& backends() {
  static const std::vector<BackendEntry> table = {
      {.name = "shm",
       .create = &shm_backend::create,
       .unavailable_reason = &shm_backend::unavailable_reason,
       .maps_heaps = true,
       .injects = Injects::kEverything},
      {.name = "hierarchical",
       .create = &hierarchical_backend::create,
       .unavailable_reason = &hierarchical_backend::unavailable_reason,
       .maps_heaps = true,
       .injects = Injects::kAllButCorrupt},
      {.name = "gloo",
       .create = &gloo_backend::create,
       .unavailable_reason = &gloo_backend::unavailable_reason,
       .injects = Injects::kAllButCorrupt},
      {.name = "mpi",
       .create = &mpi_backend::create,
       .unavailable_reason = &mpi_backend::unavailable_reason,
       .needs_launcher = true,
       .injects = Injects::kAllButCorrupt},
      {.name = "nccl",
       .create = &nccl_backend::create,
       .unavailable_reason = &nccl_backend::unavailable_reason,
       .maps_heaps = true},  // for CPU tensors
      {.name = "fake",
       .create = &fake_backend::create,
       .unavailable_reason = &fake_backend::unavailable_reason,
       .needs_peers = false,
       .injects = Injects::kAtStartAndEnd},
  };
  return table;
}

namespace {

std::string base_name(const std::string& name, bool one_host) {
  if (name == "auto") return one_host ? "shm" : "hierarchical";
  return name.substr(0, name.find(':'));
}

bool can_inject(Injects injects, const Fault& fault) {
  const bool within = fault.phase == FaultPhase::kPosted || fault.phase == FaultPhase::kMiddle;
  switch (injects) {
    case Injects::kNothing:
      return false;
    case Injects::kAtStartAndEnd:
      return fault.action != FaultAction::kCorrupt && !within;
    case Injects::kAllButCorrupt:
      return fault.action != FaultAction::kCorrupt;
    case Injects::kEverything:
      break;
  }
  return true;
}

// If a fault were silently left out, a user's test would pass without testing anything.
void check_faults(const BackendEntry& entry, const BackendContext& context) {
  static constexpr std::string_view kActions[] = {"kill", "stop", "delay", "corrupt"};
  static constexpr std::string_view kPhases[] = {"start", "posted", "middle", "end"};
  for (const Fault& fault : context.options.faults.faults()) {
    if (fault.group != context.group.name) continue;
    if (fault.rank < 0 || fault.rank >= context.group.size) {
      // Not an error: a job may go on with fewer ranks.
      if (context.group.rank == 0) {
        MUSTER_LOG(kWarning) << "the FaultPlan's fault of rank " << fault.rank << " in group '" << fault.group
                             << "' does nothing, because the group has " << context.group.size << " ranks";
      }
      continue;
    }
    if (can_inject(entry.injects, fault)) continue;
    throw Unavailable(
        text("backend '", entry.name, "' cannot inject the fault '", kActions[static_cast<size_t>(fault.action)],
             "' in phase '", kPhases[static_cast<size_t>(fault.phase)], "' in group '", context.group.name, "'"),
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
  const BackendEntry& entry = find_backend(name, on_one_host(context.group.members));
  if (const std::string reason = entry.unavailable_reason(); !reason.empty())
    throw Unavailable(text("backend '", entry.name, "' does not work here: ", reason));
  check_faults(entry, context);
  if (const auto colon = name.find(':'); colon != std::string::npos) context.options.inner = name.substr(colon + 1);
  return entry.create(context);
}

}  // namespace muster::comm
