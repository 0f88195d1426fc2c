// What this machine offers to a job, and what to change: `muster doctor`.
//
// Each finding has a verdict: good; worth knowing (it works, with a limit that a job may reach); bad (jobs fail or are
// much slower than necessary). The advice says what to change. What cannot be determined is left out.
//
// The system's files are read below `root`, so that tests can describe another machine. Limits, system calls that are
// tried, and the environment are always those of this process.
//
// Thread-safety: all functions.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace muster::launch {

enum class Verdict { kGood, kNote, kBad };

struct Finding {
  std::string name;   // "open files"
  std::string value;  // "1024, at most 1048576"
  Verdict verdict = Verdict::kGood;
  std::string advice;  // empty if nothing has to change
};

// What the muster command was built with.
struct BuiltWith {
  std::string version, libtorch, libtorch_folder;
  std::vector<std::string> backends;
};

std::vector<Finding> examine(const BuiltWith& built_with, const std::filesystem::path& root = "/");

std::string findings_table(const std::vector<Finding>& findings);
std::string findings_json(const std::vector<Finding>& findings);
bool any_bad(const std::vector<Finding>& findings);

}  // namespace muster::launch
