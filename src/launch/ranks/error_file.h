// The outcome of a job that failed, as JSON for machines: `muster run --error-file FILE`.
//
//   {"job", "host", "time" (seconds since 1970), "status", "rank", "pid", "signal", "exception": {"type", "text"},
//    "stack": [...], "last_lines": [...], "last_operations": [...], "cause", "rank_error"}
//
// "host" is that of the rank that failed; if none did, the launcher's own.
//
// "rank_error" is what the failing rank itself wrote to the file that TORCHELASTIC_ERROR_FILE names, as programs under
// torchrun do (Python: torch.distributed.elastic.multiprocessing.errors.record); null if it wrote none, and in the
// files of other hosts. These files are FILE.rank_N while the job runs. A job that succeeds leaves no file.
//
// Thread-safety: all functions.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "launch/kit/report_file.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

inline constexpr const char* kRankErrorVariable = "TORCHELASTIC_ERROR_FILE";

std::string rank_error_path(const std::string& error_file, int rank);

ReportFile error_report(const std::string& error_file);
ReportFile rank_error_report(const std::string& path);
void clear_rank_error(const std::string& path);
// For a job that succeeded after all: removes the file and the ranks' `paths`.
void clear_error_file(const std::string& error_file, const std::set<std::string>& paths);

// The message of the rank's own file: "RuntimeError: the disk is full"; nullopt if there is no such file, or no such
// message in it.
std::optional<std::string> rank_error(const std::string& path);

// What an outcome says of the rank that failed, for the launchers of other hosts; as the fields above.
std::string rank_that_failed(const Outcome& outcome);
// Takes it over. What another launcher would not have written changes nothing.
void take_rank_that_failed(const std::string& said, Outcome& outcome);

// Writes all or nothing, and removes the ranks' own files. `own`: the file of the rank that failed; its content becomes
// part of the written file. Unavailable if it cannot be written.
void write_error_file(const std::string& error_file, const Outcome& outcome, const std::string& job,
                      const std::string& own, const std::set<std::string>& paths);

}  // namespace muster::launch
