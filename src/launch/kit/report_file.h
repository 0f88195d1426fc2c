// The files in which a job that fails leaves its report: the error, the black boxes. A job removes the report of the
// job before it, and nothing else that stands at that name. Launchers of several hosts may share a file.
//
// Thread-safety: all functions.
#pragma once

#include <string>
#include <string_view>

namespace muster::launch {

struct ReportFile {
  std::string path;         // empty: the user wants no such report
  std::string_view begins;  // the first bytes of all reports of this kind, after white space
  std::string_view what;    // "the job's error"
};

// InvalidArgument if no report can be made there: its folder does not exist, or something else stands there, such as a
// device, a link, or a file that begins otherwise.
void check_report(const ReportFile& file);

// Removes the report, if one is there; leaves everything else.
void remove_report(const ReportFile& file);

}  // namespace muster::launch
