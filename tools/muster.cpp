// The muster command: a function for each subcommand, which parses its arguments and calls the layer below.
//
// Exit status: that of the work; 2 for a mistake in the arguments, 1 where the system does not let us.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/text.h"
#include "command_line.h"
#include "muster/base/error.h"
#include "muster/launch/launcher.h"

namespace {

using muster::InvalidArgument;
using muster::text;
using std::chrono::milliseconds;

constexpr int kUsageStatus = 2, kSystemStatus = 1;
constexpr const char* kUsage = "muster run -n RANKS [OPTIONS] [--] PROGRAM [ARGUMENTS...]";

int parse_ranks(const std::string& word) {
  int ranks = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, ranks);
  if (error == std::errc::invalid_argument || stop != end)
    throw InvalidArgument(text("-n takes the number of ranks, and '", word, "' is no whole number"),
                          "Use for example -n 2");
  if (error != std::errc() || ranks < 1 || ranks > muster::launch::kMaxRanks)
    throw InvalidArgument(text("-n ", word, " ranks cannot be run"),
                          text("Use -n 1 to -n ", muster::launch::kMaxRanks));
  return ranks;
}

// "700", "700ms" or "2s".
milliseconds parse_time(const std::string& option, const std::string& word) {
  constexpr int64_t kLongest = 24 * 3600 * 1000;
  int64_t number = -1;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, number);
  const std::string unit(stop, end);
  if (unit == "s" && number <= kLongest) number *= 1000;
  if (error != std::errc() || number < 0 || number > kLongest || (unit != "" && unit != "ms" && unit != "s"))
    throw InvalidArgument(text(option, " takes a time of at most a day, and '", word, "' is none"),
                          text("Use for example ", option, " 700ms or ", option, " 2s"));
  return milliseconds(number);
}

struct RunArguments {
  std::string ranks, settle = "50ms", grace = "700ms", stop_grace = "5s", black_box;
  bool no_prefix = false;
};

// CLI11 does not know of PROGRAM, since it sees only the words before it.
struct RunHelp : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override { return text("Usage: ", kUsage, '\n'); }
};

void declare_run(CLI::App& run, RunArguments& arguments) {
  run.formatter(std::make_shared<RunHelp>());
  run.add_option("-n,--ranks", arguments.ranks, "how many processes of PROGRAM to start")->type_name("RANKS");
  run.add_flag("--no-prefix", arguments.no_prefix, "print the ranks' output as it is, without [RANK] before each line");
  run.add_option("--settle", arguments.settle, "from the end of a rank that only lost another to SIGTERM for all")
      ->type_name("TIME")
      ->default_str("50ms");
  run.add_option("--grace", arguments.grace, "from a rank's failure to SIGKILL for the others")
      ->type_name("TIME")
      ->default_str("700ms");
  run.add_option("--stop-grace", arguments.stop_grace, "from the first Ctrl-C to SIGKILL")
      ->type_name("TIME")
      ->default_str("5s");
  run.add_option("--black-box", arguments.black_box, "where a job that fails leaves what its ranks did last")
      ->type_name("FILE");
  run.footer(
      "Each rank finds its place in RANK, WORLD_SIZE and torchrun's other variables; muster::init() reads them.\n"
      "The first rank that fails ends the job and gives the exit status. Rank 0 has the standard input, unless that is "
      "a\n"
      "terminal. Everything that a rank started ends with the job.\n"
      "muster blackbox prints what the ranks did last.");
}

// Where the words for us end and PROGRAM begins: all after it is the program's, also what looks like an option of ours.
size_t program_index(const CLI::App& run, const std::vector<std::string>& words) {
  size_t index = 0;
  while (index < words.size() && words[index].size() > 1 && words[index][0] == '-' && words[index] != "--") {
    const auto& word = words[index];
    const bool is_long = word.starts_with("--");
    const auto name = is_long ? word.substr(0, word.find('=')) : word.substr(0, 2);
    const auto* option = run.get_option_no_throw(name);
    const bool takes_value = option && option->get_items_expected_max() > 0;
    index += takes_value && name.size() == word.size() ? 2 : 1;
  }
  return std::min(index, words.size());
}

int run_command(std::vector<std::string> words) {
  CLI::App run(
      "Starts PROGRAM as the ranks of one job on this host, watches them, and says which failed first and why.",
      "muster run");
  RunArguments arguments;
  declare_run(run, arguments);
  const size_t index = program_index(run, words);
  std::vector<std::string> program(words.begin() + static_cast<ptrdiff_t>(index), words.end());
  if (!program.empty() && program.front() == "--") program.erase(program.begin());
  words.resize(index);
  if (!muster::tools::parse(run, words, "muster run --help")) return 0;
  if (arguments.ranks.empty()) throw InvalidArgument("the number of ranks is missing", text("Use ", kUsage));

  muster::launch::LaunchOptions options;
  options.ranks = parse_ranks(arguments.ranks);
  options.output = arguments.no_prefix ? muster::launch::RankOutput::kUnchanged : muster::launch::RankOutput::kPrefixed;
  options.settle = parse_time("--settle", arguments.settle);
  options.grace = parse_time("--grace", arguments.grace);
  options.stop_grace = parse_time("--stop-grace", arguments.stop_grace);
  options.black_box_file = arguments.black_box;
  options.own_process = true;
  if (program.empty()) throw InvalidArgument("there is no program to run", text("Use ", kUsage));
  options.command = std::move(program);

  const auto outcome = muster::launch::launch_command(options);
  if (!outcome.cause.empty()) std::cerr << "muster: " << outcome.cause << std::flush;
  return outcome.status;
}

struct Subcommand {
  const char* name;
  const char* what;
  int (*run)(std::vector<std::string> words);
};

constexpr Subcommand kSubcommands[] = {
    {"run", "starts a program as the ranks of one job on this host", run_command},
    {"blackbox", "prints what the ranks of a job did last, and who holds up whom", muster::tools::blackbox_command},
};

void print_help(std::ostream& out) {
  out << "Usage: muster COMMAND [ARGUMENTS...]\n\n";
  for (const auto& command : kSubcommands)
    out << "  " << std::left << std::setw(10) << command.name << command.what << "\n";
  out << "\nmuster COMMAND --help says more.\n";
}

int dispatch(std::vector<std::string> words) {
  if (words.empty()) {
    print_help(std::cerr);
    return kUsageStatus;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    print_help(std::cout);
    return 0;
  }
  for (const auto& command : kSubcommands)
    if (words[0] == command.name) return command.run({words.begin() + 1, words.end()});
  throw InvalidArgument(text("muster has no command '", words[0], "'"), "See muster --help");
}

}  // namespace

int main(int argc, char** argv) {
  // Descriptors that we open must never become somebody's standard output.
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) [[maybe_unused]]
      const int null = ::open("/dev/null", O_RDWR);
  try {
    return dispatch({argv + 1, argv + argc});
  } catch (const InvalidArgument& error) {
    std::cerr << "muster: " << error.what() << std::endl;
    return kUsageStatus;
  } catch (const std::exception& error) {
    std::cerr << "muster: " << error.what() << std::endl;
    return kSystemStatus;
  }
}
