// muster top: shows what the ranks of a job do, now and every second.
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <limits>
#include <sstream>

#include "base/process.h"
#include "command_line.h"
#include "launch/black_box/black_box_sources.h"
#include "launch/jobs/activity.h"
#include "launch/jobs/jobs.h"
#include "launch/output/output.h"
#include "muster/base/deadline.h"

namespace muster::tools {
namespace {

struct TopArguments {
  std::string job, pid, interval = "1";
  bool once = false, json = false;
};

void declare_top(CLI::App& app, TopArguments& arguments) {
  app.add_option("--job", arguments.job, "the job on this host whose id begins with ID")->type_name("ID");
  app.add_option("--pid", arguments.pid, "the job of this process: a rank or its muster run")->type_name("PID");
  app.add_option("--interval", arguments.interval, "seconds between two samples")
      ->type_name("SECONDS")
      ->default_str("1");
  app.add_flag("--once", arguments.once, "take one sample and end");
  app.add_flag("--json", arguments.json, "for programs: one line of JSON per sample");
  app.footer(
      "Without --job and --pid: the only job of this user that runs on this host. Ends with the job.\n"
      "Steps and samples: as the program reports them, with muster::report_progress() or muster::Progress. comm: the\n"
      "share of the time in which a collective ran. shared: the part of the memory that other ranks use too.\n"
      "muster top costs the job nothing: it reads the job's shared memory.\n"
      "\n"
      "Examples:\n"
      "  muster top\n"
      "  muster top --once --job 3fa2\n"
      "  muster top --json --interval 10 >> samples.json");
}

// The time without ranks after which a job counts as ended although its launcher lives: that of muster::spawn() does. It
// is twice as long as hosts wait for one another.
constexpr std::chrono::minutes kPatience{10};

// Draws the table over the previous one, cut to the terminal.
class Screen {
 public:
  void draw(const std::string& table) {
    const int columns = terminal_columns(), rows = terminal_rows();
    std::string out = drawn_ > 0 ? text("\x1b[", drawn_, "A\r") : "";
    drawn_ = 0;
    std::istringstream lines(table);
    for (std::string line; std::getline(lines, line); ++drawn_) {
      if (rows > 2 && drawn_ == rows - 2) {
        out += "…\x1b[K\n";
        ++drawn_;
        break;
      }
      out += std::string(columns > 0 ? launch::cut_to_columns(line, columns) : line) + "\x1b[K\n";
    }
    std::cout << out << "\x1b[J" << std::flush;
  }

 private:
  int drawn_ = 0;  // lines
};

}  // namespace

int top_command(std::vector<std::string> words) {
  CLI::App app("Shows what the ranks of a job do: step, samples per second, time in communication, memory.",
               "muster top");
  TopArguments arguments;
  declare_top(app, arguments);
  if (!parse(app, words, "muster top --help")) return 0;
  if (!arguments.job.empty() && !arguments.pid.empty())
    throw InvalidArgument("--job and --pid exclude each other", "Give one of them");
  const auto pid = arguments.pid.empty()
                       ? pid_t{0}
                       : static_cast<pid_t>(parse_number("--pid", arguments.pid, std::numeric_limits<pid_t>::max()));
  const auto interval = parse_number("--interval", arguments.interval, 3600);
  if (interval == 0)
    throw InvalidArgument("--interval: expected at least 1 second, got 0", "Use for example --interval 1");

  const bool terminal = ::isatty(STDOUT_FILENO) && !arguments.json && !arguments.once;
  launch::ActivityWatch watch;
  Screen screen;
  auto boxes = launch::find_black_boxes(arguments.job, pid);
  const std::string job = boxes.job;
  const pid_t launcher = launch::summarise(boxes).launcher;
  const uint64_t launched = start_time_of(launcher);
  for (;;) {
    const auto activity = watch.look(boxes);
    if (arguments.json)
      std::cout << launch::activity_json(activity) << std::flush;
    else if (terminal)
      screen.draw(launch::activity_table(activity));
    else
      std::cout << launch::activity_table(activity) << (arguments.once ? "" : "\n") << std::flush;
    if (arguments.once) return 0;
    if (!std::cout) return 1;  // the reader has gone
    const auto patience = Deadline::after(kPatience);
    for (bool waits = false;; waits = true) {
      pollfd reader{STDOUT_FILENO, 0, 0};
      if (::poll(&reader, 1, static_cast<int>(interval * 1000)) > 0) return 1;  // it has gone
      try {
        boxes = launch::find_black_boxes(job, 0);
        break;
      } catch (const InvalidArgument&) {
        const bool lives = launched != 0 && start_time_of(launcher) == launched && process_state(launcher) != 'Z';
        const bool may_go_on = lives && !patience.passed();
        if (!arguments.json && !(may_go_on && waits))
          std::cout << (may_go_on ? "no rank runs; the launcher does" : "the job has ended") << std::endl;
        if (!may_go_on) return 0;
        if (!std::cout) return 1;
      }
    }
  }
}

}  // namespace muster::tools
