// The files in which a job that fails leaves its report: the error, the black boxes. A job removes the report of the
// job before it, and nothing else that stands at that name.
//
// Thread-safety: all functions.
#pragma once

#include <string>
#include <string_view>

namespace muster::launch {

// Removes the earlier report. `begins`: the first bytes of all reports of this kind; `what`: "the job's error".
// InvalidArgument if no report can be made there: its folder does not exist, or something else stands there, such as a
// device, a link, or a file that begins otherwise.
void replace_report(const std::string& path, std::string_view begins, std::string_view what);

// Removes the report, if one is there; leaves everything else.
void remove_report(const std::string& path, std::string_view begins);

}  // namespace muster::launch
