// Black boxes as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.
//
// The Trace Event Format's JSON object: a process for each rank, a thread for each of its groups. A collective is a
// complete event ("X") from where it ran. A message is a pair of async events ("b", "e"), because several may be under
// way at the same time. An operation under way lasts until the boxes were read. Times count from the first operation.
//
// Thread-safety: all of it.
#pragma once

#include <string>

#include "launch/black_box/black_box_sources.h"

namespace muster::launch {

std::string trace_json(const JobBoxes& job);

}  // namespace muster::launch
