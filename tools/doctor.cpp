// muster doctor: checks this machine, and says what to change for a job.
#include "launch/jobs/doctor.h"

#include "command_line.h"

namespace muster::tools {

int doctor_command(std::vector<std::string> words) {
  CLI::App app("Checks this machine as a job would see it, and says what to change.", "muster doctor");
  bool json = false;
  app.add_flag("--json", json, "for programs: an array of findings");
  app.footer(
      "Run it where the job will run: inside the container or the batch job, with its limits.\n"
      "Exit status: 1 if a finding is bad, 0 otherwise.\n"
      "\n"
      "Examples:\n"
      "  muster doctor\n"
      "  srun muster doctor --json");
  if (!parse(app, words, "muster doctor --help")) return 0;
  launch::BuiltWith built_with{
      .version = MUSTER_VERSION, .libtorch = MUSTER_TORCH_VERSION, .libtorch_folder = MUSTER_TORCH_FOLDER};
  std::istringstream backends(MUSTER_BACKENDS);
  for (std::string name; backends >> name;) built_with.backends.push_back(name);
  const auto findings = launch::examine(built_with);
  std::cout << (json ? launch::findings_json(findings) : launch::findings_table(findings)) << std::flush;
  return launch::any_bad(findings) ? 1 : 0;
}

}  // namespace muster::tools
