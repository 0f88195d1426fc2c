// The table of backends: the one place that knows them all.
//
// A backend is a folder under backends/ with a create function and a row in the table. The factory, the contract tests
// and the benchmarks use the table. Three questions are answered in three places: whether a backend is compiled in (by
// the table), whether it works here (by its `unavailable_reason()`), and whether it reaches these peers (by its create
// function).
//
// Thread-safety: all functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/core/backend.h"
#include "comm/core/backend_context.h"

namespace muster::comm {

// Which faults of a FaultPlan a backend injects.
enum class Injects : uint8_t {
  kNothing,
  kAtStartAndEnd,  // of an operation; but not kCorrupt
  kAllButCorrupt,
  kEverything,
};

struct BackendEntry {
  std::string_view name;
  c10::intrusive_ptr<Backend> (*create)(const BackendContext&);
  std::string (*unavailable_reason)();  // empty: works here; else what is missing and how to get it
  bool maps_heaps = false;              // takes HostContext::heaps
  bool needs_peers = true;      // false: a rank works alone, whatever the size of its world, and data does not move
  bool needs_launcher = false;  // works only in processes that its own launcher started (mpirun)
  Injects injects = Injects::kNothing;
};

// All backends that are compiled in.
const std::vector<BackendEntry>& backends();

// Finds a backend by name. "auto" is shm if all members are on one host, else hierarchical; "hierarchical:mpi" also
// names the backend between hosts. InvalidArgument for an unknown name; the error lists the known ones.
const BackendEntry& find_backend(const std::string& name, bool one_host);
// Finds a backend like find_backend() and creates it. Unavailable if it does not work here.
c10::intrusive_ptr<Backend> create_backend(const std::string& name, BackendContext context);

}  // namespace muster::comm
