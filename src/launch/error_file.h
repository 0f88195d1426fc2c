// The outcome of a job that failed, as JSON for machines: `muster run --error-file FILE`.
//
//   {"job", "host", "time" (seconds since 1970), "status", "rank", "pid", "signal", "exception": {"type", "text"},
//    "stack": [...], "last_lines": [...], "last_operations": [...], "cause", "rank_error"}
//
// "rank_error" is what the failing rank itself wrote to the file that TORCHELASTIC_ERROR_FILE names, as programs under
// torchrun do (Python: torch.distributed.elastic.multiprocessing.errors.record); null where it wrote none. These files
// are FILE.rank_N while the job runs. A job that ends well leaves no file.
//
// Thread-safety: all of it.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "muster/launch/launcher.h"

namespace muster::launch {

inline constexpr const char* kRankErrorVariable = "TORCHELASTIC_ERROR_FILE";

std::string rank_error_path(const std::string& error_file, int rank);

// Removes what a job before left there. InvalidArgument where there is no folder for it.
void check_error_file(const std::string& error_file);
void clear_rank_error(const std::string& path);
// Of a job that ended well after all: nothing is left, of the ranks' `paths` neither.
void clear_error_file(const std::string& error_file, const std::set<std::string>& paths);

// The message of the rank's own file: "RuntimeError: the disk is full"; nullopt where there is none, or no such one.
std::optional<std::string> rank_error(const std::string& path);

// Whole or not at all, and the ranks' own files are removed; `own`: that of the rank that failed, which is part of it.
// Unavailable where it cannot be written.
void write_error_file(const std::string& error_file, const Outcome& outcome, const std::string& job,
                      const std::string& own, const std::set<std::string>& paths);

}  // namespace muster::launch
