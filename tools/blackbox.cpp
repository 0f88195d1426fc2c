// muster blackbox: what the ranks of a job did last, whether it runs, hangs or has ended.
#include <sys/types.h>

#include <fstream>
#include <limits>

#include "command_line.h"
#include "launch/black_box/black_box_report.h"
#include "launch/black_box/black_box_sources.h"
#include "launch/black_box/black_box_trace.h"

namespace muster::tools {
namespace {

struct BlackBoxArguments {
  std::string job, pid, file, last = "10", perfetto;
};

void declare_black_box(CLI::App& app, BlackBoxArguments& arguments) {
  app.add_option("FILE", arguments.file, "the file that muster run --black-box FILE wrote for a failed job")
      ->type_name("");
  app.add_option("--job", arguments.job, "the job on this host whose id begins with ID")->type_name("ID");
  app.add_option("--pid", arguments.pid, "the job of this process: a rank or its muster run")->type_name("PID");
  app.add_option("--last", arguments.last, "how many operations of each rank to print; 0: none")
      ->type_name("N")
      ->default_str("10");
  app.add_option("--perfetto", arguments.perfetto, "write all operations to FILE, as a trace for ui.perfetto.dev")
      ->type_name("FILE");
  app.footer(
      "Without FILE, --job and --pid: the only job of this user that runs on this host.\n"
      "Prints the operations of all ranks in the order in which they began, in seconds before now, and for each group\n"
      "where its ranks are and who waits for whom.\n"
      "\n"
      "Examples:\n"
      "  muster blackbox\n"
      "  muster blackbox --job 3fa2 --last 100\n"
      "  muster blackbox failed.boxes --perfetto trace.json");
}

launch::JobBoxes read(const BlackBoxArguments& arguments) {
  const int sources = !arguments.job.empty() + !arguments.pid.empty() + !arguments.file.empty();
  if (sources > 1) throw InvalidArgument("FILE, --job and --pid exclude each other", "Give one of them");
  if (!arguments.file.empty()) {
    try {
      return launch::read_black_boxes(arguments.file);
    } catch (const CorruptError& error) {
      throw InvalidArgument(error.message(), error.advice());
    }
  }
  const auto pid = arguments.pid.empty() ? 0 : parse_number("--pid", arguments.pid, std::numeric_limits<pid_t>::max());
  return launch::find_black_boxes(arguments.job, static_cast<pid_t>(pid));
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  if (!file) throw InvalidArgument(text("cannot write to '", path, "'"), "Choose another place with --perfetto");
}

}  // namespace

int blackbox_command(std::vector<std::string> words) {
  CLI::App app("Prints what the ranks of a job did last, and who waits for whom.", "muster blackbox");
  BlackBoxArguments arguments;
  declare_black_box(app, arguments);
  if (!parse(app, words, "muster blackbox --help")) return 0;
  const auto last = parse_number("--last", arguments.last, 4096);
  const auto job = read(arguments);
  std::cout << launch::describe_ranks(job) << '\n';
  if (last > 0) std::cout << launch::operations_table(job, last) << '\n';
  std::cout << launch::diagnosis(job) << std::flush;
  if (!arguments.perfetto.empty()) write(arguments.perfetto, launch::trace_json(job));
  return 0;
}

}  // namespace muster::tools
