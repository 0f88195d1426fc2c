// Measures what Muster promises in units of time and memory, and prints each figure with its bound, one JSON object per
// line: bench_bounds fault|idle|memory|copy… Tests assert the same promises by events, which a busy machine cannot
// disturb.
//
//   fault    the time from the end of a rank until the other ranks know it
//   idle     the share of a core that a rank takes while it waits; the cost of the black box per operation; a barrier
//            of far more ranks than cores
//   memory   the memory that a group's segment takes after the group has used everything that it can do
//   copy     how much longer copy_bytes() takes at some offset between source and destination than at none, in the
//            first- and second-level cache; and memcpy()
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bounds.h"

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> known = {
      {"fault", bench::fault}, {"idle", bench::idle}, {"memory", bench::memory}, {"copy", bench::copy}};
  std::vector<std::string> names;
  CLI::App app{"Muster's promises of time and memory, measured"};
  app.add_option("name", names, "fault, idle, memory, copy")
      ->required()
      ->check(CLI::IsMember({"fault", "idle", "memory", "copy"}));
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  for (const auto& name : names) known.at(name)();
}
